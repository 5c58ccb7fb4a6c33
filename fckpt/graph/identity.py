"""Whether two graphs are of the same computation, and where they part: a plan is used for the one it was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from fckpt.graph.graph import Graph, Node

__all__ = ["difference", "fingerprint"]


def fingerprint(graph: Graph, *, arguments: bool = True) -> str:
    """Returns a hash of what a schedule depends on: operations with their arguments, dependencies, sizes; not times.

    Args:
        graph: the graph.
        arguments: False to leave out those of operations, where the ranks of a mesh may differ.
    """
    parts = [(*_structure(n), n.arguments if arguments else "") for n in graph.nodes]
    sizes = [(v.nbytes, v.shape, v.dtype) for v in graph.values]
    return hashlib.sha256(repr((parts, sizes, _ends(graph))).encode()).hexdigest()


def difference(plan: Graph, call: Graph) -> str | None:
    """Says where the graph of a plan and that of a call part first; None if the plan fits.

    Bytes are not compared: those of a plan may be measured, those of a call's trace are computed.
    """
    counts = len(plan.nodes), len(call.nodes)
    for ours, theirs in zip(plan.nodes, call.nodes, strict=False):
        if ours.op != theirs.op:
            how = f"operation {ours.id} is {ours.op} in the plan, and {_placed(theirs)} here"
            return how if counts[0] == counts[1] else f"{_counted(*counts)}; {how}"
        if found := _operation(ours, theirs):
            return f"operation {ours.id}, {_placed(theirs)}, {found}"
    if counts[0] != counts[1]:
        longer, where = (plan, "in the plan") if counts[0] > counts[1] else (call, "here")
        return f"{_counted(*counts)}; {_placed(longer.nodes[min(counts)])} is only {where}"
    for ours, theirs in zip(plan.values, call.values, strict=False):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            text = [f"{v.dtype}{list(v.shape)}" for v in (ours, theirs)]
            return f"{theirs.origin or f'value {theirs.id}'} is {text[0]} in the plan, and {text[1]} here"
    if _ends(plan) != _ends(call) or len(plan.values) != len(call.values):
        return "what goes in and comes out differs: which arguments are differentiated, or what is returned"
    return None


def _structure(node: Node) -> tuple[Any, ...]:
    return (node.op, node.inputs, node.outputs, node.backward, node.random, node.once, node.in_place, node.writes)


def _ends(graph: Graph) -> tuple[Any, ...]:
    return (graph.inputs, graph.cotangents, graph.outputs, graph.gradients, graph.boundary)


def _counted(plan: int, call: int) -> str:
    return f"it has {plan} operations, this call has {call}"


def _placed(node: Node) -> str:
    return f"{node.op}{node.place}"


def _operation(ours: Node, theirs: Node) -> str:
    """How two operations of one kind differ, or nothing."""
    if ours.arguments != theirs.arguments:
        given = dict(_split(ours.arguments)), dict(_split(theirs.arguments))
        for name in [*given[1], *given[0]]:
            texts = [named.get(name, "left out") for named in given]
            if texts[0] != texts[1]:
                return f"has {name} {texts[0]} in the plan, and {texts[1]} here"
    if _structure(ours)[1:3] != _structure(theirs)[1:3]:
        return "reads or makes other values than in the plan"
    if _structure(ours) != _structure(theirs):
        return "runs at other times than in the plan: once or often, forward or backward"
    missing = set(ours.overwrites).difference(theirs.overwrites)
    return "may not write over its operands, as the plan has it do" if missing else ""


def _split(arguments: str) -> Iterator[tuple[str, str]]:
    """The arguments of `Node.arguments` by name."""
    depth, start = 0, 0
    for i, letter in enumerate([*arguments, ","]):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            name, _, text = arguments[start:i].strip().partition("=")
            yield name, _readable(text)
            start = i + 1


def _readable(text: str) -> str:
    """A layout without its number: `float32[2,3](3,1)` for `%0=float32[2,3](3,1)`."""
    parts: Sequence[str] = text.split("%")
    return parts[0] + "".join(p.partition("=")[2] if "=" in p.partition(",")[0] else f"%{p}" for p in parts[1:])
