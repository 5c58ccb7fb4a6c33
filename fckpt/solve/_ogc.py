"""Gradient checkpoints at the ends of closed sets: the seed of this project, for comparison.

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021,
https://arxiv.org/abs/1808.00079. Vertices are tensors, edges are operations. Checkpoints part the graph into segments;
the forward pass keeps the checkpoints, the backward pass computes one segment at a time again. In their model memory is
the bytes of all checkpoints and of the interior of the largest segment, and time has no say. Optimal for that sum: on
chains among all choices of checkpoints; on other graphs among those that the division tree (see `division`) admits: a
closed set is one segment, or its ends are checkpoints and what is between them is chosen in each alone. A linear set
is also cut into segments of several of its parts.

For each value that the largest segment can have: the fewest bytes of checkpoints, in a linear set by a shortest path
along its cuts, in others all ends. Their code tries every value; here those are left out that cannot win, because
fewer bytes in the largest segment never need fewer in checkpoints. Ties go to the largest segment, as with them.

    paper                              here
    cost of a vertex                   `nbytes`
    max term (their code)              `limit`
    accessibility graph                the `reachable` in `_along`
    GC cost                            the bytes of `chosen`

Their graphs are those of modules, with one input and one output; they come from the text of TorchScript or are written
by hand. Here `vertices` makes tensors of traced operations; ResNets come out as theirs are, vertex by vertex. The
source stands for what the caller holds and most bytes depend on, as a rule the data, and for all else that a tenth of
all depends on and not on the first. What depends on parameters and constants alone is no vertex. The target stands in
the same way for the end that depends on most, and for others that add a tenth. What leads to no end is no vertex (their
code trims it as well), and outputs of the step, which are held in any case, cost nothing.

The plan keeps the checkpoints, and a segment is computed again as soon as the backward pass reads something of it. As
with them, no segment is spared: not the last one, and no single operation. What nobody reads of a segment is left out,
the operation that ends in the next checkpoint, say, so the plan takes no more time than theirs. Whatever is no vertex
is computed again when it is read.

Complexity: the division tree (see there), then O(vertices) for each size of the largest segment that is tried, of which
there are at most as many as pairs of cuts of linear sets. Left out: nothing of the solver. A budget has no say: there
is one plan, and it fits or not. Policies are obeyed, but the model does not know them.
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
"""What part of all bytes has to depend on an input, or an end on them, to count beside the first."""


class Checkpoints(NamedTuple):
    """An answer: vertices, and what the model says of them."""

    total_nbytes: int
    """Of the checkpoints, and the most that a segment may have inside."""
    limit: int
    """The latter part of it."""
    chosen: tuple[int, ...]
    """The checkpoints, source and target not among them."""


def ogc(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that keeps the checkpoints for which their bytes and the largest segment's are least.

    Args:
        graph: one training step.
        budget: bytes; there is but one plan, whatever it is.

    Raises:
        BudgetError: the plan does not fit.
    """
    rules = Rules(graph)
    vertices, edges = between_ends(graph, tensor_graph(rules))
    nbytes = [_tensor_nbytes(graph, vertex) for vertex in vertices]
    saved: list[int] = []
    if vertices:
        best = best_checkpoints([0, *nbytes, 0], edges)
        saved = [v for i in best.chosen for v in vertices[i - 1].values]
    return within_budget(graph, schedule_of(graph, *replay(rules, saved)), budget, "ogc")


def _tensor_nbytes(graph: Graph, vertex: TensorVertex) -> int:
    return sum(graph.values[v].nbytes for v in vertex.values if v not in graph.outputs)


