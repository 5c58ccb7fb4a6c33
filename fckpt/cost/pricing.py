"""Pricing of a trace: its graph with the cost of every node."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from fckpt._trace.allocations import rounded
from fckpt._trace.memories import Memory
from fckpt._trace.operations import Call, TensorSpec, Trace, is_random, is_tagged_random, tensors_of
from fckpt.cost.allocators import granularity
from fckpt.cost.analytic import Analytic
from fckpt.cost.by_size import CostsBySize, Operation
from fckpt.cost.calls import CostSource, OpCost, registered
from fckpt.cost.measured import Measured, isolated
from fckpt.cost.pairs import makers_of, paired_signature, workspace_maker
from fckpt.cost.store import environment
from fckpt.errors import ArgumentTypeError, BudgetWarning, name_of, users_stacklevel
from fckpt.graph.graph import Graph, Node, Value, changed
from fckpt.report.progress import Line

__all__ = ["Prices", "price", "prices"]


def price(trace: Trace, source: CostSource, *, progress: bool = False) -> Graph:
    """Returns the graph of a trace with the seconds, FLOPs and temporary bytes of every node.

    Calls with equal signatures (the same op, shapes, strides, dtypes, devices and other arguments) are priced once.
    Views have no cost.

    Args:
        trace: the trace.
        source: `Measured()`, `Analytic(profile)`, or a function of a call and the specs of all tensors.
        progress: whether to show the progress on stderr, if stderr is a terminal and pricing takes more than a second.

    Returns:
        The graph of the trace, with costs.

    Warns:
        UserWarning: some operations were estimated, because `Measured` could not run them, or because they are custom.
    """
    return prices(trace, source, progress=progress).of(trace.graph)


class Prices(NamedTuple):
    """What pricing found for a trace."""

    seconds: list[float]
    """By node, like the next three."""
    flops: list[int]
    temporary_nbytes: list[int]
    replayed_nbytes: list[int]
    nbytes: list[int]
    """By value."""

    def of(self, graph: Graph) -> Graph:
        """Returns the graph of the trace with these prices."""
        return graph.with_costs(*self.parts(graph))

    def parts(self, graph: Graph) -> tuple[list[Node], list[Value]]:
        """Returns the nodes and values of `of`."""
        values = [
            v if v.nbytes == nbytes else changed(v, nbytes=nbytes)
            for v, nbytes in zip(graph.values, self.nbytes, strict=True)
        ]
        nodes = []
        for node, *spent in zip(graph.nodes, *self[:4], strict=True):
            seconds, flops, temporary, replayed = spent
            found = changed(node, seconds=seconds, flops=flops, temporary_nbytes=temporary, replayed_nbytes=replayed)
            nodes.append(_overwriting_equals(found, values) if found.overwrites or found.accumulates else found)
        return nodes, values


def prices(trace: Trace, source: CostSource, *, progress: bool = False) -> Prices:
    """Returns the seconds, FLOPs and temporary bytes of every node of a trace, and the bytes of every value.

    See `price`.
    """
    shape = _shape_of(trace)
    calls = [call for call in trace.calls if call.node is not None]
    costs = _costs(trace, source, calls, shape.distinct, progress)
    total: dict[int, OpCost] = {}
    for key, call, results in zip(shape.keys, calls, shape.results, strict=True):
        assert call.node is not None
        cost = _with_dropped(results, costs[key])
        total[call.node] = _joined(total[call.node], cost) if call.node in total else cost
    spent = [total.get(i, _FREE) for i in range(shape.nodes)]
    temporary = [cost.temporary_nbytes for cost in spent]
    before = trace.general.nbytes if trace.sized and trace.general else [value.nbytes for value in trace.graph.values]
    nbytes = _measured_sizes(shape, costs, before)
    if shape.rounds:
        grain = source.profile.allocation_granularity if isinstance(source, Analytic) else None
        nbytes = _rounded(trace, nbytes, grain)
    replayed = _replayed(shape, temporary, before)
    return Prices([cost.seconds for cost in spent], [cost.flops for cost in spent], temporary, replayed, nbytes)


_FREE = OpCost(0.0, 0, 0)


class _Results(NamedTuple):
    """The results of a call, by their positions."""

    values: tuple[tuple[int, tuple[int, ...]], ...]
    """The values of the graph that the call makes, each with the positions of its tensors.

    A value may have more memory than one storage: the fake of `mkldnn_rnn_layer_backward` returns one tensor as two
    gradients, where the kernel returns a copy as the second (torch 2.13). Both live until the value is freed.
    """
    dropped: tuple[int, ...]
    """The other tensors of the trace among the results, which are freed at once."""


class _Shape(NamedTuple):
    """What pricing reads from a trace that is the same at all sizes."""

    nodes: int
    """The number of nodes."""
    keys: list[str]
    """The signatures of the calls that belong to nodes. Calls with equal texts have equal costs. For a trace with
    symbols, these are texts with symbols."""
    distinct: dict[str, int]
    """By signature: the position of a call."""
    results: list[_Results]
    """By call."""
    replaced: list[list[tuple[int, int]]]
    """By call: the values that it writes, each before and after."""
    draws: dict[int, tuple[int, ...]]
    """The nodes that draw random numbers from a generator on the CPU, each with the values that it makes."""
    late: set[int | None]
    """Random nodes that write to memory that is already allocated when the state of the generator is read."""
    watched: set[int | None]
    """The nodes of custom operations, which may draw from any generator, so that its states are compared."""
    rounds: bool
    """Whether there are tensors on devices whose allocators round up."""


_SIZED: WeakKeyDictionary[Any, _Shape] = WeakKeyDictionary()
"""By trace with symbols."""


def _shape_of(trace: Trace) -> _Shape:
    sized = trace.sized
    if sized is None:
        return _made_shape(trace, _signatures(trace.calls, trace.tensors))
    if sized not in _SIZED:
        _SIZED[sized] = _made_shape(trace, _signatures(sized.calls, sized.tensors))
    return _SIZED[sized]


def _made_shape(trace: Trace, keys: list[str]) -> _Shape:
    calls = [call for call in trace.calls if call.node is not None]
    value_of = lambda tensor: trace.tensors[tensor].value
    draws = {node.id: node.outputs for node in trace.graph.nodes if node.random and _is_on_cpu(trace, node)}
    drawing = [call for call in (calls if draws else ()) if is_random(call.op)]
    late = {call.node for call in drawing if all(made is None for made in call.outputs)}
    watched = {call.node for call in drawing if not is_tagged_random(call.op)}
    return _Shape(
        len(trace.graph.nodes),
        keys,
        {key: position for position, key in enumerate(keys)},
        [_results_of(trace, call) for call in calls],
        [[(value_of(old), value_of(new)) for old, new in call.replaced] for call in calls],
        draws,
        late,
        watched,
        any(spec.device.type not in ("cpu", "meta") for spec in trace.tensors),
    )


def _results_of(trace: Trace, call: Call) -> _Results:
    values: dict[int, tuple[int, ...]] = {}
    dropped = []
    for position, tensor in enumerate(call.outputs):
        if tensor is None:
            continue
        value = trace.tensors[tensor].value
        if value >= 0 and trace.graph.values[value].producer == call.node:
            values[value] = (*values.get(value, ()), position)
        else:
            dropped.append(position)
    return _Results(tuple(values.items()), tuple(dropped))


def _signatures(calls: Sequence[Call], specs: Sequence[TensorSpec]) -> list[str]:
    makers = makers_of(calls)
    return [paired_signature(call, specs, workspace_maker(call, makers)) for call in calls if call.node is not None]


def _costs(
    trace: Trace, source: CostSource, calls: Sequence[Call], distinct: Mapping[str, int], progress: bool
) -> dict[str, OpCost]:
    """Returns the costs of distinct calls, by signature, and warns about operations that were estimated."""
    if isinstance(source, Measured):
        return _measured(trace, source, calls, distinct, progress)
    costs: dict[str, OpCost] = {}
    with Line(progress) as line:
        for key, position in distinct.items():
            costs[key] = _checked(source(calls[position], trace.tensors), source)
            line.update(len(costs), len(distinct), _PRICED)
    return costs


def _checked(cost: Any, source: CostSource) -> OpCost:
    if not isinstance(cost, OpCost):
        raise ArgumentTypeError(
            f"a source of costs returns a fckpt.cost.OpCost, but {name_of(source)} returned {type(cost).__name__}."
        )
    return cost


def _measured(
    trace: Trace, source: Measured, calls: Sequence[Call], distinct: Mapping[str, int], progress: bool
) -> dict[str, OpCost]:
    """Returns the costs of distinct calls as measured, now or at other sizes."""
    others: CostsBySize | None = trace.other_sizes
    costs: dict[str, OpCost] = {}
    operations: dict[str, Operation] = {}
    if others is not None:
        others.under(environment(torch.device("cpu")))
        free = [(k, i) for k, i in distinct.items() if registered(calls[i], trace.tensors) is None]
        operations = {key: Operation(calls, position, trace.tensors) for key, position in free}
        known = {key: others.cost(operation) for key, operation in operations.items()}
        costs = {key: cost for key, cost in known.items() if cost is not None}
    left = {key: calls[position] for key, position in distinct.items() if key not in costs}
    # Where times are known from other sizes, all is measured within milliseconds.
    seconds = {key: others.seconds(operations[key]) for key in left if others is not None and key in operations}
    at_once = bool(left) and len(seconds) == len(left) and None not in seconds.values()
    makers, operands = (makers_of(trace.calls), _operands(trace)) if left else ({}, {})
    before = {*source.failures, *source.refused}
    with Line(progress) as line, isolated(torch.device("cpu")) if at_once else contextlib.nullcontext():
        for key, call in left.items():
            costs[key] = source(call, trace.tensors, makers, _held(trace, operands, call), seconds.get(key))
            if others is not None and key in operations:
                others.add(operations[key], costs[key], timed=seconds[key] is None)
            line.update(len(costs), len(distinct), _PRICED)
    _warn(source, before)
    return costs


_PRICED = "priced {} of {} operations"


def _replayed(shape: _Shape, temporary: list[int], nbytes: Sequence[int]) -> list[int]:
    """Returns, by node, the memory that torch allocates to read the state of a generator.

    A planned call does so when it runs a random operation again: before the operation and, if other threads might draw,
    after it as well. For custom operations, which are watched whenever they run, the memory is added to `temporary`.

    Args:
        shape: the shape of the trace.
        temporary: the temporary bytes by node.
        nbytes: the bytes by value, as traced.
    """
    found = [0] * shape.nodes
    if not shape.draws:
        return found
    state, alone = torch.default_generator.get_state().nbytes, threading.active_count() == 1
    for node, outputs in shape.draws.items():
        if node in shape.watched:
            temporary[node] = max(temporary[node], state)
            continue
        early = alone and node not in shape.late
        made = sum([nbytes[v] for v in outputs]) if early else 0
        found[node] = max(0, state - made)
    return found


def _warn(source: Measured, before: set[str]) -> None:
    """Warns once about operations that were estimated."""
    if failed := {k: v for k, v in source.failures.items() if k not in before}:
        listed = "; ".join(f"{op}: {reason}" for op, reason in failed.items())
        warnings.warn(
            "fckpt estimated the time and temporary memory of operations that do not run on synthetic data. A budget "
            f"holds only if the estimates are right. Set their costs with fckpt.cost.register_cost. {listed}",
            BudgetWarning,
            stacklevel=users_stacklevel(),
        )
    if refused := [op for op in source.refused if op not in before]:
        warnings.warn(
            f"fckpt does not run custom operations on synthetic data, so it estimated the time and temporary memory of "
            f"{', '.join(refused)}. A budget holds only if the estimates are right. Set the cost of such an operation "
            "with fckpt.cost.register_cost, or declare with fckpt.cost.register_pure that it has no side effects, so "
            "that it can be measured.",
            BudgetWarning,
            stacklevel=users_stacklevel(),
        )


def _operands(trace: Trace) -> dict[int, tuple[TensorSpec, Memory]]:
    """Returns the operands that may be read directly, by their value: the spec of each, and its memory."""
    pairs = [(trace.tensors[t], memory) for t, memory in zip(trace.operands, trace.given, strict=False)]
    return {spec.value: (spec, memory) for spec, memory in pairs if spec.value >= 0}  # -1: no operation uses it


def _held(trace: Trace, operands: Mapping[int, tuple[TensorSpec, Memory]], call: Call) -> dict[int, torch.Tensor]:
    """Returns, by tensor that a call reads, a view of the caller's memory, for operands that can be read directly."""
    found = {}
    for number in {*tensors_of(call)}:
        spec = trace.tensors[number]
        if spec.value not in operands:
            continue
        given, memory = operands[spec.value]
        base = memory()
        if base is None or (tuple(base.shape), base.stride()) != (given.shape, given.stride):
            continue
        if (base.dtype, base.device) == (spec.dtype, spec.device):
            offset = spec.offset + int(base.storage_offset()) - given.offset
            found[number] = base.as_strided(spec.shape, spec.stride, offset)
    return found


