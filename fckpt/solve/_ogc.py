"""Optimal gradient checkpoints at the ends of closed sets, by a division tree of the tensor graph.

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021,
https://arxiv.org/abs/1808.00079; fckpt began as an implementation of this paper. Vertices are tensors, edges are
operations. Checkpoints divide the graph into segments; the forward pass saves the checkpoints, and the backward pass
recomputes one segment at a time. In the paper's model, memory is the bytes of all checkpoints plus the interior of the
largest segment; time is not considered. Optimal for that sum: on chains among all choices of checkpoints; on other
graphs among the choices that the division tree (see `division_tree`) admits: a closed set is one segment, or its ends
are checkpoints and each part between them is divided separately. A linear set is also cut into segments of several
consecutive parts.

For each possible size of the largest segment, the fewest bytes of checkpoints are computed: for a linear set by a
shortest path along its cuts, for other sets by taking all ends. The paper's code tries every size; here sizes that
cannot win are skipped, because a smaller limit never needs fewer bytes of checkpoints. Ties go to the largest segment,
as in the paper's code.

    paper                              here
    cost of a vertex                   `nbytes`
    max term (their code)              `limit`
    accessibility graph                `reachable` in `_along`
    GC cost                            the bytes of `chosen`

The paper's graphs are graphs of modules, with one input and one output, written by hand or parsed from TorchScript.
Here the tensor graph (`tensors`) is made from traced operations; ResNets give the same graph as in the paper, vertex by
vertex. The source stands for the input on which most bytes depend, usually the data, and for each other input on which
an additional tenth of all bytes depends. Tensors that depend only on parameters and constants are not vertices. In the
same way the target stands for the end that depends on most bytes, and for each other end that adds a tenth. Tensors
that lead to no end are not vertices (the paper's code removes them as well). Outputs of the step are held in any case
and cost nothing.

The plan saves the checkpoints, and recomputes a segment when the backward pass first reads from it. As in the paper,
every segment is recomputed, including the last one and single operations. Operations of a segment whose results nobody
reads are skipped, for example the operation that ends in the next checkpoint, so the plan takes at most the paper's
time. Tensors that are not vertices are recomputed when they are read.

Complexity: the division tree (see there), then O(vertices) for each size of the largest segment that is tried; there
are at most as many sizes as pairs of cuts of linear sets. Left out: nothing of the solver. The budget has no influence:
there is one plan, which fits or does not. Policies are respected, but the model does not consider them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.chains.division_tree import Edge, Part, divide
from fckpt.solve.chains.tensors import TensorVertex, tensor_graph
from fckpt.solve.core.rules import Rules, replay, within_budget

__all__ = ["Checkpoints", "best_checkpoints", "between_ends", "ogc"]

SHARE = 0.1
"""The fraction of all bytes that must depend on a further input, or on which a further end must depend, for it to
count."""


class Checkpoints(NamedTuple):
    """A choice of checkpoints, with its memory in the model."""

    total_nbytes: int
    """The bytes of the checkpoints plus `limit`."""
    limit: int
    """The most bytes that the interior of a segment may have."""
    chosen: tuple[int, ...]
    """The checkpoints, without source and target."""


def ogc(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule whose checkpoints and largest segment have the fewest bytes in total.

    Args:
        graph: one training step.
        budget: bytes; there is only one plan, whatever the budget.

    Raises:
        BudgetError: the plan does not fit.
    """
    rules = Rules(graph)
    tensors, edges = between_ends(graph, tensor_graph(rules))
    nbytes = [_tensor_nbytes(graph, tensor) for tensor in tensors]
    saved: list[int] = []
    if tensors:
        best = best_checkpoints([0, *nbytes, 0], edges)
        saved = [v for i in best.chosen for v in tensors[i - 1].values]
    return within_budget(graph, schedule_of(graph, *replay(rules, saved)), budget, "ogc")


def _tensor_nbytes(graph: Graph, tensor: TensorVertex) -> int:
    return sum(graph.values[v].nbytes for v in tensor.values if v not in graph.outputs)


def between_ends(graph: Graph, tensors: list[TensorVertex]) -> tuple[list[TensorVertex], list[Edge]]:
    """Returns the vertices on the paths from the data to the ends, and the edges.

    In the edges, 0 is the source, the vertices are numbered from 1, and the target has the last number.
    """
    count = len(tensors)
    weight = np.array([1.0 + _tensor_nbytes(graph, tensor) for tensor in tensors])
    below = np.eye(count, dtype=bool)
    for i in range(count - 1, -1, -1):
        below[list(tensors[i].reads)] |= below[i]
    users: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        for value in tensor.held:
            users.setdefault(value, []).append(i)
    inputs = np.array([below[mine].any(axis=0) for mine in users.values()], dtype=bool).reshape(len(users), count)
    data = _covering(inputs, weight)
    depends = inputs[data].any(axis=0)
    last = np.flatnonzero(depends & (below.sum(axis=1) == 1))
    ends = last[_covering(below[:, last].T, weight * depends)].tolist()
    inside = np.flatnonzero(below[:, ends].any(axis=1) & depends).tolist()
    number = {i: k for k, i in enumerate(inside, start=1)}
    first = {i for k, mine in enumerate(users.values()) if k in data for i in mine}
    edges = {(number[j], number[i]) for i in inside for j in tensors[i].reads if j in number}
    edges |= {(0, number[i]) for i in inside if i in first} | {(number[i], len(inside) + 1) for i in ends}
    return [tensors[i] for i in inside], sorted(edges)


