"""Integer programs over a few moments, turned into plans by lazy recomputation.

The solution of the integer program (`moment_program`) says which values are held at each moment. It becomes a plan in
which missing values are recomputed directly before they are read. The plan is simulated, and the positions at which it
exceeds the budget most become moments of the next program. If it exceeds the budget nowhere, no plan with its order of
first runs is faster, up to the program's gap. `repair` and `prune` make the other plans feasible, without a guarantee.
The bound that a program proves holds for all schedules that the program covers (`certificate`).

Complexity: the time of the programs. The sum of their rows is bounded, and so is the number of branches of each. Left
out: choosing the order of recomputations; the memory that recomputations need while they run; that values which a
policy recomputes in both passes may have to be recomputed more often.
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
"""The largest total number of rows of the programs that lead to plans: a few seconds."""
MORE = 4
"""The number of moments added per round."""
CANDIDATES = 6
"""The number of moments tried when one moment is added per round."""
NEAR = 0.02
"""One moment stands for all positions within this fraction of the sequence."""


class ProgramEffort(NamedTuple):
    """Limits for integer programs: counts, not times, so that plans and bounds do not depend on the machine."""

    rows: int
    """The largest total number of rows of all programs after the first."""
    branches: int = 1
    """The largest number of branches of one program. Even with one branch, HiGHS has good plans from its heuristics,
    but proves a little less."""
    searches: int = 8
    """The largest number of searches for violated planes of one program. The first ones raise the bound most."""
    gap: float = 0.05
    """The relative gap, as a fraction of the recomputation time, at which a program may stop."""
    careful: bool = False
    """Whether to add one moment per round, the one that most raises the optimum of the linear relaxation, and to drop
    moments that have no certain order with it. Otherwise several moments with a certain order are added per round."""


def moments(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule that repairs make from the plans of integer programs over moments.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: neither these plans nor the smallest plan of `greedy` fits.
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
    """Returns the effort that `moments` spends on a graph, multiplied by `factor`."""
    return ProgramEffort(round(factor * min(ROWS, ROWS_PER_NODE * len(graph.nodes))))


def moment_orders(rules: Rules, starts: Sequence[Order], budget: int, effort: ProgramEffort) -> Iterator[Order]:
    """Yields one order per round: the first respects the budget at one moment, later ones at more moments.

    The last order exceeds the budget nowhere, or the effort is spent, or further moments do not lead to a faster order.

    Args:
        rules: the rules of the graph.
        starts: orders that compute every node once. All first runs follow the start for which single moments prove the
            least time; the peak of a start says little about the cost of lowering the peak.
        budget: bytes.
        effort: the limits of the programs.
    """
    problems = (Problem(rules.graph, first_runs) for first_runs in starts)
    proved = ((problem, single_moments(problem, budget)) for problem in problems)
    problem, (_, strongest) = min(proved, key=lambda found: found[1].bound.seconds)
    if strongest is not None:
        yield from (
            found.plan for found in program_rounds(problem, strongest.moment, budget, effort) if found.plan is not None
        )


class ProgramRound(NamedTuple):
    """The result of one integer program."""

    seconds: float
    """A lower bound on the recomputation time of every schedule that the program covers."""
    plan: Order | None
    """The order made from the program's solution; None if HiGHS finds no solution."""


def program_rounds(problem: Problem, first: Moment, budget: int, effort: ProgramEffort) -> Iterator[ProgramRound]:
    """Yields the result of the program of the first moment, then of programs of more moments; see `moment_orders`."""
    chain, rows = _MomentChain(problem, budget), effort.rows
    program: MomentProgram | None = chain.program([first.node])
    while program is not None:
        rows -= program.rows
        answer = program.solve(effort.branches, effort.gap, effort.searches)
        plan, worst = (None, []) if answer.x is None else chain.planned(program, answer.x)
        yield ProgramRound(proven_seconds(problem, answer, program.columns), plan)
        program = (chain.best if effort.careful else chain.longer)(program, worst, rows)


class _MomentChain:
    """Chooses moments for the next program."""

    def __init__(self, problem: Problem, budget: int):
        self.problem, self.budget = problem, budget
        self.sequence = [*problem.first_runs.forward, *problem.first_runs.backward]
        self.place = {index: i for i, index in enumerate(self.sequence)}
        self.moments: dict[int, Moment] = {}

    def planned(self, program: MomentProgram, x: np.ndarray) -> tuple[Order, list[int]]:
        """Returns the order that holds the values of the solution `x`, and the nodes at which it exceeds the budget."""
        chain = [moment.node for moment in program.moments]
        held = [set(np.flatnonzero((row >= 0) & (x[np.maximum(row, 0)] > 0.5)).tolist()) for row in program.held]
        retention = dict(zip((self.place[index] for index in chain), held, strict=True))
        plan, stages = lazy_order(self.problem.rules, self.problem.first_runs, retention)
        return plan, self.overflow(plan, stages, chain)

    def longer(self, program: MomentProgram, worst: Sequence[int], rows: int) -> MomentProgram | None:
        """Returns the program with as many additional moments as `rows` allow."""
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
        """Returns the most promising program with one more moment, and moments that have a certain order with it."""
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
        """Returns nodes at whose first runs the budget is exceeded, the worst first, with a distance between them."""
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
        """Whether it is certain which of two nodes runs first."""
        return bool(self.moment(other).before[one] or self.moment(one).before[other])


def lazy_order(rules: Rules, first_runs: Order, held: Mapping[int, set[int]]) -> tuple[Order, list[int]]:
    """Returns the order that recomputes missing values directly before they are read, or before they are to be held.

    Args:
        rules: the rules of the graph.
        first_runs: an order that computes every node once.
        held: by position in `first_runs`, the values that stay in memory after that position. After all other positions
            everything stays. Outputs of nodes that never run twice always stay.

    Returns:
        The order; and for each computation, the position in `first_runs` of the first run that it is or serves.
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
    """Returns the indices of the computations among `runs` whose results are used, in order."""
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
