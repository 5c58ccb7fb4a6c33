"""A trace's graph with the cost of every node."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Sequence

import torch

from fckpt._call.levels import is_wrapped
from fckpt._trace.operations import Call, Trace, is_random, is_tagged_random
from fckpt.cost.calls import CostSource, OpCost
from fckpt.cost.measured import Measured
from fckpt.cost.pairs import makers_of, paired_signature, workspace_maker
from fckpt.errors import users_stacklevel
from fckpt.graph.graph import Graph, Node, Value
from fckpt.report.progress import Line

__all__ = ["price"]


def price(trace: Trace, source: CostSource, *, progress: bool = False) -> Graph:
    """Sets the seconds, FLOPs and temporary bytes of every node of a trace.

    Operations on equal tensors (the same op, shapes, strides, dtypes, devices and other arguments) are priced once.
    Views cost nothing.

    Args:
        trace: what to price.
        source: `Measured()`, `Analytic(profile)`, or a function of a call and the specs of all tensors.
        progress: whether to show a line on stderr, if that is a terminal and it takes more than a second.

    Returns:
        The graph of the trace, with costs.

    Warns:
        UserWarning: operations that `Measured` could not run, or would not (custom ones), and so were estimated.
    """
    calls = [call for call in trace.calls if call.node is not None]
    makers = makers_of(trace)
    paired = [workspace_maker(call, makers) for call in calls]
    keys = [paired_signature(call, trace.tensors, maker) for call, maker in zip(calls, paired, strict=True)]
    distinct = dict(zip(keys, calls, strict=True))
    costs: dict[str, OpCost] = {}
    before = {*source.failures, *source.refused} if isinstance(source, Measured) else set()
    held = _held(trace)
    with Line(progress) as line:
        for key, call in distinct.items():
            if isinstance(source, Measured):
                costs[key] = source(call, trace.tensors, makers, held)
            else:
                costs[key] = source(call, trace.tensors)
            line.update(len(costs), len(distinct), "priced {} of {} operations")
    held.clear()
    if isinstance(source, Measured):
        _warn(source, before)
    total: dict[int, OpCost] = {}
    for key, call in zip(keys, calls, strict=True):
        assert call.node is not None
        total[call.node] = _joined(total.get(call.node), _with_dropped(trace, call, costs[key]))
    nodes = list(trace.graph.nodes)
    for i, cost in total.items():
        spent = {"seconds": cost.seconds, "flops": cost.flops, "temporary_nbytes": cost.temporary_nbytes}
        nodes[i] = dataclasses.replace(nodes[i], **spent)
    values = _measured_sizes(trace, calls, [costs[key].storages for key in keys])
    nodes = [_overwriting_equals(node, values) for node in nodes]
    # What is written to memory that is there before, or is watched, reads the state while its result is there.
    late = {
        call.node for call in calls if is_random(call.op) and (not any(_made(call)) or not is_tagged_random(call.op))
    }
    for node in [n for n in nodes if n.random and _is_on_cpu(trace, n)]:
        # Before a random operation that will run again the generator's state is read, and let go at once; and after
        # it too, where another thread might draw.
        early = node.id not in late and threading.active_count() == 1
        made = sum(trace.graph.values[v].nbytes for v in node.outputs) if early else 0
        least = torch.default_generator.get_state().nbytes - made
        nodes[node.id] = dataclasses.replace(node, temporary_nbytes=max(node.temporary_nbytes, least))
    return dataclasses.replace(trace.graph, nodes=tuple(nodes), values=tuple(values))


WARNINGS = "fckpt estimated what it could not measure"


def _warn(source: Measured, before: set[str]) -> None:
    """Says once what had to be estimated."""
    if failed := {k: v for k, v in source.failures.items() if k not in before}:
        listed = "; ".join(f"{op}: {reason}" for op, reason in failed.items())
        warnings.warn(
            f"{WARNINGS}, as these operations do not run on made-up data. "
            f"fckpt.cost.register_cost gives them a cost of your own. {listed}",
            stacklevel=users_stacklevel(),
        )
    if refused := [op for op in source.refused if op not in before]:
        warnings.warn(
            f"fckpt does not run custom operations on made-up data, so it guessed time and temporary memory of "
            f"{', '.join(refused)}, and a budget holds only as far as the guess does. fckpt.cost.register_cost gives "
            "such an operation a cost of your own; fckpt.cost.register_pure says that it computes and does nothing "
            "else, so that it may be measured.",
            stacklevel=users_stacklevel(),
        )


def _held(trace: Trace) -> dict[int, torch.Tensor]:
    """By tensor of the trace: the caller's memory under it, where that can be read as it is."""
    bases: dict[int, tuple[torch.Tensor, int]] = {}
    for number, reference in zip(trace.operands, trace.given, strict=False):
        tensor, spec = reference(), trace.tensors[number]
        if tensor is None or not _is_real(tensor) or spec.value < 0:  # nothing uses it
            continue
        if (tuple(tensor.shape), tensor.stride()) == (spec.shape, spec.stride):
            bases[spec.value] = tensor.detach(), int(tensor.storage_offset()) - spec.offset
    found = {}
    for number, spec in enumerate(trace.tensors):
        base, offset = bases.get(spec.value, (None, 0))
        if base is not None and (base.dtype, base.device) == (spec.dtype, spec.device):
            found[number] = base.as_strided(spec.shape, spec.stride, spec.offset + offset)
    return found


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers: integers are made up, so that what they are used for is the same everywhere."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not is_wrapped(tensor)
    return plain and not tensor.is_conj() and not tensor.is_neg() and tensor.is_floating_point()