def _covering(rows: np.ndarray, weight: np.ndarray) -> list[int]:
    """Returns the row that covers the most weight, then further rows while each adds at least the fraction `SHARE`."""
    found: list[int] = []
    least = SHARE * float(weight.sum())
    while len(rows):
        gains = rows @ weight
        best = int(gains.argmax())
        if found and gains[best] < least:
            break
        found.append(best)
        weight = np.where(rows[best], 0.0, weight)
    return found


def best_checkpoints(nbytes: Sequence[int], edges: Sequence[Edge]) -> Checkpoints:
    """Returns the checkpoints for which the sum of their bytes and of the largest segment's interior is least.

    Args:
        nbytes: by vertex. Vertex 0 is the source, the last one the target, and every vertex lies on a path between
            them.
        edges: from lower to higher vertices.
    """
    tree = divide(nbytes, edges)
    limits = sorted(_limits(tree, nbytes) - {0}) or [0]

    def tried(k: int) -> Checkpoints:
        chosen = tuple(sorted(_inside(tree, limits[k], nbytes)))
        return Checkpoints(limits[k] + sum(nbytes[v] for v in chosen), limits[k], chosen)

    best = above = tried(len(limits) - 1)
    stack = [(0, len(limits) - 1, above)]
    while stack:
        low, high, above = stack.pop()  # limits from `low` to `high` - 1, and the result for `high`
        spent = above.total_nbytes - above.limit  # a lower limit needs at least as many bytes of checkpoints
        if low == high or limits[low] + spent > best.total_nbytes:
            continue
        middle = (low + high) // 2
        found = tried(middle)
        best = min(best, found, key=lambda answer: (answer.total_nbytes, -answer.limit))
        stack += [(low, middle, found), (middle + 1, high, above)]
    return best


def _limits(part: Part, nbytes: Sequence[int]) -> set[int]:
    """Returns the possible sizes of the largest segment's interior."""
    found = {child.nbytes for child in part.children}
    if part.kind == "linear":
        before = np.array(_before(part, nbytes), dtype=np.int64)
        own = np.array([nbytes[v] for v in _cuts(part)], dtype=np.int64)
        for k in range(1, len(own)):
            found.update((before[k] - own[k] - before[:k]).tolist())
    return found.union(*(_limits(child, nbytes) for child in part.children))


def _cuts(part: Part) -> list[int]:
    """Returns the vertices at which a linear part is cut, including its source and target."""
    return [part.source, *(child.target for child in part.children)]


def _before(part: Part, nbytes: Sequence[int]) -> list[int]:
    """Returns, by cut of a linear part, the bytes from its source to the cut, including the cut's bytes.

    Between cuts j and k there are before[k] - before[j] - own[k] bytes.
    """
    steps = (child.nbytes + nbytes[child.target] for child in part.children)
    return list(accumulate(steps, initial=0))


def _inside(part: Part, limit: int, nbytes: Sequence[int]) -> list[int]:
    """Returns the checkpoints that a part needs besides its ends if no segment's interior may exceed `limit`."""
    within = {i: _inside(child, limit, nbytes) for i, child in enumerate(part.children) if child.nbytes > limit}
    if part.kind == "linear":
        return _along(part, limit, nbytes, within)
    return [*part.ends, *(v for chosen in within.values() for v in chosen)]


def _along(part: Part, limit: int, nbytes: Sequence[int], within: dict[int, list[int]]) -> list[int]:
    """Returns the checkpoints of a linear part: a shortest path along its cuts, over segments that are small enough.

    Args:
        part: a linear part.
        limit: the largest interior of a segment, in bytes.
        nbytes: by vertex.
        within: by index of a child that is too large for one segment: the checkpoints inside it.
    """
    cuts, before = _cuts(part), _before(part, nbytes)
    spent, came = [0], [0]
    reachable: deque[int] = deque()  # cuts at which a segment that ends at cut k may begin, the cheapest first
    for k in range(1, len(cuts)):
        own = nbytes[cuts[k]]
        if k - 1 in within:  # the child is divided, so the path passes through both its ends
            reachable.clear()
            came.append(k - 1)
            spent.append(spent[-1] + own + sum(nbytes[v] for v in within[k - 1]))
            continue
        while reachable and spent[reachable[-1]] >= spent[k - 1]:
            reachable.pop()
        reachable.append(k - 1)
        while before[k] - own - before[reachable[0]] > limit:
            reachable.popleft()
        came.append(reachable[0])
        spent.append(spent[reachable[0]] + own)
    chosen = [v for inside in within.values() for v in inside]
    k = came[-1]
    while k:
        chosen.append(cuts[k])
        k = came[k]
    return chosen
