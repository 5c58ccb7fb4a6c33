"""`plan`, `saved_residuals` and `stats`: inspect what a call saves and what a plan does."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fckpt import _tree as tree
from fckpt import solve
from fckpt._call.arguments import DonatedArguments
from fckpt._call.closure import closure_of
from fckpt._call.results import number_of
from fckpt._fuse.option import Kernels, check_kernels
from fckpt._planned.families import Families, is_shared, quick_plan
from fckpt._planned.fusing import with_blocks
from fckpt._planned.ledger import Stats
from fckpt._planned.making import check_budget, make_plan, nbytes_of, plain_plan, priced
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.planner import traced_without_running
from fckpt._planned.tiling import Tile, check_tile, tiled_or_hinted
from fckpt._region import plain_of, planner_of
from fckpt._tile.rewriting import rewritten
from fckpt._trace.named_device import NamedDevice, device_named, named_device
from fckpt._trace.operations import Trace
from fckpt.cost import Analytic, DeviceProfile, Measured, profile_of, profiles
from fckpt.cost.calls import CostSource
from fckpt.errors import ArgumentTypeError, ArgumentValueError, PlanError
from fckpt.graph.graph import Graph
from fckpt.graph.identity import structure
from fckpt.policies.decisions import PolicyLike, as_policy
from fckpt.policies.named import reductions_saveable
from fckpt.report.table import Residual, format_residuals

__all__ = ["Looked", "Outputs", "plan", "print_saved_residuals", "saved_residuals", "stats"]


Outputs = int | str | Sequence[int | str]
"""Tensors of a result, by index or name."""


def plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: Budget | None = None,
    policy: PolicyLike | None = None,
    solver: str = "auto",
    tile: Tile = False,
    kernels: Kernels = "aten",
    costs: CostSource | str | None = None,
    device: torch.device | str | None = None,
    time_limit: float | None = None,
    outputs: Outputs | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Plan:
    """Plans a call of `fn` without running it: which tensors to save, which to recompute, and the resulting peak and
    overhead.

    Args:
        fn: a function or a module, as for `remat`.
        args: arguments as in the call to plan. Arguments and parameters that require grad are differentiated. Fake
            tensors and meta tensors are accepted.
        budget: see `remat`.
        policy: see `remat`. Without budget and policy, the plan recomputes nothing.
        solver: see `fckpt.solve.names()`.
        tile: see `remat`.
        kernels: see `remat`. For real tensors, kernels are compiled and tried now, so that the peak is the one with
            them; otherwise the plan only notes them.
        costs: the source of times and temporary memory: `fckpt.cost.Measured()`, the default for real tensors,
            `fckpt.cost.Analytic(profile)`, the default for fake ones, or the name of a profile (`"H100"`).
        device: the device to plan for, if it is not the device of the tensors: `"cuda"`, which need not be here. The
            tensors that are passed and captured then count as tensors on that device, and the plan has the operations
            that the device runs. By default, for tensors on the meta device, the device that `costs` describes;
            `"meta"` stands for the operations of the meta device itself.
        time_limit: approximate time limit of the solver `auto`, in seconds; see `fckpt.solve.auto`. If interrupted, it
            returns the best plan so far.
        outputs: the tensors of the result that the loss depends on: indices, or names such as `"loss"` and
            `"hidden.0"`. By default the only scalar among the outputs that require grad, if there is exactly one,
            otherwise all of them; `Plan.loss_of` says which. (`remat` needs no such argument: it learns the outputs
            from the first backward pass.)
        donate_argnums: see `remat`.
        donate_argnames: see `remat`.
        kwargs: as in the call.

    Raises:
        ArgumentValueError: `outputs` names no tensor of the result, or one that does not require grad.
        TraceError: the function's control flow depends on tensor values.
        BudgetError: no plan fits the budget; `least_bytes` is the least budget for which one does.

    Example:
        >>> import torch, fckpt
        >>> def loss(w, x):
        ...     for _ in range(20):
        ...         x = torch.tanh(x @ w)
        ...     return x.sum()
        >>> w = torch.randn(16, 16, requires_grad=True)
        >>> plan = fckpt.plan(loss, w, torch.randn(1024, 16), budget=0.5)
        >>> plan.peak_bytes <= plan.baseline_peak_bytes / 2
        True
    """
    tile, donated = check_tile(tile, budget), (donate_argnums, donate_argnames)
    kernels = check_kernels(kernels, planned=budget is not None or policy is not None)
    look = lambda args, kwargs: Looked(fn, args, kwargs, costs, outputs, donated, device)

    def remade(known: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        looked = look(args, kwargs)
        within = None if budget is None else known.budget_bytes
        if within is None or not is_shared(solver, tile):
            made = looked.plan(policy, within, solver, time_limit, tile)
        else:
            made = looked.adapted(known, policy, within, solver, time_limit)
        return dataclasses.replace(looked.with_kernels(made, known.kernels), remade=remade)

    looked = look(args, kwargs)
    made = looked.plan(policy, budget, solver, time_limit, tile)
    return dataclasses.replace(looked.with_kernels(made, kernels), remade=remade)


def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Residual]:
    """Lists the tensors that a call of `fn` saves for backward: bytes, shape, dtype, origin, name, and reason.

    Args:
        fn: a result of `remat`, with or without a policy, budget or plan; or any function, for the tensors that plain
            autograd saves.
        args: as in the call.
        kwargs: as in the call.

    Returns:
        Intermediates, and the arguments and outputs that backward reads, which are held in any case.

    Example:
        >>> import torch, fckpt
        >>> fn = lambda w, x: torch.sin(torch.tanh(x @ w)).sum()
        >>> w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
        >>> [row.shape for row in fckpt.saved_residuals(fckpt.remat(fn), w, x) if row.kind == "intermediate"]
        []

    References:
        `jax.ad_checkpoint.saved_residuals`; here with bytes and reasons.
    """
    planner = planner_of(fn)
    looked = Looked(fn, args, kwargs, None)
    if planner is None:
        return looked.plan(None, None, "save_all").residuals
    if planner.given is None and planner.budget is None and planner.policy is None:
        return looked.plan(reductions_saveable, None, "policy").residuals
    return planner.plan(looked.trace).residuals


def print_saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Prints the table of `saved_residuals`: largest first, repeated blocks combined, with totals.

    Example:
        >>> import torch, fckpt
        >>> w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
        >>> fn = fckpt.remat(lambda w, x: torch.sin(x @ w).sum())
        >>> fckpt.print_saved_residuals(fn, w, x)  # doctest: +ELLIPSIS +NORMALIZE_WHITESPACE
        bytes what from needed by recompute
        36 B float32[3, 3] args[0] ...
    """
    print(format_residuals(saved_residuals(fn, *args, **kwargs)))


