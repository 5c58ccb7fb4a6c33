"""Pricing of a trace: its graph with the cost of every node."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fckpt._trace.allocations import rounded
from fckpt._trace.memories import Memory
from fckpt._trace.operations import Call, TensorSpec, Trace, is_random, is_tagged_random
from fckpt.cost.allocators import granularity
from fckpt.cost.analytic import Analytic
from fckpt.cost.by_size import CostsBySize, Operation
from fckpt.cost.calls import CostSource, OpCost, refs, registered
from fckpt.cost.measured import Measured
from fckpt.cost.pairs import makers_of, paired_signature, workspace_maker
from fckpt.cost.store import environment
from fckpt.errors import ArgumentTypeError, BudgetWarning, name_of, users_stacklevel
from fckpt.graph.graph import Graph, Node, Value, changed
from fckpt.report.progress import Line

__all__ = ["price"]


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
    calls = [call for call in trace.calls if call.node is not None]
    keys = _keys(trace)
    distinct = {key: position for position, key in enumerate(keys)}
    costs = _costs(trace, source, calls, distinct, makers_of(trace.calls), progress)
    made = [_sizes_of(trace, call, costs[key].storages) for key, call in zip(keys, calls, strict=True)]
    total: dict[int, OpCost] = {}
    for key, call, sizes in zip(keys, calls, made, strict=True):
        assert call.node is not None
        total[call.node] = _joined(total.get(call.node), _with_dropped(call, costs[key], sizes))
    nodes = list(trace.graph.nodes)
    for i, cost in total.items():
        spent = {"seconds": cost.seconds, "flops": cost.flops, "temporary_nbytes": cost.temporary_nbytes}
        nodes[i] = changed(nodes[i], **spent)
    values = _measured_sizes(trace, calls, made)
    values = _rounded(trace, values, source.profile.allocation_granularity if isinstance(source, Analytic) else None)
    nodes = [_overwriting_equals(node, values) for node in nodes]
    return trace.graph.with_costs(_with_states(trace, calls, nodes), values)


_SIZED_KEYS: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()
"""The keys of traces with symbols."""


def _keys(trace: Trace) -> list[str]:
    """Returns the signatures of the calls that belong to nodes. Calls with equal texts have equal costs.

    For a trace that was made from a trace with symbols, these are the texts with symbols, the same at all sizes.
    """
    sized = trace.sized
    if sized is None:
        return _signatures(trace.calls, trace.tensors)
    if sized not in _SIZED_KEYS:
        _SIZED_KEYS[sized] = _signatures(sized.calls, sized.tensors)
    return _SIZED_KEYS[sized]


def _signatures(calls: Sequence[Call], specs: Sequence[TensorSpec]) -> list[str]:
    makers = makers_of(calls)
    return [paired_signature(call, specs, workspace_maker(call, makers)) for call in calls if call.node is not None]


def _costs(
    trace: Trace,
    source: CostSource,
    calls: Sequence[Call],
    distinct: dict[str, int],
    makers: Mapping[int, Call],
    progress: bool,
) -> dict[str, OpCost]:
    """Returns the costs of distinct calls, by signature, and warns about operations that were estimated."""
    costs: dict[str, OpCost] = {}
    before = {*source.failures, *source.refused} if isinstance(source, Measured) else set()
    held = functools.partial(_held, trace, functools.cache(lambda: _operands(trace)))
    if trace.other_sizes is not None:
        trace.other_sizes.under(environment(torch.device("cpu")))
    with Line(progress) as line:
        for key, position in distinct.items():
            if isinstance(source, Measured):
                costs[key] = _measured(source, trace, calls, position, makers, held)
            else:
                costs[key] = _checked(source(calls[position], trace.tensors), source)
            line.update(len(costs), len(distinct), "priced {} of {} operations")
    if isinstance(source, Measured):
        _warn(source, before)
    return costs


def _checked(cost: Any, source: CostSource) -> OpCost:
    if not isinstance(cost, OpCost):
        raise ArgumentTypeError(
            f"a source of costs returns a fckpt.cost.OpCost, but {name_of(source)} returned {type(cost).__name__}."
        )
    return cost


def _measured(
    source: Measured,
    trace: Trace,
    calls: Sequence[Call],
    position: int,
    makers: Mapping[int, Call],
    held: Callable[[Call], Mapping[int, torch.Tensor]],
) -> OpCost:
    """Returns the cost of a call. If enough other sizes are known, only its memory is measured, or nothing at all."""
    others: CostsBySize | None = trace.other_sizes
    if others is None or registered(calls[position], trace.tensors) is not None:
        return source(calls[position], trace.tensors, makers, held(calls[position]))
    operation = Operation(calls, position, trace.tensors)
    found = others.cost(operation)
    if found is None:
        seconds = others.seconds(operation)
        found = source(calls[position], trace.tensors, makers, held(operation.call), seconds)
        others.add(operation, found, timed=seconds is None)
    return found


def _with_states(trace: Trace, calls: Sequence[Call], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Returns the nodes with the memory of generator states, which a planned call copies around random operations."""
    # These operations read the generator's state while memory for their result is already allocated: those that write
    # to existing memory, and custom ones, whose generators are observed.
    draws = [n for n in nodes if n.random and _is_on_cpu(trace, n)]
    late = {
        call.node
        for call in (calls if draws else ())
        if is_random(call.op) and (not any(_made(call)) or not is_tagged_random(call.op))
    }
    found = list(nodes)
    for node in draws:
        # A planned call copies the generator's state before a random operation that it will recompute. If other threads
        # might draw, it copies the state after the operation too.
        early = node.id not in late and threading.active_count() == 1
        made = sum(trace.graph.values[v].nbytes for v in node.outputs) if early else 0
        least = torch.default_generator.get_state().nbytes - made
        found[node.id] = changed(node, temporary_nbytes=max(node.temporary_nbytes, least))
    return tuple(found)


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


