"""Solving: a named solver schedules a priced graph within a budget, with a line that shows the progress."""

from __future__ import annotations

from fckpt import solve
from fckpt._planned.plan import Plan
from fckpt._units import format_bytes
from fckpt.errors import ArgumentValueError, BudgetError
from fckpt.graph.graph import Graph
from fckpt.report.progress import Line

__all__ = ["solved"]


def solved(graph: Graph, nbytes: int, solver: str, torch_version: str, time_limit: float | None = None) -> Plan:
    """Solves a priced graph. On a terminal, a line shows the progress.

    Args:
        graph: the graph.
        nbytes: the budget.
        solver: the name of a solver.
        torch_version: the version of torch, which the plan records.
        time_limit: the time limit of the solver in seconds; None for its default.

    Raises:
        BudgetError: no plan fits the budget, or the solver returned a plan that does not fit.
        ArgumentValueError: the solver takes no time limit, or the time limit is not a positive number.
    """
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise ArgumentValueError(f"a time limit is a number of seconds above 0, not {time_limit!r}.")
    chosen = solve.get(solver)
    if chosen is not solve.auto:
        if time_limit is not None:
            raise ArgumentValueError(f"the solver {solver!r} takes no time limit; 'auto' does.")
        return _within(Plan(graph, chosen(graph, nbytes), solver, nbytes, torch_version), nbytes)
    with Line() as line:

        def tell(what: str, done: int, of: int) -> None:
            if of:
                line.update(done, of, f"{what}: {{}} of {{}}")
            else:
                line.say(f"{what}: {done}" if done else what)

        schedule = solve.auto(graph, nbytes, time_limit=time_limit, watch=tell)
    return _within(Plan(graph, schedule, solver, nbytes, torch_version), nbytes)


def _within(plan: Plan, nbytes: int) -> Plan:
    """Returns the plan if its peak is within the budget; otherwise raises `BudgetError`."""
    if plan.peak_bytes <= nbytes:
        return plan
    raise BudgetError(
        f"the solver {plan.solver!r} returned a plan that needs {format_bytes(plan.peak_bytes)} where the budget is "
        f"{format_bytes(nbytes)}. Name that budget or another solver; a solver should raise a BudgetError itself.",
        plan.peak_bytes,
    )
