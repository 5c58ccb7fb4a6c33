"""The integer program of several moments: what is held at them, what runs again between them; cutting planes.

A *moment* is the first run of a node (`bounds`). Each moment of the program comes before the next one in every schedule
that the program covers: all schedules, or all with a given order of first runs. A value that is not held at one moment
and must be live at a later one is made again between the two. Recomputations between one pair of consecutive moments
are different from recomputations between another pair, so their times add up.

    min  sum of T[k,n] R[k,n]                    over the moments k and the nodes n
    R[k,n] <= S[k,v] + R[k,p(v)]                 v is read by n
    S[k+1,v] <= S[k,v] + R[k,p(v)]
    sum of M_v S[k,v] <= room[k]                 as in `bounds`, for each moment

S[k,v] says whether v is held at moment k; R[k,n] says whether n runs between moment k and the next one, at least once;
p(v) is the node that makes v. R is 1 if the first run of n is certainly between these moments, and 0 if it is certainly
later, or if n may not run again. T is the time of n if it has certainly run by moment k, and 0 otherwise. All this
holds for every schedule, with any number of recomputations, so the optimum is a lower bound on their time, and so is
the bound that HiGHS proves before it finds the optimum. With a given order of all first runs, and every node as a
moment, it would be the program of P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", 2020, https://arxiv.org/abs/1910.02653.

For integers these rows suffice, but their linear relaxation, from which HiGHS starts, is weak: half a value that is
held at a moment serves once more after every later moment. Cutting planes over several moments strengthen it. Let n
certainly run between moment j and moment k + 1, and let n need q by a path of values q -> v1 -> ... -> vm -> n. If none
of the values v1, ..., vm is held at moment j, then q runs in between:

    S[j,v1] + ... + S[j,vm] + R[j,q] + ... + R[k,q] >= 1

and likewise with S[k+1,w] on the right, for a path to a value w. There are far too many of these planes to add them
all. The violated ones are found by a search backwards from what is certain, which computes a maximum along paths; only
these are added, and the relaxation is solved again.

    above                       here
    S, R                        `MomentProgram.held`, `MomentProgram.runs`
    M, T, p                     as in `bounds`

Complexity: rows and columns grow with nodes times moments; the search for planes takes nodes times moments squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fckpt._late import late
from fckpt.solve.proofs.bounds import UNIT, Moment, Problem

__all__ = ["CuttingPlane", "MomentProgram"]

PLANES, PLANES_PER_PAIR = 400, 10
"""The largest number of planes added per search, and per pair of moments in one search."""
VIOLATED = 0.01
"""A plane is added only if it is violated by more than this."""
GAIN = 1e-4
"""The search for planes continues only if the relaxation's optimum rises by this fraction."""
ZERO, ONE = -1, -2
"""Stand in place of a column if the variable is certain."""


class CuttingPlane(NamedTuple):
    """A row: between two moments a node runs, unless one of several values is held at the first moment."""

    first: int
    """The node of the first moment."""
    last: int | None
    """The node of the second moment; None for the end of the step."""
    node: int
    """The node that runs."""
    held: tuple[int, ...]
    """The values."""
    wanted: int | None
    """The row is required only if this value is held at the second moment; None if it is always required."""


