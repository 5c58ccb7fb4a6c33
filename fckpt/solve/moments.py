"""Lazy moment generation: an integer program about a few moments, scheduled lazily; where it overflows, more moments.

A *moment* is the first run of a node, and what matters there is which earlier values lie in memory (S). Between a
moment and the next, nodes are run again (R) for what later first runs read. One row bounds the bytes of each moment,
and the time of all repetitions is least: two binary variables per earlier node and moment, where the program of
Checkmate (P. Jain et al., 2020, https://arxiv.org/abs/1910.02653) has a row and a column for every pair of nodes. All
else is left to the schedule: what is missing is computed right before it is read. Where the simulated schedule
overflows, its stage becomes a moment too. The first moment is the peak of the plan that saves everything.

    min  sum of T_n R[k,n]                               over moments k = 0, 1, ... and nodes n
    S[k,v] + R[k,p(v)] >= 1                              v is read by a first run between moments k and k + 1
    R[k,n] <= S[k,u] + R[k,p(u)]                         u is read by n
    S[k+1,v] <= S[k,v] + R[k,p(v)]                       v was made before moment k
    sum of M_v S[k,v] <= budget - what is there anyway   at each moment

with p(v) the node that makes v. The optimum for its first runs in the order of the base plan, as far as only the chosen
moments bind; `repair` and `prune` take care of the rest, without a guarantee.

Complexity: a mixed integer program (HiGHS, in scipy) of O(nodes) per moment and round. Left out: a choice of the order,
which is that of the base plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fckpt.graph import Graph
from fckpt.schedule import Schedule, schedule_of
from fckpt.solve.base import Order, Rules, ancestors, peak_of, profile_of, seconds_of, within
from fckpt.solve.greedy import fit, smallest
from fckpt.solve.seeds import backward_orders, save_everything

__all__ = ["generated", "moments"]

ROUNDS = 10
"""How often moments are added before the rest is left to repairs."""
FRESH = 1
"""The most moments that one round adds."""
GAP = 1e-2
"""How far from the optimum, as a part of the repetitions' time, the integer program may stop."""
NODES = 20
"""Branches of the search for integers, at most. A count and not a time, so that plans do not depend on the machine."""


class Retention(NamedTuple):
    """What is in memory at each of some moments."""

    moments: list[int]
    """Positions in the base sequence."""
    held: list[set[int]]


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
    found = [plan for order in generated(rules, base, budget) if (plan := fit(rules, order, budget)) is not None]
    if not found:
        least = smallest(rules)
        found = [fit(rules, least, budget) or least]
    best = min(found, key=lambda order: seconds_of(rules, order))
    return within(graph, schedule_of(graph, *best), budget, "moments")


def generated(rules: Rules, base: Order, budget: int, rounds: int = ROUNDS, columns: float = np.inf) -> Iterator[Order]:
    """Yields plans round by round: the first respects the budget at the peak of `base`, later ones at more moments.

    The last one fits, or the rounds are over, or no plan fits at the chosen moments.

    Args:
        rules: of the graph.
        base: computes everything once; its first runs are those of all the plans.
        budget: bytes.
        rounds: how many at most.
        columns: ends the rounds before a program has more; not before the first.
    """
    program = _Program(rules, base)
    room = {int(profile_of(rules, base).argmax()): budget}
    for _ in range(rounds):
        if len(room) > 1 and sum(2 * len(program.useful(moment)) for moment in room) > columns:
            return
        retention = program.solve(room)
        if retention is None:
            return
        order, stages = lazily(rules, base, retention)
        yield order
        profile = profile_of(rules, order)
        if int(profile.max()) <= budget:
            return
        _overflow(room, profile, stages, budget)


def _overflow(room: dict[int, int], profile: np.ndarray, stages: Sequence[int], budget: int) -> None:
    """Makes the worst stages moments, or leaves less room at those that are."""
    worst: dict[int, int] = {}
    for position in np.flatnonzero(profile > budget).tolist():
        worst[stages[position]] = max(worst.get(stages[position], 0), int(profile[position]) - budget)
    chosen: list[int] = []
    reach = len(stages) // 50
    for stage in sorted(worst, key=lambda s: (-worst[s], s)):
        if all(abs(stage - other) > reach for other in chosen):
            chosen.append(stage)
        if len(chosen) == FRESH:
            break
    for stage in chosen:
        room[stage] = room[stage] - worst[stage] if stage in room else budget


