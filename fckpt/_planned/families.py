"""Families of plans: graphs that differ in sizes only share their schedules, so that a new size is not solved anew.

A schedule that was found for one size is valid for all sizes. For a new size, the known schedules are adapted to the
budget, which takes a fraction of a second; the solver runs only if none of them fits. The plan is used at once, while
another process solves the graph (`background`). If that plan is faster, it replaces the adapted plan.

Not shared are plans of named solvers, which promise their own plans, of policies alone, with tiles, and on a mesh.
"""

from __future__ import annotations

from collections.abc import Callable

from fckpt._planned import background
from fckpt._planned.late_writes import settled_within, writes_late
from fckpt._planned.plan import Plan
from fckpt.graph.graph import Graph
from fckpt.graph.identity import structure
from fckpt.graph.schedule import Schedule
from fckpt.solve._adapt import adapt

__all__ = ["Families"]

_MOST = 16
"""The number of schedules per structure that are adapted to a new size: the latest ones."""
_PENDING = 8
"""The number of plans that wait to be solved in the background: the latest ones."""


class Families:
    """The schedules of one function's plans, by structure."""

    def __init__(self) -> None:
        self._known: dict[str, list[Schedule]] = {}
        self._pending: dict[int, tuple[Plan, background.Request]] = {}
        """Adapted plans that are being solved in the background, by id."""

    def plan(self, graph: Graph, nbytes: int, version: str, solve: Callable[[], Plan]) -> tuple[Plan, bool]:
        """Returns a plan for a priced graph, and whether the plan was adapted from the plan of another size.

        Args:
            graph: the graph.
            nbytes: the budget.
            version: the version of torch, which the plan records.
            solve: returns the solver's plan.

        Raises:
            BudgetError: the solver finds no plan that fits.
        """
        known = self._known.setdefault(structure(graph), [])
        found = _adapted(graph, nbytes, version, known) if known else None
        plan = solve() if found is None else found
        self._add(known, plan)
        return plan, found is not None

    def solve_later(self, plan: Plan) -> None:
        """Has an adapted plan solved in the background, unless it recomputes nothing."""
        if plan.overhead > 0:
            while len(self._pending) >= _PENDING:
                del self._pending[next(iter(self._pending))]
            self._pending[id(plan)] = plan, background.Request(plan)

    def improved(self, plan: Plan) -> Plan | None:
        """Returns a faster plan that was solved in the background meanwhile, once; None if there is none."""
        if not self._pending or id(plan) not in self._pending:
            return None
        solved = self._pending[id(plan)][1].answer()
        if solved is background.PENDING:
            return None
        del self._pending[id(plan)]
        if not isinstance(solved, Plan) or solved.timeline.seconds >= plan.timeline.seconds:
            return None
        self._add(self._known.setdefault(structure(plan.graph), []), solved)
        return solved

    @staticmethod
    def _add(known: list[Schedule], plan: Plan) -> None:
        if plan.schedule not in known:
            known.insert(0, plan.schedule)
            del known[_MOST:]


def _adapted(graph: Graph, nbytes: int, version: str, known: list[Schedule]) -> Plan | None:
    if writes_late(graph):
        schedule = settled_within(graph, nbytes, lambda graph, nbytes: adapt(graph, nbytes, known))
    else:
        schedule = adapt(graph, nbytes, known)
    return None if schedule is None else Plan(graph, schedule, "auto", nbytes, version)
