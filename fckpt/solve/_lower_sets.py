"""Blocks between lower sets: the canonical strategies of Kusumoto et al., by dynamic programming.

M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama, "A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation", NeurIPS 2019, https://arxiv.org/abs/1905.11722. A lower set is closed under
predecessors. An increasing sequence of lower sets, from nothing to everything, parts the forward pass into blocks. Of
each block only what later blocks read is cached; the backward pass computes one block at a time again, from what is
cached. In their model block i takes

    M(U[i-1]) + 2 M(V[i]) + M(later readers of L[i]) + M(what else these read)

bytes: what is cached, the block's values and their gradients, and the gradients that come into it with what they are
made of. The time of a block is that of its values that are not cached, which are computed again.

With all lower sets (`all_lower_sets`; the exact algorithm) the sequence of least time for a budget is found, in that
model and up to the rounding of times; with those of the ancestors of one vertex (`ancestor_sets`; the approximate one)
the best of these sequences. *Time-centric* strategies take the least time, *memory-centric* ones the most: what they
forget besides lowers the peak when values are freed as early as can be.

Their budget is not the peak. So the model is asked for a row of budgets, from the least for which it has a sequence,
sought by bisection as they do, to that from which on nothing binds; the strategies of both kinds are simulated, and of
those whose peak fits the fastest is returned.

    paper                       here
    L, M_v, T_v                 a row of `Blocks.members`, `nbytes`, `ticks`
    boundary of L               `Blocks.boundary`
    opt[L, t]                   the states of a lower set; only those that no other beats in both time and bytes
    U                           what `Blocks.saved` returns, with the last block, which their code does not forget

Complexity: O(F^2 |V|) for the sums over blocks, with F lower sets, by matrix products, and O(F^2 states) per budget.
Times are rounded up to ticks, about 5 for each vertex, as in their code (policy_gt.cc of chainer-compiler), which
counts the values of a block once where the paper and this file count them twice. Vertices are those of `vertices`, so
an operation whose result nothing but the next one wants is none. The exact family is taken if it has at most `FEW`
sets. Of more than `MANY` ancestor sets those are taken that cache least, evenly spread: then blocks cannot be small,
and between the plans that keep little and the one that keeps all there may be none. Left out: nothing else. What is
computed again is computed when it is read, instead of a block at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.chains.tensors import TensorVertex, tensor_graph
from fckpt.solve.core.rules import Rules, fastest, replay

__all__ = ["Blocks", "all_lower_sets", "ancestor_sets", "lower_sets", "ticks_of"]

FEW = 256
"""Up to so many lower sets all of them are taken."""
MANY = 512
"""So many ancestor sets are taken at most."""
BUDGETS = 10
"""How many budgets the model is asked for."""
TICKS = 5
"""Of time, by vertex."""
BISECTIONS = 10
"""How often the interval of budgets is halved to find the least one."""


def lower_sets(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest of the canonical strategies whose peak fits.

    Args:
        graph: one training step.
        budget: bytes; None takes the memory-centric strategy for the least budget that the model knows one for.

    Raises:
        BudgetError: the peaks of all are over the budget.
    """
    rules = Rules(graph)
    vertices = tensor_graph(rules)
    strategies = _strategies(_blocks_of(rules, vertices), BUDGETS if budget is not None else 0) if vertices else [[]]
    whole = [(*vertex.values, *vertex.late) for vertex in vertices]
    plans = [replay(rules, [v for i in saved for v in whole[i]]) for saved in strategies]
    if budget is None:
        return schedule_of(graph, *plans[0])
    return fastest(rules, plans, budget, "lower_sets")


def _blocks_of(rules: Rules, vertices: list[TensorVertex]) -> Blocks:
    values = rules.graph.values
    nbytes = [sum(values[v].nbytes for v in (*vertex.values, *vertex.late)) for vertex in vertices]
    ticks = ticks_of([sum(rules.seconds[i] for i in vertex.nodes) for vertex in vertices])
    reads = [vertex.reads for vertex in vertices]
    family = all_lower_sets(reads, FEW) or _thinned(ancestor_sets(reads), reads, nbytes)
    return Blocks(reads, nbytes, ticks, family)


