"""A trace's graph with the cost of every node."""

from __future__ import annotations

import dataclasses
import threading
import warnings

import torch

from fckpt.cost.calls import CostSource, OpCost, signature
from fckpt.cost.measured import Measured
from fckpt.errors import users_stacklevel
from fckpt.graph import Graph, Node
from fckpt.progress import Line
from fckpt.trace import Trace

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
        UserWarning: operations that `Measured` could not run, and so were estimated.
    """
    calls = [call for call in trace.calls if call.node is not None]
    keys = [signature(call, trace.tensors) for call in calls]
    distinct = dict(zip(keys, calls, strict=True))
    costs: dict[str, OpCost] = {}
    before = set(source.failures) if isinstance(source, Measured) else set()
    with Line(progress) as line:
        for key, call in distinct.items():
            costs[key] = source(call, trace.tensors)
            line.update(len(costs), len(distinct), "priced {} of {} operations")
    if isinstance(source, Measured) and (failed := {k: v for k, v in source.failures.items() if k not in before}):
        listed = "; ".join(f"{op}: {reason}" for op, reason in failed.items())
        warnings.warn(
            f"fckpt estimated what it could not measure, as these operations do not run on made-up data. "
            f"fckpt.cost.register_cost gives them a cost of your own. {listed}",
            stacklevel=users_stacklevel(),
        )
    total: dict[int, OpCost] = {}
    for key, call in zip(keys, calls, strict=True):
        assert call.node is not None
        total[call.node] = _joined(total.get(call.node), costs[key])
    nodes = list(trace.graph.nodes)
    for i, cost in total.items():
        nodes[i] = dataclasses.replace(nodes[i], **dataclasses.asdict(cost))
    for node in [n for n in nodes if n.random and _is_on_cpu(trace, n)]:
        # Before a random operation that will run again the generator's state is read, and let go at once; and after
        # it too, where another thread might draw.
        made = sum(trace.graph.values[v].nbytes for v in node.outputs) if threading.active_count() == 1 else 0
        least = torch.default_generator.get_state().nbytes - made
        nodes[node.id] = dataclasses.replace(node, temporary_nbytes=max(node.temporary_nbytes, least))
    return dataclasses.replace(trace.graph, nodes=tuple(nodes))


def _is_on_cpu(trace: Trace, node: Node) -> bool:
    devices = {spec.device.type for spec in trace.tensors if spec.value in node.outputs}
    return bool(devices & {"cpu", "meta"})


def _joined(first: OpCost | None, then: OpCost) -> OpCost:
    """The cost of a node of several calls, one after the other."""
    if first is None:
        return then
    temporary = max(first.temporary_nbytes, then.temporary_nbytes)
    return OpCost(first.seconds + then.seconds, first.flops + then.flops, temporary)
