"""`remat`: where the stages meet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from fckpt import ambient
from fckpt.arguments import Arguments, StaticArguments
from fckpt.batched import NOT_BATCHED, Batching, run_batched
from fckpt.conditions import BufferHabits, Observation
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.module import remat_module
from fckpt.planner import TRACING, Planner, Reached, layouts_below
from fckpt.plans import Budget, Plan, check_budget
from fckpt.policies import PolicyLike, reductions_saveable
from fckpt.primitives import UserCall
from fckpt.run import Execution
from fckpt.segment import HooksUnavailable, run_segment
from fckpt.trace import inlined, is_tracing
from fckpt.transform import run_nodes, run_planned

__all__ = ["remat"]

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)


@overload
def remat(
    fn: M,
    *,
    policy: PolicyLike | None = ...,
    budget: Budget | None = ...,
    plan: Plan | None = ...,
    solver: str = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
) -> M: ...
@overload
def remat(
    fn: Callable[P, R],
    *,
    policy: PolicyLike | None = ...,
    budget: Budget | None = ...,
    plan: Plan | None = ...,
    solver: str = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
) -> Callable[P, R]: ...
@overload
def remat(
    fn: None = None,
    *,
    policy: PolicyLike | None = ...,
    budget: Budget | None = ...,
    plan: Plan | None = ...,
    solver: str = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def remat(
    fn: Callable[..., Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    budget: Budget | None = None,
    plan: Plan | None = None,
    solver: str = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Rematerialises `fn`: same values, same gradients, and backward keeps less of its inside, or nothing.

    Without `policy`, `budget` and `plan`, what `fn` computes between its arguments and its results is not kept for
    backward but computed again when backward needs it. Nothing is traced: any Python function will do,
    data-dependent control flow included, if it is pure (its result depends on its arguments alone). Random
    numbers, autocast, buffers such as BatchNorm's statistics, and closed-over tensors are taken care of: the
    recompute sees what the forward saw and changes nothing a second time.

    With one of them, `fn` is traced once per signature (structure, shapes, dtypes, devices, static leaves, autocast
    state), and planned: a policy says what is kept; a budget says how many bytes forward and backward may hold at
    once, above what is held at the call, and a solver finds what to compute again in the least time. Within
    another region, under forward mode, with a `vmap` around the transform that differentiates, and in second
    derivatives, a planned function is rematerialised as a whole.

    Composes with `.backward()` and all of `torch.func`, in any order and nesting. Whether an argument requires
    grad changes nothing for the others. Under `torch.compile` the region becomes `torch.utils.checkpoint`'s
    (whose recompute the compiler plans itself); under `make_fx` it is inlined.

    Args:
        fn: a function from pytrees to pytrees, or an `nn.Module`. Leaves that are no tensors are static. Left
            out, `remat` is a decorator with options.
        policy: one of `fckpt.policies`, or a function of an operation that says whether its results are kept.
        budget: the most bytes that forward and backward may hold at once: an int, a text like "4GiB", or a float
            for a fraction of the plain function's peak.
        plan: what `fckpt.plan` made for these arguments.
        solver: which solver looks for the plan; see `fckpt.solve.names()`.
        static_argnums: positions of arguments that are passed whole, without a look inside. They must be
            hashable, and tensors within are treated like closed-over ones.
        static_argnames: the same for keyword arguments.

    Returns:
        A function like `fn`; or, for a module, a module of the same class that shares parameters, buffers,
        hooks, submodules and `state_dict` keys with it.

    Raises:
        ArgumentTypeError: `fn` is not callable; `static_argnums` or `static_argnames` are of a wrong type.
        ArgumentValueError: `static_argnums` is out of range; `budget` is no size; a `solver` without a budget.

    With a budget or a policy, the first call may raise `TraceError` (the function's course depends on data),
    `BudgetError` (nothing fits; it says what would) or `PlanError` (the plan is another function's). Later the result
    raises `MutationError`, `ImpureFunctionError` or `RandomStateError` when a recompute
    cannot be what the forward was.

    Example:
        >>> import torch, fckpt
        >>> def block(params, x):
        ...     return torch.tanh(torch.tanh(x @ params["w1"]) @ params["w2"])
        >>> params = {"w1": torch.randn(4, 8), "w2": torch.randn(8, 4)}
        >>> x = torch.randn(2, 4)
        >>> loss = lambda f: lambda p: f(p, x).sum()
        >>> plain = torch.func.grad(loss(block))(params)
        >>> less = torch.func.grad(loss(fckpt.remat(block)))(params)
        >>> all(torch.equal(plain[k], less[k]) for k in params)
        True

    References:
        A. Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
        differentiation" (1992), https://doi.org/10.1080/10556789208805505; T. Chen, B. Xu, C. Zhang, C. Guestrin,
        "Training deep nets with sublinear memory cost" (2016), https://arxiv.org/abs/1604.06174. The interface is
        `jax.checkpoint`'s.
    """
    if fn is None:
        return functools.partial(
            remat,
            policy=policy,
            budget=budget,
            plan=plan,
            solver=solver,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    _check_function(fn)
    static = StaticArguments(fn.forward if isinstance(fn, nn.Module) else fn, static_argnums, static_argnames)
    make = functools.partial(_Region, static)
    if solver != "auto" and budget is None:
        raise ArgumentValueError(
            f"solver={solver!r} looks for a plan within a budget, and there is none: give budget=..."
        )
    if policy is not None or budget is not None or plan is not None:
        budget = None if budget is None else check_budget(budget)
        make = functools.partial(_PlannedRegion, static, policy, budget, plan, solver)
    if isinstance(fn, nn.Module):
        return remat_module(fn, make)
    region = make()

    @functools.wraps(fn)
    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        return region(fn, args, kwargs)

    rematerialised._fckpt_region = region  # type: ignore[attr-defined]
    return rematerialised


def _check_function(fn: Any) -> None:
    if isinstance(fn, type) and issubclass(fn, nn.Module):
        raise ArgumentTypeError(f"remat got the class {fn.__name__}; it takes an instance: remat({fn.__name__}(...)).")
    if not callable(fn):
        hint = ""
        if isinstance(fn, torch.Tensor):
            hint = " Apply remat to the function first, then call the result: remat(fn)(x), not remat(fn(x))."
        raise ArgumentTypeError(f"remat takes a function or an nn.Module, not {type(fn).__name__}.{hint}")


class _Region:
    """What was learnt about one rematerialised function from call to call."""

    __slots__ = ("differentiates", "habits", "policy", "static")

    def __init__(self, static: StaticArguments, policy: PolicyLike | None = reductions_saveable):
        self.policy = policy
        """What it lets an enclosing plan keep of its inside."""
        self.static = static if static else None
        self.habits: BufferHabits = {}
        self.differentiates = False
        """Whether `fn` was seen to use a reverse-mode transform inside."""

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            from fckpt import compiled  # imports Dynamo, which takes a second

            return compiled.call(self, fn, args, kwargs)
        if is_tracing():
            return inlined(fn, args, kwargs, self.policy)
        if not torch.is_grad_enabled() or _is_traced():
            return fn(*args, **kwargs)
        arguments = Arguments(args, kwargs, self.static)
        return self.run(fn, arguments)

    def run(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        """Runs `fn` as it stands; it will run again in backward."""
        if not self.differentiates:
            try:
                if torch._C._are_functorch_transforms_active():
                    return run_nodes(fn, arguments, self.habits)
                return run_segment(fn, arguments, self.habits)
            except HooksUnavailable:
                self.differentiates = True
        return run_nodes(fn, arguments, self.habits, discard=False)


class _PlannedRegion(_Region):
    """A function that is traced and planned, once per signature."""

    __slots__ = ("planner",)

    def __init__(
        self,
        static: StaticArguments,
        policy: PolicyLike | None,
        budget: Budget | None,
        plan: Plan | None,
        solver: str,
    ):
        super().__init__(static, policy)
        self.planner = Planner(policy, budget, plan, solver)

    def run(self, fn: Callable[..., Any], arguments: Arguments) -> Any:
        return self.plan_and_run(fn, arguments) if _may_plan() else super().run(fn, arguments)

    def plan_and_run(self, fn: Callable[..., Any], arguments: Arguments, batching: Batching = NOT_BATCHED) -> Any:
        """Runs a call by its plan, below the `vmap`s of `batching`."""
        call = UserCall(fn, arguments, self.habits)
        with TRACING:
            observation = Observation(call.fn, arguments.statics, call.inputs, self.habits, facts=True)
            reached = Reached(observation, call.inputs, batching.passed)
            layouts = layouts_below((*call.inputs, *reached.tensors))
            tracked = any(layout.requires_grad for layout in layouts)
            program = None
            if tracked and _innermost() != TransformType.Vmap:
                program = self.planner.program(fn, arguments, observation, reached, layouts, batching.sizes)
        if not tracked:
            args, kwargs = arguments.rebuild(call.inputs)
            return fn(*args, **kwargs)
        if program is None:
            return run_batched(fn, arguments, reached.tensors, reached.slots, batching, self.plan_and_run)
        call.plan(program.lifted(reached.tensors), program.ends)
        call.planned = Execution(program, reached.tensors)
        return run_planned(call, program.trace.flags, lambda: observation.conditions(program.draws))


def planner_of(fn: Callable[..., Any]) -> Planner | None:
    """Returns what plans the calls of a rematerialised function or module; None if `fn` is plain."""
    region = getattr(fn, "_fckpt_region", None)
    if region is None:
        return None
    return region.planner if isinstance(region, _PlannedRegion) else Planner()


def plain_of(fn: Callable[..., Any]) -> Any:
    """Returns the function or module that `remat` made `fn` of; `fn` itself if it is plain."""
    if not hasattr(fn, "_fckpt_region"):
        return fn
    return getattr(fn, "_fckpt_inner", None) or fn.__wrapped__  # type: ignore[attr-defined]  # functools.wraps sets it


def _may_plan() -> bool:
    """Whether a plan can run here; elsewhere the function is rematerialised as a whole.

    Within another region it cannot: what it keeps, that region would have to keep. Nor under forward mode, or where
    a `vmap` is around the transform that differentiates.
    """
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if forward_ad._current_level > ambient.idle_level or hooked:
        return False
    levels = [level.key() for level in _levels()]
    while levels and levels[-1] == TransformType.Vmap:
        levels.pop()
    return all(key == TransformType.Grad for key in levels)


def _levels() -> Sequence[Any]:
    """The levels of torch.func in force, outermost first."""
    return (get_interpreter_stack() or ()) if torch._C._are_functorch_transforms_active() else ()


def _innermost() -> Any:
    levels = _levels()
    return levels[-1].key() if levels else None


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def _is_traced() -> bool:
    """Whether a graph is being recorded, which a recompute inside would only confuse.

    `make_fx` drops the calls that set generators: a recompute of dropout would be traced with other numbers.
    """
    if torch._C._get_dispatch_mode(_PROXY) is not None:
        return True
    return any(level.key() == TransformType.Functionalize for level in _levels())