def _strategies(blocks: Blocks, count: int) -> list[list[int]]:
    """Returns the vertices that strategies keep: the memory-centric one for the least budget, then those of the row.

    They are the time-centric ones for `count` budgets, memory-centric ones for the lower half of these (further up,
    time-centric ones of the same peak are faster), and one block, of which nothing is forgotten.
    """
    least = max(1, blocks.least())
    found = [blocks.best(least, longest=True)]
    if count:
        top = max(least, blocks.needs(blocks.best(blocks.most) or []))
        budgets = [int(np.ceil(budget)) for budget in np.geomspace(least, top, count)]
        found += [blocks.best(budget) for budget in budgets]
        found += [blocks.best(budget, longest=True) for budget in budgets[1 : count // 2]]
        found.append([0, len(blocks.nested) - 1])
    return [blocks.saved(sequence) for sequence in found if sequence is not None]


def ancestor_sets(reads: Sequence[Sequence[int]]) -> list[int]:
    """Returns nothing, everything, and the ancestors of each vertex with itself, as sets of bits, the smallest first.

    Args:
        reads: by vertex: those that it reads, which have lower numbers.
    """
    found: list[int] = []
    for vertex, read in enumerate(reads):
        found.append(1 << vertex)
        for other in read:
            found[vertex] |= found[other]
    return _sorted({0, *found, (1 << len(reads)) - 1})


def all_lower_sets(reads: Sequence[Sequence[int]], most: int) -> list[int] | None:
    """Returns all sets of vertices that hold what their members read, the smallest first; None if more than `most`."""
    needs = [sum(1 << v for v in read) for read in reads]
    found = {0}
    for vertex, need in enumerate(needs):
        found |= {members | 1 << vertex for members in found if not need & ~members}
        if len(found) > most:
            return None
    return _sorted(found)


def _sorted(family: set[int]) -> list[int]:
    return sorted(family, key=lambda members: (members.bit_count(), members))


def _thinned(family: list[int], reads: Sequence[Sequence[int]], nbytes: Sequence[int]) -> list[int]:
    """Returns at most `MANY` sets of the family: those that cache least in as many stretches of it, and its ends."""
    if len(family) <= MANY:
        return family
    cached = np.array(nbytes) @ _boundary(_members(family, len(reads)), reads)
    stretches = np.array_split(np.arange(1, len(family) - 1), MANY - 2)
    return [0, *(family[int(stretch[cached[stretch].argmin()])] for stretch in stretches), family[-1]]


def ticks_of(seconds: Sequence[float]) -> list[int]:
    """Returns times, rounded up to a unit of which all take about `TICKS` times their number together."""
    exact = np.array(seconds)
    low, high = 0.0, float(exact.sum()) or 1.0
    for _ in range(50):
        width = (low + high) / 2
        low, high = (low, width) if np.ceil(exact / width).sum() < TICKS * len(exact) else (width, high)
    return np.ceil(exact / high).astype(np.int64).tolist()


def _members(family: Sequence[int], count: int) -> np.ndarray:
    """By vertex and set: whether it is in there."""
    width = count // 8 + 1
    packed = np.frombuffer(b"".join(members.to_bytes(width, "little") for members in family), dtype=np.uint8)
    columns = np.unpackbits(packed.reshape(-1, width), axis=1, count=count, bitorder="little")
    return np.ascontiguousarray(columns.T).astype(bool)


def _readers(reads: Sequence[Sequence[int]]) -> list[list[int]]:
    readers: list[list[int]] = [[] for _ in reads]
    for vertex, read in enumerate(reads):
        for other in read:
            readers[other].append(vertex)
    return readers


def _boundary(members: np.ndarray, reads: Sequence[Sequence[int]]) -> np.ndarray:
    """By vertex and set: whether it is in there, and is read from outside."""
    return np.array([members[v] & ~members[readers].all(axis=0) for v, readers in enumerate(_readers(reads))])


class _States(NamedTuple):
    """What sequences up to a lower set come to: of those with as few ticks, the fewest bytes, and the reverse."""

    cached: np.ndarray
    """Bytes, ascending."""
    ticks: np.ndarray
    """Descending."""

    def has(self, cached: int, ticks: int) -> bool:
        """Whether there is this state."""
        at = int(self.cached.searchsorted(cached))
        return at < len(self.cached) and self.cached[at] == cached and self.ticks[at] == ticks


class Blocks:
    """What the block between any two lower sets of a family costs, and the best sequences."""

    def __init__(
        self, reads: Sequence[Sequence[int]], nbytes: Sequence[int], ticks: Sequence[int], family: Sequence[int]
    ):
        """Sums up.

        Args:
            reads: by vertex: those that it reads, which have lower numbers.
            nbytes: by vertex.
            ticks: by vertex.
            family: lower sets, the smallest first; nothing and everything are among them.
        """
        self.members = members = _members(family, len(reads))
        self.boundary = _boundary(members, reads)
        outer = np.array([~members[v] & members[list(read)].any(axis=0) for v, read in enumerate(reads)])
        besides = np.array([~members[v] & outer[readers].any(axis=0) for v, readers in enumerate(_readers(reads))])
        space, time = np.array(nbytes, dtype=np.float64), np.array(ticks, dtype=np.float64)
        rest = members & ~self.boundary
        sizes = members.sum(axis=0)
        self.nested = (members.T.astype(np.float64) @ members == sizes[:, None]) & (sizes[:, None] < sizes)
        """By lower set, and lower set: whether there is a block between them. The same below."""
        self.again = _between(time, members, rest)
        """Ticks that the block computes again."""
        self.caches = _between(space, members, self.boundary)
        """Bytes that it adds to what is cached."""
        self.stage = 2 * _between(space, members, members) + (space @ outer + space @ besides).astype(np.int64)
        """Bytes that it takes, besides what was cached before."""
        self.all_ticks = int(sum(ticks))
        self.most = int(self.stage[0, -1])
        """A budget that no sequence is over: everything as one block."""

    def best(self, budget: int, *, longest: bool = False) -> list[int] | None:
        """Returns the sequence of lower sets that takes the least ticks of those within `budget`.

        Args:
            budget: bytes, in the model.
            longest: the most ticks instead.

        Returns:
            Numbers of sets of the family, from nothing to everything; None if no sequence is within the budget.
        """
        sign = -1 if longest else 1
        zero = self.all_ticks if longest else 0  # so that signed ticks are places in `least`
        room = budget - np.maximum(self.stage, self.caches)
        states = [_States(np.array([0]), np.array([zero]))]
        for j in range(1, len(self.nested)):
            least = np.full(self.all_ticks + 1, np.iinfo(np.int64).max)
            for i in np.flatnonzero(self.nested[:, j] & (room[:, j] >= 0)).tolist():
                cached, ticks = states[i]
                count = cached.searchsorted(room[i, j], side="right")
                if count:
                    places = ticks[:count] + sign * self.again[i, j]
                    least[places] = np.minimum(least[places], cached[:count] + self.caches[i, j])
            steps = np.flatnonzero(np.diff(np.minimum.accumulate(least), prepend=np.iinfo(np.int64).max))[::-1]
            states.append(_States(least[steps], steps))
        return self._traced(states, room, sign) if len(states[-1].ticks) else None

    def _traced(self, states: list[_States], room: np.ndarray, sign: int) -> list[int]:
        """Returns the sequence that leads to the last state."""
        sequence = [len(states) - 1]
        cached, ticks = (int(column[-1]) for column in states[-1])
        while sequence[-1]:
            j = sequence[-1]
            for i in np.flatnonzero(self.nested[:, j]).tolist():
                before = int(cached - self.caches[i, j]), int(ticks - sign * self.again[i, j])
                if before[0] <= room[i, j] and states[i].has(*before):
                    sequence.append(i)
                    cached, ticks = before
                    break
        return sequence[::-1]

    def needs(self, sequence: Sequence[int]) -> int:
        """Returns the least budget that a sequence is within."""
        cached = most = 0
        for i, j in pairwise(sequence):
            most = max(most, cached + int(max(self.stage[i, j], self.caches[i, j])))
            cached += int(self.caches[i, j])
        return most

    def least(self) -> int:
        """Returns a budget for which there is a sequence, near the least one."""
        low, high = 0, self.most
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            low, high = (low, middle) if self._has(middle) else (middle, high)
        return high

    def _has(self, budget: int) -> bool:
        """Whether a sequence is within `budget`: then one is that caches the least that can be, at every lower set."""
        cached = np.full(self.nested.shape[0], np.inf)
        cached[0] = 0
        for j in range(1, len(cached)):
            fits = self.nested[:, j] & (cached + np.maximum(self.stage[:, j], self.caches[:, j]) <= budget)
            cached[j] = (cached + self.caches[:, j])[fits].min(initial=np.inf)
        return bool(np.isfinite(cached[-1]))

    def saved(self, sequence: Sequence[int]) -> list[int]:
        """Returns the vertices that a sequence keeps: what its blocks cache, and the last block."""
        saved = self.boundary[:, sequence].any(axis=1) | ~self.members[:, sequence[-2]]
        return np.flatnonzero(saved).tolist()


def _between(weight: np.ndarray, members: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Returns, by lower set and lower set around it, the weight of `part` of the second that is not in the first."""
    weighed = part * weight[:, None]
    return (weighed.sum(axis=0) - members.T.astype(np.float64) @ weighed).astype(np.int64)
