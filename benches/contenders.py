"""What `networks.py` compares: the ways to run a step in less memory, planned, and what is proven of them.

Memory is counted as the seed counts it (see `accumulating`), overhead by the costs of the graph.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import fckpt
from benches import torch_knapsack
from benches.task import Task
from benches.timing import Spread
from fckpt import policies, solve
from fckpt._planned.plan import Plan
from fckpt.cost import Analytic, CostSource, profiles
from fckpt.errors import BudgetError
from fckpt.graph import Graph, Schedule, simulate
from fckpt.solve.proofs.bounds import least_peak
from fckpt.solve.proofs.certificate import quick, tighter

__all__ = [
    "REFERENCE",
    "Contender",
    "Planned",
    "Point",
    "Report",
    "Target",
    "accumulating",
    "curve_of",
    "plan_all",
    "prepare",
    "search",
    "targets_of",
]

REFERENCE = "ogc"
"""Whose memory is the budget of the others."""
CLOSE = 1.01
"""The search for the least memory ends when it is known as well as this."""
TARGETS = {"overhead": 0.5, "memory": 0.75}
"""The most of ogc's overhead in its memory, and of its memory with its overhead."""
GAP = 0.05
"""Where the target is proven to be out of reach: how far our plan may be from what is proven."""


# ---- what comes out ------------------------------------------------------------------------------


@dataclass
class Point:
    """A way to run the step."""

    solver: str
    """Also "plain" and "torch"."""
    budget: str = ""
    """What it was asked for, in words."""
    budget_bytes: int | None = None
    least_bytes: int | None = None
    """Where it refuses that budget: the least that would do."""
    solve_seconds: float = 0.0
    predicted_bytes: int | None = None
    """The peak above weights and gradients, as the seed counts it. Budgets count the same."""
    predicted_overhead: float | None = None
    lower_bound: float | None = None
    """For our solver: no plan whatsoever has less overhead within this budget, as far as is proven."""
    predicted_step_bytes: int | None = None
    """The peak above the weights, of a step that begins without gradients."""
    measured_bytes: int | None = None
    """For what is no plan: see above."""
    measured_step_bytes: int | None = None
    time_ratio: Spread | None = None
    """Its step over the plain one."""
    step_seconds: Spread | None = None
    unequal: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Solver and budget."""
        return f"{self.solver}, {self.budget}" if self.budget else self.solver

    @property
    def bytes(self) -> int | None:
        """The peak as the seed counts it, measured if it was."""
        return self.predicted_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def overhead(self) -> float | None:
        """The time in addition to the plain step's, measured if it was."""
        return self.predicted_overhead if self.time_ratio is None else self.time_ratio.median - 1


@dataclass
class Target:
    """What our solver reaches of one of the `TARGETS`."""

    value: float | None
    """As a part of the reference's; None if no plan is found."""
    proven: float | None
    """No plan reaches less than this part (by the predicted costs)."""
    gap: float | None
    """How far it is from what is proven: of a step's seconds, or of its memory."""

    def is_met(self, most: float) -> bool:
        """Whether it is reached, or is proven to be out of reach and what is proven is close."""
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
class Report:
    """What was found out about one network."""

    network: str
    title: str
    what: str
    published: dict[str, float]
    """The seed's own figures, in its own sizes."""
    gradient_bytes: int = 0
    nodes: int = 0
    trace_seconds: float = 0.0
    predicted_seconds: float = 0.0
    """Of the plain step."""
    points: list[Point] = field(default_factory=list)
    least_bytes: int | None = None
    """The least budget that our solver says is feasible."""
    curve: list[Point] = field(default_factory=list)
    """Our plans from there to the plain peak: not run."""
    floor_bytes: int | None = None
    """No plan whatsoever peaks below, as far as is proven."""
    targets: dict[str, Target] = field(default_factory=dict)
    """See `TARGETS`."""
    complaints: list[str] = field(default_factory=list)

    def everything_wrong(self) -> Iterator[str]:
        """Yields the complaints, those of the points with their names, and the targets that are missed."""
        yield from self.complaints
        for point in self.points:
            yield from (f"{point.title}: {text}" for text in point.complaints)
        for name, target in self.targets.items():
            if not target.is_met(TARGETS[name]):
                yield f"{name}: {target}, and at most {TARGETS[name]} is the target"


# ---- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A priced step, and what is planned for it."""

    graph: Graph
    version: str
    """Of torch."""
    blocks: Schedule
    """With a checkpoint around each block."""
    ours: str = "auto"
    """The solver that is compared with the others."""

    @functools.cached_property
    def counted(self) -> Graph:
        """The graph that is solved."""
        return accumulating(self.graph)

    def plan(self, solver: str, budget: int | None) -> Plan:
        """Plans; a budget of None leaves the memory to the solver."""
        return Plan(self.graph, torch_knapsack.solver(solver)(self.counted, budget), solver, budget, self.version)

    def point(self, solver: str, budget: str, nbytes: int | None) -> tuple[Point, Plan | None]:
        """Plans, and says what comes of it: no plan where none fits."""
        point = Point(solver, budget, nbytes)
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
    """Returns the graph of a step that finds the gradients of the last one, and adds to them.

    They cost nothing then: a new gradient is there while the operation runs that makes it, and is added to the old one.
    (Autograd holds the gradients of a linear layer's weight and bias, which two operations make, until it has both.)
    """
    gradients = frozenset(graph.gradients)
    nodes = []
    for node in graph.nodes:
        passing = sum(graph.values[v].nbytes for v in node.outputs if v in gradients)
        if passing:
            node = replace(node, temporary_nbytes=node.temporary_nbytes + passing, overwrites=())
        nodes.append(node)
    # What a gradient may be written over is no longer as large as it.
    values = tuple(replace(value, nbytes=0) if value.id in gradients else value for value in graph.values)
    return replace(graph, nodes=tuple(nodes), values=values)


