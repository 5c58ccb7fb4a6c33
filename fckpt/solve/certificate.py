"""A tighter lower bound on the seconds within a budget: several moments in one integer program.

`bounds` looks at one moment, the first run of one node. Here are some, of which each comes before the next in every
schedule that the claim is about. Between them are windows, and what runs again in one window does not run in another:
times add up. What is thrown away at one moment and must be there at a later one runs again in between, and what is
held at neither of two moments, though it is read in between and later, runs again twice.

    min  sum of T[k,n] R[k,k,n]                  over the moments k and the nodes n
    R[j,k,n] <= S[j,v] + R[j,k,p(v)]             v is read by n
    S[k+1,v] <= S[j,v] + R[j,k,p(v)]
    R[j,k,n] <= R[j,i,n] + R[i+1,k,n]            j <= i < k
    sum of M_v S[k,v] <= room[k]                 as in `bounds`, for each moment

S[k,v] says whether v is held at moment k, R[j,k,n] whether n runs after moment j and before moment k + 1, once or more
often, p(v) is the node that makes v. R is 1 where the first run of n certainly comes there, and 0 where it certainly
comes later, or where n may not run again. T is the time of n where it has certainly run by moment k, and 0 elsewhere.
All this holds for every schedule, in any order and with any number of repetitions, so that the optimum is a bound, and
so is what HiGHS proves before it finds the optimum.

The rows of single windows (j = k) would do for whole numbers. The others are there for the fractions that the search
begins with: without them half a value that is held at a moment serves in every later window.

The moments are found as `moments` finds those of plans: what the program holds is scheduled lazily, and simulated.
Where it overflows, the stage whose moment raises the optimum in fractions most is taken in. If it overflows nowhere,
the bound is the optimum. The idea of such moments is `moments`' own; P. Jain et al., "Checkmate: Breaking the Memory
Wall with Optimal Tensor Rematerialization", 2020, https://arxiv.org/abs/1910.02653, has every node for a moment.

    above                       here
    S, R                        `_Program.held`, `_Program.runs`
    M, T, p                     as in `bounds`

Complexity: rows grow with nodes times moments squared. Their sum over all programs is bounded, and so is the number of
branches; graphs for which two moments are too much get the bound of one. Left out: that what runs again needs room
while it does; that what a policy sends through both passes may have to run more often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fckpt.graph import Graph
from fckpt.solve.base import Order, profile_of
from fckpt.solve.bounds import UNIT, Bound, Moment, Problem, proven, single
from fckpt.solve.moments import Retention, lazily

__all__ = ["QUICK", "tighter"]

ROWS = 11_000
"""The most rows of all programs together: some seconds."""
QUICK = 3_000
"""The same for every plan: a second."""
ROUNDS = 8
"""The most programs."""
BRANCHES = 20
"""The most branches of one. A count and not a time, so that bounds do not depend on the machine."""
GAP = 5e-4
"""A part of the repetitions' time, below which a bound need not be improved."""
CANDIDATES = 6
"""How many stages that overflow are tried as the next moment."""
NEAR = 0.02
"""A part of the graph, within which one candidate stands for all."""
ZERO, ONE = -1, -2
"""Stand for a column where something is certain."""


def tighter(graph: Graph, budget: int, order: Order | None = None, rows: int = ROWS) -> Bound:
    """Returns a proven lower bound on the seconds of every schedule whose peak is at most `budget`.

    Args:
        graph: one training step.
        budget: bytes.
        order: restricts the claim to schedules whose first runs come in this order, as in `lower_bound`.
        rows: the effort: the most rows of all integer programs together.

    Returns:
        The bound of several moments, or that of `lower_bound`, where they prove no more.
    """
    problem = Problem(graph, order)
    bound, look = single(problem, budget)
    if look is None or 3 * look.moment.columns > rows:  # a second moment has about twice as many again
        return bound
    repeated = _Search(problem, budget).run(look.moment, rows)
    if repeated <= (1 + GAP) * (bound.seconds - problem.least):
        return bound
    return Bound(float(problem.least + repeated), bound.order, "several moments")


