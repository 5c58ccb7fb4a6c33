"""The division tree of a graph with one source and one target: nested closed sets.

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021,
https://arxiv.org/abs/1808.00079. A closed set [s, t] consists of s, t and vertices between them without edges to the
outside. It is divided into smaller closed sets, no two of which share an edge, in one of three ways:

1. *linear*: if all paths from s to t pass through some vertex, the set is cut there, at all such vertices at once.
2. *branched*: otherwise, if its interior is disconnected without s and t, into the connected parts. An edge from s to t
   is a part as well.
3. *non-divisible*: otherwise, into its maximal closed sets. Their ends are s, t and vertices with more than two edges.

A set without interior is a leaf. The division is unique: maximal closed sets of a non-divisible set share edges only if
one contains the other. The union of two overlapping closed sets is closed as well, so either one of them was not
maximal or the set was divisible.

    paper                                     here
    [s, t]                                    `Part.source`, `Part.target`
    cost of an edge of the division tree      `Part.nbytes`
    splitting vertex                          where `_chain` cuts
    largest IS of i and j (their code)        `_closed`

Complexity: linear for each of 1 and 2; for 3, one pass over the interior per pair of ends with something between them,
found by dominators (the paper's code tries all pairs). Sets of vertices are bits of ints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Edge", "Part", "divide"]

Edge = tuple[int, int]


class Part(NamedTuple):
    """A closed set, and its division."""

    source: int
    target: int
    nbytes: int
    """The bytes of all vertices between source and target."""
    kind: str
    """One of "leaf", "linear", "branched" and "non-divisible"."""
    children: tuple[Part, ...]
    """In order, if the part is linear."""
    edges: tuple[Edge, ...]

    @property
    def ends(self) -> set[int]:
        """The vertices strictly inside at which children begin and end."""
        return {v for child in self.children for v in (child.source, child.target)} - {self.source, self.target}


class Piece(NamedTuple):
    """A closed set that is not divided yet."""

    source: int
    target: int
    edges: list[Edge]


def divide(nbytes: Sequence[int], edges: Iterable[Edge]) -> Part:
    """Returns the division tree of a graph.

    Args:
        nbytes: by vertex. Vertex 0 is the source, the last one the target, and every vertex lies on a path between
            them.
        edges: from lower to higher vertices.
    """
    return _part(nbytes, Piece(0, len(nbytes) - 1, sorted(edges)), "")


def _part(nbytes: Sequence[int], piece: Piece, above: str) -> Part:
    source, target, edges = piece
    inside = sorted({v for edge in edges for v in edge} - {source, target})
    if not inside:
        return Part(source, target, 0, "leaf", (), tuple(edges))
    # a child of a linear set is already cut at every possible vertex
    kind, pieces = "linear", [] if above == "linear" else _chain(piece, inside)
    if len(pieces) < 2:
        kind, pieces = "branched", _branches(piece, inside)
    if len(pieces) < 2:
        kind, pieces = "non-divisible", _closed_sets(piece, inside)
    children = tuple(_part(nbytes, child, kind) for child in pieces)
    return Part(source, target, sum(nbytes[v] for v in inside), kind, children, tuple(edges))


def _chain(piece: Piece, inside: list[int]) -> list[Piece]:
    """Cuts at every vertex through which all paths pass, that is, over which no edge passes."""
    heads = dict(piece.edges)  # the farthest head of each tail, because edges are sorted
    cuts, farthest = [piece.source], piece.source
    for before, vertex in pairwise([piece.source, *inside]):
        farthest = max(farthest, heads[before])
        if farthest <= vertex:
            cuts.append(vertex)
    cuts.append(piece.target)
    places = [bisect_left(piece.edges, (cut,)) for cut in cuts]
    return [Piece(s, t, piece.edges[i:j]) for (s, t), (i, j) in zip(pairwise(cuts), pairwise(places), strict=True)]


def _branches(piece: Piece, inside: list[int]) -> list[Piece]:
    """Divides the interior into its connected components without the ends."""
    near = _neighbours(piece.edges)
    unseen, branch = sum(1 << v for v in inside), dict[int, int]()
    for vertex in inside:
        if vertex not in branch:
            found, _ = _component(vertex, unseen, near)
            branch.update(dict.fromkeys(_bits(found), vertex))
    pieces: dict[int, Piece] = {}
    for edge in piece.edges:
        first = min((branch[v] for v in edge if v in branch), default=-1)
        pieces.setdefault(first, Piece(piece.source, piece.target, [])).edges.append(edge)
    return list(pieces.values())


def _closed_sets(piece: Piece, inside: list[int]) -> list[Piece]:
    """Returns the maximal closed sets inside, the largest first."""
    source, target, edges = piece
    near = _neighbours(edges)
    degrees = dict.fromkeys(near, 0)
    for edge in edges:
        for vertex in edge:
            degrees[vertex] += 1
    ends = [source, *(v for v in inside if degrees[v] > 2), target]
    below = _dominated(edges, source, inside, ends)
    above = _dominated([(b, a) for a, b in reversed(edges)], target, inside[::-1], ends)
    touching: dict[int, int] = dict.fromkeys(near, 0)
    direct: dict[Edge, int] = {}
    for k, edge in enumerate(edges):
        direct[edge] = direct.get(edge, 0) | 1 << k
        for vertex in edge:
            touching[vertex] |= 1 << k
    found: list[tuple[int, Edge]] = []
    for i, first in enumerate(ends):
        for last in reversed(ends[i + 1 :]):
            mine = direct.get((first, last), 0)
            for vertex in _bits(_closed(below[first] & above[last], first, last, near)):
                mine |= touching[vertex]
            if mine and (first, last) != (source, target):
                found.append((mine, (first, last)))
    found.sort(key=lambda entry: -entry[0].bit_count())
    pieces, taken = list[Piece](), 0
    for mine, (first, last) in found:
        if not mine & taken:
            taken |= mine
            pieces.append(Piece(first, last, [edges[k] for k in _bits(mine)]))
    return pieces


def _dominated(edges: list[Edge], root: int, order: list[int], ends: list[int]) -> dict[int, int]:
    """Returns, by end, the vertices that are reachable from `root` only through the end.

    Args:
        edges: the edges of the graph; edges into a vertex come after edges into the vertices before it.
        root: the vertex at which all paths begin.
        order: the other vertices but the last, in topological order.
        ends: the vertices to ask for.
    """
    into: dict[int, list[int]] = {}
    for tail, head in edges:
        into.setdefault(head, []).append(tail)
    over = {root: 0}
    for vertex in order:
        over[vertex] = -1  # all bits
        for tail in into[vertex]:
            over[vertex] &= over[tail] | 1 << tail
    return {end: sum(1 << v for v in order if over[v] >> end & 1) for end in ends}


def _closed(between: int, first: int, last: int, near: dict[int, int]) -> int:
    """Returns the largest subset of `between` that has no edges to the outside except to `first` and `last`."""
    closed, border = 0, 1 << first | 1 << last
    while between:
        part, links = _component((between & -between).bit_length() - 1, between, near)
        between &= ~part
        if not links & ~(part | border):
            closed |= part
    return closed


def _component(start: int, among: int, near: dict[int, int]) -> tuple[int, int]:
    """Returns the connected component of `start` among the vertices `among`, and all neighbours of the component."""
    part = frontier = 1 << start
    links = 0
    while frontier:
        low = frontier & -frontier
        frontier ^= low
        around = near[low.bit_length() - 1]
        links |= around
        frontier |= around & among & ~part
        part |= around & among
    return part, links


def _neighbours(edges: list[Edge]) -> dict[int, int]:
    near: dict[int, int] = {}
    for tail, head in edges:
        near[tail] = near.get(tail, 0) | 1 << head
        near[head] = near.get(head, 0) | 1 << tail
    return near


def _bits(members: int) -> list[int]:
    """Returns the positions of the bits that are set in `members`, in ascending order."""
    found = []
    while members:
        low = members & -members
        found.append(low.bit_length() - 1)
        members ^= low
    return found