def _measured_sizes(shape: _Shape, costs: Mapping[str, OpCost], before: Sequence[int]) -> list[int]:
    """Returns the bytes of all values: those measured as each call made them, or else those `before`."""
    found = list(before)
    seen: set[int] = set()
    for key, results, replaced in zip(shape.keys, shape.results, shape.replaced, strict=True):
        storages = costs[key].storages
        for value, positions in results.values if storages else ():
            sizes = [storages[i] for i in positions if i < len(storages)]
            if sizes:  # a storage that an earlier result shares is measured as 0
                found[value] = max(sum(sizes), found[value]) if value in seen else sum(sizes)
                seen.add(value)
        for old, new in replaced:  # both versions have the same memory
            if old in seen and new >= 0 and before[new]:
                found[new] = found[old]
                seen.add(new)
    return found


def _rounded(trace: Trace, nbytes: Sequence[int], grain: int | None) -> list[int]:
    """Returns the bytes that the allocators of their devices take for the values.

    Args:
        trace: the trace.
        nbytes: the bytes by value of its graph.
        grain: the allocator of the GPU rounds up to a multiple of this many bytes; None for that of torch.
    """
    there = {spec.value: spec.device for spec in trace.tensors if spec.device.type not in ("cpu", "meta")}
    grains = {device: grain or granularity(device) for device in {*there.values()}}
    return [rounded(size, grains[there[value]]) if value in there else size for value, size in enumerate(nbytes)]


