"""Schedules of other sizes, adapted to a graph: the fastest that fits, or that repairs make fit, and a short search.

A function that is called with tensors of another size has a graph with the same operations and edges, but other bytes
and seconds. Schedules that were found for one size are valid for all; only their peaks and times change. The fastest
that fits is taken as it is if it recomputes nothing, or leaves hardly any bytes of the budget unused. Otherwise it is
pruned. If it is not nearly as fast as a schedule slightly above the budget, schedules that exceed the budget are
repaired, and a short local search starts from the fastest results. This takes a fraction of the time of a solver, whose
starts have to be computed for each graph.

Complexity: linear in the length of the schedules, plus a limited number of moves.

Left out: a guarantee. That no schedule is returned does not mean that none fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve._greedy import fit
from fckpt.solve.core.rules import Order, Rules, peak_of, seconds_of
from fckpt.solve.core.starts import Start, measured, save_everything_orders
from fckpt.solve.repair.search import Search

__all__ = ["adapt", "fitted"]

MOVES = 3_000
"""The largest number of moves of all repairs, and of the search: each about a quarter of a second on a slow core."""
MOST = 3
"""The number of schedules on each side of the budget that are pruned or repaired, besides the one of largest peak."""

FULL = 0.98
"""A schedule that takes at least this fraction of the budget is not improved: at 15 sizes of a GPT-2, the search
returned the schedule that it began with."""

CLOSE = 0.03
"""A schedule within the budget is not improved further if one slightly above the budget is faster by at most this
fraction of the time of a step: repairs would make that one slower."""


def adapt(graph: Graph, budget: int, known: Iterable[Schedule]) -> Schedule | None:
    """Returns a schedule within `budget`, made from schedules of graphs with the same structure; None if none is found.

    Args:
        graph: one training step.
        budget: bytes.
        known: schedules of graphs that differ from `graph` in sizes only, so that they are valid for `graph` as well.
    """
    rules = Rules(graph)
    orders = [(Order(*schedule.computed), schedule) for schedule in known]
    ranked = sorted(
        [(seconds_of(rules, order), order, schedule) for order, schedule in orders], key=lambda part: part[0]
    )
    starts, best = list[Start](), None
    for seconds, order, schedule in ranked:  # the first that fits is the fastest
        starts.append(Start(peak_of(rules, order), seconds, order))
        if starts[-1].peak_nbytes <= budget:
            best = schedule
            break
    if best is not None and _recomputes_nothing(starts[-1].order):
        return best
    plain = measured(rules, save_everything_orders(rules)) if _read_nbytes(rules) <= budget else []
    if plain and plain[0].peak_nbytes <= budget:
        return schedule_of(graph, *plain[0].order)
    if best is not None and starts[-1].peak_nbytes >= FULL * budget:
        return best
    starts += measured(rules, [order for _, order, _ in ranked[len(starts) :]])
    starts = sorted([*starts, *(plain or measured(rules, save_everything_orders(rules)))])
    near = _near(rules, starts, budget)
    if near is not None:
        return schedule_of(graph, *near)
    found = sorted(fitted(rules, starts, budget, MOVES), key=_seconds)
    if not found:
        return None
    search = Search(rules, [start.order for start in found[:MOST]], budget)
    search.run(MOVES, 0.0)
    return schedule_of(graph, *min(search.found, key=lambda order: seconds_of(rules, order)))


def _read_nbytes(rules: Rules) -> int:
    """Returns the bytes that the backward pass reads from the forward pass: no order that saves them takes less."""
    graph = rules.graph
    read = {v for i in rules.backward if graph.nodes[i].backward for v in graph.nodes[i].inputs} - rules.unsaved
    makers = [(v, graph.values[v].producer) for v in read]
    return sum([graph.values[v].nbytes for v, made_by in makers if made_by is not None and made_by < graph.boundary])


def _recomputes_nothing(order: Order) -> bool:
    return len({*order.forward, *order.backward}) == len(order.forward) + len(order.backward)


def _fastest_within(starts: Iterable[Start], budget: int) -> Start | None:
    return min((s for s in starts if s.peak_nbytes <= budget), key=_seconds, default=None)


def _near(rules: Rules, starts: Sequence[Start], budget: int) -> Order | None:
    """Returns the fastest start within the budget, pruned, if it is nearly as fast as one slightly above the budget.

    Args:
        rules: the rules of the graph.
        starts: schedules by ascending peak.
        budget: bytes.
    """
    best = _fastest_within(starts, budget)
    outside = next((s for s in starts if s.peak_nbytes > budget), None)
    if best is None or outside is None:
        return None
    order, _ = fit(rules, best.order, budget, effort=MOVES)
    close = outside.seconds + CLOSE * rules.graph.seconds
    return None if order is None or seconds_of(rules, order) > close else order


def fitted(rules: Rules, starts: Iterable[Start], budget: int, moves: int) -> Iterator[Start]:
    """Yields starts within the budget: the fastest, pruned, and those with slightly larger peaks, repaired.

    Args:
        rules: the rules of the graph.
        starts: where to begin.
        budget: bytes.
        moves: the largest number of moves of all repairs.
    """
    ranked = sorted(starts)
    inside = sorted((s for s in ranked if s.peak_nbytes <= budget), key=_seconds)[:MOST]
    fastest = inside[0].seconds if inside else inf
    outside = [s for s in ranked if s.peak_nbytes > budget and s.seconds < fastest]
    left = moves
    for start in (*inside, *outside[:MOST], *outside[MOST:][-1:]):
        order, weighed = fit(rules, start.order, budget, effort=left)
        left -= weighed
        if order is not None:
            yield from measured(rules, [order])


def _seconds(start: Start) -> float:
    return start.seconds
