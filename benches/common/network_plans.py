"""Plans for `benches.networks`: methods to run a step in less memory, lower bounds, and targets.

Memory is the peak of a step that adds to existing gradients (see `accumulating`), as Feng & Huang count it. Overheads
are by the costs of the graph.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import fckpt
from benches.common import torch_knapsack
from benches.common.rows import Record, Row
from benches.common.training import Task
from fckpt import policies, solve
from fckpt._planned.plan import Plan
from fckpt.cost import Analytic, CostSource, profiles
from fckpt.errors import BudgetError
from fckpt.graph import Graph, Schedule, simulate
from fckpt.solve.proofs.bounds import least_peak
from fckpt.solve.proofs.certificate import quick, tighter

REFERENCE = "ogc"
"""The solver whose memory is the budget of the others."""
CLOSE = 1.01
"""The search for the least memory ends at this ratio of the interval's ends."""
TARGETS = {"overhead": 0.5, "memory": 0.75}
"""The targets: fractions of ogc's overhead in its memory, and of its memory with its overhead."""
GAP = 0.05
"""If a target is proven to be impossible: how far our plan may be from the proven bound."""


# ---- results -------------------------------------------------------------------------------------


@dataclass
class Point(Row):
    """The result of one method. Peaks and budgets are above weights and gradients (see the module)."""

    solver: str
    """Also "plain" and "torch"."""
    budget: str = ""
    """The kind of budget, in words."""
    solve_seconds: float = 0.0
    lower_bound: float | None = None
    """For our solver: a proven lower bound on the overhead of any plan within this budget."""
    predicted_step_bytes: int | None = None
    """The peak above the weights of a step that begins without gradients."""
    measured_step_bytes: int | None = None

    @property
    def title(self) -> str:
        """Solver and budget."""
        return f"{self.solver}, {self.budget}" if self.budget else self.solver

    @property
    def bytes(self) -> int | None:
        """The peak above weights and gradients: measured if it was, otherwise predicted."""
        return self.predicted_bytes if self.peak_bytes is None else self.peak_bytes

    @property
    def overhead(self) -> float | None:
        """The overhead: measured if it was, otherwise predicted."""
        return self.predicted_overhead if self.time_ratio is None else self.time_ratio.median - 1


@dataclass
class Target:
    """The result of our solver for one of the `TARGETS`."""

    value: float | None
    """A fraction of the reference; None if no plan is found."""
    proven: float | None
    """A lower bound on `value` for any plan, by the predicted costs."""
    gap: float | None
    """The distance from the bound: a fraction of a step's seconds, or of its memory."""

    def is_met(self, most: float) -> bool:
        """Whether `value` is at most `most`, or that is proven to be impossible and the bound is close."""
        if self.value is None:
            return False
        excused = self.proven is not None and self.gap is not None and self.proven > most and self.gap <= GAP
        return self.value <= most or excused

    def __str__(self) -> str:
        if self.value is None:
            return "no plan"
        certificate = "" if self.gap is None else f" (at least {self.proven:.2f}; gap {self.gap:.1%})"
        return f"{self.value:.2f} of the reference's{certificate}"


@dataclass
class Report(Record):
    """The results of one network."""

    network: str
    title: str
    what: str
    published: dict[str, float]
    """The published figures, in the sizes of the paper."""
    gradient_bytes: int = 0
    nodes: int = 0
    trace_seconds: float = 0.0
    predicted_seconds: float = 0.0
    """Of the plain step."""
    points: list[Point] = field(default_factory=list)
    least_bytes: int | None = None
    """The least budget that is feasible according to our solver."""
    curve: list[Point] = field(default_factory=list)
    """Plans of our solver from there to the plain peak, which are not run."""
    floor_bytes: int | None = None
    """A proven lower bound on the peak of any plan."""
    targets: dict[str, Target] = field(default_factory=dict)
    """See `TARGETS`."""

    def everything_wrong(self) -> Iterator[str]:
        """Yields the complaints; those of a point begin with its title. Yields missed targets as well."""
        yield from self.complaints
        for point in self.points:
            yield from (f"{point.title}: {text}" for text in point.complaints)
        for name, target in self.targets.items():
            if not target.is_met(TARGETS[name]):
                yield f"{name}: {target}, and at most {TARGETS[name]} is the target"