def _with_dropped(results: _Results, cost: OpCost) -> OpCost:
    """Returns the cost with results that are no values of the graph counted as temporaries."""
    if not results.dropped:
        return cost
    dropped = sum([cost.storages[i] for i in results.dropped if i < len(cost.storages)])
    return dataclasses.replace(cost, temporary_nbytes=cost.temporary_nbytes + dropped) if dropped else cost


def _overwriting_equals(node: Node, values: Sequence[Value]) -> Node:
    """Returns the node without overwrites of values whose measured size differs from that of the result."""
    sizes = {values[v].nbytes for v in node.outputs}
    overwrites = tuple([v for v in node.overwrites if {values[v].nbytes} == sizes])
    accumulates = tuple([v for v in node.accumulates if {values[v].nbytes} == sizes])
    if (overwrites, accumulates) == (node.overwrites, node.accumulates):
        return node
    return changed(node, overwrites=overwrites, accumulates=accumulates)


def _is_on_cpu(trace: Trace, node: Node) -> bool:
    devices = {spec.device.type for spec in trace.tensors if spec.value in node.outputs}
    return bool(devices & {"cpu", "meta"})


def _joined(first: OpCost, then: OpCost) -> OpCost:
    """Returns the cost of two calls of a node that run one after the other."""
    temporary = max(first.temporary_nbytes, then.temporary_nbytes)
    return OpCost(first.seconds + then.seconds, first.flops + then.flops, temporary)
