"""The best of the other solvers: the fastest plan that fits.

`greedy` always runs; those that are worth it and take less than about a second run on graphs of up to `QUICK` nodes.
The choice depends on the graph and the budget alone, never on a clock. Saving everything is optimal if it fits, and
ends the search.
"""

from __future__ import annotations

from fckpt.errors import BudgetError
from fckpt.graph import Graph
from fckpt.schedule import Schedule
from fckpt.simulate import simulate
from fckpt.solve.greedy import greedy
from fckpt.solve.knapsack import knapsack
from fckpt.solve.min_cut import min_cut
from fckpt.solve.policy import policy
from fckpt.solve.save_all import save_all

__all__ = ["auto"]

QUICK = 1500


def auto(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule that any solver finds within `budget`.

    Args:
        graph: one training step.
        budget: bytes; None does what the decisions of a policy say, and without any saves everything.

    Raises:
        BudgetError: no solver finds any.
    """
    if budget is None:
        decided = any(value.decision for value in graph.values)
        return policy(graph) if decided else save_all(graph)
    errors: list[BudgetError] = []
    found: list[Schedule] = []
    for solver in (save_all, greedy, min_cut, knapsack):
        if solver in (min_cut, knapsack) and len(graph.nodes) > QUICK:
            continue
        try:
            found.append(solver(graph, budget))
        except BudgetError as error:
            errors.append(error)
        if solver is save_all and found:
            break
    if not found:
        raise min(errors, key=lambda error: error.least_bytes)
    return min(found, key=lambda schedule: simulate(graph, schedule).seconds)
