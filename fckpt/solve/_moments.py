"""Lazy moment generation: integer programs about a few moments, scheduled lazy_order; where that overflows, more moments.

What the program of some moments (`windows`) holds at them leads to a plan: what is missing is computed right before it
is read. The plan is simulated, and where it overflows most there are moments as well. If it overflows nowhere, nothing
with its order of first runs is faster, up to the gap that the program may have. `repair` and `prune` take care of the
rest, without a guarantee. What a program proves is a bound on all schedules that it is about (`certificate`).

Complexity: that of the programs. Their rows are bounded in sum, and so is the number of branches. Left out: a choice of
the order of what runs again; that it needs room while it does; that what a policy sends through both passes may have to
run more often.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve._greedy import fit, smallest
from fckpt.solve.core.rules import Order, Rules, ancestors, peak_of, profile_of, seconds_of, within_budget
from fckpt.solve.core.starts import save_everything_orders
from fckpt.solve.proofs.bounds import Moment, Problem, proven_seconds, single_moments
from fckpt.solve.proofs.moment_program import CuttingPlane, MomentProgram

__all__ = ["ProgramEffort", "ProgramRound", "moment_orders", "moments", "program_rounds", "usual_effort"]

ROWS, ROWS_PER_NODE = 9_500, 20
"""The most rows of all programs together that lead to plans: some seconds."""
MORE = 4
"""How many moments are added at once."""
CANDIDATES = 6
"""How many are tried where one is added."""
NEAR = 0.02
"""A part of the graph, within which one moment stands for all."""


class ProgramEffort(NamedTuple):
    """What programs may cost. Counts and not times, so that plans and bounds do not depend on the machine."""

    rows: int
    """The most of all programs together but the first."""
    branches: int = 1
    """The most of each. Without any HiGHS has good plans already, from its heuristics, and proves a little less."""
    gap: float = 0.05
    """A part of the repetitions' time, below which an optimum need not be improved."""
    careful: bool = False
    """One moment more at a time, that which raises the optimum in fractions most, in place of those that may as well
    come after it as before it; or several at once, that have a certain order."""


