"""Programs: traced calls, lowered by the schedules of their plans and ready to run any number of times."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fckpt._call import ambient
from fckpt._call.levels import below_all
from fckpt._call.results import Rebuilt, Returned, is_number
from fckpt._fuse.option import Kernels
from fckpt._planned.fusing import with_blocks
from fckpt._planned.lower import Lowered, lower
from fckpt._planned.plan import Plan
from fckpt._trace.operations import Ref, Trace, indices_of, is_expanded, statistics_of, strides_of, tensors_of
from fckpt.graph.schedule import Compute, FusedSchedule, Schedule, Step
from fckpt.graph.simulation import Timeline, simulate

__all__ = ["Program"]

_FEW, _MANY = 16, 256


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
        self.kernels: Kernels = kernels
        self.count = count
        running = plan if kernels == "aten" else with_blocks(trace, plan, kernels, within)
        self.schedule = schedule = running.schedule
        graph = plan.graph
        self.fused = None if kernels == "aten" else running.fused
        """The schedule with compiled blocks; None if there are none."""
        self._fit(trace, plan, lower(trace, schedule, graph))
        self.constants = [data for _, data in trace.constants]
        self.written = {operand for _, operand in trace.versions}
        """The operands that the call writes."""
        self.uses = {*range(count), *_read(trace), *self.written}
        """The operands of interest: all arguments, and the captured tensors that the operations use or write."""
        self.draws = any(node.random for node in trace.graph.nodes)
        """Whether an operation draws random numbers."""
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
        sources = [leaf.source if isinstance(leaf, Rebuilt) else leaf for leaf in trace.leaves]
        viewed = {source[1] for source in sources if is_number(source) and source[0] == "in"}
        self.summed = {places[i]: places[i] in viewed for i in _summed(trace) if i in places}
        """The operands of the call for autograd whose gradients are sums of several contributions, by place, each with
        whether a result is the operand or a view of it: autograd differentiates such a result outside of the call.
        """
        self.statistics = [i for i in closed_over if i in self.written]
        """The captured tensors that the forward pass writes."""
        behind = _behind_results(trace) if self.statistics else set[int]()
        self.remembered = [i for i in self.statistics if trace.tensors[trace.operands[i]].value in behind]
        """The written captured tensors whose previous values affect results or gradients (BatchNorm's do not)."""
        late = {t for node in _computed(schedule.backward) for t in graph.nodes[node].inputs}
        again = {t for n in _computed(schedule.backward) if not graph.nodes[n].backward for t in graph.nodes[n].inputs}
        words = {i: _MANY if trace.gradients[i] is None else _FEW for i in places if i not in self.written}
        self.sampled = {places[i]: number for i, number in words.items()}
        """The operands of the call for autograd that it does not write, by place, each with the number of words that a
        sample of its contents has. Parameters are many, and usually change everywhere.
        """
        self.sampled_again = {
            places[i]: number for i, number in words.items() if trace.tensors[trace.operands[i]].value in again
        }
        """Those of them from which the backward pass recomputes values."""
        versions = {trace.operands[i]: i for i in self.statistics} | dict(trace.versions)
        self.reread = {i for t, i in versions.items() if trace.tensors[t].value in late}
        """The captured tensors that the forward pass writes and the backward pass reads."""
        self.writes_late = any(graph.nodes[call.node].backward for call in trace.calls if call.node and call.replaced)
        """Whether the backward pass has in-place operations, which do not work with batched cotangents."""
        self.casts = _cast(trace)
        """The operands that autocast casts, and whose casts it may cache."""

    def _fit(self, trace: Trace, plan: Plan, lowered: Lowered) -> None:
        """Sets what depends on sizes."""
        self.trace = trace
        self.plan = plan
        self.graph = plan.graph
        self.unfused = lowered
        """The lowered functions that run operation by operation, for cotangents with other strides than planned."""
        self.lowered = self.unfused if self.fused is None else lower(trace, self.fused, self.graph)
        if self.lowered.residuals != self.unfused.residuals:  # the backward pass of one may follow on the other forward
            self.fused, self.lowered = None, self.unfused
        self.ambient = ambient.capture()
        """The settings of the trace, which are those of every call. The backward pass recomputes under them."""
        self.backward = trace.backward
        """The planned backward pass."""
        self.returned = _returned(trace)
        """The result as the caller sees it: tree structure, leaves, and the shapes and dtypes of its tensors."""
        self._taken: dict[tuple[tuple[int, ...], ...], bool] = {}

    def at(self, trace: Trace, plan: Plan) -> Program:
        """Returns the program of a trace that the same trace with symbols made for other sizes.

        Args:
            trace: the trace.
            plan: a plan with the schedule of this program, whose graph overwrites the same values.
        """
        found = copy.copy(self)
        for name in ("dependents", "functional", "timeline", "again_nbytes"):  # cached
            vars(found).pop(name, None)
        found._fit(trace, plan, self.unfused.at(trace))
        return found

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
        if self.executed is self.plan.schedule and self.plan.fused is None:
            return self.plan.timeline
        return simulate(self.graph, self.executed)

    @functools.cached_property
    def again_nbytes(self) -> int:
        """The peak, in bytes at most, of a backward pass that runs the forward pass again.

        The caller holds the results of the first forward pass and the cotangents all the time. The results of the
        second forward pass are held until its end, and during the backward pass if the backward pass reads them.
        """
        graph, live = self.graph, self.timeline.live_nbytes
        count = len(self.executed.forward)
        results = set(graph.outputs).difference(graph.inputs)
        read = {v for node in _computed(self.schedule.backward) for v in graph.nodes[node].inputs}
        first, kept, given = (
            sum(graph.values[v].nbytes for v in values) for values in (results, results & read, graph.cotangents)
        )
        return max(max(live[:count], default=0) + first + given, max(live[count:], default=0) + kept)

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
                todo += tensors_of(call)
        for j in outputs:
            if trace.outputs[j] != trace.outputs[i] and trace.outputs[j] in seen:
                found[j].append(i)
    return {j: tuple(others) for j, others in found.items() if others}


def _read(trace: Trace) -> list[int]:
    """Returns the operands that operations read, that are results, or that get a gradient.

    A gradient may lead to a tensor whose value nothing reads: to the bias of a value that a custom
    `autograd.Function` replaces by another.
    """
    used = {v for node in trace.graph.nodes for v in node.inputs} | {trace.tensors[t].value for t in trace.outputs}
    led = trace.differentiable or [gradient is not None for gradient in trace.gradients]
    return [i for i, t in enumerate(trace.operands) if led[i] or trace.tensors[t].value in used]


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
            read = tensors_of(call)
            if found.keys().isdisjoint(read):
                continue
            try:
                result = call.op(*map(sent, call.args), **{k: sent(v) for k, v in call.kwargs.items()})
            except (RuntimeError, NotImplementedError):  # an operation that does not take these strides
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
    converted = {t for call in trace.calls if call.op is _CONVERT for t in tensors_of(call)}
    pairs = zip(trace.operands, trace.gradients, strict=True)
    return [i for i, (t, grad) in enumerate(pairs) if grad is not None and t in converted]


def _summed(trace: Trace) -> list[int]:
    """Returns the operands whose gradients autograd's engine adds up from several contributions.

    A gradient whose formula ends with an addition is taken for such a sum.
    """
    nodes, found = trace.graph.nodes, []
    for i, t in enumerate(trace.gradients):
        maker = None if t is None else trace.graph.values[trace.tensors[t].value].producer
        while maker is not None and nodes[maker].op in _COPIES:
            maker = trace.graph.values[nodes[maker].inputs[0]].producer
        if maker is not None and nodes[maker].backward and nodes[maker].op in _ADDITIONS:
            found.append(i)
    return found


_ADDITIONS = ("aten.add.Tensor", "aten.add_.Tensor")
_COPIES = ("aten.clone.default", "aten._to_copy.default")
_CONVERT = torch.ops.aten._to_copy.default


def _computed(steps: Sequence[Step]) -> set[int]:
    return {step.node for step in steps if isinstance(step, Compute)}