def between_ends(graph: Graph, vertices: list[TensorVertex]) -> tuple[list[TensorVertex], list[Edge]]:
    """Returns the vertices on the way from the data to the ends, and the edges.

    In the edges 0 is the source, the vertices are numbered from 1, and the target comes last.
    """
    count = len(vertices)
    weight = np.array([1.0 + _tensor_nbytes(graph, vertex) for vertex in vertices])
    below = np.eye(count, dtype=bool)
    for i in range(count - 1, -1, -1):
        below[list(vertices[i].reads)] |= below[i]
    users: dict[int, list[int]] = {}
    for i, vertex in enumerate(vertices):
        for value in vertex.held:
            users.setdefault(value, []).append(i)
    inputs = np.array([below[mine].any(axis=0) for mine in users.values()], dtype=bool).reshape(len(users), count)
    data = _covering(inputs, weight)
    depends = inputs[data].any(axis=0)
    last = np.flatnonzero(depends & (below.sum(axis=1) == 1))
    ends = last[_covering(below[:, last].T, weight * depends)].tolist()
    inside = np.flatnonzero(below[:, ends].any(axis=1) & depends).tolist()
    number = {i: k for k, i in enumerate(inside, start=1)}
    first = {i for k, mine in enumerate(users.values()) if k in data for i in mine}
    edges = {(number[j], number[i]) for i in inside for j in vertices[i].reads if j in number}
    edges |= {(0, number[i]) for i in inside if i in first} | {(number[i], len(inside) + 1) for i in ends}
    return [vertices[i] for i in inside], sorted(edges)


def _covering(rows: np.ndarray, weight: np.ndarray) -> list[int]:
    """Returns the row that covers most, and then others for as long as one adds a part of `SHARE`."""
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
    """Returns the checkpoints for which their bytes plus the interior of the largest segment are fewest.

    Args:
        nbytes: by vertex. TensorVertex 0 is the source, the last one the target, and every one lies on a path between them.
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
        low, high, above = stack.pop()  # limits from `low` to before `high`, and the answer for `high`
        spent = above.total_nbytes - above.limit  # of which a lower limit needs no less
        if low == high or limits[low] + spent > best.total_nbytes:
            continue
        middle = (low + high) // 2
        found = tried(middle)
        best = min(best, found, key=lambda answer: (answer.total_nbytes, -answer.limit))
        stack += [(low, middle, found), (middle + 1, high, above)]
    return best


def _limits(part: Part, nbytes: Sequence[int]) -> set[int]:
    """Returns what the interior of the largest segment may come to: what a segment can have inside."""
    found = {child.nbytes for child in part.children}
    if part.kind == "linear":
        before = np.array(_before(part, nbytes), dtype=np.int64)
        own = np.array([nbytes[v] for v in _cuts(part)], dtype=np.int64)
        for k in range(1, len(own)):
            found.update((before[k] - own[k] - before[:k]).tolist())
    return found.union(*(_limits(child, nbytes) for child in part.children))


def _cuts(part: Part) -> list[int]:
    """The vertices between which a linear part is a chain."""
    return [part.source, *(child.target for child in part.children)]


def _before(part: Part, nbytes: Sequence[int]) -> list[int]:
    """By cut of a linear part: the bytes up to it, and its own. Between j and k lies before[k] - before[j] - own[k]."""
    steps = (child.nbytes + nbytes[child.target] for child in part.children)
    return list(accumulate(steps, initial=0))


def _inside(part: Part, limit: int, nbytes: Sequence[int]) -> list[int]:
    """Returns the checkpoints that a part needs besides its ends, if no segment may have more than `limit` inside."""
    within = {i: _inside(child, limit, nbytes) for i, child in enumerate(part.children) if child.nbytes > limit}
    if part.kind == "linear":
        return _along(part, limit, nbytes, within)
    return [*part.ends, *(v for chosen in within.values() for v in chosen)]


def _along(part: Part, limit: int, nbytes: Sequence[int], within: dict[int, list[int]]) -> list[int]:
    """Returns the checkpoints of a linear part: a shortest path along its cuts, over segments that are small enough.

    Args:
        part: a linear one.
        limit: what a segment may have inside.
        nbytes: by vertex.
        within: by number of a child that is no segment itself: the checkpoints inside.
    """
    cuts, before = _cuts(part), _before(part, nbytes)
    spent, came = [0], [0]
    reachable: deque[int] = deque()  # cuts from which a segment may come, the cheapest first
    for k in range(1, len(cuts)):
        own = nbytes[cuts[k]]
        if k - 1 in within:  # only from its other end
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
