"""Segments: what crosses some cuts of the forward pass is saved, and one segment at a time is computed again.

T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
https://arxiv.org/abs/1604.06174. Cuts are made at articulation points, where one value crosses, as Checkmate's
reimplementations do (P. Jain et al., 2020, https://arxiv.org/abs/1910.02653, AP-sqrt(n) and AP-greedy): without a
budget at every sqrt(n)-th of n points; with one, after more than b bytes have been made since the last cut, for a row
of b, of which the fastest plan that fits is taken. Graphs may have few such points (U-Net) or none, so b is tried on
cuts with little live as well.

    the paper          here
    k segments         what is `over` k - 1 cuts is saved
    b                  `nbytes` of `_greedy`

On a chain of n equal layers sqrt(n) segments take O(sqrt(n)) memory and less than one more forward pass; nothing is
optimal elsewhere. The last segment is not computed again: it is saved, because its backward follows at once.

Complexity: linear in the graph, for each b. Left out: the recursion of section 4.4 (`segmented` in `segment_orders` has it), and
the sweep by in-place and sharing plans, which `schedule_of` does by liveness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.cuts import CutPoints
from fckpt.solve.core.rules import Order, Rules, fastest, replay
from fckpt.solve.core.starts import backward_orders, save_everything

__all__ = ["chen", "segment_orders"]

POINTS = 24
"""How many b are tried, between the largest output and all of them."""
LOW = 100
"""How many cuts with little live there are, at most."""


def chen(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule of sqrt(n) segments, or the fastest of segments of b bytes that fits.

    Args:
        graph: one training step.
        budget: bytes; None takes sqrt(n) segments.

    Raises:
        BudgetError: no b leads to a peak that fits.
    """
    rules = Rules(graph)
    if budget is None:
        return schedule_of(graph, *next(segment_orders(rules)))
    return fastest(rules, segment_orders(rules), budget, "chen")


def segment_orders(rules: Rules) -> Iterator[Order]:
    """Yields plans of segments: sqrt(n) of them first, then for rising b."""
    order = backward_orders(rules)[-1]
    points = CutPoints(rules, save_everything(rules, order).forward)
    alone, low = _articulations(points), points.low(LOW)
    chosen = alone or low
    step = max(1, round(len(chosen) ** 0.5))
    plans = {tuple(chosen[step - 1 :: step]): None}
    largest = np.diff(points.made, prepend=0).max(initial=1)
    for nbytes in np.geomspace(largest, points.made.max(initial=1), POINTS).tolist():
        plans |= {_greedy(points.made, places, nbytes): None for places in (alone, low)}
    for cuts in plans:
        last = points.nodes[cuts[-1] + 1 if cuts else 0 :]
        rest = [value for index in last for value in rules.graph.nodes[index].outputs]
        yield replay(rules, [*points.values_across(cuts), *rest], order)


def _articulations(points: CutPoints) -> list[int]:
    """Returns the places that one value crosses, besides those that more than half of the forward pass can read."""
    count = points.count.copy()
    for first, last, _ in points.spans:
        count[first:last] -= last - first > points.length / 2
    return np.flatnonzero(count[:-1] <= 1).tolist()


def _greedy(made: np.ndarray, places: Sequence[int], nbytes: float) -> tuple[int, ...]:
    """Returns the first of `places` after more than `nbytes` have been made, and the first after as many more, ..."""
    cuts: list[int] = []
    start = 0
    for place in places:
        if made[place] - start > nbytes:
            cuts.append(place)
            start = made[place]
    return tuple(cuts)
