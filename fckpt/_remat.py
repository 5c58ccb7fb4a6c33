"""The public `remat`: checks the options, and makes a region of the function."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from fckpt._call.arguments import DonatedArguments, StaticArguments
from fckpt._fuse.option import Kernels, check_kernels
from fckpt._module import check_plannable, remat_module
from fckpt._planned.making import check_budget
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.tiling import Tile, check_tile
from fckpt._region import PlannedRegion, Region, Untraceable
from fckpt.errors import ArgumentTypeError, ArgumentValueError, name_of
from fckpt.policies.decisions import PolicyLike
from fckpt.policies.named import reductions_saveable

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
    tile: Tile = ...,
    kernels: Kernels = ...,
    cuda_graphs: bool = ...,
    untraceable: Untraceable = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    donate_argnums: int | Sequence[int] = ...,
    donate_argnames: str | Sequence[str] = ...,
    name: str | None = ...,
) -> M: ...
@overload
def remat(
    fn: Callable[P, R],
    *,
    policy: PolicyLike | None = ...,
    budget: Budget | None = ...,
    plan: Plan | None = ...,
    solver: str = ...,
    tile: Tile = ...,
    kernels: Kernels = ...,
    cuda_graphs: bool = ...,
    untraceable: Untraceable = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    donate_argnums: int | Sequence[int] = ...,
    donate_argnames: str | Sequence[str] = ...,
    name: str | None = ...,
) -> Callable[P, R]: ...
@overload
def remat(
    fn: None = None,
    *,
    policy: PolicyLike | None = ...,
    budget: Budget | None = ...,
    plan: Plan | None = ...,
    solver: str = ...,
    tile: Tile = ...,
    kernels: Kernels = ...,
    cuda_graphs: bool = ...,
    untraceable: Untraceable = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    donate_argnums: int | Sequence[int] = ...,
    donate_argnames: str | Sequence[str] = ...,
    name: str | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def remat(
    fn: Callable[..., Any] | None = None,
    *,
    policy: PolicyLike | None = None,
    budget: Budget | None = None,
    plan: Plan | None = None,
    solver: str = "auto",
    tile: Tile = False,
    kernels: Kernels = "aten",
    cuda_graphs: bool = False,
    untraceable: Untraceable = "raise",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    name: str | None = None,
) -> Any:
    """Returns `fn` with the same values and gradients, but with less memory held for the backward pass.

    Autograd saves the intermediates of a function from the forward pass to the backward pass. A rematerialised function
    (also called activation checkpointing) saves only its inputs, and runs again in the backward pass to recompute its
    intermediates. This trades time for memory. With a `budget`, a solver chooses which intermediates to recompute, so
    that the call fits in a number of bytes with the least extra time.

    Without `policy`, `budget` and `plan`, all intermediates are recomputed. Nothing is traced: any Python function is
    accepted, including data-dependent control flow, if it is pure (its result depends only on its arguments, captured
    tensors and random numbers). The recompute sees the random numbers, autocast settings, buffers (such as BatchNorm's
    statistics) and captured tensors of the forward, and changes no state a second time.

    With `policy`, `budget` or `plan`, `fn` is traced once per signature (structure, shapes, dtypes, devices, static
    leaves, autocast state), and planned. A policy says which values are saved. A budget is the most bytes that forward
    and backward may hold at once, above what is held at the call; a solver finds a plan that fits and recomputes in the
    least time. A call that nothing differentiates from outside is planned as well, with the budget of that call: a
    training step with `torch.func.grad` inside, a Hessian-vector product, inference. Only a module with grad mode off
    runs as it is. A call for which no plan can run is rematerialised as a whole: inside another region, under forward
    mode, with several `vmap`s outside of the differentiating transform, and in second derivatives.

    A rematerialised function composes with `.backward()` and with all of `torch.func`, in any order and nesting.
    Whether one argument requires grad does not affect the others. Under `torch.compile`, a region without a plan is a
    region of `torch.utils.checkpoint`, and the compiler plans the recompute; a region with a budget or a policy is
    compiled by itself, with the backend "fckpt". Under `make_fx` a region is inlined.

    Args:
        fn: a function from pytrees to pytrees, or an `nn.Module`. Leaves that are not tensors are static. If omitted,
            `remat` returns a decorator with the given options.
        policy: one of `fckpt.policies`, or a function that says for an operation whether its results are saved.
        budget: the most bytes that forward and backward may hold at once: an int, a string such as "4GiB", or a float
            for a fraction of the plain function's peak.
        plan: a result of `fckpt.plan` for these arguments.
        solver: the solver that looks for a plan; see `fckpt.solve.names()`.
        tile: whether to cut operations that are independent by rows into tiles, where the budget needs it: matrix
            products, softmax, normalisation, losses, pointwise operations and their derivatives. "exact" takes only
            tiles that give the bits of the whole operation, as tested on its kernel; True also sums in another order
            (the gradient of a weight, for example). A plan without tiles stays if it is as fast.
        kernels: "aten" runs a plan with torch's kernels, one operation after the other. "exact" compiles consecutive
            operations with exactly rounded results (float32 and float64 on CPU: add, mul, div, comparisons, where) to
            one kernel each, which is used where its bits are the same and it is faster. "fused" compiles all pointwise
            operations, softmax and normalisations; gradients then differ by rounding, as with `torch.compile`. The
            budget holds in any case. Each kernel takes about a second at the first call, and inductor keeps it on disk.
        cuda_graphs: whether the forward and the backward pass of a plan become one CUDA graph each, after three calls
            with the same sizes, so that a step has two launches. The budget then also holds what the graphs keep
            between calls, and copies of arguments (but not of parameters), outputs and gradients. Other calls run
            without graphs: those with other sizes, and a second forward pass before the backward pass of the first.
        untraceable: what to do with a function that cannot be traced into a graph: "raise" a `TraceError`, or "remat",
            which rematerialises its repeated blocks (or the whole function if it has none) without a plan, and warns
            once that the budget does not hold.
        static_argnums: positions of arguments that are passed unchanged. Tensors inside them are treated like captured
            tensors.
        static_argnames: the same for keyword arguments.
        donate_argnums: positions of arguments whose memory the caller gives away, as for parameters and optimizer state
            in a training step: results are written over tensors of the same layout in these arguments, as soon as
            nothing reads them any more, and are returned as these very tensors. Needs a budget or a plan, and a call
            that nothing outside differentiates.
        donate_argnames: the same for keyword arguments.
        name: the name of the function in warnings; by default its `__qualname__`.

    Returns:
        A function with the signature of `fn`. For a bound method, a partial or a callable object, a partial that is
        copied and pickled together with `fn`: a copy of a model that keeps it uses the copy's weights. For a module, a
        module of the same class that shares parameters, buffers, hooks, submodules and `state_dict` keys with it.

    Raises:
        ArgumentTypeError: `fn` is not callable; `static_argnums` or `static_argnames` has a wrong type.
        ArgumentValueError: `static_argnums` or `donate_argnums` is out of range; `budget` is not a size; a `solver` or
            donated arguments without a budget; `cuda_graphs` without a plan, or with tiles or donated arguments.

    With a budget or a policy, the first call may raise `TraceError` (control flow depends on tensor values),
    `BudgetError` (no plan fits; the message says which budget would do) or `PlanError` (the plan was made for another
    function). Later, `MutationError`, `ImpureFunctionError` or `RandomStateError` is raised if a recompute cannot
    reproduce the forward.

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
        "Training deep nets with sublinear memory cost" (2016), https://arxiv.org/abs/1604.06174. The interface follows
        `jax.checkpoint`.
    """
    options = {
        "policy": policy, "budget": budget, "plan": plan, "solver": solver, "tile": tile, "kernels": kernels,
        "cuda_graphs": cuda_graphs, "untraceable": untraceable, "static_argnums": static_argnums,
        "static_argnames": static_argnames, "donate_argnums": donate_argnums, "donate_argnames": donate_argnames,
        "name": name,
    }  # fmt: skip
    if fn is None:
        return functools.partial(remat, **options)
    if torch.compiler.is_compiling():
        from fckpt._recompute import compiled  # imports Dynamo, which takes about a second

        plain = policy is None and budget is None and plan is None
        others = (solver, tile, kernels, cuda_graphs, untraceable, donate_argnums, donate_argnames)
        alone = plain and others == ("auto", False, "aten", False, "raise", (), ())
        planned = None if alone else functools.partial(remat, **options)  # also to refuse what needs a plan
        return compiled.made(fn, reductions_saveable if plain else policy, remat, planned)
    _check_function(fn)
    static = StaticArguments(fn.forward if isinstance(fn, nn.Module) else fn, static_argnums, static_argnames)
    make = functools.partial(Region, static)
    if solver != "auto" and budget is None:
        raise ArgumentValueError(f"solver={solver!r} needs a budget: pass budget=...")
    tile = check_tile(tile, budget)
    planned = policy is not None or budget is not None or plan is not None
    kernels = check_kernels(kernels, planned=planned)
    if cuda_graphs and not planned:
        raise ArgumentValueError("cuda_graphs=True needs a plan: pass budget=... or policy=...")
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str, not {type(name).__name__}: {name!r}.")
    if untraceable not in ("raise", "remat"):
        raise ArgumentValueError(f'untraceable must be "raise" or "remat", not {untraceable!r}.')
    donated = DonatedArguments(fn.forward if isinstance(fn, nn.Module) else fn, donate_argnums, donate_argnames)
    if donated and budget is None and plan is None:
        raise ArgumentValueError("donated arguments need a budget or a plan: pass budget=...")
    if cuda_graphs and (donated or tile):
        raise ArgumentValueError(
            "cuda_graphs=True does not work with donated arguments or tiles: leave one of them out."
        )
    if planned:
        if isinstance(fn, nn.Module):
            check_plannable(fn)
        budget = None if budget is None else check_budget(budget)
        named = name_of(fn) if name is None else name
        is_module = isinstance(fn, nn.Module)
        options = (static, donated, policy, budget, plan, solver, tile, kernels, cuda_graphs)
        options = (*options, untraceable, named, is_module)
        make = functools.partial(PlannedRegion, *options)
    if isinstance(fn, nn.Module):
        return remat_module(fn, make)
    region = make()
    if not _becomes_method(fn):
        return _copyable(region, fn)

    @functools.wraps(fn)
    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        return region(fn, args, kwargs)

    rematerialised._fckpt_region = region  # type: ignore[attr-defined]  # an attribute of a function
    return rematerialised


def _becomes_method(fn: Callable[..., Any]) -> bool:
    """Whether `fn` becomes a method as an attribute of a class."""
    # Partials do so from Python 3.14 on, and ours then too.
    return hasattr(type(fn), "__get__") and not isinstance(fn, (types.MethodType, functools.partial))


def _copyable(region: Region, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rematerialised `fn`, whose copies call copies of `fn`.

    A copied model must not compute with the original's weights through a bound method that it keeps as an attribute.
    `copy.deepcopy` treats a function as a constant, but copies what a partial holds. Dynamo and the walk through a
    closure follow partials too.
    """
    made = functools.partial(_called, region, fn)
    # The attributes of a method do not change. Those of an object may, and a copy of them would be stale.
    functools.update_wrapper(made, fn, updated=("__dict__",) if isinstance(fn, types.MethodType) else ())
    made._fckpt_region = region  # type: ignore[attr-defined]  # an attribute of a partial
    return made


def _called(region: Region, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return region(fn, args, kwargs)


def _check_function(fn: Any) -> None:
    if isinstance(fn, type) and issubclass(fn, nn.Module):
        raise ArgumentTypeError(f"remat got the class {fn.__name__}; it takes an instance: remat({fn.__name__}(...)).")
    if inspect.iscoroutinefunction(fn):
        raise ArgumentTypeError(
            f"{name_of(fn)} is an async function, whose body runs after the call has returned. Make a function of the "
            "tensor operations in it, and rematerialise that."
        )
    if not callable(fn):
        hint = ""
        if isinstance(fn, torch.Tensor):
            hint = " Apply remat to the function first, then call the result: remat(fn)(x), not remat(fn(x))."
        raise ArgumentTypeError(f"remat takes a function or an nn.Module, not {type(fn).__name__}.{hint}")
