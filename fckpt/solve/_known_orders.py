"""The orders of one graph from which `auto` starts, for any budget: each kind is computed once, when it is needed.

Within `remembering()`, all calls of `auto` on equal graphs share these orders, the order with the lowest peak, and the
schedules found: a search for the least budget solves one graph several times, and so does a curve of budgets.

Complexity: a graph's tables for chains may take 200 MB, so they are kept for the body of `remembering()` only, and for
one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve._chen import segment_orders
from fckpt.solve._greedy import lowered
from fckpt.solve._hierarchy import Chain, ChainSolver
from fckpt.solve._min_cut import PRICES, cheapest
from fckpt.solve._revolve import binomial_orders
from fckpt.solve._rotor import Curve, curves
from fckpt.solve.core.rules import Order, Rules, peak_of
from fckpt.solve.core.starts import Start, backward_orders, measured, save_everything_orders, segmented
from fckpt.solve.proofs.bounds import least_peak

__all__ = ["KnownOrders", "by_peak", "known_orders", "remembering"]

LARGE = 20_000
"""For graphs of more nodes that repeat themselves, only chains of blocks are planned."""
STARTS_PER_SIDE = 2
"""Number of feasible starts, and of infeasible ones, to repair in a family; and of small starts to lower."""


class KnownOrders:
    """Orders of one graph, by method."""

    def __init__(self, graph: Graph, lowering_moves: float):
        """Prepares to compute the orders.

        Args:
            graph: one training step.
            lowering_moves: once this many moves have been weighed, no further start is lowered.
        """
        self.graph, self.lowering_moves = graph, lowering_moves
        self.rules = Rules(graph)
        self.plain = save_everything_orders(self.rules)
        """The orders that save everything, the lowest peak first."""
        self.found: dict[tuple[int, float | None, int], Schedule] = {}
        """Schedules of `auto`, by budget, time limit and seed."""

    @functools.cached_property
    def least_peak(self) -> int:
        """A proven lower bound on the peak of every schedule."""
        return least_peak(self.graph)

    @functools.cached_property
    def blocks_only(self) -> bool:
        """Whether only chains of blocks are planned."""
        return len(self.graph.nodes) > LARGE and self.chain.repeats

    @functools.cached_property
    def minimum_cuts(self) -> list[Order]:
        """Minimum cuts at several prices."""
        return [] if self.blocks_only else [cheapest(self.rules, price) for price in PRICES]

    @functools.cached_property
    def chains(self) -> list[Curve]:
        """Optimal schedules of chains."""
        return [] if self.blocks_only else curves(self.rules)

    @functools.cached_property
    def chain(self) -> Chain:
        """The graph as a chain of blocks."""
        return Chain(self.rules)

    @functools.cached_property
    def blocks(self) -> list[Curve]:
        """Optimal schedules of the chain of blocks, if blocks repeat."""
        return ChainSolver().curves(self.chain) if self.chain.repeats else []

    @functools.cached_property
    def segments(self) -> list[Start]:
        """Saving everything, and segments, also nested, with the recorded order of the backward pass."""
        return measured(self.rules, (*self.plain, *segmented(self.rules)))

    @functools.cached_property
    def common(self) -> list[Start]:
        """The starts that do not depend on the budget."""
        if self.blocks_only:
            return measured(self.rules, self.plain)
        return [*self.segments, *measured(self.rules, (*segment_orders(self.rules), *self.minimum_cuts))]

    @functools.cached_property
    def spread(self) -> list[Start]:
        """Some schedules of the chains, down to the smallest."""
        return measured(self.rules, (order for curve in (*self.blocks, *self.chains) for order in curve.spread()))

    @functools.cached_property
    def binomials(self) -> list[Start]:
        """Binomial schedules, which need the fewest bytes."""
        return measured(self.rules, binomial_orders(self.rules))

    @functools.cached_property
    def least(self) -> Order:
        """The order with the lowest peak."""
        return min(self.smallest, key=lambda order: peak_of(self.rules, order))

    @functools.cached_property
    def smallest(self) -> list[Order]:
        """Orders whose peaks repairs have lowered as far as possible."""
        weighed = 0
        done: list[Order] = []
        found: list[Order] = []
        for start in self._to_lower():
            if start not in done:
                order, moves = lowered(self.rules, start)
                weighed += moves
                done.append(start)
                found.append(order)
            if weighed > self.lowering_moves:
                break  # before the next start is computed
        return found

    def _to_lower(self) -> Iterator[Order]:
        """Yields the orders with the smallest peaks, and last the one of `greedy`, which may become smaller still."""
        for starts in ([*self.common, *self.spread], self.binomials):
            yield from (start.order for start in by_peak(starts)[:STARTS_PER_SIDE])
        if not self.blocks_only:
            orders = backward_orders(self.rules)[1:]
            others = measured(self.rules, (plan for order in orders for plan in segmented(self.rules, order)))
            yield min([*self.segments, *others], key=lambda start: start.peak_nbytes).order


def by_peak(starts: Iterable[Start]) -> list[Start]:
    """Returns starts by ascending peak, without later ones of equal peak and seconds."""
    found: dict[tuple[int, float], Order] = {}
    for peak, seconds, order in starts:
        found.setdefault((peak, seconds), order)
    return [Start(*key, found[key]) for key in sorted(found)]


_memory: ContextVar[list[KnownOrders] | None] = ContextVar("_memory", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Lets the calls of `auto` within the body share what they find out about equal graphs."""
    if _memory.get() is not None:
        yield
        return
    token = _memory.set([])
    try:
        yield
    finally:
        _memory.reset(token)


def known_orders(graph: Graph, make: Callable[[], KnownOrders]) -> KnownOrders:
    """Returns the orders of a graph: those of an earlier call within `remembering`, or new ones from `make`."""
    memory = _memory.get()
    if memory and (memory[0].graph is graph or memory[0].graph == graph):
        return memory[0]
    made = make()
    if memory is not None:
        memory[:] = [made]
    return made
