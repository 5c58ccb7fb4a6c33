"""Execution of planned calls: the forward pass, the residuals that it saves, and the backward pass that reads them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from fckpt._call import ambient
from fckpt._call.levels import (
    add_batch_dim,
    below_all,
    below_autograd,
    innermost,
    is_legacy_batch,
    is_wrapped,
    unbatched,
)
from fckpt._call.results import Returned
from fckpt._fuse.option import Kernels
from fckpt._planned.fusing import with_blocks
from fckpt._planned.ledger import Ledger
from fckpt._planned.lower import Lowered, lower
from fckpt._planned.plan import Plan
from fckpt._recompute.saved_tensors import keeps_graph
from fckpt._trace.formulas import FormulaError
from fckpt._trace.operations import Backward, Ref, Trace, indices_of, is_expanded, statistics_of, strides_of
from fckpt.cost.calls import refs
from fckpt.errors import MutationError
from fckpt.graph.schedule import Compute, FusedSchedule, Schedule, Step
from fckpt.graph.simulation import Timeline, simulate

__all__ = ["NOT_AGAIN", "Execution", "Program"]


class Program:
    """A planned program: a traced call, lowered by a schedule. It can run any number of times, in any threads."""

    def __init__(self, trace: Trace, plan: Plan, count: int, kernels: Kernels = "aten", within: int | None = None):
        """Lowers a plan.

        Args:
            trace: the traced call, cut into the tiles of the plan.
            plan: the plan.
            count: the number of the trace's operands that are arguments; the others are captured tensors.
            kernels: the kernels that run it, see `remat`.
            within: for compiled kernels, see `with_blocks`.
        """
        self.trace = trace
        self.plan = plan
        self.kernels: Kernels = kernels
        running = plan if kernels == "aten" else with_blocks(trace, plan, kernels, within)
        self.schedule = schedule = running.schedule
        self.graph = graph = plan.graph
        self.unfused = lower(trace, schedule, graph)
        """The lowered functions that run operation by operation, for cotangents with other strides than planned."""
        self.fused = None if kernels == "aten" else running.fused
        """The schedule with compiled blocks; None if there are none."""
        self.lowered = self.unfused if self.fused is None else lower(trace, self.fused, graph)
        if self.lowered.residuals != self.unfused.residuals:  # the backward pass of one may follow on the other forward
            self.fused, self.lowered = None, self.unfused
        self.count = count
        self.ambient = ambient.capture()
        """The settings of the trace, which are those of every call. The backward pass recomputes under them."""
        self.constants = [data for _, data in trace.constants]
        self.written = {operand for _, operand in trace.versions}
        """The operands that the call writes."""
        self.uses = {*range(count), *_read(trace), *self.written}
        """The operands of interest: all arguments, and the captured tensors that the operations use or write."""
        self.draws = any(node.random for node in trace.graph.nodes)
        """Whether an operation draws random numbers."""
        self.backward = trace.backward
        """The planned backward pass."""
        self.returned = _returned(trace)
        """The result as the caller sees it: tree structure, leaves, and the shapes and dtypes of its tensors."""
        closed_over = [i for i in range(count, len(trace.operands)) if i in self.uses]
        self.read_only = [i for i in closed_over if i not in self.written]
        """The captured tensors that are used but not written. They are operands of the call for autograd."""
        differentiable = trace.differentiable or [True] * len(trace.operands)
        self.constant = [place for place, i in enumerate([*range(count), *self.read_only]) if not differentiable[i]]
        """The operands of the call for autograd that get no gradient, whichever outputs are differentiated, by place.
        What is behind them in the caller's graph must not become part of a backward pass."""
        places = {i: place for place, i in enumerate([*range(count), *self.read_only])}
        self.delivered = [places[i] for i in trace.delivered if i in places]
        """The operands of the call for autograd that are leaves, in the order in which they get their gradients."""
        self.statistics = [i for i in closed_over if i in self.written]
        """The captured tensors that the forward pass writes."""
        behind = _behind_results(trace) if self.statistics else set[int]()
        self.remembered = [i for i in self.statistics if trace.tensors[trace.operands[i]].value in behind]
        """The written captured tensors whose previous values affect results or gradients (BatchNorm's do not)."""
        late = {t for node in _computed(schedule.backward) for t in graph.nodes[node].inputs}
        versions = {trace.operands[i]: i for i in self.statistics} | dict(trace.versions)
        self.reread = {i for t, i in versions.items() if trace.tensors[t].value in late}
        """The captured tensors that the forward pass writes and the backward pass reads."""
        self.writes_late = any(graph.nodes[call.node].backward for call in trace.calls if call.node and call.replaced)
        """Whether the backward pass has in-place operations, which do not work with batched cotangents."""
        self._taken: dict[tuple[tuple[int, ...], ...], bool] = {}
        self.casts = _cast(trace)
        """The operands that autocast casts, and whose casts it may cache."""
        self.complex = [i for i, t in enumerate(trace.operands) if trace.tensors[t].dtype.is_complex]

    @functools.cached_property
    def dependents(self) -> dict[int, tuple[int, ...]]:
        """By output that requires grad: the other such outputs that are computed from it; only those with any."""
        outputs = [i for i, flag in enumerate(self.trace.flags) if flag]
        return _dependents(self.trace, outputs) if len(outputs) > 1 else {}

    @functools.cached_property
    def functional(self) -> Lowered:
        """The lowered functions without overwriting: a residual is too small for a batch of results."""
        return lower(self.trace, self.schedule, self.graph.plain)

    def lowered_for(self, strides: tuple[tuple[int, ...], ...]) -> Lowered:
        """Returns the lowered functions for cotangents with these strides; compiled kernels take planned ones only."""
        return self.lowered if strides == self.backward.strides else self.unfused

    @property
    def executed(self) -> Schedule | FusedSchedule:
        """The schedule that runs, with compiled blocks if there are any."""
        if self.fused is None:
            return self.schedule
        return self.fused

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The memory of the program, step by step, with its compiled blocks."""
        return simulate(self.graph, self.executed)

    @functools.cached_property
    def again_nbytes(self) -> int:
        """The peak, in bytes at most, of a backward pass that runs the forward pass again.

        The caller holds the results of the first forward pass all the time. The results of the second one are held
        until its end, and during the backward pass if the backward pass reads them.
        """
        graph, live = self.graph, self.timeline.live_nbytes
        count = len(self.executed.forward)
        results = set(graph.outputs).difference(graph.inputs)
        read = {v for node in _computed(self.schedule.backward) for v in graph.nodes[node].inputs}
        first, kept = (sum(graph.values[v].nbytes for v in values) for values in (results, results & read))
        return max(max(live[:count], default=0) + first, max(live[count:], default=0) + kept)

    def has_room_for(self, nbytes: int) -> bool:
        """Whether so many bytes beside the plan are within the budget."""
        budget = self.plan.budget_bytes
        return budget is None or self.timeline.peak_nbytes + nbytes <= budget

    def takes(self, strides: Sequence[tuple[int, ...]]) -> bool:
        """Whether the plan is valid for cotangents with these strides: only their first readers see the difference.

        Other strides than the planned ones are accepted for expanded cotangents only. Others might be copied, and the
        plan does not account for copies.
        """
        key = tuple(strides)
        if key not in self._taken:
            self._taken[key] = _taken(self.trace, key)
        return self._taken[key]

    def origin(self, operand: int) -> str:
        """Returns a description of an operand for the user."""
        value = self.graph.values[self.trace.tensors[self.trace.operands[operand]].value]
        return value.origin or f"a tensor of shape {list(value.shape)}"

    def closed_over(self, closure: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the captured tensors that are used but not written."""
        return [closure[i - self.count] for i in self.read_only]