def lazily(rules: Rules, base: Order, retention: Retention) -> tuple[Order, list[int]]:
    """Returns the plan that holds what `retention` says, and computes the rest right before it is read.

    Returns:
        The plan; and for each computation the position in `base` of the first run that it is, or is made for.
    """
    graph, split = rules.graph, len(base.forward)
    held = dict(zip(retention.moments, retention.held, strict=True))
    live = {*graph.inputs}
    runs: list[int] = []
    stages: list[int] = []
    for position, index in enumerate((*base.forward, *base.backward)):
        if position == split:
            live.update(graph.cotangents)
            live.difference_update(rules.unsaved)
        node = graph.nodes[index]
        todo = ancestors(
            graph, [p for v in node.inputs if v not in live and (p := graph.values[v].producer) is not None], live
        )
        for again in (*todo, index):
            runs.append(again)
            stages.append(position)
            live.update(graph.nodes[again].outputs)
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


class _Program:
    """The integer program of one graph and order."""

    def __init__(self, rules: Rules, base: Order):
        graph = rules.graph
        self.rules = rules
        self.sequence = [*base.forward, *base.backward]
        self.split = len(base.forward)
        self.position = {index: i for i, index in enumerate(self.sequence)}
        count = len(graph.values)
        self.nbytes = [v.nbytes for v in graph.values]
        self.producer = [v.producer for v in graph.values]
        self.free = [
            v.producer is not None and v.producer in self.position and v.id not in rules.kept for v in graph.values
        ]
        """By value: whether there is a choice about it."""
        self.reads: list[list[int]] = [[] for _ in range(count)]
        """By value: the positions of the first runs that read it."""
        for i, index in enumerate(self.sequence):
            for value in graph.nodes[index].inputs:
                self.reads[value].append(i)
        scale = max(max(rules.seconds), 1e-30)
        self.seconds = [s / scale + 1e-9 for s in rules.seconds]

    def made(self, value: int) -> int:
        producer = self.producer[value]
        assert producer is not None
        return self.position[producer]

    def useful(self, moment: int) -> list[int]:
        """The values that may lie in memory at `moment` to some end, made at it or before."""
        graph = self.rules.graph
        stack = [
            v
            for v, reads in enumerate(self.reads)
            if self.free[v] and self.made(v) <= moment and reads and reads[-1] > moment
        ]
        found = set(stack)
        while stack:
            producer = self.producer[stack.pop()]
            assert producer is not None
            for value in graph.nodes[producer].inputs:
                if self.free[value] and value not in found:
                    found.add(value)
                    stack.append(value)
        return sorted(found)

    def anyway(self, moment: int) -> int:
        """The bytes that are there at `moment` whatever is held."""
        rules, graph = self.rules, self.rules.graph
        node = graph.nodes[self.sequence[moment]]
        around = {*node.inputs, *node.outputs}
        fixed = {v for v in (*graph.outputs, *graph.gradients) if self._came(v, moment)}
        if moment >= self.split:
            fixed.update(graph.cotangents)
        fixed.update(v for v in around if v not in graph.inputs)
        total = node.temporary_nbytes + sum(self.nbytes[v] for v in fixed)
        if any(v not in rules.kept and self.reads[v][-1] <= moment for v in node.overwrites):
            total -= self.nbytes[node.outputs[0]]
        return total

    def _came(self, value: int, moment: int) -> bool:
        producer = self.producer[value]
        return producer in self.position and self.position[producer] <= moment

    def solve(self, room: dict[int, int]) -> Retention | None:
        """Returns what to hold so that at each moment of `room` no more than its bytes are there; None if none can."""
        import scipy.optimize  # takes 0.4 s

        optimize: Any = scipy.optimize  # its bounds are annotated as floats, and may be arrays

        moments = sorted(room)
        build = _Build()
        for k, moment in enumerate(moments):
            end = moments[k + 1] if k + 1 < len(moments) else len(self.sequence) - 1
            self._window(build, k, moment, end)
            left = room[moment] - self.anyway(moment)
            if left < 0:
                return None
            self._limit(build, k, moment, left)
        if not build.cost:
            return Retention(moments, [set() for _ in moments])
        rows = optimize.LinearConstraint(build.matrix(), np.array(build.low), np.array(build.high))
        bounds = optimize.Bounds(np.array(build.least, dtype=float), np.array(build.most, dtype=float))
        options: dict[str, Any] = {"mip_rel_gap": GAP, "node_limit": NODES}
        found = optimize.milp(
            np.array(build.cost), integrality=np.ones(len(build.cost)), bounds=bounds, constraints=rows, options=options
        )
        if found.x is None:
            return None
        held: list[set[int]] = [set() for _ in moments]
        for (k, value), column in build.states.items():
            if found.x[column] > 0.5:
                held[k].add(value)
        return Retention(moments, held)

    def _window(self, build: _Build, k: int, moment: int, end: int) -> None:
        """Adds the variables of a moment and the rows of the window up to `end`."""
        rules, graph = self.rules, self.rules.graph
        values = self.useful(moment)
        node = graph.nodes[self.sequence[moment]]
        around = {*node.inputs, *node.outputs}
        for value in values:
            first_late = moment >= self.split and value in rules.unsaved and self.made(value) < self.split
            barred = first_late and value not in around
            build.state(k, value, least=value in around, most=not barred)
        for index in dict.fromkeys(self.producer[v] for v in values):
            assert index is not None
            build.run(k, index, self.seconds[index], most=not rules.pinned[index])
        for value in values:
            producer = self.producer[value]
            assert producer is not None
            reads = self.reads[value]
            i = bisect_right(reads, moment)
            if i < len(reads) and reads[i] <= end:
                build.row([(build.states[k, value], 1.0), (build.runs[k, producer], 1.0)], 1.0, np.inf)
            if (before := build.states.get((k - 1, value))) is not None:
                again = build.runs[k - 1, producer]
                build.row([(build.states[k, value], 1.0), (before, -1.0), (again, -1.0)], -np.inf, 0.0)
        for index in dict.fromkeys(self.producer[v] for v in values):
            assert index is not None
            for value in graph.nodes[index].inputs:
                if self.free[value]:
                    entries = [(build.runs[k, index], 1.0), (build.states[k, value], -1.0)]
                    source = self.producer[value]
                    assert source is not None
                    build.row([*entries, (build.runs[k, source], -1.0)], -np.inf, 0.0)

    def _limit(self, build: _Build, k: int, moment: int, nbytes: int) -> None:
        """Adds the row that says how much may be held at a moment, besides what its node reads and makes."""
        node = self.rules.graph.nodes[self.sequence[moment]]
        around = {*node.inputs, *node.outputs}
        unit = float(max(nbytes, 1))
        entries = [
            (column, self.nbytes[value] / unit)
            for (j, value), column in build.states.items()
            if j == k and value not in around and self.nbytes[value]
        ]
        if entries:
            build.row(entries, -np.inf, nbytes / unit)


class _Build:
    """Columns and rows as they come."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.least: list[int] = []
        self.most: list[int] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.states: dict[tuple[int, int], int] = {}
        self.runs: dict[tuple[int, int], int] = {}

    def state(self, k: int, value: int, *, least: bool, most: bool) -> None:
        self.states[k, value] = self._column(0.0, least, most)

    def run(self, k: int, index: int, cost: float, *, most: bool) -> None:
        self.runs[k, index] = self._column(cost, False, most)

    def _column(self, cost: float, least: bool, most: bool) -> int:
        self.cost.append(cost)
        self.least.append(int(least))
        self.most.append(int(most))
        return len(self.cost) - 1

    def row(self, entries: Iterable[tuple[int, float]], low: float, high: float) -> None:
        number = len(self.low)
        for column, coefficient in entries:
            self.entries[0].append(number)
            self.entries[1].append(column)
            self.entries[2].append(coefficient)
        self.low.append(low)
        self.high.append(high)

    def matrix(self) -> Any:
        from scipy.sparse import csr_array

        rows, columns, coefficients = self.entries
        return csr_array((coefficients, (rows, columns)), shape=(len(self.low), len(self.cost)))
