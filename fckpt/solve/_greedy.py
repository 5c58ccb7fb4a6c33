"""The workhorse: from saving everything down to the budget, and from what is known to be small up to it.

Of three ways the one that takes the least time wins: (1) save everything and `repair` the profile where it is over
budget; (2) cut the forward pass into segments, as Chen et al. do (see `starts`), nested ones too, and `prune` what fits;
(3) `repair` the smallest of these. All of them end with `prune`. The backward pass keeps its recorded order unless
another one has a lower peak.

Nothing is optimal. On chains of equal layers it meets the optimum of one repetition per layer; against exhaustive
search on small graphs see tests/solve. The least budget is the least peak over all of these, and of repairs of the
smallest with ever lower budgets; it does not depend on the budget asked.

Complexity: near-linear in practice; a graph of 9,000 nodes takes some seconds. Left out: search over the order beyond
the list schedules, and over moves that do not help at once.
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
"""How many starts on each side of the budget are repaired; one for graphs of more than `LARGE` nodes."""
LARGE = 4000
DESCENTS = 6
"""How many lower budgets are tried to find the least."""


def greedy(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns a schedule with a peak of at most `budget` bytes, fast if not fastest.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no schedule is known that fits.
    """
    rules = Rules(graph)
    if budget is None:
        return schedule_of(graph, *save_everything(rules))
    starts = _front(rules, segmented(rules))
    first = [save_everything(rules, order) for order in backward_orders(rules)]
    if all(peak_of(rules, order) > budget for order in (*first, *(start for _, start in starts))):
        # Below all starts the smallest plan decides whether anything fits, so that the least budget is one number.
        least = smallest(rules)
        if peak_of(rules, least) > budget:
            raise over_budget(graph, schedule_of(graph, *least), budget, "greedy")
        first = [least]
    best = None
    for order in (*first, *_nearest(starts, budget, 1 if len(graph.nodes) > LARGE else NEIGHBOURS)):
        # A repair adds time, so what takes longer than the best before it is repaired will not win.
        if best is not None and peak_of(rules, order) > budget and seconds_of(rules, order) >= seconds_of(rules, best):
            continue
        plan, _ = fit(rules, order, budget)
        if plan is not None and (best is None or seconds_of(rules, plan) < seconds_of(rules, best)):
            best = plan
    assert best is not None  # one of them fitted as it was
    return within_budget(graph, schedule_of(graph, *best), budget, "greedy")


def _nearest(starts: list[tuple[int, Order]], budget: int, count: int) -> list[Order]:
    """Returns the `count` starts with peaks next to the budget, on either side."""
    inside = [order for peak, order in starts if peak <= budget]
    outside = [order for peak, order in starts if peak > budget]
    return [*inside[-count:], *outside[:count]]


def _front(rules: Rules, orders: Iterable[Order]) -> list[tuple[int, Order]]:
    """Returns those of `orders` that no other beats in both peak and time, by falling time, with their peaks."""
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
    """Returns `order` with as many changes as it takes to have a peak of `budget` bytes, and as few repetitions.

    Args:
        rules: of the graph.
        order: the plan.
        budget: bytes.
        limit: gives up where all repetitions together take longer, before as many as can be are taken out again.
        effort: and where so many moves have been weighed.

    Returns:
        The plan, None if it does not fit; and how many moves have been weighed for it.
    """
    schedule = EditableSchedule(rules, order)
    repair = Repair(schedule, budget)
    if not repair.run(limit, effort):
        return None, repair.effort
    prune(schedule, budget)
    return schedule.order(), repair.effort


def smallest(rules: Rules) -> Order:
    """Returns the plan with the least peak that can be found; the budget has no say in it."""
    return lowered(rules, min(_candidates(rules), key=lambda order: peak_of(rules, order)))[0]


def lowered(rules: Rules, best: Order) -> tuple[Order, int]:
    """Returns a plan with the least peak that repairs of `best` lead to, and how many moves have been weighed."""
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
    """Returns a lower bound of the peak: the most that a single node reads, makes and uses."""
    graph, most = rules.graph, 0
    for index in {*rules.backward, *rules.forward_roots}:
        node = graph.nodes[index]
        around = {*node.inputs, *(() if node.overwrites else node.outputs)}.difference(graph.held)
        most = max(most, node.temporary_nbytes + sum(graph.values[v].nbytes for v in around))
    return most
