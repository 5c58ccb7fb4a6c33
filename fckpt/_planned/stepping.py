"""Plans of whole training steps: forward, backward and updates as one graph, within one budget.

Solvers need not know about updates. They get the graph of a step without the rule that nothing may read a parameter
after its update; in their schedules an update comes directly after its gradient, as in program order. `settled` then
moves an update behind the last computation that reads the old parameter, where there is one, and `simulate` judges.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fckpt._call import ambient
from fckpt._planned.execution import Program
from fckpt._planned.making import make_plan, priced
from fckpt._planned.plan import Plan
from fckpt._planned.planner import Planner, _identity
from fckpt._trace.operations import Backward, Trace
from fckpt._trace.updates import UPDATE, Ending, runs
from fckpt._units import format_bytes
from fckpt.errors import BudgetError
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, Schedule, schedule_of
from fckpt.solve.core.rules import Rules
from fckpt.solve.core.starts import save_everything

__all__ = ["StepPlanner", "plan_of_step", "settled"]

_ATTEMPTS = 4


def settled(graph: Graph, schedule: Schedule) -> Schedule:
    """Returns a schedule in which each update runs after all computations that read the parameter, recomputes included.

    The schedule itself is returned if it is one already.
    """
    order = [step.node for step in schedule.backward if isinstance(step, Compute)]
    last: dict[int, int] = {}
    for place, index in enumerate(order):
        last.update(dict.fromkeys(graph.nodes[index].inputs, place))
    behind: dict[int, list[int]] = {}
    for place, index in enumerate(order):
        node = graph.nodes[index]
        target = max([last[v] for v in node.writes], default=place) if node.backward else place
        if target > place:
            behind.setdefault(target, []).append(index)
    if not behind:
        return schedule
    moved = {index for indices in behind.values() for index in indices}
    found: list[int] = []
    for place, index in enumerate(order):
        found += [] if index in moved else [index]
        found += behind.get(place, [])
    forward = [step.node for step in schedule.forward if isinstance(step, Compute)]
    return schedule_of(graph, forward, found)


def _relaxed(graph: Graph) -> Graph:
    """Returns the graph without the rule that nothing may read a parameter after its update."""
    nodes = (dataclasses.replace(node, writes=()) if node.backward and node.writes else node for node in graph.nodes)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def plan_of_step(graph: Graph, budget: int | float | str | None, solver: str, version: str) -> Plan:
    """Solves the priced graph of a step.

    Args:
        graph: the graph of a training step with its updates.
        budget: see `remat`; None for a plan that recomputes nothing and updates early.
        solver: the name of a solver.
        version: the version of torch, which the plan records.

    Raises:
        BudgetError: no plan fits the budget.
    """
    if budget is None:
        rules = Rules(_relaxed(graph))
        return Plan(graph, settled(graph, schedule_of(graph, *save_everything(rules))), "save_all", None, version)
    relaxed = _relaxed(graph)
    wanted: int | float | str = budget
    least = None
    for _ in range(_ATTEMPTS):
        made = make_plan(relaxed, wanted, solver, version)
        assert made.budget_bytes is not None
        nbytes = made.budget_bytes if least is None else nbytes
        found = dataclasses.replace(made, graph=graph, schedule=settled(graph, made.schedule), budget_bytes=nbytes)
        if found.peak_bytes <= nbytes:
            return found
        least = min(least or found.peak_bytes, found.peak_bytes)
        wanted = made.budget_bytes - (found.peak_bytes - nbytes)
        if wanted <= 0:
            break
    assert least is not None
    raise BudgetError(
        f"no plan fits {format_bytes(nbytes)} ({nbytes} bytes): updates wait for recomputations that read the old "
        f"parameters, and the least that the solver {solver!r} finds with them is {format_bytes(least)}. Give at "
        "least that, or a smaller batch.",
        least,
    )


def _with_first_updates(graph: Graph, trace: Trace) -> Graph:
    """Returns a graph with the temporaries of the next updates, which may be the first ones."""
    nodes = list(graph.nodes)
    for call in trace.calls:
        if call.op is UPDATE and call.node is not None:
            nbytes = runs().first_nbytes(call.args[-1])
            nodes[call.node] = dataclasses.replace(nodes[call.node], temporary_nbytes=nbytes)
    return dataclasses.replace(graph, nodes=tuple(nodes))


class StepPlanner(Planner):
    """Planner of the microbatches of a training step."""

    def __init__(self, budget: int | float | str | None, solver: str):
        super().__init__(budget=budget, solver=solver)
        self.then: Ending | None = None
        """What follows on the backward pass of the calls to plan now."""
        self.plan_of: weakref.WeakKeyDictionary[Program, Plan] = weakref.WeakKeyDictionary()
        self._exact: weakref.WeakKeyDictionary[Program, Plan] = weakref.WeakKeyDictionary()

    def _make(self, call: Callable[[Backward], Trace], *rest: Any) -> Program:
        then, autocast = self.then, ambient.autocast()

        def completed(backward: Backward) -> Trace:
            try:
                return call(backward._replace(then=then, autocast=autocast))
            finally:
                if then is not None:
                    then.forget()

        program = super()._make(completed, *rest)
        self.plan_of[program] = self._latest
        return program

    def exact_plan(self, program: Program) -> Plan:
        """Returns the plan of a program, with the temporaries of its operations. Without a budget they are measured now."""
        plan = self.plan_of[program]
        if plan.budget_bytes is not None:
            return plan
        if program not in self._exact:
            graph = priced(program.trace, None, self.costs, budgeted=True)
            self._exact[program] = dataclasses.replace(plan, graph=graph)
        return self._exact[program]

    def plan(self, traced: Trace, *rest: Any) -> Plan:
        """Prices and solves a trace of one microbatch."""
        first = self.then is not None and self.then.first
        key = (_identity(traced), self.budget, first)
        if key not in self.plans:
            graph = traced.graph if self.budget is None else self._priced(traced, ())
            with self.ledger.timed("solve"):
                graph = _with_first_updates(graph, traced) if first else graph
                self.plans[key] = plan_of_step(graph, self.budget, self.solver, str(torch.__version__))
            self.ledger.count("plans")
        self._latest = self.plans[key]
        return self._latest

    def fits_first(self, program: Program) -> bool:
        """Whether the first updates of the parameters, which may take more memory than later ones, fit the plan."""
        plan = self.plan_of[program]
        if plan.budget_bytes is None:
            return True
        graph = _with_first_updates(plan.graph, program.trace)
        return dataclasses.replace(plan, graph=graph).peak_bytes <= plan.budget_bytes
