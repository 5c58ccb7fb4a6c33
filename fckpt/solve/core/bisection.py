"""Bisection over an internal limit, for heuristics whose plan at a given budget may or may not fit.

Feasibility need not be monotone: a heuristic may fail at one limit and succeed at a smaller one.

Complexity: about `HALVINGS` runs of the heuristic if its first plan does not fit.
"""

from __future__ import annotations

from collections.abc import Callable

from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.rules import Order, Rules, over_budget, peak_of

__all__ = ["bisected"]

HALVINGS = 8


def bisected(rules: Rules, order_at: Callable[[int | None], Order | None], budget: int | None, solver: str) -> Schedule:
    """Returns the schedule that `order_at` finds for the budget or, failing that, for the least limit that it meets.

    Args:
        rules: the rules of the graph.
        order_at: returns an order for a limit in bytes, which may exceed the limit, or None. For the limit None it
            always returns an order.
        budget: bytes, or None.
        solver: the solver's name, for the error message.

    Raises:
        BudgetError: the order exceeds the budget, and bisection finds no limit that is small enough. The least limit
            that bisection finds does not depend on `budget`.
    """
    order = order_at(budget)
    if order is not None and (budget is None or peak_of(rules, order) <= budget):
        return schedule_of(rules.graph, *order)
    least = order_at(None)
    assert budget is not None and least is not None
    low, high = 0, peak_of(rules, least)
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        order = order_at(middle)
        if order is not None and (peak := peak_of(rules, order)) <= middle:
            least, high = order, peak
        else:
            low = middle
    schedule = schedule_of(rules.graph, *least)
    if high > budget:
        raise over_budget(rules.graph, schedule, budget, solver)
    return schedule
