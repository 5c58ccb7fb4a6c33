"""The tensor graph of the forward pass, for solvers that come from frameworks with module-level operations.

A trace has one operation per kernel: a residual block of a ResNet consists of nine. A tensor, in module-level solvers,
is one that plain training saves or that several operations read. Therefore an operation is merged with its reader if
its results have only this one reader and the backward pass does not read them: plain training frees such results at
once. A ReLU that may overwrite the result of a BatchNorm is merged with it; the BatchNorms and the sum at the end of a
residual block become one operation with two operands; a tensor that an activation's derivative reads stays separate.

Operations that read only the shape of an operand (`empty_like` in a dropout mask) do not depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

from fckpt.graph.graph import Graph, Node
from fckpt.solve.core.rules import Rules, ancestors
from fckpt.solve.core.starts import save_everything

__all__ = ["TensorVertex", "tensor_graph"]


class TensorVertex(NamedTuple):
    """A vertex of the tensor graph: operations that run as one, and the values that they leave."""

    nodes: tuple[int, ...]
    """The operations, in order; the last one makes `values`."""
    reads: tuple[int, ...]
    """The vertices that it reads, which have lower numbers."""
    held: tuple[int, ...]
    """The values that it reads and that the caller holds."""
    values: tuple[int, ...]
    """The values that other vertices read: the tensor. At the end of the forward pass, all outputs of the last
    operation."""
    late: tuple[int, ...]
    """The values that only backward operations read: statistics, indices."""


def tensor_graph(rules: Rules) -> list[TensorVertex]:
    """Returns the vertices on which the backward pass depends, in order."""
    graph = rules.graph
    made = [v for node in graph.nodes[: graph.boundary] for v in node.outputs]
    wanted = {v for i in save_everything(rules).backward for v in graph.nodes[i].inputs}
    producers = {p for v in wanted.intersection(made) if (p := graph.values[v].producer) is not None}
    nodes = ancestors(graph, producers)
    readers: dict[int, set[int]] = {}
    for index in nodes:
        for value in _operands(graph.nodes[index]):
            readers.setdefault(value, set()).add(index)
    home = _homes(rules, nodes, readers, wanted)
    groups: dict[int, list[int]] = {}
    for index in nodes:
        groups.setdefault(home[index], []).append(index)
    number = {last: k for k, last in enumerate(sorted(groups))}
    place = {index: number[last] for index, last in home.items()}
    return [_vertex(graph, groups[last], place, readers, wanted) for last in number]


def _homes(rules: Rules, nodes: list[int], readers: dict[int, set[int]], wanted: set[int]) -> dict[int, int]:
    """Returns, by operation, the last operation of its vertex."""
    graph = rules.graph
    home: dict[int, int] = {}
    for index in reversed(nodes):
        read = [v for v in graph.nodes[index].outputs if v in readers]
        by = {reader for v in read for reader in readers[v]}
        alone = len(by) == 1 and not rules.pinned[index] and wanted.union(graph.outputs).isdisjoint(read)
        home[index] = home[by.pop()] if alone else index
    return home


def _vertex(
    graph: Graph, group: list[int], place: dict[int, int], readers: dict[int, set[int]], wanted: set[int]
) -> TensorVertex:
    operands = dict.fromkeys(v for i in group for v in _operands(graph.nodes[i]))
    mine = set(group)
    reads = {place[p] for v in operands if (p := graph.values[v].producer) is not None and p not in mine}
    last = graph.nodes[group[-1]].outputs
    values = tuple(v for v in last if v in readers) or last
    late = tuple(v for i in group for v in graph.nodes[i].outputs if v in wanted and v not in values)
    held = tuple(v for v in operands if v in graph.held)
    return TensorVertex(tuple(group), tuple(sorted(reads)), held, values, late)


def _operands(node: Node) -> tuple[int, ...]:
    """Returns the inputs of a node, unless it reads only their shapes."""
    _, _, name = node.op.partition(".")
    return () if name.split(".")[0].endswith("_like") else node.inputs
