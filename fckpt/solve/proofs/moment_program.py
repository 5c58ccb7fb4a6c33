"""The integer program of what is held at some moments and what runs again between them, with planes.

A *moment* is the first run of a node (`bounds`). Each moment here comes before the next in every schedule that the
program is about: all, or those with a given order of first runs. Between two moments is a window. What is thrown away
at one moment and must be there at a later one runs again in between, and what runs again in one window does not run in
another: times add up.

    min  sum of T[k,n] R[k,n]                    over the moments k and the nodes n
    R[k,n] <= S[k,v] + R[k,p(v)]                 v is read by n
    S[k+1,v] <= S[k,v] + R[k,p(v)]
    sum of M_v S[k,v] <= room[k]                 as in `bounds`, for each moment

S[k,v] says whether v is held at moment k, R[k,n] whether n runs in the window after it, once or more often, p(v) is the
node that makes v. R is 1 where the first run of n certainly comes there, and 0 where it certainly comes later, or where
n may not run again. T is the time of n where it has certainly run by moment k, and 0 elsewhere. All this holds for
every schedule, with any number of repetitions, so that the optimum is a bound on them, and so is what HiGHS proves
before it finds the optimum. With a given order of all first runs and every node for a moment it would be the program of
P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", 2020,
https://arxiv.org/abs/1910.02653.

That is enough for whole numbers, but weak in fractions, from which HiGHS starts: half a value that is held at a moment
serves once more in every later window. So windows are also taken together. Let n certainly run between moment j and
moment k + 1, and let it need q by a path of values q -> v1 -> ... -> vm -> n. If none of them is held at moment j, then
q runs in between:

    S[j,v1] + ... + S[j,vm] + R[j,q] + ... + R[k,q] >= 1

and the same with S[k+1,w] on the right, for a path to a value w. There are far too many of these planes for all of them.
Those that the fractions violate are found by going backwards from what is certain, a maximum along paths, and only they
are added; then the fractions are found anew.

    above                       here
    S, R                        `MomentProgram.held`, `MomentProgram.runs`
    M, T, p                     as in `bounds`

Complexity: rows and columns grow with nodes times moments; looking for planes takes nodes times moments squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fckpt.solve.proofs.bounds import UNIT, Moment, Problem

__all__ = ["CuttingPlane", "MomentProgram"]

SEARCHES = 25
"""How often planes are looked for."""
PLANES, PLANES_PER_PAIR = 400, 10
"""The most planes of one look, and of one pair of moments in it."""
VIOLATED = 0.01
"""By how much a plane has to be violated."""
GAIN = 1e-4
"""A part of the optimum in fractions, by which it must rise for another look."""
ZERO, ONE = -1, -2
"""Stand for a column where something is certain."""


class CuttingPlane(NamedTuple):
    """Somewhere between two moments a node runs, unless one of some values is held at the first."""

    first: int
    """The node of the first moment."""
    last: int | None
    """That of the second; None where it is the end."""
    node: int
    """What runs."""
    held: tuple[int, ...]
    """The values."""
    wanted: int | None
    """Only if this value is held at the second moment; None if it is certain."""


class MomentProgram:
    """The integer program of some moments."""

    def __init__(self, problem: Problem, moments: Sequence[Moment], budget: int, planes: Iterable[CuttingPlane] = ()):
        """Prepares it.

        Args:
            problem: the graph.
            moments: in order.
            budget: bytes.
            planes: known from a program of some of the moments.
        """
        self.problem, self.moments = problem, moments
        self.place = {moment.node: k for k, moment in enumerate(moments)}
        self.columns, self.rows = 0, 0
        self.costs: list[np.ndarray] = []
        self.low: list[np.ndarray] = []
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        required = problem.certain.required[: len(problem.pinned)]
        self.nodes = np.flatnonzero(required)
        self.values = np.flatnonzero((problem.producer >= 0) & required[problem.producer])
        self.made = problem.producer[self.values]
        self.before = [m.before | (np.arange(len(required)) == m.node) for m in moments]
        self.after = [required & ~m.runs & ~before for m, before in zip(moments, self.before, strict=True)]
        self.held = [self._held(k) for k in range(len(moments))]
        """By moment and value: the column that says whether it is held."""
        self.runs = [self._runs(k) for k in range(len(moments))]
        """By moment and node: the column that says whether it runs after it, before what follows the next."""
        for k in range(len(moments)):
            self._memory_row(k, budget)
            self._interval_rows(k)
        self.planes: dict[CuttingPlane, None] = {}
        self._add_planes(planes)

    def _held(self, k: int) -> np.ndarray:
        choice = self.moments[k].choice
        held = np.full(len(choice), ONE)  # inputs and cotangents too
        held[self.values[self.after[k][self.made]]] = ZERO
        held[choice] = self._new(np.zeros(int(choice.sum())))
        return held

    def _certain(self, j: int, k: int) -> np.ndarray:
        """By node: whether it certainly runs between moment j and the one after k."""
        return self.after[j] if k + 1 == len(self.moments) else self.after[j] & self.before[k + 1]

    def _runs(self, k: int) -> np.ndarray:
        problem, certain = self.problem, self._certain(k, k)
        never = self.before[k] & problem.pinned
        if k + 1 < len(self.moments):
            never |= self.after[k + 1]
        runs = np.full(len(certain), ZERO)
        runs[certain] = ONE
        free = self.nodes[~(certain | never)[self.nodes]]
        seconds = np.where(self.before[k] & ~problem.twice, problem.seconds, 0.0)[free]
        runs[free] = self._new(seconds * (UNIT / problem.least))
        return runs

    def _new(self, costs: np.ndarray) -> np.ndarray:
        self.costs.append(costs)
        self.columns += len(costs)
        return np.arange(self.columns - len(costs), self.columns)

    def _memory_row(self, k: int, budget: int) -> None:
        """Adds the row of the bytes at a moment."""
        choice, room = np.flatnonzero(self.moments[k].choice), budget - self.moments[k].nbytes
        unit = max(room, 1)
        row = np.full(len(choice), self.rows)
        self.entries.append((row, self.held[k][choice], -self.problem.nbytes[choice] / unit))
        self.low.append(np.array([-room / unit]))
        self.rows += 1

    def _interval_rows(self, k: int) -> None:
        """Adds the rows of what may run from one moment to the next."""
        problem, held, runs = self.problem, self.held[k], self.runs[k]
        made = problem.producer[problem.read] >= 0
        read, reader = problem.read[made], problem.reader[made]
        self._at_most(runs[reader], held[read], runs[problem.producer[read]])
        if k + 1 < len(self.moments):
            self._at_most(self.held[k + 1][self.values], held[self.values], runs[self.made])
        else:
            ends = self.values[problem.ends[self.values]]
            self._at_most(np.full(len(ends), ONE), held[ends], runs[problem.producer[ends]])

    def _at_most(self, least: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
        """Adds the rows `least <= one + other`, where they say anything."""
        says = (least != ZERO) & (one != ONE) & (other != ONE)
        number = self.rows + np.arange(int(says.sum()))
        for columns, sign in ((least[says], -1.0), (one[says], 1.0), (other[says], 1.0)):
            open_ = columns >= 0
            self.entries.append((number[open_], columns[open_], np.full(int(open_.sum()), sign)))
        self.low.append((least[says] == ONE).astype(float))
        self.rows += len(number)

    def _add_planes(self, planes: Iterable[CuttingPlane]) -> None:
        """Adds the rows of planes that are not there, where both their moments are."""
        for plane in planes:
            end = len(self.moments) if plane.last is None else self.place.get(plane.last)
            if plane in self.planes or plane.first not in self.place or end is None:
                continue
            start = self.place[plane.first]
            enough = [*(runs[plane.node] for runs in self.runs[start:end]), *(self.held[start][v] for v in plane.held)]
            wanted = ONE if plane.wanted is None else self.held[end][plane.wanted]
            if ONE in enough or wanted == ZERO:
                continue
            self.planes[plane] = None
            columns = np.array([c for c in (*enough, wanted) if c >= 0], dtype=np.int64)
            signs = np.ones(len(columns))
            if wanted >= 0:
                signs[-1] = -1.0
            self.entries.append((np.full(len(columns), self.rows), columns, signs))
            self.low.append(np.array([float(wanted == ONE)]))
            self.rows += 1

    def solve(self, branches: int, gap: float) -> Any:
        """Returns the answer of HiGHS in whole numbers, as `scipy.optimize.milp` does.

        Args:
            branches: the most.
            gap: a part of the repetitions' time, below which it need not be improved.
        """
        least = -np.inf
        for _ in range(SEARCHES if len(self.moments) > 1 else 0):
            answer = self._answer(whole=False, options={})
            if answer.x is None or answer.fun <= least + GAIN * abs(least):
                break
            least, known = answer.fun, len(self.planes)
            self._add_planes(self._violated(answer.x))
            if len(self.planes) == known:
                break
        return self._answer(whole=True, options={"node_limit": branches, "mip_rel_gap": gap})

    def promise(self) -> float:
        """Returns the optimum in fractions, roughly, so that little does not count; infinite if nothing fits."""
        answer = self._answer(whole=False, options={})
        return np.inf if answer.fun is None else round(answer.fun, -1)

    def _answer(self, *, whole: bool, options: dict[str, float]) -> Any:
        import scipy.optimize
        from scipy.sparse import csr_array

        optimize: Any = scipy.optimize  # its annotations want floats where it takes arrays
        row, column, entry = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        matrix = csr_array((entry, (row, column)), shape=(self.rows, self.columns))
        return optimize.milp(
            np.concatenate(self.costs),
            integrality=np.full(self.columns, int(whole)),  # of all: HiGHS is twice as fast as with those of S alone
            bounds=optimize.Bounds(0.0, 1.0),
            constraints=optimize.LinearConstraint(matrix, np.concatenate(self.low), np.inf),
            options=options,
        )

    def _violated(self, x: np.ndarray) -> list[CuttingPlane]:
        """Returns the planes that are violated most, at most one through each node for each pair of moments."""
        held, runs = (np.stack([_fractions(row, x) for row in rows]) for rows in (self.held, self.runs))
        first, last = np.triu_indices(len(self.moments), 1)
        paths = self._paths(held, first, last)
        cumulated = np.concatenate([np.zeros((1, runs.shape[1])), np.cumsum(runs, axis=0)])
        lack = paths.need - (cumulated[last + 1] - cumulated[first])
        found: list[tuple[float, CuttingPlane]] = []
        for pair, (j, k) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            lacking = np.flatnonzero(lack[pair] > VIOLATED)
            taken: set[int] = set()
            left = PLANES_PER_PAIR
            for node in lacking[np.argsort(-lack[pair, lacking], kind="stable")].tolist():
                if not left:
                    break
                values, nodes, wanted = paths.trace(pair, node)
                if taken.isdisjoint(nodes):
                    end = k + 1 < len(self.moments)
                    ends = (self.moments[k + 1].node, wanted) if end else (None, None)
                    plane = CuttingPlane(self.moments[j].node, ends[0], node, tuple(values), ends[1])
                    found.append((float(lack[pair, node]), plane))
                    taken.update(nodes)
                    left -= 1
        found.sort(key=lambda violated: -violated[0])
        return [plane for _, plane in found[:PLANES]]

    def _paths(self, held: np.ndarray, first: np.ndarray, last: np.ndarray) -> _Paths:
        problem, count = self.problem, len(self.moments)
        there = held[first]
        end = (last + 1 == count)[:, None]
        wanted = np.where(end, problem.ends.astype(float), held[np.minimum(last + 1, count - 1)]) - there
        need = np.stack([self._certain(j, k) for j, k in zip(first, last, strict=True)]).astype(float).T.copy()
        through, reader = (np.full(need.shape, -1, dtype=np.int64) for _ in range(2))
        graph, there, wanted = problem.graph, there.T.copy(), wanted.T.copy()
        for index in reversed((*problem.first_runs.forward, *problem.first_runs.backward)):
            for value in graph.nodes[index].outputs:
                more = wanted[value] > need[index]
                need[index, more] = wanted[value, more]
                through[index, more], reader[index, more] = value, -1
            for value in graph.nodes[index].inputs:
                source = graph.values[value].producer
                if source is not None:
                    less = need[index] - there[value]
                    more = less > need[source]
                    need[source, more] = less[more]
                    through[source, more], reader[source, more] = value, index
        return _Paths(need.T, through.T, reader.T)


class _Paths(NamedTuple):
    """What must run between pairs of moments, as fractions go. All by pair and node."""

    need: np.ndarray
    """What must run at least."""
    through: np.ndarray
    """The value for which it must; -1 where it is certain."""
    reader: np.ndarray
    """The node that reads that value; -1 where it is to be held."""

    def trace(self, pair: int, node: int) -> tuple[list[int], list[int], int | None]:
        """Returns the values and the nodes on the way to what must be there, and the value that is to be held."""
        values, nodes = [], [node]
        while (value := int(self.through[pair, node])) >= 0:
            values.append(value)
            node = int(self.reader[pair, node])
            if node < 0:
                return values, nodes, value
            nodes.append(node)
        return values, nodes, None


def _fractions(columns: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.where(columns >= 0, x[np.maximum(columns, 0)], columns == ONE)
