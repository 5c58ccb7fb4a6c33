"""Segments: values that live across some cuts of the forward pass are saved, and one segment at a time is recomputed.

T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
https://arxiv.org/abs/1604.06174. The forward pass is cut at articulation points, across which one value lives, as in
Checkmate's reimplementations (P. Jain et al., 2020, https://arxiv.org/abs/1910.02653, AP-sqrt(n) and AP-greedy).
Without a budget, the cuts are every sqrt(n)-th of n such points. With a budget, a cut is made whenever more than b
bytes have been made since the last cut; several b are tried, and the fastest plan that fits is returned. A graph may
have few articulation points (U-Net) or none, so each b is also tried on positions across which few bytes live.

    the paper          here
    k segments         `CutPoints.values_across` of k - 1 cuts is saved
    b                  `nbytes` of `_greedy`

On a chain of n equal layers, sqrt(n) segments need O(sqrt(n)) memory and less than one additional forward pass. On
other graphs nothing is optimal. The last segment is saved instead of recomputed, because its backward pass follows at
once.

Complexity: linear in the size of the graph, for each b. Left out: the recursion of section 4.4 (see `segmented` in
`starts`), and the paper's in-place and sharing passes, which liveness in `schedule_of` replaces.
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
"""The number of values of b that are tried, between the largest output and the sum of all outputs."""
LOW = 100
"""The largest number of positions with few live bytes."""


def chen(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule of sqrt(n) segments or, with a budget, the fastest one of segments of b bytes that fits.

    Args:
        graph: one training step.
        budget: bytes; None gives sqrt(n) segments.

    Raises:
        BudgetError: no b gives a schedule that fits.
    """
    rules = Rules(graph)
    if budget is None:
        return schedule_of(graph, *next(segment_orders(rules)))
    return fastest(rules, segment_orders(rules), budget, "chen")


def segment_orders(rules: Rules) -> Iterator[Order]:
    """Yields the order with sqrt(n) segments, then orders for ascending b."""
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
    """Returns the positions across which one value lives, ignoring values read across more than half of the pass."""
    count = points.count.copy()
    for span in points.spans:
        count[span.first : span.last] -= span.last - span.first > points.length / 2
    return np.flatnonzero(count[:-1] <= 1).tolist()


def _greedy(made: np.ndarray, places: Sequence[int], nbytes: float) -> tuple[int, ...]:
    """Returns the cuts among `places`: each one is the first after more than `nbytes` were made since the last cut."""
    cuts: list[int] = []
    start = 0
    for place in places:
        if made[place] - start > nbytes:
            cuts.append(place)
            start = made[place]
    return tuple(cuts)
