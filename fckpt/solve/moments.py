"""Lazy moment generation: integer programs about a few moments, scheduled lazily; where that overflows, more moments.

A *moment* is the first run of a node, and what matters there is which earlier values lie in memory (S). Each moment
comes before the next in every schedule that the program is about: all, or those with a given order of first runs.
Between two moments is a window, and what runs again in one window does not run in another: times add up. What is thrown
away at one moment and must be there at a later one runs again in between, and what is held at neither of two moments,
though it is read in between and later, runs again twice.

    min  sum of T[k,n] R[k,k,n]                  over the moments k and the nodes n
    R[j,k,n] <= S[j,v] + R[j,k,p(v)]             v is read by n
    S[k+1,v] <= S[j,v] + R[j,k,p(v)]
    R[j,k,n] <= R[j,i,n] + R[i+1,k,n]            j <= i < k
    sum of M_v S[k,v] <= room[k]                 as in `bounds`, for each moment

S[k,v] says whether v is held at moment k, R[j,k,n] whether n runs after moment j and before moment k + 1, once or more
often, p(v) is the node that makes v. R is 1 where the first run of n certainly comes there, and 0 where it certainly
comes later, or where n may not run again. T is the time of n where it has certainly run by moment k, and 0 elsewhere.
All this holds for every schedule, with any number of repetitions, so that the optimum is a bound on them, and so is
what HiGHS proves before it finds the optimum (`certificate`).

The rows of single windows (j = k) would do for whole numbers. The others are there for the fractions that the search
begins with: without them half a value that is held at a moment serves in every later window.

All else is left to the schedule: what is missing is computed right before it is read. The schedule is simulated, and
where it overflows, the stage whose moment raises the optimum in fractions most is taken in. If it overflows nowhere, it
is optimal. `repair` and `prune` take care of the rest, without a guarantee. P. Jain et al., "Checkmate: Breaking the
Memory Wall with Optimal Tensor Rematerialization", 2020, https://arxiv.org/abs/1910.02653, has every node for a moment,
and a row and a column for every pair of nodes.

    above                       here
    S, R                        `Program.held`, `Program.runs`
    M, T, p                     as in `bounds`

Complexity: rows grow with nodes times moments squared. Their sum over all programs is bounded, and so is the number of
branches. Left out: a choice of the order of what runs again; that it needs room while it does; that what a policy sends
through both passes may have to run more often.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fckpt.graph import Graph
from fckpt.schedule import Schedule, schedule_of
from fckpt.solve.base import Order, Rules, ancestors, peak_of, profile_of, seconds_of, within
from fckpt.solve.bounds import UNIT, Moment, Problem, proven, single
from fckpt.solve.greedy import fit, smallest
from fckpt.solve.seeds import backward_orders, save_everything

__all__ = ["Program", "Round", "generated", "moments", "retained", "usual_rows"]

ROWS, ROWS_PER_NODE = 9_000, 20
"""The most rows of all programs together: some seconds, and now and then half a minute."""
ROUNDS = 8
"""The most programs."""
BRANCHES = 20
"""The most branches of one. A count and not a time, so that plans and bounds do not depend on the machine."""
GAP = 5e-4
"""A part of the repetitions' time, below which an optimum need not be improved."""
CANDIDATES = 6
"""How many stages that overflow are tried as the next moment."""
NEAR = 0.02
"""A part of the graph, within which one candidate stands for all."""
ZERO, ONE = -1, -2
"""Stand for a column where something is certain."""