class MomentProgram:
    """The integer program of several moments."""

    def __init__(self, problem: Problem, moments: Sequence[Moment], budget: int, planes: Iterable[CuttingPlane] = ()):
        """Builds the program.

        Args:
            problem: the graph.
            moments: the moments, in order.
            budget: bytes.
            planes: cutting planes that a program of some of the moments found.
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
        """By moment and value: the column that says whether the value is held."""
        self.runs = [self._runs(k) for k in range(len(moments))]
        """By moment and node: the column that says whether the node runs between this moment and the next."""
        for k in range(len(moments)):
            self._memory_row(k, budget)
            self._interval_rows(k)
        self.planes: dict[CuttingPlane, None] = {}
        self._add_planes(planes)

    def _held(self, k: int) -> np.ndarray:
        choice = self.moments[k].choice
        held = np.full(len(choice), ONE)  # also for inputs and cotangents
        held[self.values[self.after[k][self.made]]] = ZERO
        held[choice] = self._new(np.zeros(int(choice.sum())))
        return held

    def _certain(self, j: int, k: int) -> np.ndarray:
        """Returns, by node, whether its first run is certainly between moment j and the moment after k."""
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
        """Adds the row that bounds the bytes at a moment."""
        choice, room = np.flatnonzero(self.moments[k].choice), budget - self.moments[k].nbytes
        unit = max(room, 1)
        row = np.full(len(choice), self.rows)
        self.entries.append((row, self.held[k][choice], -self.problem.nbytes[choice] / unit))
        self.low.append(np.array([-room / unit]))
        self.rows += 1

    def _interval_rows(self, k: int) -> None:
        """Adds the rows for what may run between a moment and the next."""
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
        """Adds the rows `least <= one + other` that are not satisfied trivially."""
        says = (least != ZERO) & (one != ONE) & (other != ONE)
        number = self.rows + np.arange(int(says.sum()))
        for columns, sign in ((least[says], -1.0), (one[says], 1.0), (other[says], 1.0)):
            open_ = columns >= 0
            self.entries.append((number[open_], columns[open_], np.full(int(open_.sum()), sign)))
        self.low.append((least[says] == ONE).astype(float))
        self.rows += len(number)

    def _add_planes(self, planes: Iterable[CuttingPlane]) -> None:
        """Adds the rows of new cutting planes whose moments are both in the program."""
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

    def solve(self, branches: int, gap: float, searches: int) -> Any:
        """Returns HiGHS's result for the integer program, as from `scipy.optimize.milp`.

        Args:
            branches: the largest number of branches.
            gap: the relative gap, as a fraction of the recomputation time, at which HiGHS may stop.
            searches: the largest number of searches for violated planes.
        """
        least = -np.inf
        for _ in range(searches if len(self.moments) > 1 else 0):
            answer = self._answer(whole=False, options={})
            if answer.x is None or answer.fun <= least + GAIN * abs(least):
                break
            least, known = answer.fun, len(self.planes)
            self._add_planes(self._violated(answer.x))
            if len(self.planes) == known:
                break
        return self._answer(whole=True, options={"node_limit": branches, "mip_rel_gap": gap})

    def promise(self) -> float:
        """Returns the relaxation's optimum, rounded so that small differences do not count; infinite if infeasible."""
        answer = self._answer(whole=False, options={})
        return np.inf if answer.fun is None else round(answer.fun, -1)

    def _answer(self, *, whole: bool, options: dict[str, float]) -> Any:
        optimize, csr_array = late("scipy.optimize"), late("scipy.sparse").csr_array
        row, column, entry = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        matrix = csr_array((entry, (row, column)), shape=(self.rows, self.columns))
        return optimize.milp(
            np.concatenate(self.costs),
            integrality=np.full(self.columns, int(whole)),  # all columns: HiGHS is twice as fast as with S alone
            bounds=optimize.Bounds(0.0, 1.0),
            constraints=optimize.LinearConstraint(matrix, np.concatenate(self.low), np.inf),
            options=options,
        )

    def _violated(self, x: np.ndarray) -> list[CuttingPlane]:
        """Returns the planes that are violated most: at most one through each node, for each pair of moments."""
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
    """By pair of moments and node: how much of the node must run in between, by the relaxation's solution."""

    need: np.ndarray
    """The least amount that must run."""
    through: np.ndarray
    """The value for which the node must run; -1 if its run is certain."""
    reader: np.ndarray
    """The node that reads that value; -1 if the value is to be held."""

    def trace(self, pair: int, node: int) -> tuple[list[int], list[int], int | None]:
        """Returns the values and nodes on the path to what is required, and the value to be held at its end, if any."""
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