class _Program:
    """The integer program of some moments."""

    def __init__(self, problem: Problem, moments: Sequence[Moment], budget: int):
        self.problem, self.moments = problem, moments
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
        self.runs = {(j, k): self._runs(j, k) for j in range(len(moments)) for k in range(j, len(moments))}
        """By two moments and node: the column that says whether it runs after one, before what follows the other."""
        for k in range(len(moments)):
            self._limit(k, budget)
        for j, k in self.runs:
            self._window(j, k)

    def _held(self, k: int) -> np.ndarray:
        choice = self.moments[k].choice
        held = np.full(len(choice), ONE)  # inputs and cotangents too
        held[self.values[self.after[k][self.made]]] = ZERO
        held[choice] = self._new(np.zeros(int(choice.sum())))
        return held

    def _runs(self, j: int, k: int) -> np.ndarray:
        problem, after = self.problem, self.after[j]
        last = k + 1 == len(self.moments)
        certain = after if last else after & self.before[k + 1]
        never = self.before[j] & problem.pinned if last else (self.before[j] & problem.pinned) | self.after[k + 1]
        runs = np.full(len(after), ZERO)
        runs[certain] = ONE
        free = self.nodes[~(certain | never)[self.nodes]]
        seconds = np.where(self.before[j] & ~problem.twice, problem.seconds, 0.0)[free] * (j == k)
        runs[free] = self._new(seconds * (UNIT / problem.least))
        return runs

    def _new(self, costs: np.ndarray) -> np.ndarray:
        self.costs.append(costs)
        self.columns += len(costs)
        return np.arange(self.columns - len(costs), self.columns)

    def _limit(self, k: int, budget: int) -> None:
        """Adds the row of the bytes at a moment."""
        choice, room = np.flatnonzero(self.moments[k].choice), budget - self.moments[k].nbytes
        unit = max(room, 1)
        row = np.full(len(choice), self.rows)
        self.entries.append((row, self.held[k][choice], -self.problem.nbytes[choice] / unit))
        self.low.append(np.array([-room / unit]))
        self.rows += 1

    def _window(self, j: int, k: int) -> None:
        """Adds the rows of what may run from moment j to the one after k."""
        problem, held, runs = self.problem, self.held[j], self.runs[j, k]
        made = problem.producer[problem.read] >= 0
        read, reader = problem.read[made], problem.reader[made]
        self._at_most(runs[reader], held[read], runs[problem.producer[read]])
        if k + 1 < len(self.moments):
            self._at_most(self.held[k + 1][self.values], held[self.values], runs[self.made])
        else:
            ends = self.values[problem.ends[self.values]]
            self._at_most(np.full(len(ends), ONE), held[ends], runs[problem.producer[ends]])
        for i in range(j, k):
            self._at_most(runs[self.nodes], self.runs[j, i][self.nodes], self.runs[i + 1, k][self.nodes])

    def _at_most(self, least: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
        """Adds the rows `least <= one + other`, where they say anything."""
        says = (least != ZERO) & (one != ONE) & (other != ONE)
        number = self.rows + np.arange(int(says.sum()))
        for columns, sign in ((least[says], -1.0), (one[says], 1.0), (other[says], 1.0)):
            open_ = columns >= 0
            self.entries.append((number[open_], columns[open_], np.full(int(open_.sum()), sign)))
        self.low.append((least[says] == ONE).astype(float))
        self.rows += len(number)

    def solve(self, *, whole: bool) -> Any:
        """Returns the answer of HiGHS, in whole numbers or fractions."""
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
            options={"node_limit": BRANCHES, "mip_rel_gap": GAP},
        )


class _Search:
    """Looks for moments."""

    def __init__(self, problem: Problem, budget: int):
        self.problem, self.budget = problem, budget
        self.sequence = [*problem.base.forward, *problem.base.backward]
        self.place = {index: i for i, index in enumerate(self.sequence)}
        self.moments: dict[int, Moment] = {}

    def run(self, first: Moment, rows: int) -> float:
        """Returns the seconds of repetitions that programs of `rows` rows in all prove."""
        tries, found = [self.program([first.node])], 0.0
        for _ in range(ROUNDS):
            tries = [program for program in tries if program.rows <= rows]
            if not tries:
                break
            program = max(tries, key=_promise) if len(tries) > 1 else tries[0]
            rows -= program.rows
            answer = program.solve(whole=True)
            found = max(found, proven(self.problem, answer, program.columns))
            tries = [] if answer.x is None else self.longer(program, answer.x)
        return found

    def longer(self, program: _Program, x: np.ndarray) -> list[_Program]:
        """Returns programs with one more moment: where there is too much if one holds what the columns `x` say."""
        chain = [moment.node for moment in program.moments]
        held = [set(np.flatnonzero((row >= 0) & (x[np.maximum(row, 0)] > 0.5)).tolist()) for row in program.held]
        return [self.program(self.with_moment(chain, index)) for index in self.overflow(chain, held)]

    def moment(self, index: int) -> Moment:
        if index not in self.moments:
            self.moments[index] = self.problem.moment(index)
        return self.moments[index]

    def program(self, chain: Sequence[int]) -> _Program:
        return _Program(self.problem, [self.moment(index) for index in chain], self.budget)

    def overflow(self, chain: Sequence[int], held: Sequence[set[int]]) -> list[int]:
        """Returns nodes during or for whose first runs there is too much, the worst first, some way apart."""
        problem = self.problem
        retention = Retention([self.place[index] for index in chain], list(held))
        order, stages = lazily(problem.rules, problem.base, retention)
        worst: dict[int, int] = {}
        for nbytes, stage in zip(profile_of(problem.rules, order).tolist(), stages, strict=True):
            if nbytes > self.budget:
                worst[stage] = max(worst.get(stage, 0), nbytes)
        found: list[int] = []
        for stage in sorted(worst, key=lambda s: (-worst[s], s)):
            index = self.sequence[stage]
            far = all(abs(stage - self.place[other]) > NEAR * len(stages) for other in found)
            if far and index not in chain and problem.certain.required[index]:
                found.append(index)
        return found[:CANDIDATES]

    def with_moment(self, chain: Sequence[int], index: int) -> list[int]:
        """Returns the chain with one more, without those that may come before it or after it."""
        place, moment = self.place, self.moment
        fits = [c for c in chain if moment(index).before[c] or moment(c).before[index]]
        return sorted([*fits, index], key=place.__getitem__)


def _promise(program: _Program) -> float:
    """Returns the optimum in fractions, roughly, so that little does not count."""
    answer = program.solve(whole=False)
    return math.inf if answer.fun is None else round(answer.fun, -1)
