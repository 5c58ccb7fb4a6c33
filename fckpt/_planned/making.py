"""Making of plans: a trace is priced, policies decide about its values, and a solver schedules it within a budget."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from fckpt import solve
from fckpt._call import ambient
from fckpt._planned.late_writes import solved_with_writes, writes_late
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.solving import solved
from fckpt._planned.tracing import TRACING
from fckpt._trace.operations import Trace
from fckpt._units import parse_bytes
from fckpt.cost import Measured, price
from fckpt.cost.allocators import warn_of_whole_blocks
from fckpt.cost.calls import CostSource
from fckpt.errors import ArgumentTypeError, ArgumentValueError, BudgetError
from fckpt.graph.graph import Graph
from fckpt.graph.identity import fingerprint
from fckpt.graph.schedule import plain_schedule
from fckpt.graph.simulation import simulate
from fckpt.policies.decisions import Policy
from fckpt.policies.named import apply_policy
from fckpt.solve.core.rules import over_budget
from fckpt.solve.proofs.bounds import least_peak

__all__ = ["check_budget", "identity", "make_plan", "nbytes_of", "nbytes_within", "plain_plan", "priced"]


def check_budget(budget: Any) -> Budget:
    """Returns `budget` if it is valid.

    Raises:
        ArgumentTypeError: the budget is not an int, float or str.
        ArgumentValueError: the budget is not a valid size, or a float that is not a fraction of the plain peak.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise ArgumentTypeError(
            f'a budget is a number of bytes (an int, or "4GiB"), or a float for a fraction of the plain peak, not '
            f"{type(budget).__name__}: {budget!r}."
        )
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ArgumentValueError(
                f"a float budget is a fraction of the plain function's peak, above 0 and at most 1, not {budget!r}. "
                'Bytes are ints, or text like "4GiB".'
            )
        return budget
    return parse_bytes(budget)


def identity(traced: Trace) -> tuple[Any, ...]:
    """Returns everything on which the plan of a trace depends, except times."""
    if traced.general is not None and traced.sized is not None:
        return traced.sized, traced.general.sizes, ambient.of_plans()
    graph = traced.graph
    return (
        fingerprint(graph),
        tuple([(v.names, v.held_to) for v in graph.values]),
        tuple([(n.overwrites, n.accumulates) for n in graph.nodes]),
        tuple([(nodes, id(policy)) for nodes, policy in traced.regions]),
        tuple([traced.tensors[t].device for t in traced.operands]),
        ambient.of_plans(),
    )


def priced(
    traced: Trace,
    policy: Policy | None,
    costs: CostSource | None,
    *,
    budgeted: bool,
    batches: tuple[int, ...] = (),
) -> Graph:
    """Returns the graph of a trace with the decisions of policies and, if there is a budget, with costs.

    Args:
        traced: the trace. It holds the policies of the regions inside.
        policy: the policy of the whole call.
        costs: the source of costs; None for `Measured()`.
        budgeted: whether there is a budget. Without one, plans do not depend on costs.
        batches: the sizes of the `vmap`s that batched the call.
    """
    graph = traced.graph
    if budgeted:
        with TRACING:
            graph = price(traced, costs or Measured(), progress=sys.stderr.isatty())
        if costs is None or isinstance(costs, Measured):
            warn_of_whole_blocks(spec.device for spec in traced.tensors)
    for nodes, inner in traced.regions:
        graph = apply_policy(graph, inner, nodes=nodes, budgeted=budgeted)
    if policy is not None:
        batching = {node.id: batches for node in graph.nodes} if batches else None
        graph = apply_policy(graph, policy, batching=batching, budgeted=budgeted)
    return graph


def plain_plan(graph: Graph, torch_version: str) -> Plan:
    """Returns the plan of the plain function, which saves what autograd saves and recomputes nothing."""
    plan = Plan(graph.eager, plain_schedule(graph), "save_all", None, torch_version)
    return dataclasses.replace(plan, budget_bytes=plan.peak_bytes)


def make_plan(
    graph: Graph, budget: Budget | None, solver: str, torch_version: str, time_limit: float | None = None
) -> Plan:
    """Solves a priced graph. On a terminal, a line shows the progress.

    Args:
        graph: the graph, with costs and with the decisions of policies.
        budget: see `check_budget`; None to follow the decisions only.
        solver: the name of a solver.
        torch_version: the version of torch, which the plan records.
        time_limit: the time limit of the solver in seconds; None for its default.

    Raises:
        BudgetError: no plan fits the budget, or the solver returned a plan that does not fit.
        ArgumentValueError: the solver takes no time limit, or the time limit is not a positive number.
    """
    if budget is None:
        return Plan(graph, solve.get("policy")(graph, None), "policy", None, torch_version)
    nbytes = nbytes_of(budget, graph)
    make = solved_with_writes if writes_late(graph) else solved
    solve_for = lambda graph, nbytes: make(graph, nbytes, solver, torch_version, time_limit)
    return _with_replays(graph, nbytes, solve_for) if graph.replaying_nbytes else solve_for(graph, nbytes)


_PARTS = 8
"""The number of smaller budgets that are tried if a plan exceeds its budget where random numbers are drawn again."""


def _with_replays(graph: Graph, nbytes: int, make: Callable[[Graph, int], Plan]) -> Plan:
    """Solves a graph in which random nodes take more memory if they run again.

    Solvers take the memory of a node to be the same however often it runs. So they get the graph without that memory,
    which rarely matters, because it is a few kilobytes. If the plan does not fit, smaller budgets are tried.

    Raises:
        BudgetError: no plan fits the budget. Its `least_bytes` do not depend on the budget.
    """
    given = graph.without_replays
    solve_for = lambda size: dataclasses.replace(make(given, size), graph=graph, budget_bytes=nbytes)
    try:
        for part in range(_PARTS + 1):  # the last one fits
            plan = solve_for(max(1, nbytes - graph.replaying_nbytes * part // _PARTS))
            if plan.peak_bytes <= nbytes:
                return plan
        raise AssertionError("a plan takes more memory to draw again than any random node")
    except BudgetError as error:
        low = error.least_bytes
        plan = solve_for(low)
        plain = dataclasses.replace(plan, schedule=plain_schedule(graph))  # solvers may draw earlier
        if min(low, plain.peak_bytes) > nbytes and plan.peak_bytes == low:
            raise
    budgets = [low + (plan.peak_bytes - low) * part // _PARTS for part in range(_PARTS)]
    plans = [plan, plain, *[solve_for(each) for each in budgets[1:]]]
    fitting = [plan for plan in plans if plan.peak_bytes <= nbytes]
    if fitting:
        return min(fitting, key=lambda plan: plan.timeline.seconds)
    least = min(plans, key=lambda plan: plan.peak_bytes)
    raise over_budget(graph, least.schedule, nbytes, least.solver, least.timeline, least_peak(given))


def nbytes_of(budget: Budget, graph: Graph) -> int:
    """Returns a budget in bytes; a float is a fraction of the plain peak of `graph`."""
    return nbytes_within(budget, lambda: simulate(graph.eager, plain_schedule(graph)).peak_nbytes)


def nbytes_within(budget: Budget, plain_peak: Callable[[], int]) -> int:
    """Returns a budget in bytes; a float is a fraction of what `plain_peak` returns."""
    return max(1, int(plain_peak() * budget)) if isinstance(budget, float) else parse_bytes(budget)