def stats(fn: Callable[..., Any]) -> Stats:
    """Returns statistics about the calls of a rematerialised function or module: plans, hits, fallbacks, seconds.

    Args:
        fn: a result of `remat` with a budget, a policy or a plan, or a result of `step`.

    Raises:
        ArgumentTypeError: `fn` is not rematerialised.

    Example:
        >>> import torch, fckpt
        >>> fn = fckpt.remat(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w).sum(), budget=1.0)
        >>> w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
        >>> for _ in range(3):
        ...     fn(w, x).backward()
        >>> found = fckpt.stats(fn)
        >>> found.calls, found.plans, found.captures, found.hits, found.fallbacks
        (3, 1, 1, 2, {})
    """
    planner = getattr(fn, "_fckpt_planner", None) or planner_of(fn)
    if planner is None:
        raise ArgumentTypeError(f"stats takes a result of fckpt.remat, not {type(fn).__name__}: {fn!r}.")
    return planner.ledger.stats


def _checked_outputs(outputs: Any) -> Sequence[int | str] | None:
    if outputs is None:
        return None
    chosen = [outputs] if isinstance(outputs, (int, str)) else outputs
    if not isinstance(chosen, Sequence) or any(type(output) not in (int, str) for output in chosen):
        raise ArgumentTypeError(f"outputs are ints or str, or a sequence of them, not {outputs!r}.")
    return chosen


