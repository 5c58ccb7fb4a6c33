"""Canonical strategies of Kusumoto et al.: blocks between lower sets, chosen by dynamic programming.

M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama, "A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation", NeurIPS 2019, https://arxiv.org/abs/1905.11722. A lower set is closed under
predecessors. An increasing sequence of lower sets, from the empty set to the whole graph, divides the forward pass into
blocks. Of each block, only the values that later blocks read are cached; the backward pass recomputes one block at a
time from cached values. In the paper's model, block i takes

    M(U[i-1]) + 2 M(V[i]) + M(later readers of L[i]) + M(other inputs of these readers)

bytes: the cached values, the block's values and their gradients, and the gradients that enter the block with the values
from which they are made. The time of a block is the time of its values that are not cached, which are recomputed.

With all lower sets (`all_lower_sets`; the paper's exact algorithm), the sequence with the least time within a budget is
found, in this model and up to the rounding of times. With only the ancestor sets of single vertices (`ancestor_sets`;
the paper's approximate algorithm), the best sequence of such sets is found. *Time-centric* strategies take the least
time; *memory-centric* strategies take the most: the additional values that they do not save lower the peak when values
are freed as early as possible.

The budget of the model is not the simulated peak. Therefore the model is solved for a series of budgets, from the least
budget for which it has a sequence, found by bisection as in the paper, to a budget that no sequence exceeds. The
strategies of both kinds are simulated, and the fastest one that fits is returned.

    paper                       here
    L, M_v, T_v                 a row of `LowerSetBlocks.members`, `nbytes`, `ticks`
    boundary of L               `LowerSetBlocks.boundary`
    opt[L, t]                   the states of a lower set: its Pareto front in time and bytes
    U                           the result of `LowerSetBlocks.saved`, and the last block, which the paper saves too

Complexity: O(F^2 |V|) for the sums over blocks, with F lower sets, by matrix products, and O(F^2 states) per budget.
Times are rounded up to ticks, about 5 for each vertex, as in the paper's code (policy_gt.cc of chainer-compiler), which
counts the values of a block once, while the paper and this file count them twice. Vertices are those of the tensor
graph (`tensors`), in which an operation whose result is read only by the next operation is not a separate vertex. The
exact family is used if it has at most `FEW` sets. If there are more than `MANY` ancestor sets, the sets that cache
least are used, spread evenly; blocks then cannot be small, and there may be no plan between the plans that save little
and the plan that saves everything. Apart from this choice of sets, nothing is left out. Recomputation is lazy: a value
is recomputed when it is read, not a whole block at once.
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

__all__ = ["LowerSetBlocks", "all_lower_sets", "ancestor_sets", "lower_sets", "ticks_of"]

FEW = 256
"""All lower sets are used if there are at most this many."""
MANY = 512
"""The largest number of ancestor sets that are used."""
BUDGETS = 10
"""The number of budgets for which the model is solved."""
TICKS = 5
"""Ticks of time per vertex."""
BISECTIONS = 10
"""The number of halvings in the search for the least budget."""


def lower_sets(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest canonical strategy that fits.

    Args:
        graph: one training step.
        budget: bytes; None gives the memory-centric strategy for the least budget of the model.

    Raises:
        BudgetError: no strategy that is found fits.
    """
    rules = Rules(graph)
    vertices = tensor_graph(rules)
    strategies = _strategies(_blocks_of(rules, vertices), BUDGETS if budget is not None else 0) if vertices else [[]]
    whole = [(*vertex.values, *vertex.late) for vertex in vertices]
    plans = [replay(rules, [v for i in saved for v in whole[i]]) for saved in strategies]
    if budget is None:
        return schedule_of(graph, *plans[0])
    return fastest(rules, plans, budget, "lower_sets")