def _measured_sizes(trace: Trace, calls: Sequence[Call], storages: Sequence[Sequence[int]]) -> list[Value]:
    """The values of a graph with the bytes that their memory was seen to take."""
    sizes: dict[int, int] = {}
    for call, seen in zip(calls, storages, strict=True):
        for value, nbytes in _kept(trace, call, seen).items():
            sizes[value] = max(nbytes, sizes.get(value, 0))
        for old, new in call.replaced:  # the same memory, written over
            before, after = (trace.tensors[t].value for t in (old, new))
            if before in sizes and after >= 0 and trace.graph.values[after].nbytes:
                sizes[after] = sizes[before]
    return [dataclasses.replace(v, nbytes=sizes[v.id]) if v.id in sizes else v for v in trace.graph.values]


def _kept(trace: Trace, call: Call, storages: Sequence[int]) -> dict[int, int]:
    """The values that a call makes, with the bytes that were seen."""
    sizes: dict[int, int] = {}
    for tensor, nbytes in zip(call.outputs, storages, strict=False):
        value = -1 if tensor is None else trace.tensors[tensor].value
        if value >= 0 and trace.graph.values[value].producer == call.node:
            sizes[value] = max(nbytes, sizes.get(value, 0))
    return sizes


def _with_dropped(trace: Trace, call: Call, cost: OpCost) -> OpCost:
    """The cost with the results that are let go at once among the temporaries: two that count as one value, say."""
    made = sum(nbytes for t, nbytes in zip(call.outputs, cost.storages, strict=False) if t is not None)
    dropped = made - sum(_kept(trace, call, cost.storages).values())
    return dataclasses.replace(cost, temporary_nbytes=cost.temporary_nbytes + max(0, dropped))


def _overwriting_equals(node: Node, values: Sequence[Value]) -> Node:
    """The node, which overwrites nothing that turned out to be of another size."""
    sizes = {values[v].nbytes for v in node.outputs}
    fit = lambda over: tuple(v for v in over if {values[v].nbytes} == sizes)
    return dataclasses.replace(node, overwrites=fit(node.overwrites), accumulates=fit(node.accumulates))


def _made(call: Call) -> list[bool]:
    return [t is not None for t in call.outputs]


def _is_on_cpu(trace: Trace, node: Node) -> bool:
    devices = {spec.device.type for spec in trace.tensors if spec.value in node.outputs}
    return bool(devices & {"cpu", "meta"})


def _joined(first: OpCost | None, then: OpCost) -> OpCost:
    """The cost of a node of several calls, one after the other."""
    if first is None:
        return then
    temporary = max(first.temporary_nbytes, then.temporary_nbytes)
    return OpCost(first.seconds + then.seconds, first.flops + then.flops, temporary)