def moments(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest of the plans that moments lead to and that repairs make fit.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: neither they nor the smallest plan of `greedy` fit.
    """
    rules = Rules(graph)
    starts = save_everything_orders(rules)
    if budget is None or peak_of(rules, starts[0]) <= budget:
        return schedule_of(graph, *starts[0])
    orders = moment_orders(rules, starts, budget, usual_effort(graph))
    found = [plan for order in orders if (plan := fit(rules, order, budget)[0]) is not None]
    if not found:
        least = smallest(rules)
        found = [fit(rules, least, budget)[0] or least]
    best = min(found, key=lambda order: seconds_of(rules, order))
    return within_budget(graph, schedule_of(graph, *best), budget, "moments")


def usual_effort(graph: Graph, factor: float = 1.0) -> ProgramEffort:
    """Returns what `moments` spends on a graph, or a multiple of it."""
    return ProgramEffort(round(factor * min(ROWS, ROWS_PER_NODE * len(graph.nodes))))


def moment_orders(rules: Rules, starts: Sequence[Order], budget: int, effort: ProgramEffort) -> Iterator[Order]:
    """Yields plans round by round: the first respects the budget at one moment, later ones at more.

    The last one overflows nowhere, or the effort is spent, or no plan is faster for what is known.

    Args:
        rules: of the graph.
        starts: plans that compute everything once. All first runs are in the order of that for which single moments
            prove the least time; the peak of an order says little about what it costs to come below it.
        budget: bytes.
        effort: what may be spent.
    """
    problems = (Problem(rules.graph, first_runs) for first_runs in starts)
    proved = ((problem, single_moments(problem, budget)) for problem in problems)
    problem, (_, strongest) = min(proved, key=lambda found: found[1].bound.seconds)
    if strongest is not None:
        yield from (
            found.plan for found in program_rounds(problem, strongest.moment, budget, effort) if found.plan is not None
        )


class ProgramRound(NamedTuple):
    """What comes of one program."""

    seconds: float
    """Repetitions take so long at least, in every schedule that the program is about."""
    plan: Order | None
    """What the program holds, scheduled lazy_order; None where it holds nothing that is known."""


def program_rounds(problem: Problem, first: Moment, budget: int, effort: ProgramEffort) -> Iterator[ProgramRound]:
    """Yields what comes of the first moment, then of more, and so on; see `moment_orders`."""
    chain, rows = _MomentChain(problem, budget), effort.rows
    program: MomentProgram | None = chain.program([first.node])
    while program is not None:
        rows -= program.rows
        answer = program.solve(effort.branches, effort.gap)
        plan, worst = (None, []) if answer.x is None else chain.planned(program, answer.x)
        yield ProgramRound(proven_seconds(problem, answer, program.columns), plan)
        program = (chain.best if effort.careful else chain.longer)(program, worst, rows)


class _MomentChain:
    """Looks for moments."""

    def __init__(self, problem: Problem, budget: int):
        self.problem, self.budget = problem, budget
        self.sequence = [*problem.first_runs.forward, *problem.first_runs.backward]
        self.place = {index: i for i, index in enumerate(self.sequence)}
        self.moments: dict[int, Moment] = {}

    def planned(self, program: MomentProgram, x: np.ndarray) -> tuple[Order, list[int]]:
        """Returns the plan that holds what the columns `x` say, and the nodes where it overflows."""
        chain = [moment.node for moment in program.moments]
        held = [set(np.flatnonzero((row >= 0) & (x[np.maximum(row, 0)] > 0.5)).tolist()) for row in program.held]
        retention = dict(zip((self.place[index] for index in chain), held, strict=True))
        plan, stages = lazy_order(self.problem.rules, self.problem.first_runs, retention)
        return plan, self.overflow(plan, stages, chain)

    def longer(self, program: MomentProgram, worst: Sequence[int], rows: int) -> MomentProgram | None:
        """Returns the program of as many moments more as `rows` allow."""
        chain = [moment.node for moment in program.moments]
        more: list[int] = []
        for index in worst:
            if len(more) < MORE and all(self.ordered(index, other) for other in (*chain, *more)):
                more.append(index)
        for count in range(len(more), 0, -1):
            longer = self.program([*chain, *more[:count]], program.planes)
            if longer.rows <= rows:
                return longer
        return None

    def best(self, program: MomentProgram, worst: Sequence[int], rows: int) -> MomentProgram | None:
        """Returns the program with one moment more that promises most, without those that have no order with it."""
        chain = [moment.node for moment in program.moments]
        tries = [
            self.program([*(other for other in chain if self.ordered(index, other)), index], program.planes)
            for index in worst[:CANDIDATES]
        ]
        return max((longer for longer in tries if longer.rows <= rows), key=MomentProgram.promise, default=None)

    def program(self, chain: Iterable[int], planes: Iterable[CuttingPlane] = ()) -> MomentProgram:
        ordered = sorted(chain, key=self.place.__getitem__)
        return MomentProgram(self.problem, [self.moment(index) for index in ordered], self.budget, planes)

    def moment(self, index: int) -> Moment:
        if index not in self.moments:
            self.moments[index] = self.problem.moment(index)
        return self.moments[index]

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
        return found

    def ordered(self, one: int, other: int) -> bool:
        """Whether one of two nodes certainly runs first."""
        return bool(self.moment(other).before[one] or self.moment(one).before[other])


def lazy_order(rules: Rules, first_runs: Order, held: Mapping[int, set[int]]) -> tuple[Order, list[int]]:
    """Returns the plan that computes right before it is read, or is to be held, what is not in memory.

    Args:
        rules: of the graph.
        first_runs: computes everything once.
        held: by position in `first_runs`, what stays in memory after it; after others everything does, and so does always
            what comes of nodes that never run twice.

    Returns:
        The plan; and for each computation the position in `first_runs` of the first run that it is, or is made for.
    """
    graph, split = rules.graph, len(first_runs.forward)
    stays = {*rules.permanent, *(v for n in graph.nodes if rules.pinned[n.id] for v in n.outputs)}
    live, ran = {*graph.inputs}, set[int]()
    runs: list[int] = []
    stages: list[int] = []
    for position, index in enumerate((*first_runs.forward, *first_runs.backward)):
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
            live.intersection_update({*held[position], *stays, *node.inputs, *node.outputs})
    boundary = sum(stage < split for stage in stages)
    used = _used(rules, runs, boundary)
    forward = [runs[i] for i in used if i < boundary]
    return Order(forward, [runs[i] for i in used if i >= boundary]), [stages[i] for i in used]


def _used(rules: Rules, runs: Sequence[int], boundary: int) -> list[int]:
    """The computations among `runs` that something comes of, in order."""
    graph = rules.graph
    musts = {n.id for n in graph.nodes if n.once or n.random or n.writes}
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