# ---- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PricedStep:
    """A priced step, for which plans are made."""

    graph: Graph
    version: str
    """Of torch."""
    blocks: Schedule
    """The schedule with a checkpoint around each block."""
    ours: str = "auto"
    """The solver that is compared with the others."""

    @functools.cached_property
    def counted(self) -> Graph:
        """The graph that is solved."""
        return accumulating(self.graph)

    def plan(self, solver: str, budget: int | None) -> Plan:
        """Makes a plan; the solver chooses the memory if the budget is None."""
        return Plan(self.graph, torch_knapsack.solver(solver)(self.counted, budget), solver, budget, self.version)

    def point(self, solver: str, budget: str, nbytes: int | None) -> tuple[Point, Plan | None]:
        """Makes a plan and its point; the plan is None if none is feasible."""
        point = Point(solver, budget, budget_bytes=nbytes)
        start = time.perf_counter()
        try:
            plan = self.plan(solver, nbytes)
        except BudgetError as error:
            point.least_bytes, plan = error.least_bytes, None
        else:
            _predict(point, self.graph, plan.schedule)
        point.solve_seconds = time.perf_counter() - start
        if solver == self.ours and nbytes is not None and plan is not None:
            point.lower_bound = self.lower_bound(nbytes)
        return point, plan

    def lower_bound(self, nbytes: int) -> float:
        """Returns a proven lower bound on the overhead within a budget."""
        return tighter(self.counted, nbytes, effort=quick(self.counted)).seconds / self.graph.seconds - 1


def _predict(point: Point, graph: Graph, schedule: Schedule) -> None:
    timeline = simulate(accumulating(graph), schedule)
    point.predicted_bytes, point.predicted_overhead = timeline.peak_nbytes, timeline.overhead
    point.predicted_step_bytes = simulate(graph, schedule).peak_nbytes


def accumulating(graph: Graph) -> Graph:
    """Returns the graph of a step that adds to existing gradients.

    Gradients then cost no memory, except while the operation runs that makes one, before it is added to the old one.
    (Autograd holds the gradients of a linear layer's weight and bias, which two operations make, until it has both.)
    """
    gradients = frozenset(graph.gradients)
    nodes = []
    for node in graph.nodes:
        passing = sum(graph.values[v].nbytes for v in node.outputs if v in gradients)
        if passing:
            node = replace(node, temporary_nbytes=node.temporary_nbytes + passing, overwrites=())
        nodes.append(node)
    # A gradient is no longer written in place of another value, which is larger now.
    values = tuple(replace(value, nbytes=0) if value.id in gradients else value for value in graph.values)
    return replace(graph, nodes=tuple(nodes), values=values)


def price(task: Task, costs: CostSource, ours: str = "auto") -> PricedStep:
    """Traces and prices a step."""
    plain = task.plan(costs)
    return PricedStep(plain.graph, plain.torch_version, _per_block(task, plain), ours)


def _per_block(task: Task, plain: Plan) -> Schedule:
    """Returns the schedule of a checkpoint around each block."""
    rematerialised = functools.partial(fckpt.remat, policy=policies.nothing_saveable)
    blocks = replace(task, loss=task.in_blocks(rematerialised))
    decided = blocks.plan(Analytic(profiles["cpu"]))  # only the decisions are used
    assert decided.fingerprint == plain.fingerprint
    graph = decided.graph
    made = [graph.values[v] for node in graph.nodes[: graph.boundary] for v in node.outputs]
    return solve.from_saved(plain.graph, [value.id for value in made if value.decision != "must_recompute"])