class Looked:
    """A call that is traced and planned, but not run."""

    def __init__(
        self,
        fn: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        costs: CostSource | str | None,
        outputs: Outputs | None = None,
        donated: tuple[Any, Any] = ((), ()),
        device: torch.device | str | None = None,
    ):
        if not callable(fn):
            raise ArgumentTypeError(f"a plan needs a function or an nn.Module, not {type(fn).__name__}.")
        plain = plain_of(fn)
        run = plain.forward if isinstance(plain, nn.Module) else plain
        self.chosen = _checked_outputs(outputs)
        region = getattr(fn, "_fckpt_region", None)
        given = DonatedArguments(run, *donated) or getattr(region, "donated", None)
        if isinstance(costs, type) or not (costs is None or isinstance(costs, str) or callable(costs)):
            raise ArgumentTypeError(
                f"costs are a source such as fckpt.cost.Measured(), or the name of a profile, not {costs!r}."
            )
        if isinstance(costs, str):
            costs = Analytic(profile_of(costs))
        target = _target(fn, args, kwargs, costs, device)
        self.trace, tensors = traced_without_running(run, tuple(args), kwargs, self.chosen, given, target)
        fake = next((t for t in tensors if isinstance(t, FakeTensor) or t.device.type == "meta"), None)
        if costs is None and fake is not None and fake.device.type == "meta" and target is None:
            raise ArgumentValueError(
                'tensors on the meta device do not say which device to plan for: pass costs="H100", for example. '
                f"The profiles are {', '.join(profiles)}; fckpt.cost.DeviceProfile describes another device."
            )
        if costs is None and target is not None:
            costs = Analytic(_profile_here(target.device))
        elif costs is None:
            costs = Measured() if fake is None else Analytic(profile_of(fake.device))
        self.costs = costs
        self.is_real = fake is None and target is None
        """Whether the tensors are real ones, of the device to plan for."""
        self.graphs: dict[Any, Any] = {}

    def plan(
        self,
        policy: PolicyLike | None,
        budget: Budget | None,
        solver: str,
        time_limit: float | None = None,
        tile: Tile = False,
        *,
        hint: bool = True,
        quickly: bool = False,
    ) -> Plan:
        """Plans the call.

        Args:
            policy: see `fckpt.plan`.
            budget: see `fckpt.plan`.
            solver: see `fckpt.plan`.
            time_limit: see `fckpt.plan`.
            tile: see `fckpt.remat`.
            hint: whether the error says what smaller parts of the batch would fit.
            quickly: whether a plan that is found quickly will do. If none is found, the solver runs.

        Raises:
            BudgetError: no plan fits.
        """
        budget = None if budget is None else check_budget(budget)
        solve.get(solver)  # raises if there is no such solver, before the operations are priced
        policy = None if policy is None else as_policy(policy)
        if policy not in self.graphs:
            self.graphs[policy] = priced(self.trace, policy, self.costs, budgeted=True)
        graph = self.graphs[policy]
        version = str(torch.__version__)

        def make(graph: Graph, budget: Budget | None) -> Plan:
            found = quick_plan(graph, nbytes_of(budget, graph)) if quickly and budget is not None else None
            return found or make_plan(graph, budget, solver, version, time_limit)

        if budget is None and policy is None:
            made = plain_plan(graph, version)
        elif not tile and not hint:
            made = make(graph, budget)
        else:
            price = lambda trace: priced(trace, policy, self.costs, budgeted=True)
            made = tiled_or_hinted(self.trace, graph, price, budget, make, tile)
        return dataclasses.replace(made, loss_of=_loss_of(self.trace, self.chosen is not None))

    def with_kernels(self, plan: Plan, kernels: Kernels) -> Plan:
        """Returns a plan that runs with these kernels, with its blocks if they can be compiled and tried here."""
        if kernels == "aten" or not self.is_real:
            return dataclasses.replace(plan, kernels=kernels)
        return with_blocks(rewritten(self.trace, plan.tiles), plan, kernels, plan.budget_bytes)

    def adapted(
        self, known: Plan, policy: PolicyLike | None, budget: int, solver: str, time_limit: float | None
    ) -> Plan:
        """Returns the schedule of a plan for other sizes, adapted to this call, or a solved plan if that does not fit.

        Raises:
            PlanError: the call has other operations.
            BudgetError: no plan fits.
        """
        decided = None if policy is None else as_policy(policy)
        graph = priced(self.trace, decided, self.costs, budgeted=True)
        if structure(graph) != structure(known.graph):
            pairs = itertools.zip_longest([n.op for n in known.graph.nodes], [n.op for n in graph.nodes])
            how = next(
                (f"operation {i} is {a} in the plan, and {b} here" for i, (a, b) in enumerate(pairs) if a != b), ""
            )
            raise PlanError(
                "at these sizes the function runs other operations than the plan has, or makes results of other "
                f"kinds{how and ': '}{how}. Make another plan with fckpt.plan."
            )
        families = Families()
        families.add(known)
        solve = lambda: self.plan(policy, budget, solver, time_limit)
        made, _ = families.plan(graph, budget, solve)
        return dataclasses.replace(made, loss_of=_loss_of(self.trace, self.chosen is not None))