def _blocks_of(rules: Rules, vertices: list[TensorVertex]) -> LowerSetBlocks:
    values = rules.graph.values
    nbytes = [sum(values[v].nbytes for v in (*vertex.values, *vertex.late)) for vertex in vertices]
    ticks = ticks_of([sum(rules.seconds[i] for i in vertex.nodes) for vertex in vertices])
    reads = [vertex.reads for vertex in vertices]
    family = all_lower_sets(reads, FEW) or _thinned(ancestor_sets(reads), reads, nbytes)
    return LowerSetBlocks(reads, nbytes, ticks, family)


def _strategies(blocks: LowerSetBlocks, count: int) -> list[list[int]]:
    """Returns the vertices that each strategy saves; the memory-centric strategy for the least budget comes first.

    It is followed by the time-centric strategies for `count` budgets; the memory-centric strategies for the lower half
    of these budgets (for the upper half, time-centric strategies with the same peak are faster); and the strategy with
    a single block, which saves everything.
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
    """Returns the empty set, the whole graph, and each vertex with its ancestors, as bits of ints, the smallest first.

    Args:
        reads: by vertex: the vertices that it reads, which have lower numbers.
    """
    found: list[int] = []
    for vertex, read in enumerate(reads):
        found.append(1 << vertex)
        for other in read:
            found[vertex] |= found[other]
    return _sorted({0, *found, (1 << len(reads)) - 1})


def all_lower_sets(reads: Sequence[Sequence[int]], most: int) -> list[int] | None:
    """Returns all sets that contain the inputs of their members, the smallest first; None if more than `most`."""
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
    """Returns at most `MANY` sets: the first, the last, and from each of equal parts the set that caches least."""
    if len(family) <= MANY:
        return family
    cached = np.array(nbytes) @ _boundary(_members(family, len(reads)), reads)
    stretches = np.array_split(np.arange(1, len(family) - 1), MANY - 2)
    return [0, *(family[int(stretch[cached[stretch].argmin()])] for stretch in stretches), family[-1]]


def ticks_of(seconds: Sequence[float]) -> list[int]:
    """Returns times rounded up to a unit that is chosen such that the sum is about `TICKS` per entry."""
    exact = np.array(seconds)
    low, high = 0.0, float(exact.sum()) or 1.0
    for _ in range(50):
        width = (low + high) / 2
        low, high = (low, width) if np.ceil(exact / width).sum() < TICKS * len(exact) else (width, high)
    return np.ceil(exact / high).astype(np.int64).tolist()


def _members(family: Sequence[int], count: int) -> np.ndarray:
    """Returns, by vertex and set, whether the set contains the vertex."""
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
    """Returns, by vertex and set, whether the set contains the vertex and a vertex outside the set reads it."""
    return np.array([members[v] & ~members[readers].all(axis=0) for v, readers in enumerate(_readers(reads))])


class _States(NamedTuple):
    """The Pareto front, in bytes and ticks, of the sequences that end at one lower set."""

    cached: np.ndarray
    """Bytes, ascending."""
    ticks: np.ndarray
    """Ticks, descending."""

    def has(self, cached: int, ticks: int) -> bool:
        """Whether the front contains this state."""
        at = int(self.cached.searchsorted(cached))
        return at < len(self.cached) and self.cached[at] == cached and self.ticks[at] == ticks


class LowerSetBlocks:
    """The costs of the block between any two lower sets of a family, and the best sequences."""

    def __init__(
        self, reads: Sequence[Sequence[int]], nbytes: Sequence[int], ticks: Sequence[int], family: Sequence[int]
    ):
        """Computes the costs of all blocks.

        Args:
            reads: by vertex: the vertices that it reads, which have lower numbers.
            nbytes: by vertex.
            ticks: by vertex.
            family: lower sets, the smallest first, including the empty set and the whole graph.
        """
        self.members = members = _members(family, len(reads))
        self.boundary = _boundary(members, reads)
        outer = np.array([~members[v] & members[list(read)].any(axis=0) for v, read in enumerate(reads)])
        besides = np.array([~members[v] & outer[readers].any(axis=0) for v, readers in enumerate(_readers(reads))])
        space, time = np.array(nbytes, dtype=np.float64), np.array(ticks, dtype=np.float64)
        rest = members & ~self.boundary
        sizes = members.sum(axis=0)
        self.nested = (members.T.astype(np.float64) @ members == sizes[:, None]) & (sizes[:, None] < sizes)
        """By pair of lower sets: whether the first is a proper subset of the second, so that there is a block between
        them. The arrays below have the same indices."""
        self.recomputed = _between(time, members, rest)
        """The ticks that the block recomputes."""
        self.caches = _between(space, members, self.boundary)
        """The bytes that the block adds to the cache."""
        self.stage = 2 * _between(space, members, members) + (space @ outer + space @ besides).astype(np.int64)
        """The bytes that the block needs, in addition to earlier cached bytes."""
        self.all_ticks = int(sum(ticks))
        self.most = int(self.stage[0, -1])
        """A budget that no sequence exceeds: everything as one block."""

    def best(self, budget: int, *, longest: bool = False) -> list[int] | None:
        """Returns the sequence of lower sets with the fewest ticks among all sequences within `budget`.

        Args:
            budget: bytes, in the model.
            longest: return the sequence with the most ticks instead.

        Returns:
            Indices into the family, from the empty set to the whole graph; None if no sequence is within the budget.
        """
        sign = -1 if longest else 1
        zero = self.all_ticks if longest else 0  # so that signed ticks are indices into `least`
        room = budget - np.maximum(self.stage, self.caches)
        states = [_States(np.array([0]), np.array([zero]))]
        for j in range(1, len(self.nested)):
            least = np.full(self.all_ticks + 1, np.iinfo(np.int64).max)
            for i in np.flatnonzero(self.nested[:, j] & (room[:, j] >= 0)).tolist():
                cached, ticks = states[i]
                count = cached.searchsorted(room[i, j], side="right")
                if count:
                    places = ticks[:count] + sign * self.recomputed[i, j]
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
                before = int(cached - self.caches[i, j]), int(ticks - sign * self.recomputed[i, j])
                if before[0] <= room[i, j] and states[i].has(*before):
                    sequence.append(i)
                    cached, ticks = before
                    break
        return sequence[::-1]

    def needs(self, sequence: Sequence[int]) -> int:
        """Returns the least budget of the model that a sequence needs."""
        cached = most = 0
        for i, j in pairwise(sequence):
            most = max(most, cached + int(max(self.stage[i, j], self.caches[i, j])))
            cached += int(self.caches[i, j])
        return most

    def least(self) -> int:
        """Returns a budget for which there is a sequence, close to the least such budget."""
        low, high = 0, self.most
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            low, high = (low, middle) if self._has(middle) else (middle, high)
        return high

    def _has(self, budget: int) -> bool:
        """Whether a sequence is within `budget`: it is enough to cache the fewest possible bytes at every lower set."""
        cached = np.full(self.nested.shape[0], np.inf)
        cached[0] = 0
        for j in range(1, len(cached)):
            fits = self.nested[:, j] & (cached + np.maximum(self.stage[:, j], self.caches[:, j]) <= budget)
            cached[j] = (cached + self.caches[:, j])[fits].min(initial=np.inf)
        return bool(np.isfinite(cached[-1]))

    def saved(self, sequence: Sequence[int]) -> list[int]:
        """Returns the vertices that a sequence saves: the vertices that its blocks cache, and the last block."""
        saved = self.boundary[:, sequence].any(axis=1) | ~self.members[:, sequence[-2]]
        return np.flatnonzero(saved).tolist()


def _between(weight: np.ndarray, members: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Returns, by pair of nested lower sets, the weight of `part` of the larger set that is not in the smaller one."""
    weighed = part * weight[:, None]
    return (weighed.sum(axis=0) - members.T.astype(np.float64) @ weighed).astype(np.int64)