def moments(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest of the plans that moments lead to and that repairs make fit.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: neither they nor the smallest plan of `greedy` fit.
    """
    rules = Rules(graph)
    base = min((save_everything(rules, o) for o in backward_orders(rules)), key=lambda order: peak_of(rules, order))
    if budget is None or peak_of(rules, base) <= budget:
        return schedule_of(graph, *base)
    orders = retained(rules, base, budget, usual_rows(graph))
    found = [plan for order in orders if (plan := fit(rules, order, budget)) is not None]
    if not found:
        least = smallest(rules)
        found = [fit(rules, least, budget) or least]
    best = min(found, key=lambda order: seconds_of(rules, order))
    return within(graph, schedule_of(graph, *best), budget, "moments")


def usual_rows(graph: Graph) -> int:
    """Returns how many rows `moments` takes for all programs of a graph."""
    return min(ROWS, ROWS_PER_NODE * len(graph.nodes))


def retained(rules: Rules, base: Order, budget: int, rows: int) -> Iterator[Order]:
    """Yields plans round by round: the first respects the budget at one moment, later ones at more.

    The last one fits, or programs of `rows` rows have been solved, or no plan is faster for what is known.

    Args:
        rules: of the graph.
        base: computes everything once; its first runs are those of all the plans.
        budget: bytes.
        rows: the most of all programs but the first.
    """
    problem = Problem(rules.graph, base)
    look = single(problem, budget).look
    if look is not None:
        yield from (found.plan for found in generated(problem, look.moment, budget, rows) if found.plan is not None)


class Round(NamedTuple):
    """What comes of one program."""

    seconds: float
    """Repetitions take so long at least, in every schedule that the program is about."""
    plan: Order | None
    """What the program holds, scheduled lazily; None where it holds nothing that is known."""


def generated(problem: Problem, first: Moment, budget: int, rows: int) -> Iterator[Round]:
    """Yields what comes of the first moment, then of two, and so on; see `retained`."""
    chain = _Chain(problem, budget)
    tries = [chain.program([first.node])]
    for _ in range(ROUNDS):
        if not tries:
            return
        program = max(tries, key=_promise) if len(tries) > 1 else tries[0]
        rows -= program.rows
        answer = program.solve(whole=True)
        plan, longer = (None, []) if answer.x is None else chain.longer(program, answer.x)
        yield Round(proven(problem, answer, program.columns), plan)
        tries = [program for program in longer if program.rows <= rows]


class Program:
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


class _Chain:
    """Looks for moments."""

    def __init__(self, problem: Problem, budget: int):
        self.problem, self.budget = problem, budget
        self.sequence = [*problem.base.forward, *problem.base.backward]
        self.place = {index: i for i, index in enumerate(self.sequence)}
        self.moments: dict[int, Moment] = {}

    def longer(self, program: Program, x: np.ndarray) -> tuple[Order, list[Program]]:
        """Returns the plan that holds what the columns `x` say, and programs of one moment more where it overflows."""
        chain = [moment.node for moment in program.moments]
        held = [set(np.flatnonzero((row >= 0) & (x[np.maximum(row, 0)] > 0.5)).tolist()) for row in program.held]
        retention = dict(zip((self.place[index] for index in chain), held, strict=True))
        plan, stages = lazily(self.problem.rules, self.problem.base, retention)
        worst = self.overflow(plan, stages, chain)
        return plan, [self.program(self.with_moment(chain, index)) for index in worst]

    def moment(self, index: int) -> Moment:
        if index not in self.moments:
            self.moments[index] = self.problem.moment(index)
        return self.moments[index]

    def program(self, chain: Sequence[int]) -> Program:
        return Program(self.problem, [self.moment(index) for index in chain], self.budget)

    def overflow(self, plan: Order, stages: Sequence[int], chain: Sequence[int]) -> list[int]:
        """Returns nodes during or for whose first runs there is too much, the worst first, some way apart."""
        problem = self.problem
        worst: dict[int, int] = {}
        for nbytes, stage in zip(profile_of(problem.rules, plan).tolist(), stages, strict=True):
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


def _promise(program: Program) -> float:
    """Returns the optimum in fractions, roughly, so that little does not count."""
    answer = program.solve(whole=False)
    return math.inf if answer.fun is None else round(answer.fun, -1)


def lazily(rules: Rules, base: Order, held: Mapping[int, set[int]]) -> tuple[Order, list[int]]:
    """Returns the plan that computes right before it is read, or is to be held, what is not in memory.

    Args:
        rules: of the graph.
        base: computes everything once.
        held: by position in `base`, what stays in memory after it; after others everything does.

    Returns:
        The plan; and for each computation the position in `base` of the first run that it is, or is made for.
    """
    graph, split = rules.graph, len(base.forward)
    live, ran = {*graph.inputs}, set[int]()
    runs: list[int] = []
    stages: list[int] = []
    for position, index in enumerate((*base.forward, *base.backward)):
        if position == split:
            live.update(graph.cotangents)
            live.difference_update(rules.unsaved)
        node = graph.nodes[index]
        wanted = {*node.inputs, *(v for v in held.get(position, ()) if graph.values[v].producer in ran)} - live
        todo = ancestors(graph, [p for v in sorted(wanted) if (p := graph.values[v].producer) is not None], live)
        for again in (*todo, index):
            runs.append(again)
            stages.append(position)
            live.update(graph.nodes[again].outputs)
        ran.add(index)
        if position in held:
            live.intersection_update({*held[position], *rules.kept, *node.inputs, *node.outputs})
    boundary = sum(stage < split for stage in stages)
    kept = _used(rules, runs, boundary)
    forward = [runs[i] for i in kept if i < boundary]
    return Order(forward, [runs[i] for i in kept if i >= boundary]), [stages[i] for i in kept]


def _used(rules: Rules, runs: Sequence[int], boundary: int) -> list[int]:
    """The computations among `runs` that something comes of, in order."""
    graph = rules.graph
    musts = {n.id for n in graph.nodes if n.once or n.random}
    first = {index: i for i, index in reversed([*enumerate(runs)])}
    needed = set(graph.gradients)
    found: list[int] = []
    for i in range(len(runs) - 1, -1, -1):
        if i == boundary - 1:
            needed.update(graph.outputs)
        node = graph.nodes[runs[i]]
        if needed.isdisjoint(node.outputs) and not (node.id in musts and first[node.id] == i):
            continue
        needed.difference_update(node.outputs)
        needed.update(node.inputs)
        found.append(i)
    return found[::-1]
