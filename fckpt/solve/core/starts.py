"""Starts: plans from which a repair or a search begins, and orders of the backward pass.

`segmented` is T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
https://arxiv.org/abs/1604.06174, on graphs: the forward pass is cut where few bytes live, the values that live across a
cut are saved, and the backward pass recomputes one segment at a time. With `leaf`, segments are halved recursively
(section 4.4 of the paper, with k = 1; Griewank 1992, see `rules`): O(log n) memory for O(n log n) time on a chain of n
equal layers.

`_early` and `_small` give list schedules of the backward pass, whose main effect is that weight gradients are computed
early. B. Steiner, M. Elhoushi, J. Kahn, J. Hegarty, "MODeL: Memory Optimizations for Deep Learning", 2023,
https://proceedings.mlr.press/v202/steiner23a.html, search for an optimal order.

Complexity: each function is near-linear. Nothing here is optimal; `repair` and `prune` improve the plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from fckpt.solve.core.cuts import CutPoints
from fckpt.solve.core.rules import Order, Rules, peak_of, replay, seconds_of

__all__ = ["Start", "backward_orders", "measured", "save_everything", "save_everything_orders", "segmented"]


class Start(NamedTuple):
    """An order from which a repair or a search may begin."""

    peak_nbytes: int
    seconds: float
    order: Order


def measured(rules: Rules, orders: Iterable[Order]) -> list[Start]:
    """Returns orders with their peaks and seconds."""
    return [Start(peak_of(rules, order), seconds_of(rules, order), order) for order in orders]


def save_everything(rules: Rules, backward_order: Sequence[int] | None = None) -> Order:
    """Returns the order that saves everything that may be saved."""
    graph = rules.graph
    return replay(rules, [v for node in graph.nodes[: graph.boundary] for v in node.outputs], backward_order)


def save_everything_orders(rules: Rules) -> list[Order]:
    """Returns the orders that save everything, one for each order of the backward pass, the lowest peak first."""
    plans = (save_everything(rules, order) for order in backward_orders(rules))
    return sorted(plans, key=lambda plan: peak_of(rules, plan))


def segmented(rules: Rules, backward_order: Sequence[int] | None = None) -> Iterator[Order]:
    """Yields orders that save the values across the cuts between 1, 2, 3, 4, 6, 8, ... segments, also nested ones."""
    points = CutPoints(rules, save_everything(rules).forward)
    for leaf in (None, 64, 16, 4):
        for count in _counts(points.length):
            yield replay(rules, points.values_across(points.even(count - 1)), backward_order, leaf)


def _counts(most: int) -> list[int]:
    counts, count = [1], 2.0
    while count <= most / 2:
        counts.append(int(count))
        count = max(count + 1, count * 2**0.5)
    return counts


def backward_orders(rules: Rules) -> list[Sequence[int]]:
    """Returns the recorded order of the backward pass, and list schedules that lower the peak of saving everything."""
    orders: list[Sequence[int]] = [rules.backward]
    least = peak_of(rules, save_everything(rules))
    for key in (_early, _small):
        order = _list_schedule(rules, key)
        peak = peak_of(rules, save_everything(rules, order))
        if peak < least:
            orders.append(order)
            least = peak
    return orders


def _early(change: int, index: int) -> tuple[int, int]:
    return (0 if change <= 0 else 1, index)


def _small(change: int, index: int) -> tuple[int, int]:
    return (change, index)


def _list_schedule(rules: Rules, key: Callable[[int, int], tuple[int, int]]) -> list[int]:
    """Returns a list schedule of the backward pass: of the nodes that are ready, the one with the least `key` is next.

    Args:
        rules: the rules of the graph.
        key: the priority, given the change in live bytes that the node causes, and its id.
    """
    graph, permanent = rules.graph, rules.permanent
    readers: dict[int, list[int]] = {}
    for index in rules.backward:
        for value in graph.nodes[index].inputs:
            readers.setdefault(value, []).append(index)
    left = {value: len(found) for value, found in readers.items()}
    waits, follower = _waits(rules)

    def change(index: int) -> int:
        node = graph.nodes[index]
        made = sum(graph.values[v].nbytes for v in node.outputs if v in left or v in permanent)
        return made - sum(graph.values[v].nbytes for v in node.inputs if left[v] == 1 and v not in permanent)

    ready = [(key(change(i), i), i) for i in rules.backward if not waits[i]]
    heapq.heapify(ready)
    done: set[int] = set()
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        if index in done:
            continue
        done.add(index)
        order.append(index)
        node = graph.nodes[index]
        woken = [follower[index]] if index in follower else []
        for value in node.outputs:
            woken += readers.get(value, ())
        for other in woken:
            waits[other] -= 1
        freeing = []
        for value in node.inputs:
            left[value] -= 1
            if left[value] == 1:  # the last reader frees the value, so its priority has changed
                freeing += [i for i in readers[value] if i not in done]
        for other in {*woken, *freeing}:
            if not waits[other] and other not in done:
                heapq.heappush(ready, (key(change(other), other), other))
    return order


def _waits(rules: Rules) -> tuple[dict[int, int], dict[int, int]]:
    """Returns the number of nodes for which each node of the backward pass waits, and its random nodes' followers.

    Random nodes stay in their order, so each waits for the one before it.
    """
    nodes, values, mine = rules.graph.nodes, rules.graph.values, set(rules.backward)
    waits = {i: sum(values[v].producer in mine for v in nodes[i].inputs) for i in rules.backward}
    follower = dict(pairwise([i for i in rules.backward if nodes[i].random]))
    for index in follower.values():
        waits[index] += 1
    return waits, follower
