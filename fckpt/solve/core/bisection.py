"""A budget for solvers that try: what they return at a budget may fit or not, and the next smaller one may fit again.

Complexity: about `HALVINGS` attempts where the first does not fit.
"""

from __future__ import annotations

from collections.abc import Callable

from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.rules import Order, Rules, over_budget, peak_of

__all__ = ["bisected"]

HALVINGS = 8


def bisected(rules: Rules, order_at: Callable[[int | None], Order | None], budget: int | None, solver: str) -> Schedule:
    """Returns what `order_at` makes of the budget, or of the least at which it was seen to succeed.

    Args:
        rules: of the graph.
        order_at: makes an order for a budget, which need not fit, or none; without a budget it always does.
        budget: bytes, or none.
        solver: its name, for the error.

    Raises:
        BudgetError: the order does not fit, and bisection finds no budget so small. The least that it finds does
            not depend on `budget`.
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