def search(fits: Callable[[int], bool], least: int, most: int) -> tuple[int, int]:
    """Finds the least budget for which `fits` is true, by bisection.

    Args:
        fits: whether a budget is large enough.
        least: a budget that is too small.
        most: a budget that is large enough.

    Returns:
        The largest budget found that is too small, and the smallest that is large enough.
    """
    while most > CLOSE * least:
        middle = math.isqrt(least * most)
        least, most = (least, middle) if fits(middle) else (middle, most)
    return least, most


Method = tuple[Point, Plan | None]


def plan_all(
    step: PricedStep, report: Report, solvers: Sequence[str], advance: Callable[[str], object]
) -> list[Method]:
    """Makes the plans of all methods, the plain step first, and writes the budgets to the report."""
    graph = step.graph.plain
    plain, torch = Point("plain"), Point("torch", "per block")
    _predict(plain, graph, solve.get("save_all")(graph, None))
    _predict(torch, graph, step.blocks)
    found: list[Method] = [(plain, None), (torch, None)]
    advance(REFERENCE)
    found.append(step.point(REFERENCE, "", None))
    reference = found[-1][0]
    nbytes, overhead = reference.predicted_bytes, reference.predicted_overhead
    assert nbytes is not None and overhead is not None
    for solver in solvers:
        if solver != step.ours:
            advance(solver)
            found.append(step.point(solver, "same memory", nbytes))
    advance(step.ours)
    found.append(step.point(step.ours, "same memory", nbytes))
    found.append(step.point(step.ours, "half of it", nbytes // 2))
    report.least_bytes = _least_bytes(step)
    report.floor_bytes = least_peak(step.counted)
    advance(f"{step.ours}, in the same time")
    same = found[-2][0]
    if same.predicted_overhead is not None and same.predicted_overhead <= overhead:
        _, budget = search(lambda nbytes: _takes(step, nbytes) <= overhead, report.least_bytes - 1, nbytes)
        found.append(step.point(step.ours, "same time", budget))
    return found


def _takes(step: PricedStep, nbytes: int) -> float:
    try:
        return simulate(step.counted, step.plan(step.ours, nbytes).schedule).overhead
    except BudgetError:
        return math.inf


def _least_bytes(step: PricedStep) -> int:
    least = step.point(step.ours, "", 1)[0].least_bytes
    assert least is not None  # one byte is not feasible
    return least


def curve_of(step: PricedStep, least: int, most: int, points: int) -> list[Point]:
    """Plans with our solver, for budgets from the least memory to the plain peak in equal ratios."""
    budgets = [max(least, round(least * (most / least) ** (i / (points - 1)))) for i in range(points)]
    return [step.point(step.ours, "", budget)[0] for budget in budgets]


def targets_of(step: PricedStep, report: Report) -> dict[str, Target]:
    """Returns the targets with the values of our solver, measured if it was run, and the lower bounds."""
    by_budget = {point.budget: point for point in report.points if point.solver == step.ours and point.budget_bytes}
    reference = next(point for point in report.points if point.solver == REFERENCE)
    same_memory, same_time = by_budget["same memory"], by_budget.get("same time", Point(step.ours))
    overhead, nbytes, floor = reference.predicted_overhead, reference.predicted_bytes, report.floor_bytes
    assert overhead is not None and nbytes is not None and floor is not None
    bound = step.lower_bound(nbytes)
    too_small, _ = search(lambda budget: step.lower_bound(budget) <= overhead, floor - 1, nbytes)
    taken, needed = same_memory.predicted_overhead, same_time.predicted_bytes
    time_gap = None if taken is None else (1 + taken) / (1 + bound) - 1
    memory_gap = None if needed is None else needed / too_small - 1
    quotient = lambda part, whole: None if part is None or not whole else part / whole
    return {
        "overhead": Target(quotient(same_memory.overhead, reference.overhead), quotient(bound, overhead), time_gap),
        "memory": Target(quotient(same_time.bytes, reference.bytes), too_small / nbytes, memory_gap),
    }
