"""Compilations of a graph with Inductor under a budget: the peak is measured, and it is planned again if necessary."""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx

from fckpt import solve
from fckpt._compile.by_data import reads_numbers, sized_by_data
from fckpt._compile.joint import copied
from fckpt._compile.partition import Partitioner
from fckpt._compile.rehearsal import can_measure, peak_of, plain_peak_of
from fckpt._planned.making import check_budget
from fckpt._planned.plan import Budget
from fckpt._units import format_bytes, parse_bytes
from fckpt.errors import ArgumentTypeError, ArgumentValueError, BudgetWarning
from fckpt.policies.decisions import PolicyLike, as_policy

__all__ = ["Compilation"]

_OWN = ("budget", "policy", "solver", "mode")
_PARTITIONER = "custom_partitioner_fn"
"""The option of Inductor that each compilation sets."""
ATTEMPTS = 3
"""How often a plan is made again because the compiled function exceeded the budget."""
SHARES = (0.2, 0.1, 0.0)
"""The budgets (`activation_memory_budget`) of torch's own partitions that are tried if no plan keeps the budget."""
STEP = 2
"""By how many percent of the budget the second correction lowers the target at least; the third by twice as many."""

_NOTHING_SAVED = "and it has no backward pass for which it could save less. Pass less data at a time."


