"""A fast heuristic: repairs of the plan that saves everything and of plans with small peaks, the fastest of which wins.

Three kinds of plans are tried: (1) save everything, and `repair` the profile where it exceeds the budget; (2) cut the
forward pass into segments, also nested, as in Chen et al. (see `segmented` in `starts`), and `prune` the plans that
fit; (3) `repair` the smallest of the segmented plans. Every plan ends with `prune`. The backward pass keeps its
recorded order unless another order has a lower peak.

No plan is guaranteed to be optimal. On chains of equal layers, `greedy` reaches the optimum of one recomputation per
layer; tests/solve compares it with exhaustive search on small graphs. The least budget is the least peak over all these
plans, and over repairs of the smallest plan for successively lower budgets; it does not depend on the requested budget.

Complexity: near-linear in practice; a graph of 9,000 nodes takes a few seconds. Left out: search over orders other than
the list schedules, and over moves that do not help immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.rules import Order, Rules, over_budget, peak_of, seconds_of, within_budget
from fckpt.solve.core.starts import backward_orders, save_everything, segmented
from fckpt.solve.repair.editable import EditableSchedule
from fckpt.solve.repair.repair import Repair, prune

__all__ = ["fit", "greedy", "lowered", "smallest"]

NEIGHBOURS = 2
"""The number of starts repaired on each side of the budget; one for graphs of more than `LARGE` nodes."""
LARGE = 4000
DESCENTS = 6
"""The number of lower budgets tried to find the least budget."""


def greedy(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns a fast schedule whose peak is at most `budget` bytes.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no schedule is found that fits.
    """
    rules = Rules(graph)
    if budget is None:
        return schedule_of(graph, *save_everything(rules))
    starts = _front(rules, segmented(rules))
    first = [save_everything(rules, order) for order in backward_orders(rules)]
    if all(peak_of(rules, order) > budget for order in (*first, *(start for _, start in starts))):
        # Below all starts, the smallest plan alone decides feasibility, so that the least budget is a single number.
        least = smallest(rules)
        if peak_of(rules, least) > budget:
            raise over_budget(graph, schedule_of(graph, *least), budget, "greedy")
        first = [least]
    best = None
    for order in (*first, *_nearest(starts, budget, 1 if len(graph.nodes) > LARGE else NEIGHBOURS)):
        # A repair adds time, so a start that is slower than the best plan before its repair cannot win.
        if best is not None and peak_of(rules, order) > budget and seconds_of(rules, order) >= seconds_of(rules, best):
            continue
        plan, _ = fit(rules, order, budget)
        if plan is not None and (best is None or seconds_of(rules, plan) < seconds_of(rules, best)):
            best = plan
    assert best is not None  # at least one start fits without a repair
    return within_budget(graph, schedule_of(graph, *best), budget, "greedy")


def _nearest(starts: list[tuple[int, Order]], budget: int, count: int) -> list[Order]:
    """Returns the `count` starts with peaks nearest to the budget, on each side."""
    inside = [order for peak, order in starts if peak <= budget]
    outside = [order for peak, order in starts if peak > budget]
    return [*inside[-count:], *outside[:count]]


def _front(rules: Rules, orders: Iterable[Order]) -> list[tuple[int, Order]]:
    """Returns the Pareto front of `orders` in peak and time, by descending time, with the peaks."""
    found = sorted((peak_of(rules, o), seconds_of(rules, o), i, o) for i, o in enumerate(orders))
    front: list[tuple[int, Order]] = []
    least = float("inf")
    for peak, seconds, _, order in found:
        if seconds < least:
            front.append((peak, order))
            least = seconds
    return front


def fit(
    rules: Rules, order: Order, budget: int, limit: float = float("inf"), effort: float = float("inf")
) -> tuple[Order | None, int]:
    """Returns `order` repaired until its peak is at most `budget` bytes, then pruned.

    Args:
        rules: the rules of the graph.
        order: the order to repair.
        budget: bytes.
        limit: abandon the repair if its recomputations together take more seconds than this, before pruning.
        effort: abandon the repair after weighing this many moves.

    Returns:
        The repaired order, or None if it does not fit; and the number of moves weighed.
    """
    schedule = EditableSchedule(rules, order)
    repair = Repair(schedule, budget)
    if not repair.run(limit, effort):
        return None, repair.effort
    prune(schedule, budget)
    return schedule.order(), repair.effort


def smallest(rules: Rules) -> Order:
    """Returns the order with the least peak that is found; it does not depend on a budget."""
    return lowered(rules, min(_candidates(rules), key=lambda order: peak_of(rules, order)))[0]


def lowered(rules: Rules, best: Order) -> tuple[Order, int]:
    """Returns the order with the least peak that repairs of `best` reach, and the number of moves weighed."""
    low, high, moves = _working_set(rules), peak_of(rules, best), 0
    for _ in range(DESCENTS):
        target = (low + high) // 2
        if target >= high:
            break
        schedule = EditableSchedule(rules, best)
        repair = Repair(schedule, target)
        repair.run()
        moves += repair.effort
        peak = int(schedule.profile.max())
        if peak < high:
            best, high = schedule.order(), peak
        if peak > target:
            low = target
    return best, moves


def _candidates(rules: Rules) -> Iterator[Order]:
    for order in backward_orders(rules):
        yield save_everything(rules, order)
        yield from segmented(rules, order)


def _working_set(rules: Rules) -> int:
    """Returns a lower bound on the peak: the most bytes that a single node reads, makes and uses temporarily."""
    graph, most = rules.graph, 0
    for index in {*rules.backward, *rules.forward_roots}:
        node = graph.nodes[index]
        around = {*node.inputs, *(() if node.overwrites else node.outputs)}.difference(graph.held)
        most = max(most, node.temporary_nbytes + sum(graph.values[v].nbytes for v in around))
    return most
