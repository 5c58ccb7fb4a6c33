"""Plans of whole training steps: forward, backward and updates as one graph, within one budget.

Solvers need not know about updates. They get the graph of a step without the rule that nothing may read a parameter
after its update; in their schedules an update comes directly after its gradient, as in program order. `settled` then
moves an update behind the last computation that reads the old parameter, where there is one, and `simulate` judges.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fckpt._call import ambient
from fckpt._planned.execution import Program
from fckpt._planned.making import make_plan, nbytes_of, priced
from fckpt._planned.plan import Plan
from fckpt._planned.planner import Planner, _identity
from fckpt._trace.operations import Backward, Trace
from fckpt._trace.updates import UPDATE, Ending, runs
from fckpt._units import format_bytes
from fckpt.errors import BudgetError
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, Schedule, schedule_of
from fckpt.solve.core.rules import Rules, peak_of
from fckpt.solve.core.starts import backward_orders, save_everything

__all__ = ["StepPlanner", "plan_of_step", "settled"]

_STARTS = 12


def settled(graph: Graph, schedule: Schedule) -> Schedule:
    """Returns a schedule in which each update runs after all computations that read the parameter, recomputes included.

    Other computations keep their order.
    """
    order = [step.node for step in schedule.backward if isinstance(step, Compute)]
    last: dict[int, int] = {}
    for place, index in enumerate(order):
        last.update(dict.fromkeys(graph.nodes[index].inputs, place))
    placed: list[tuple[int, bool, int]] = []
    for place, index in enumerate(order):
        node = graph.nodes[index]
        target = max([last[v] for v in node.writes], default=place) if node.backward else place
        placed.append((target, target > place, index))  # behind the node at `target`
    forward = [step.node for step in schedule.forward if isinstance(step, Compute)]
    return schedule_of(graph, forward, [index for _, _, index in sorted(placed, key=lambda p: p[:2])])


def _relaxed(graph: Graph) -> Graph:
    """Returns the graph without the rule that nothing may read a parameter after its update.

    So that solvers, which may reorder the backward pass, still run an update after the other nodes of the backward pass
    that read the parameter, the update reads their results.
    """
    before: list[int] = []  # by node: the nodes on which it depends, as bits
    nodes = []
    for node in graph.nodes:
        needed = 0
        for producer in (graph.values[v].producer for v in node.inputs):
            needed |= 0 if producer is None else before[producer] | 1 << producer
        before.append(needed)
        if node.backward and node.writes:
            readers = [n for v in node.writes for n in graph.consumers[v] if graph.boundary <= n < node.id]
            others = [graph.nodes[n].outputs[0] for n in readers if not needed >> n & 1]
            node = dataclasses.replace(node, writes=(), inputs=tuple(dict.fromkeys((*node.inputs, *others))))
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _without_recomputation(graph: Graph) -> Schedule:
    """Returns the schedule with the lowest peak of a few that recompute nothing.

    All updates that could run earlier wait for a node of the backward pass, because the temporaries of an update may
    be larger than its gradient. Later updates run as early as they may.
    """
    rules = Rules(_relaxed(graph))
    updates = {node.id for node in graph.nodes if node.backward and node.writes}
    orders = [list(order) for order in backward_orders(rules)]
    found = []
    for order in orders:
        size = len(order)
        for start in dict.fromkeys(size * i // _STARTS for i in range(_STARTS + 1)):
            waiting = [i for i in order[:start] if i in updates]
            moved = [*[i for i in order[:start] if i not in updates], *waiting, *order[start:]]
            found.append(save_everything(rules, moved))
    return settled(graph, schedule_of(graph, *min(found, key=lambda order: peak_of(rules, order))))


def plan_of_step(graph: Graph, budget: int | float | str | None, solver: str, version: str) -> Plan:
    """Solves the priced graph of a step.

    Args:
        graph: the graph of a training step with its updates. Without a budget, only updates need their temporaries.
        budget: see `remat`; None for a plan that recomputes nothing and updates early.
        solver: the name of a solver.
        version: the version of torch, which the plan records.

    Raises:
        BudgetError: no plan fits the budget.
    """
    if budget is None:
        return Plan(graph, _without_recomputation(graph), "save_all", None, version)
    nbytes = nbytes_of(budget, graph)
    smallest: Plan | None = None
    why: BudgetError | None = None
    for made in _tries(_relaxed(graph), nbytes, solver, version):
        if isinstance(made, BudgetError):
            why = made
            continue
        found = dataclasses.replace(made, graph=graph, schedule=settled(graph, made.schedule), budget_bytes=nbytes)
        if found.peak_bytes <= nbytes:
            return found
        if smallest is None or found.peak_bytes < smallest.peak_bytes:
            smallest = found
    if smallest is None or (why is not None and smallest.peak_bytes == why.least_bytes):
        assert why is not None
        raise why
    least = smallest.peak_bytes
    raise BudgetError(
        f"no plan fits {format_bytes(nbytes)} ({nbytes} bytes): the least that the solver {solver!r} finds is "
        f"{format_bytes(least)} ({least} bytes), because updates wait for recomputations that read the old parameters. "
        "Give at least that, or a smaller batch.",
        least,
    )


def _tries(relaxed: Graph, nbytes: int, solver: str, version: str) -> Iterator[Plan | BudgetError]:
    """Yields plans without regard to updates: for the budget, for less, and the smallest that the solver finds.

    An error stands for a budget that no plan fits; the smallest plan follows on it.
    """
    for excess in (0, 0.01, 0.05):
        try:
            yield make_plan(relaxed, int(nbytes * (1 - excess)), solver, version)
        except BudgetError as error:
            least = error.least_bytes
            yield error
            break
    else:
        return
    yield make_plan(relaxed, least, solver, version)


def _with_updates(traced: Trace) -> Graph:
    """Returns the graph of a trace with the costs of updates, and of no other operations."""
    nodes = list(traced.graph.nodes)
    for call in traced.calls:
        if call.op is UPDATE and call.node is not None:
            nbytes = runs().cost(call.args[-1]).temporary_nbytes
            nodes[call.node] = dataclasses.replace(nodes[call.node], temporary_nbytes=nbytes)
    return dataclasses.replace(traced.graph, nodes=tuple(nodes))


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

    def _make(self, call: Callable[[Backward], Trace], *rest: Any) -> Program:  # type: ignore[override]
        then, autocast = self.then, ambient.autocast()

        def completed(backward: Backward) -> Trace:
            return call(backward._replace(then=then, autocast=autocast))

        program = super()._make(completed, *rest)
        self.plan_of[program] = self._latest
        return program

    def exact_plan(self, program: Program) -> Plan:
        """Returns the plan of a program with all temporaries, which are measured now if there is no budget."""
        plan = self.plan_of[program]
        if plan.budget_bytes is not None:
            return plan
        if program not in self._exact:
            graph = priced(program.trace, None, self.costs, budgeted=True)
            self._exact[program] = dataclasses.replace(plan, graph=graph)
        return self._exact[program]

    def plan(self, traced: Trace, *rest: Any) -> Plan:  # type: ignore[override]
        """Prices and solves a trace of one microbatch."""
        first = self.then is not None and self.then.first
        key = (_identity(traced), self.budget, first)
        if key not in self.plans:
            graph = _with_updates(traced) if self.budget is None else self._priced(traced, ())
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