def _dependents(trace: Trace, outputs: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Returns, by output, those of these outputs that are computed from it; only outputs with any."""
    makers = {t: call for call in trace.calls for t in call.outputs if t is not None}
    found: dict[int, list[int]] = {i: [] for i in outputs}
    for i in outputs:
        seen, todo = set[int](), [trace.outputs[i]]
        while todo:
            tensor = todo.pop()
            call = makers.get(tensor)
            if call is not None and tensor not in seen and call.op is not torch.ops.aten.detach.default:
                seen.add(tensor)
                todo += [ref.tensor for ref in refs((call.args, call.kwargs))]
        for j in outputs:
            if trace.outputs[j] != trace.outputs[i] and trace.outputs[j] in seen:
                found[j].append(i)
    return {j: tuple(others) for j, others in found.items() if others}


def _read(trace: Trace) -> list[int]:
    """Returns the operands that operations read, or that are results."""
    used = {v for node in trace.graph.nodes for v in node.inputs} | {trace.tensors[t].value for t in trace.outputs}
    return [i for i, t in enumerate(trace.operands) if trace.tensors[t].value in used]


def _returned(trace: Trace) -> Returned:
    """Returns the result as the caller sees it."""
    dims = trace.out_dims or (None,) * len(trace.outputs)
    specs = [(trace.tensors[t], dim) for t, dim in zip(trace.outputs, dims, strict=True)]
    return Returned(trace.spec, trace.leaves, [(_without(spec.shape, dim), spec.dtype) for spec, dim in specs])


def _without(shape: Sequence[int], dim: int | None) -> torch.Size:
    """Returns a shape without its batch dimension."""
    return torch.Size(shape if dim is None else (*shape[:dim], *shape[dim + 1 :]))


def _taken(trace: Trace, strides: Sequence[tuple[int, ...]]) -> bool:
    """Checks with fake cotangents of other strides whether the operations that read them return the same strides."""
    assert trace.backward.outputs is not None and trace.backward.strides is not None
    mode = FakeTensorMode()
    found: dict[int, torch.Tensor] = {}

    def empty(number: int, stride: Sequence[int] | None = None) -> torch.Tensor:
        spec = trace.tensors[number]
        return torch.empty_strided(spec.shape, stride or spec.stride, dtype=spec.dtype, device=spec.device)

    def sent(value: Any) -> Any:
        if isinstance(value, Ref):
            return found[value.tensor] if value.tensor in found else empty(value.tensor)
        return type(value)(map(sent, value)) if isinstance(value, (list, tuple)) else value

    with below_all(), ambient.without_modes(), mode, torch.no_grad():
        for output, own, other in zip(trace.backward.outputs, trace.backward.strides, strides, strict=True):
            number = trace.cotangents[output]
            assert number is not None
            if own != other and not is_expanded(trace.tensors[number].shape, other):
                return False
            found[number] = empty(number, trace.tensors[number].stride if own == other else other)
        for call in trace.calls:
            read = [*indices_of(call.args), *indices_of(tuple(call.kwargs.values()))]
            if found.keys().isdisjoint(read):
                continue
            try:
                result = call.op(*map(sent, call.args), **{k: sent(v) for k, v in call.kwargs.items()})
            except (RuntimeError, NotImplementedError):
                return False
            results = result if isinstance(result, (list, tuple)) else [result]
            for number, made in zip(call.outputs, results, strict=True):
                if number is None or not isinstance(made, torch.Tensor):
                    continue
                if call.node is None:
                    found[number] = made
                elif strides_of(made.shape, made.stride()) != strides_of(made.shape, trace.tensors[number].stride):
                    return False
    return True


_NOW: Any = object()


def _behind_results(trace: Trace) -> set[int]:
    """Returns the values on which outputs and gradients depend, without running statistics that are only written."""
    calls = {call.node: call for call in trace.calls if call.node is not None}
    producers = {v: node for node in trace.graph.nodes for v in node.outputs}
    ends = [*trace.outputs, *(t for t in trace.gradients if t is not None)]
    todo = [trace.tensors[t].value for t in ends]
    seen = set(todo)
    while todo:
        node = producers.get(todo.pop())
        if node is None:
            continue
        call = calls[node.id]
        statistics = {t for i in statistics_of(call.op, call.args) for t in indices_of(call.args[i])}
        statistics |= {old for old, new in call.replaced if new in statistics}
        written = {trace.tensors[t].value for t in statistics}
        new = set(node.inputs) - written - seen
        seen |= new
        todo += new
    return seen


def _cast(trace: Trace) -> list[int]:
    """Returns the operands that are differentiated and that a dtype conversion reads directly."""
    converted = {t for call in trace.calls if call.op is _CONVERT for t in indices_of(call.args)}
    pairs = zip(trace.operands, trace.gradients, strict=True)
    return [i for i, (t, grad) in enumerate(pairs) if grad is not None and t in converted]


_CONVERT = torch.ops.aten._to_copy.default


NOT_AGAIN = (
    "the forward pass of a planned function would have to run again (for a second backward pass, a second derivative, "
    "or a backward pass of other outputs than before), but it changed a buffer that its results depend on, and the "
    "plan saved no copy of it. Call the function again before this backward pass, or return the new value of the "
    "buffer instead of changing it."
)


def _computed(steps: Sequence[Step]) -> set[int]:
    return {step.node for step in steps if isinstance(step, Compute)}


class Execution:
    """One call by a plan: it runs the forward pass of a `Program`, holds the residuals, and runs the backward pass."""

    def __init__(
        self,
        program: Program,
        closure: Sequence[torch.Tensor],
        replan: Callable[[Backward], Program],
        ledger: Ledger,
        certain: bool,
        seen: Callable[[], None],
        level: int = 0,
        *,
        retraceable: bool = True,
    ):
        """Prepares a call.

        Args:
            program: the planned program to run. Another one replaces it if the backward pass is for other outputs.
            closure: the captured tensors, in the order of the trace.
            replan: returns the planned program for a backward pass.
            ledger: counts the backward passes that cannot run by a plan or exceed it, and warns of them.
            certain: whether a backward pass like the planned one has been observed. Until then the forward pass may
                have to run again, so buffers that it changes are copied first, if the budget has room for the copies.
            seen: called when a backward pass has run.
            level: the level of the `vmap` under which the program was traced; 0 if there was none.
            retraceable: whether `replan` can trace the function again.
        """
        self.program = program
        self.level = level
        self.retraceable = retraceable
        self.read_only = program.read_only
        self.replan = replan
        self.ledger = ledger
        self.seen = seen
        self.statistics = [(i, self._batch(closure[i - program.count])[0]) for i in program.statistics]
        """The written captured tensors: operands of the trace, but not operands of the call for autograd."""
        known = dict(self.statistics)
        copies = bool(program.remembered) and not certain
        copies = copies and program.has_room_for(sum([known[i].nbytes for i in program.remembered]))
        self.before = {i: known[i].detach().clone() if copies else None for i in program.remembered}
        """By written captured tensor whose previous value matters: a copy of that value, or None if not copied."""
        self.residuals: list[Any] | None = None
        self.shared: list[tuple[torch.Tensor, int]] = []
        """The outputs that are also residuals, with their versions: the caller may change them in place."""
        self.written: list[tuple[torch.Tensor, int]] = []
        """The captured tensors that the forward pass wrote and the backward pass reads, with their versions."""
        self.has_run = False
        self.over = False
        """Whether a backward pass has run."""
        self.returned: dict[Any, int] = {}
        """The sizes of the gradients of earlier backward passes, by a weak reference to their storage."""
        self.lock = threading.Lock()
        self.restored: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Returns a context manager that restores the conditions of the forward pass, for running it again."""

    def forward(self, operands: Sequence[torch.Tensor]) -> list[Any] | None:
        """Runs the forward pass at the first call; later calls return None."""
        with self.lock:
            if self.has_run:
                return None
            self.has_run = True
        with self._below_level(), below_autograd():
            operands = [t for t, _ in map(self._batch, operands)]
            outputs, self.residuals = self.program.lowered.forward(self._given(self.program, operands, self.statistics))
            kept = {t.untyped_storage()._cdata for t in self.residuals if isinstance(t, torch.Tensor)}
            self.shared = [(t, t._version) for t in outputs if t.untyped_storage()._cdata in kept]
        self.written = [(t, t._version) for i, t in self.statistics if i in self.program.reread]
        return self._batched(outputs, self.program.trace.out_dims)

    # -- under a vmap

    def _below_level(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that leaves the level of the `vmap`, if there is one."""
        if not self.level:
            return contextlib.nullcontext()
        return innermost().lower()

    def _batch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return unbatched(tensor, self.level) if self.level else (tensor, None)

    def _batched(self, tensors: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        if not self.level:
            return list(tensors)
        pairs = zip(tensors, dims, strict=True)
        return [t if t is None else add_batch_dim(t, dim, self.level) for t, dim in pairs]

    def _cotangents(self, given: Sequence[int], cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Returns the cotangents with the batch dimensions of the trace.

        Returns None if the cotangent of an output without a batch dimension has one.
        """
        found = []
        for i, ct in zip(given, cotangents, strict=True):
            value, dim = self._batch(ct)
            wanted = self.program.trace.out_dims[i]
            if wanted is None and dim is not None:
                return None
            if wanted is not None and dim is None:
                spec = self.program.trace.tensors[self.program.trace.outputs[i]]
                value, dim = value.unsqueeze(wanted).expand(spec.shape), wanted
            moved = dim is not None and wanted is not None and dim != wanted
            found.append(value.movedim(dim or 0, wanted or 0) if moved else value)
        return found

    def backward(
        self,
        operands: Sequence[torch.Tensor],
        given: Sequence[int],
        cotangents: Sequence[torch.Tensor],
        *,
        recorded: bool,
        wrapped: bool,
    ) -> list[Any] | None:
        """Runs the backward pass by a plan; returns None if that is not possible. See `Backward` for `recorded` and
        `wrapped`.

        A backward pass for other outputs than planned, or a second backward pass, has no residuals: the saved ones are
        freed, and the forward pass of the matching plan runs again.
        """
        brought = self._cotangents(given, cotangents)
        operands = [t for t, _ in map(self._batch, operands)]
        tensors = (*operands, *(brought or ()))
        records = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        reason = ""
        if brought is None or any(map(is_wrapped, tensors)):
            reason = "batched backward"
        elif records or not (self.retraceable or self._formulas_match(recorded, wrapped)):
            reason = "second derivative"
        elif self.program.writes_late and any(map(is_legacy_batch, tensors)):
            reason = "batched backward"
        elif ambient.interfering_mode() is not None:
            reason = "dispatch mode"
        if brought is None or reason:
            self.give_up(reason)
            return None
        try:
            with self._below_level():
                grads = self._grads(operands, tuple(given), brought, recorded, wrapped)
        except FormulaError:
            self.give_up("second derivative")
            return None
        except RuntimeError as error:
            # Autograd has formulas for batches of cotangents that write nothing in place; the plan has the usual ones.
            if not (any(map(is_legacy_batch, tensors)) and str(error).startswith("vmap: ")):
                raise
            self.give_up("batched backward")
            return None
        self.over = True
        if keeps_graph():
            known = (g for g in grads if g is not None and not is_legacy_batch(g))
            self.returned |= {StorageWeakRef(g.untyped_storage()): g.nbytes for g in known}
        self.seen()
        return self._batched(grads, [self.program.trace.grad_dims[i] for i in self._gradients()])

    def _formulas_match(self, recorded: bool, wrapped: bool) -> bool:
        """Whether the plan was made with the derivative formulas of this backward pass."""
        planned = self.program.backward
        return recorded == planned.recorded and planned.wrapped in (None, wrapped)

    def give_up(self, reason: str) -> None:
        """Frees the residuals of a forward pass whose planned backward pass will not run, and says why."""
        self.residuals = None
        self.ledger.falls_back(reason)

    def _gradients(self) -> list[int]:
        """Returns the operands of the trace that are operands of the call for autograd."""
        return [*range(self.program.count), *self.read_only]

    def _grads(
        self,
        operands: Sequence[torch.Tensor],
        given: tuple[int, ...],
        cotangents: list[torch.Tensor],
        recorded: bool,
        wrapped: bool,
    ) -> list[Any]:
        with self.lock:
            residuals, self.residuals = self.residuals, None
        # Lazy conjugation and negation are views above the recorded operations.
        cotangents = [ct.resolve_conj().resolve_neg() for ct in cotangents]
        functional = any(map(is_legacy_batch, cotangents))
        planned = self.program.backward
        strides = tuple([strides_of(ct.shape, ct.stride()) for ct in cotangents])
        asked = Backward(given, ambient.autocast(), strides, recorded=recorded, wrapped=wrapped)
        backward = asked if planned.wrapped is not None else asked._replace(wrapped=None)
        if backward != planned and backward._replace(strides=planned.strides) == planned:
            if not functional and not self.program.takes(strides) and not self.retraceable:
                self.ledger.falls_back("other strides")
                functional = True  # without overwriting, operations accept operands with any strides
            if functional or self.program.takes(strides):
                backward = planned
        plans = self.ledger.stats.plans
        if backward != planned and not self._replanned(asked):
            residuals = None
        program, statistics = self.program, self.statistics
        if residuals is None:
            if self.ledger.stats.plans == plans:  # the first backward pass of a kind shows what to plan for
                self._check_again()
            residuals, statistics = self._again(operands)
        else:
            self._check_statistics()
        self._check_outputs()
        elsewhere = program.ambient != ambient.capture()
        with ambient.restored(program.ambient) if elsewhere else contextlib.nullcontext(), below_autograd():
            lowered = program.functional if functional else program.lowered_for(strides)
            grads = lowered.backward(self._given(program, operands, statistics), residuals, cotangents)
        return [grads[i] for i in self._gradients()]

    def _replanned(self, asked: Backward) -> bool:
        """Changes to the program for another backward pass; returns whether it can use the same residuals."""
        before = self.program
        with ambient.restored(before.ambient):
            self.program = self.replan(asked)
        same = self.program.lowered.is_same(before.lowered)
        if not same:
            self.shared = []
        return same

    def _check_again(self) -> None:
        """Says if the budget does not allow for a forward pass that runs again while earlier gradients are held."""
        held = sum(nbytes for storage, nbytes in self.returned.items() if not storage.expired())
        budget, nbytes = self.program.plan.budget_bytes, self.program.again_nbytes + held
        if budget is not None and nbytes > budget:
            self.ledger.falls_back("forward again", nbytes=nbytes)

    def _again(self, operands: Sequence[torch.Tensor]) -> tuple[list[Any], list[tuple[int, torch.Tensor]]]:
        """Runs the forward pass again, with all side effects on copies; returns its residuals and the copies."""
        program = self.program
        with self.restored(), torch.no_grad():
            copies = [(i, self._before(i).clone()) for i in program.statistics]
            with below_autograd():
                return program.lowered.forward(self._given(program, operands, copies))[1], copies

    def _before(self, operand: int) -> torch.Tensor:
        """Returns a written captured tensor as it was before the call, or as it is now if its value does not matter."""
        known = self.before.get(operand, _NOW)
        if known is _NOW:
            return next(t for i, t in self.statistics if i == operand).detach()
        if known is None:
            raise MutationError(NOT_AGAIN)
        return known

    def _check_outputs(self) -> None:
        for tensor, then in self.shared:
            if tensor._version != then:
                raise MutationError(
                    f"an output of a rematerialised function (shape {list(tensor.shape)}, {tensor.dtype}) was changed "
                    f"in place between forward and backward (version {then} -> {tensor._version}), and its plan saves "
                    "that output for backward. Change a copy instead."
                )
        self.shared = []

    def _check_statistics(self) -> None:
        for tensor, then in self.written:
            if tensor._version != then:
                raise MutationError(
                    f"a buffer that a planned function writes and its backward pass reads (shape {list(tensor.shape)}, "
                    f"{tensor.dtype}) was changed in place between forward and backward (version {then} -> "
                    f"{tensor._version}), for example by another call of the function. Run backward before that call."
                )

    def _given(
        self, program: Program, operands: Sequence[torch.Tensor], statistics: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        own: list[Any] = [None] * len(program.trace.operands)
        own[: program.count] = operands[: program.count]
        for i, tensor in zip(self.read_only, operands[program.count :], strict=True):
            own[i] = tensor
        for i, tensor in statistics:
            own[i] = tensor
        for i in program.complex:
            if own[i] is not None:  # lazy conjugation and negation are views above the recorded operations
                own[i] = own[i].resolve_conj().resolve_neg()
        return own + program.constants
