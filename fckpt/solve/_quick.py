"""A good plan in about a second, for a call that waits for it, while `auto` solves the same graph elsewhere.

The plan that saves everything, with the lowest peak, is repaired until it fits the budget. On most graphs the result is
about as fast as the plan of `auto`. If the repair takes too long, minimum cuts are repaired instead, and then, if the
graph repeats itself, schedules of its chain of blocks. For large graphs, these come first. A short local search starts
from the result.

Complexity: near-linear in the size of the graph, plus a limited number of moves.

Left out: integer programs, chains of single operations, and bounds, on which `auto` spends most of its time; and a
guarantee: that no schedule is returned does not mean that none fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve._adapt import fitted
from fckpt.solve._hierarchy import Chain, ChainSolver
from fckpt.solve._min_cut import PRICES, cheapest, near_budget
from fckpt.solve.core.rules import Order, Rules, peak_of, seconds_of
from fckpt.solve.core.starts import measured, save_everything_orders
from fckpt.solve.repair.search import Search

__all__ = ["quick"]

MOVES_PER_NODE = 25
"""The largest number of moves of the repairs of one kind of start, by node of the graph. Repairs that succeed take ten
or fifteen.
"""
LARGE = 4_000
"""The number of nodes above which repairs of the plan that saves everything take longer than chains of blocks."""
SEARCH_MOVES = 12_000
IDLE_MOVES = 3_000
"""The search ends after this many moves without a better plan."""


def quick(graph: Graph, budget: int) -> Schedule | None:
    """Returns a schedule within `budget` that is found quickly; None if none is found.

    Args:
        graph: one training step.
        budget: bytes.
    """
    rules = Rules(graph)
    plain = save_everything_orders(rules)
    if peak_of(rules, plain[0]) <= budget:
        return schedule_of(graph, *plain[0])
    moves = MOVES_PER_NODE * len(graph.nodes)
    for starts in _starts(rules, plain[0], budget):
        found = sorted(fitted(rules, measured(rules, starts()), budget, moves), key=lambda start: start.seconds)
        if found:
            search = Search(rules, [found[0].order], budget)
            search.run(SEARCH_MOVES, 0.0, idle_moves=IDLE_MOVES)
            return schedule_of(graph, *min(search.found, key=lambda order: seconds_of(rules, order)))
    return None


def _starts(rules: Rules, plain: Order, budget: int) -> Iterator[Callable[[], Iterable[Order]]]:
    """Yields functions that compute starts, the kind that takes the least time first."""
    kinds: list[Callable[[], Iterable[Order]]] = [
        lambda: [plain],
        lambda: near_budget(rules, [cheapest(rules, price) for price in PRICES], budget),
        lambda: _of_blocks(rules, budget),
    ]
    yield from kinds if len(rules.graph.nodes) <= LARGE else reversed(kinds)


def _of_blocks(rules: Rules, budget: int) -> Iterable[Order]:
    """Yields the schedules of the chain of blocks next to the budget, if blocks repeat."""
    chain = Chain(rules)
    for curve in ChainSolver().curves(chain, budget) if chain.repeats else ():
        yield from curve.around(budget)