def prepare(task: Task, costs: CostSource, ours: str = "auto") -> Planned:
    """Traces and prices a step."""
    plain = task.plan(costs)
    return Planned(plain.graph, plain.torch_version, _per_block(task, plain), ours)


def _per_block(task: Task, plain: Plan) -> Schedule:
    """What is kept and computed again with a checkpoint around each block."""
    rematerialised = functools.partial(fckpt.remat, policy=policies.nothing_saveable)
    blocks = replace(task, loss=task.in_blocks(rematerialised))
    decided = blocks.plan(Analytic(profiles["cpu"]))  # only what is kept is of interest
    assert decided.fingerprint == plain.fingerprint
    graph = decided.graph
    made = [graph.values[v] for node in graph.nodes[: graph.boundary] for v in node.outputs]
    return solve.from_saved(plain.graph, [value.id for value in made if value.decision != "must_recompute"])


def search(fits: Callable[[int], bool], least: int, most: int) -> tuple[int, int]:
    """Finds the least budget that fits, by bisection.

    Args:
        fits: whether a budget is large enough.
        least: one that is not.
        most: one that is.

    Returns:
        The largest budget found that is too small, and the smallest one that is large enough.
    """
    while most > CLOSE * least:
        middle = math.isqrt(least * most)
        least, most = (least, middle) if fits(middle) else (middle, most)
    return least, most


Contender = tuple[Point, Plan | None]


def plan_all(
    planned: Planned, report: Report, solvers: Sequence[str], advance: Callable[[str], object]
) -> list[Contender]:
    """Plans the step in every way, the plain one first, and notes in the report what budgets there are."""
    graph = planned.graph.plain
    plain, torchs = Point("plain"), Point("torch", "per block")
    _predict(plain, graph, solve.get("save_all")(graph, None))
    _predict(torchs, graph, planned.blocks)
    found: list[Contender] = [(plain, None), (torchs, None)]
    advance(REFERENCE)
    found.append(planned.point(REFERENCE, "", None))
    reference = found[-1][0]
    nbytes, overhead = reference.predicted_bytes, reference.predicted_overhead
    assert nbytes is not None
    assert overhead is not None
    for solver in solvers:
        if solver != planned.ours:
            advance(solver)
            found.append(planned.point(solver, "same memory", nbytes))
    advance(planned.ours)
    found.append(planned.point(planned.ours, "same memory", nbytes))
    found.append(planned.point(planned.ours, "half of it", nbytes // 2))
    report.least_bytes = _least_bytes(planned)
    report.floor_bytes = least_peak(planned.counted)
    advance(f"{planned.ours}, in the same time")
    same = found[-2][0]
    if same.predicted_overhead is not None and same.predicted_overhead <= overhead:
        _, budget = search(lambda nbytes: _takes(planned, nbytes) <= overhead, report.least_bytes - 1, nbytes)
        found.append(planned.point(planned.ours, "same time", budget))
    return found


def _takes(planned: Planned, nbytes: int) -> float:
    try:
        return simulate(planned.counted, planned.plan(planned.ours, nbytes).schedule).overhead
    except BudgetError:
        return math.inf


def _least_bytes(planned: Planned) -> int:
    least = planned.point(planned.ours, "", 1)[0].least_bytes
    assert least is not None  # not even the loss fits into one byte
    return least


def curve_of(planned: Planned, least: int, most: int, points: int) -> list[Point]:
    """Plans with our solver from the least memory to the plain peak, in equal ratios."""
    budgets = [max(least, round(least * (most / least) ** (i / (points - 1)))) for i in range(points)]
    return [planned.point(planned.ours, "", budget)[0] for budget in budgets]


def targets_of(planned: Planned, report: Report) -> dict[str, Target]:
    """Returns what our solver reaches, measured if it was run, and what is proven of it."""
    by_budget = {point.budget: point for point in report.points if point.solver == planned.ours and point.budget_bytes}
    reference = next(point for point in report.points if point.solver == REFERENCE)
    same_memory, same_time = by_budget["same memory"], by_budget.get("same time")
    overhead, nbytes = reference.predicted_overhead, reference.predicted_bytes
    assert overhead is not None
    assert nbytes is not None
    assert report.floor_bytes is not None
    bound = planned.lower_bound(nbytes)
    taken = same_memory.predicted_overhead
    too_small, _ = search(lambda budget: planned.lower_bound(budget) <= overhead, report.floor_bytes - 1, nbytes)
    needed = same_time.predicted_bytes if same_time else None
    return {
        "overhead": Target(
            _quotient(same_memory.overhead, reference.overhead),
            _quotient(bound, overhead),
            None if taken is None else (1 + taken) / (1 + bound) - 1,
        ),
        "memory": Target(
            _quotient(same_time.bytes if same_time else None, reference.bytes),
            too_small / nbytes,
            None if needed is None else needed / too_small - 1,
        ),
    }


def _quotient(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