class Compilation:
    """The compilations of one graph under one budget."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], mode: str | None):
        """Checks the options, which are changed here, see `backend.fckpt`."""
        if wrong := [key for key in options if not isinstance(key, str)]:
            raise ArgumentTypeError(f"the names of options are str, not {type(wrong[0]).__name__}: {wrong[0]!r}.")
        budget: Budget | None = options.pop("budget", None)
        policy: PolicyLike | None = options.pop("policy", None)
        self.solver = options.pop("solver", "auto")
        self.budget = None if budget is None else check_budget(budget)
        self.policy = None if policy is None else as_policy(policy)
        if self.policy is not None and self.policy.mentioned:
            raise ArgumentValueError(
                f"the policy {self.policy!r} mentions names, and names that fckpt.checkpoint_name gives do not reach "
                "the compiler. Use a policy without names, or put the region below torch.compile: "
                "fckpt.remat(fn, policy=...) runs by its plan there."
            )
        solve.get(self.solver)  # raises an error that lists the solvers, if there is none of this name
        self.patches = {**_of_mode(options.pop("mode", mode)), **{k.replace("-", "_"): v for k, v in options.items()}}
        known = inductor.get_config_copy()
        unknown = sorted(set(self.patches) - set(known))
        if unknown:
            close = difflib.get_close_matches(unknown[0], [*_OWN, *known], n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ArgumentValueError(
                f"the backend fckpt has no option {unknown[0]!r}{meant}. Its options are budget, policy, "
                "solver and mode, and those of Inductor (torch._inductor.list_options())."
            )
        if self.patches.get(_PARTITIONER, inductor.custom_partitioner_fn) is not None:
            raise ArgumentValueError(
                f"{_PARTITIONER} is set, in the options or in torch._inductor.config, and the backend fckpt would not "
                "call it, because its plans are partitions themselves. Leave it None, or use "
                'torch.compile(..., backend="inductor").'
            )
        self.module = module
        self.inputs = inputs
        self.held = [*module.parameters(), *module.buffers()]
        """Tensors that the graph holds itself, such as the parameters and the state of an optimizer."""
        self.can_be_fixed = not reads_numbers(module)
        """Whether the function can be compiled for the sizes of a call alone: there, torch refuses numbers of data."""
        self.is_kept = True
        """Whether the budget is kept, as far as it was measured."""
        self.measured: tuple[int, int] | None = None
        """The peak that was measured last and the budget, both in bytes; None if nothing was measured."""
        self.trains = True
        """Whether a result may have a gradient."""

    @property
    def is_fraction(self) -> bool:
        """Whether the budget is a fraction of the peak with a backward pass, which grows with the sizes."""
        return isinstance(self.budget, float)

    def is_for_more_sizes(self) -> bool:
        """Whether the graph, which has been compiled, has symbolic sizes, at each of which a budget must hold."""
        has_symbols = any(isinstance(value, torch.SymInt) for value in self.inputs)
        return has_symbols and (self.trains if self.is_fraction else self.budget is not None)

    def at(self, inputs: Sequence[Any]) -> Compilation:
        """Returns the compilations of the graph for other inputs, whose sizes are numbers."""
        other = copy.copy(self)
        other.inputs, other.is_kept = inputs, True
        return other

    def peak_and_limit(self, function: Callable[..., Any]) -> tuple[int, int] | None:
        """Returns the measured peak of a function that was compiled before, and the budget, both in bytes.

        None if there is no budget, or if nothing can be measured, with a warning.
        """
        peak = None if self.budget is None else self._measured(function)
        return None if peak is None or self.budget is None else (peak, self._limit(self.budget))

    def fixed(self) -> Compilation:
        """Returns the compilations of the graph for the sizes of the inputs alone, whose inputs are the tensors.

        See `can_be_fixed`.
        """
        other = self.at([value for value in self.inputs if type(value) is not int])
        other.module = _copied(self.module)
        placeholders = other.module.graph.find_nodes(op="placeholder")
        numbers = {n: v for n, v in zip(placeholders, self.inputs, strict=True) if type(v) is int}
        for node in other.module.graph.nodes:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: numbers.get(n, n))
        for node in numbers:
            other.module.graph.erase_node(node)
        other.module.recompile()
        return other

    def compiled(self) -> Callable[..., Any]:
        """Returns the compiled function, within the budget if any attempt is."""
        if self.budget is None:
            return self._attempt(None)[0]
        self._warn_of_parts()
        self._warn_of_data()
        self.trains = self._may_train()
        if not self.trains:
            return self._without_gradients(self.budget)
        limit = self._limit(self.budget)
        target: int = limit
        found: list[tuple[int, Callable[..., Any]]] = []
        plans = 0
        while plans <= ATTEMPTS:
            torch_budget = None
            if not found and self.policy is None:  # the first attempt takes torch's partition, if that fits
                torch_budget = 1.0
            function, partitioner = self._attempt(target, torch_budget)
            peak = self._measured(function)
            if peak is None or self._fits(peak, limit):
                return function
            if not partitioner.trains:  # a cache had the function, but it does not tell what the partitioner decided
                function, partitioner = self._attempt(target, torch_budget, cached=False)
                if not partitioner.trains:  # no result has a gradient
                    self.trains = False
                    if not self.is_fraction:  # see `_without_gradients`
                        self.warn(peak, limit, _NOTHING_SAVED)
                    return function
            plans += partitioner.plan is not None
            found.append((peak, function))
            if partitioner.is_least:
                break
            if partitioner.plan is not None:
                # A few bytes less may give the same plan again, so the later steps are larger.
                target = max(1, target - max(peak - limit, limit * (plans - 1) * STEP // 100))
        torch_budgets = SHARES if self.policy is None else ()  # torch's own partitions ignore policies
        for share in torch_budgets:
            function, partitioner = self._attempt(limit, share)
            if partitioner.trains and partitioner.plan is not None:  # torch's partition is wrong, or saves too much
                continue
            peak = self._measured(function)
            if peak is None or self._fits(peak, limit):
                return function
            found.append((peak, function))
        peak, function = min(found, key=lambda pair: pair[0])
        self.warn(
            peak,
            limit,
            f"which is the least that was measured with {plans} plan{'s' * (plans != 1)}. Name that budget, or use "
            "fckpt.remat without torch.compile, where a budget holds to the byte or is an error.",
        )
        return function

    def _warn_of_parts(self) -> None:
        """Warns if the function was not compiled as a whole."""
        reason = getattr(self.module, "compile_subgraph_reason", None)
        if reason is not None and getattr(reason, "graph_break", False):
            why = str(reason.reason).partition("\n")[0]
            warnings.warn(
                "torch.compile compiles the function in parts, and the budget holds for each part by itself: the "
                f"values that one part saves are not counted in the others. The reason of the break: {why}. "
                "fullgraph=True shows its line.",
                BudgetWarning,
                stacklevel=2,
            )

    def _warn_of_data(self) -> None:
        """Warns if sizes depend on data, for which the peak that is measured here says little about later calls."""
        where = sized_by_data(self.module)
        if where:
            warnings.warn(
                f"the size of {where} depends on data, and the function is compiled once for all its sizes. The budget "
                "is kept for the data of the first call, and may be exceeded with other data. Compute such sizes "
                "outside of the compiled function, which is measured again for each larger size of its arguments, or "
                "pad to a fixed size.",
                BudgetWarning,
                stacklevel=2,
            )

    def _limit(self, budget: Budget) -> int:
        if not isinstance(budget, float):
            return parse_bytes(budget)
        return max(1, int(plain_peak_of(_copied(self.module), self.inputs) * budget))

    def _may_train(self) -> bool:
        """Whether a result can require grad: then a partitioner that was not called means that a cache was hit."""
        tensors = [t for t in (*self.inputs, *self.held) if isinstance(t, torch.Tensor)]
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    def _without_gradients(self, budget: Budget) -> Callable[..., Any]:
        """Returns the compiled function, for which nothing is planned: inference, or the update of an optimizer.

        The peak is only compared with a budget in bytes; a fraction is one of the peak with a backward pass. For an
        update, it is the peak without a compiler: a run would need copies of all tensors that the update holds.
        """
        function, _ = self._attempt(None)
        if isinstance(budget, float):
            return function
        limit = self._limit(budget)
        if self.held and can_measure(self.inputs):
            peak = plain_peak_of(_copied(self.module), self.inputs)
        else:
            peak = self._measured(function)
        if peak is not None and not self._fits(peak, limit):
            self.warn(peak, limit, _NOTHING_SAVED)
        return function

    def _attempt(
        self, nbytes: int | None, torch_budget: float | None = None, cached: bool = True
    ) -> tuple[Callable[..., Any], Partitioner]:
        """Compiles the function for a number of bytes, see `Partitioner`.

        Without `cached`, kernels may come from Inductor's cache, but the function is traced and partitioned.
        """
        partitioner = Partitioner(nbytes, self.policy, self.solver, torch_budget)
        patches = {**self.patches, _PARTITIONER: partitioner}
        # By default, the backward half is compiled by its first run, which cannot be a rehearsal within a compilation.
        # Without a budget there is no rehearsal, and Inductor sees in the first run whether the graph is retained.
        measured = nbytes is not None
        caching = cached and functorch.enable_autograd_cache
        with functorch.patch(force_non_lazy_backward_lowering=measured, enable_autograd_cache=caching):
            function = compile_fx(_copied(self.module), self.inputs, config_patches=patches)
        return cast(Callable[..., Any], function), partitioner

    def _fits(self, peak: int, limit: int) -> bool:
        """Notes a measured peak and the budget as `measured`, and returns whether the peak is within the budget."""
        self.measured = peak, limit
        return peak <= limit

    def warn(self, peak: int, limit: int, why: str) -> None:
        """Warns that the function exceeds its budget, and why."""
        self.is_kept = False
        promised = f"{self.budget!r} = {format_bytes(limit)}" if isinstance(self.budget, float) else format_bytes(limit)
        warnings.warn(
            f"the function that torch.compile compiled with the budget {promised} holds {format_bytes(peak)}, {why}",
            BudgetWarning,
            stacklevel=2,
        )

    def _measured(self, function: Callable[..., Any]) -> int | None:
        """Returns the measured peak of a compiled function in bytes; None, with a warning, if it cannot be measured."""
        why = "its inputs are no plain tensors, or because a profiler was running"
        if can_measure(self.inputs):
            try:
                return peak_of(function, self.inputs, self.held)
            except Exception as error:  # the compiled function may refuse inputs that are not the caller's own
                why = f"it failed on copies of its inputs ({type(error).__name__}: {error})"
        warnings.warn(
            f"the peak of the compiled function was not measured, because {why}. The budget holds as far as the plan "
            "knows Inductor's kernels. Call the compiled function once before you profile it.",
            BudgetWarning,
            stacklevel=2,
        )
        return None


def _of_mode(mode: Any) -> dict[str, Any]:
    modes = list_mode_options()
    if mode is not None and mode not in list(modes):
        raise ArgumentValueError(f"there is no mode {mode!r}. The modes of Inductor are {', '.join(map(repr, modes))}.")
    return {} if mode is None else dict(modes[mode])


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph with the same tensors: Inductor changes the graph that it compiles."""
    made = copied(module)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(module, name):
            setattr(made, name, getattr(module, name))
    for old, new in zip(module.graph.nodes, made.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return made
