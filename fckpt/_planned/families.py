"""Families of plans: graphs that differ in sizes only share their schedules, so that a new size is not solved anew.

A schedule that was found for one size is valid for all sizes. For a new size, the known schedules are adapted to the
budget, which takes a fraction of a second; the solver runs only if none of them fits. The plan is used at once, while
another process solves the graph (`background`). If that plan is faster, it replaces the adapted plan. A process starts
with the schedules that other processes have stored on disk (`stored`).

A call of a structure without any schedules does not wait for the solver either, if its graph is not small: it runs by a
plan that is found quickly (`solve/_quick.py`), which another process improves in the same way.

`is_shared` says which plans are adapted. Plans of policies alone and plans on a mesh are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch

from fckpt._planned import background
from fckpt._planned.late_writes import settled_within, writes_late
from fckpt._planned.plan import Plan
from fckpt._planned.stored import StoredPlans
from fckpt._planned.tiling import Tile
from fckpt.graph.graph import Graph
from fckpt.graph.identity import structure
from fckpt.graph.schedule import Schedule
from fckpt.solve._adapt import adapt
from fckpt.solve._quick import quick

__all__ = ["SMALL", "Families", "is_shared", "quick_plan", "settled"]

_MOST = 16
"""The number of schedules per structure that are adapted to a new size: the latest ones."""
_STRUCTURES = 128
"""The number of structures whose schedules are known: the first ones are forgotten."""
_PENDING = 8
"""The number of plans that wait to be solved in the background: the latest ones."""
_NOTED = 128
"""The number of plans that are solved in the background if they are used again: the latest ones."""
SMALL = 40
"""The number of nodes of a graph that is solved at once, because that takes less than a second."""

Origin = Literal["solved", "read", "adapted", "quick"]
"""Where a plan comes from: from the solver, the disk, plans of other sizes, or a quick search."""


def is_shared(solver: str, tile: Tile) -> bool:
    """Whether plans within a budget may be adapted from plans of other sizes.

    Named solvers promise their own plans, and tiles depend on the sizes.
    """
    return solver == "auto" and not tile


class Families:
    """The schedules of one function's plans, by structure."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Schedule, ...]] = {}
        """Schedules by structure, the latest first. Tuples, because other threads may be adapting them."""
        self._noted: dict[int, tuple[Plan, StoredPlans | None]] = {}
        """Plans that are solved in the background if they are used again, by id: the latest ones."""
        self._pending: dict[int, tuple[Plan, background.Request, StoredPlans | None]] = {}
        """Plans, adapted or found quickly, whose graphs are being solved in the background, by id."""
        self._better: dict[int, tuple[Plan, Plan]] = {}
        """Such plans with the faster plans that replace them, by id: the latest ones."""

    def plan(
        self,
        graph: Graph,
        nbytes: int,
        solve: Callable[[], Plan],
        stored: StoredPlans | None = None,
        *,
        quickly: bool = False,
    ) -> tuple[Plan, Origin]:
        """Returns a plan for a priced graph, and its origin.

        Args:
            graph: the graph.
            nbytes: the budget.
            solve: returns the solver's plan.
            stored: the plans on disk, which are tried first.
            quickly: whether a plan that is found quickly will do, if another process can solve the graph.

        Raises:
            BudgetError: the solver finds no plan that fits.
        """
        name = structure(graph)
        plan = stored.plan(graph, nbytes) if stored else None
        if plan is not None:
            self._add(name, plan)
            return plan, "read"
        known = self._known.get(name) or (stored.schedules(graph) if stored else ())
        origin: Origin = "solved"
        if known:
            plan, origin = settled(graph, nbytes, functools.partial(adapt, known=known)), "adapted"
        elif quickly and background.is_available():
            plan, origin = quick_plan(graph, nbytes), "quick"
        if plan is None:
            plan, origin = solve(), "solved"
        self._add(name, plan)
        return plan, origin

    def add(self, plan: Plan) -> None:
        """Adds the schedule of a plan."""
        self._add(structure(plan.graph), plan)

    def solve_later(self, plan: Plan, stored: StoredPlans | None = None, *, if_used_again: bool = False) -> None:
        """Has a plan solved in the background, and the result stored on disk, unless the plan recomputes nothing.

        Args:
            plan: the plan.
            stored: the plans on disk.
            if_used_again: whether to wait until `improved` is called for the plan: many sizes occur only once.
        """
        if plan.overhead > 0 and if_used_again:
            self._noted = dict([*self._noted.items(), (id(plan), (plan, stored))][-_NOTED:])
        elif plan.overhead > 0:
            for other in list(self._pending)[: 1 - _PENDING]:
                self._pending.pop(other, None)
            self._pending[id(plan)] = plan, background.Request(plan), stored

    def improved(self, plan: Plan) -> Plan | None:
        """Returns a faster plan that was solved in the background meanwhile; None if there is none.

        It is called at each step, in any thread, without a lock.
        """
        better = self._better.get(id(plan))
        if better is not None and better[0] is plan:  # other programs of the plan ask as well
            return better[1]
        noted = self._noted.pop(id(plan), None)
        if noted is not None and noted[0] is plan:
            self.solve_later(*noted)
        pending = self._pending.get(id(plan))
        if pending is None:
            return None
        solved = pending[1].answer()
        if solved is background.PENDING or self._pending.pop(id(plan), None) is None:  # another thread has it
            return None
        if not isinstance(solved, Plan):
            return None
        faster = solved.timeline.seconds < plan.timeline.seconds
        if pending[2] is not None:
            pending[2].add(solved if faster else plan)
        if not faster:
            return None
        self._better = dict([*self._better.items(), (id(plan), (plan, solved))][-_MOST:])
        self._add(structure(plan.graph), solved)
        return solved

    def _add(self, name: str, plan: Plan) -> None:
        known = self._known.get(name, ())
        if plan.schedule not in known:
            for other in list(self._known)[:-_STRUCTURES]:
                self._known.pop(other, None)
            self._known[name] = (plan.schedule, *known)[:_MOST]


def quick_plan(graph: Graph, nbytes: int) -> Plan | None:
    """Returns the plan of a quick search; None if the search finds no plan, or if the graph is small.

    On small graphs a solver is as fast.
    """
    return settled(graph, nbytes, quick) if len(graph.nodes) > SMALL else None


def settled(graph: Graph, nbytes: int, find: Callable[[Graph, int], Schedule | None]) -> Plan | None:
    """Returns the plan with the schedule that `find` returns, if it fits; None if not."""
    given = graph.without_replays
    for size in dict.fromkeys((nbytes, max(1, nbytes - graph.replaying_nbytes))):
        schedule = settled_within(given, size, find) if writes_late(graph) else find(given, size)
        if schedule is not None:
            plan = Plan(graph, schedule, "auto", nbytes, str(torch.__version__))
            if plan.peak_bytes <= nbytes:
                return plan
    return None