def _target(
    fn: Any, args: Sequence[Any], kwargs: dict[str, Any], costs: CostSource | None, device: torch.device | str | None
) -> NamedDevice | None:
    """Returns the device to plan for, if it is not the device of the tensors."""
    profile = costs.profile if isinstance(costs, Analytic) else None
    capability = None if profile is None else profile.capability
    asked = None if device is None else device_named(device)
    if asked is not None and asked.type == "meta":
        return None
    tensors = [t for t in tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    tensors += [t for module in closure_of([fn], []).modules for t in (*module.parameters(), *module.buffers())]
    here = {t.device.type for t in tensors}
    if asked is None:
        if "meta" in here and capability is not None:
            return named_device(torch.device("cuda"), capability)
        hidden = any(isinstance(t, FakeTensor) and t.device.type == "cuda" for t in tensors)
        return named_device(torch.device("cuda"), capability) if hidden and not torch.cuda.is_available() else None
    real = not any(isinstance(t, FakeTensor) for t in tensors)
    if here == {asked.type} and (real or torch.cuda.is_available() or asked.type != "cuda"):
        return None
    return named_device(asked, capability)


def _profile_here(device: torch.device) -> DeviceProfile:
    try:
        return profile_of(device)
    except ArgumentValueError as error:
        raise ArgumentValueError(
            f'this machine has no device {str(device)!r}, so say which one to plan for: costs="H100", for example. '
            f"The profiles are {', '.join(profiles)}; fckpt.cost.DeviceProfile describes another device."
        ) from error


def _loss_of(trace: Trace, named: bool) -> tuple[str, ...]:
    """Returns the tensors of the result that are differentiated, if there are others; with their names if these are
    known.
    """
    if sum(trace.flags) == len(trace.backward.outputs or ()):
        return ()
    leaves = [(number_of(leaf), name) for leaf, name in zip(trace.leaves, trace.spec.names(), strict=True)]
    # In reverse: the first of several views of one tensor names it.
    names = {number[:2]: name for number, name in reversed(leaves) if number is not None} if named else {}
    found = []
    for output in trace.backward.outputs or ():
        spec = trace.tensors[trace.outputs[output]]
        layout = f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
        found.append(f"{names.get(('out', output), '')} {layout}".strip())
    return tuple(found)
