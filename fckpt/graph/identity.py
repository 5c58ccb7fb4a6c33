"""Identity of graphs: fingerprints of computation and structure, and the first difference between two graphs.

`difference` decides whether a given plan may run a call. The fingerprint is part of the key under which plans are
cached. It also shows whether a file is damaged, and whether all ranks have traced the same graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from fckpt.graph.graph import Graph, Node

__all__ = ["difference", "fingerprint", "structure"]


def fingerprint(graph: Graph, *, arguments: bool = True) -> str:
    """Returns a hash of everything on which a schedule depends.

    These are operations, their arguments, dependencies and sizes, but not times.

    Args:
        graph: the graph.
        arguments: whether arguments of operations count. The ranks of a mesh may differ in them.
    """
    parts = [n.arguments for n in graph.nodes] if arguments else []
    sizes = [(v.nbytes, v.shape, v.dtype) for v in graph.values]
    return hashlib.sha256(repr((graph.skeleton, parts, sizes)).encode()).hexdigest()


def structure(graph: Graph) -> str:
    """Returns a hash of operations, dependencies and decisions, without arguments and sizes.

    Every schedule of a graph is a schedule of all graphs with the same structure.
    """
    return hashlib.sha256(repr((graph.skeleton, [v.decision for v in graph.values])).encode()).hexdigest()


def difference(plan: Graph, call: Graph) -> str | None:
    """Describes the first difference between the graphs of a plan and of a call; None if the plan fits the call.

    Sizes in bytes are not compared: a plan's sizes may be measured, while the sizes in a call's trace are computed.
    """
    counts = len(plan.nodes), len(call.nodes)
    forward = [[(n.op, n.arguments) for n in graph.nodes[: graph.boundary]] for graph in (plan, call)]
    gradients = len(plan.gradients), len(call.gradients)
    if forward[0] == forward[1] and gradients[0] != gradients[1]:
        how = "the number of gradients is {} in the plan, and {} here: other arguments or parameters require grad"
        return how.format(*gradients)
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
    if plan.ends != call.ends or len(plan.values) != len(call.values):
        return "inputs or outputs differ: which arguments are differentiated, or what is returned"
    return None


def _counted(plan: int, call: int) -> str:
    return f"it has {plan} operations, this call has {call}"


def _placed(node: Node) -> str:
    return f"{node.op}{node.place}"


def _operation(ours: Node, theirs: Node) -> str:
    """Describes how two operations of the same kind differ; empty if they do not."""
    if ours.arguments != theirs.arguments:
        given = dict(_split(ours.arguments)), dict(_split(theirs.arguments))
        for name in [*given[1], *given[0]]:
            texts = [named.get(name, "left out") for named in given]
            if texts[0] != texts[1]:
                return f"has {name} {texts[0]} in the plan, and {texts[1]} here"
    if (ours.inputs, ours.outputs) != (theirs.inputs, theirs.outputs):
        return "reads or makes other values than in the plan"
    if ours.structure != theirs.structure:
        return "runs at another time than in the plan: once or any number of times, forward or backward"
    missing = set(ours.overwrites).difference(theirs.overwrites)
    return "may not overwrite its operands, but does so in the plan" if missing else ""


def _split(arguments: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each argument in `Node.arguments`."""
    depth, start = 0, 0
    for i, letter in enumerate([*arguments, ","]):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            name, _, text = arguments[start:i].strip().partition("=")
            yield name, _readable(text)
            start = i + 1


def _readable(text: str) -> str:
    """Returns a layout without the number of its storage: `float32[2,3](3,1)` for `%0=float32[2,3](3,1)`."""
    parts: Sequence[str] = text.split("%")
    return parts[0] + "".join(p.partition("=")[2] if "=" in p.partition(",")[0] else f"%{p}" for p in parts[1:])