def _held(
    trace: Trace, operands: Callable[[], Mapping[int, tuple[TensorSpec, Memory]]], call: Call
) -> dict[int, torch.Tensor]:
    """Returns, by tensor that a call reads, a view of the caller's memory, for operands that can be read directly."""
    found = {}
    for number in {ref.tensor for ref in refs((call.args, call.kwargs))}:
        spec = trace.tensors[number]
        if spec.value not in operands():
            continue
        given, memory = operands()[spec.value]
        base = memory()
        if base is None or (tuple(base.shape), base.stride()) != (given.shape, given.stride):
            continue
        if (base.dtype, base.device) == (spec.dtype, spec.device):
            offset = spec.offset + int(base.storage_offset()) - given.offset
            found[number] = base.as_strided(spec.shape, spec.stride, offset)
    return found


def _measured_sizes(trace: Trace, calls: Sequence[Call], made: Sequence[dict[int, int]]) -> list[Value]:
    """Returns the values of the graph with the sizes measured as each call made them."""
    sizes: dict[int, int] = {}
    for call, seen in zip(calls, made, strict=True):
        for value, nbytes in seen.items():
            sizes[value] = max(nbytes, sizes.get(value, 0))
        for old, new in call.replaced:  # both versions have the same memory
            before, after = (trace.tensors[t].value for t in (old, new))
            if before in sizes and after >= 0 and trace.graph.values[after].nbytes:
                sizes[after] = sizes[before]
    values = list(trace.graph.values)
    for value, nbytes in sizes.items():
        if values[value].nbytes != nbytes:
            values[value] = dataclasses.replace(values[value], nbytes=nbytes)
    return values


def _rounded(trace: Trace, values: Sequence[Value], grain: int | None) -> list[Value]:
    """Returns the values with the bytes that the allocators of their devices take for them.

    Args:
        trace: the trace.
        values: the values of its graph.
        grain: the allocator of the GPU rounds up to a multiple of this many bytes; None for that of torch.
    """
    there = {spec.value: spec.device for spec in trace.tensors if spec.device.type not in ("cpu", "meta")}
    if not there:
        return list(values)
    grains = {device: grain or granularity(device) for device in {*there.values()}}
    size = lambda value: rounded(value.nbytes, grains[there[value.id]]) if value.id in there else value.nbytes
    return [dataclasses.replace(value, nbytes=size(value)) for value in values]


def _sizes_of(trace: Trace, call: Call, storages: Sequence[int]) -> dict[int, int]:
    """Returns the values that a call makes, with their measured bytes.

    A value may have more memory than one storage: the fake of `mkldnn_rnn_layer_backward` returns one tensor as two
    gradients, where the kernel returns a copy as the second (torch 2.13). Both live until the value is freed.
    """
    sizes: dict[int, int] = {}
    for tensor, nbytes in zip(call.outputs, storages, strict=False):
        value = -1 if tensor is None else trace.tensors[tensor].value
        if value >= 0 and trace.graph.values[value].producer == call.node:
            sizes[value] = nbytes + sizes.get(value, 0)  # a storage that an earlier result shares is measured as 0
    return sizes


def _with_dropped(call: Call, cost: OpCost, sizes: dict[int, int]) -> OpCost:
    """Returns the cost with results that are not among `sizes`, the values of the graph, counted as temporaries."""
    made = sum([nbytes for t, nbytes in zip(call.outputs, cost.storages, strict=False) if t is not None])
    dropped = made - sum(sizes.values())
    if dropped <= 0:
        return cost
    return dataclasses.replace(cost, temporary_nbytes=cost.temporary_nbytes + dropped)


def _overwriting_equals(node: Node, values: Sequence[Value]) -> Node:
    """Returns the node without overwrites of values whose measured size differs from that of the result."""
    if not node.overwrites and not node.accumulates:
        return node
    sizes = {values[v].nbytes for v in node.outputs}
    fit = lambda over: tuple(v for v in over if {values[v].nbytes} == sizes)
    overwrites, accumulates = fit(node.overwrites), fit(node.accumulates)
    if (overwrites, accumulates) == (node.overwrites, node.accumulates):
        return node
    return changed(node, overwrites=overwrites, accumulates=accumulates)


def _made(call: Call) -> list[bool]:
    return [t is not None for t in call.outputs]


def _is_on_cpu(trace: Trace, node: Node) -> bool:
    devices = {spec.device.type for spec in trace.tensors if spec.value in node.outputs}
    return bool(devices & {"cpu", "meta"})


def _joined(first: OpCost | None, then: OpCost) -> OpCost:
    """Returns the cost of two calls of a node that run one after the other."""
    if first is None:
        return then
    temporary = max(first.temporary_nbytes, then.temporary_nbytes)
    return OpCost(first.seconds + then.seconds, first.flops + then.flops, temporary)
