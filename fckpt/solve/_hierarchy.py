"""Chains of repeated blocks: each distinct block is planned once, for several budgets, and larger blocks recursively.

1. The graph is cut into a chain of blocks, one per period if the forward pass repeats itself (`blocks`).
2. Blocks that are equal except for names are one problem. A block is planned for pairs of budgets: for its peak while
   it runs, and for what it holds while other blocks run. For a small block, plans that save everything and plans of
   segments are repaired and pruned, and minimum cuts are added. A larger block is itself treated as a graph: all three
   steps apply to it again.
3. Each plan of a block is one way to save its stage. Dynamic programming (`rotor`) chooses among them, for every memory
   limit.

Step 2 follows X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O. Beaumont, "Rockmate: an efficient, fast, automatic
and generic tool for re-materialization in PyTorch", 2023, https://proceedings.mlr.press/v202/zhao23b.html, which solves
an integer program for each pair. Blocks within blocks follow J. Gusak, X. Zhao, T. Le Hellard, Z. Li, L. Eyraud-Dubois,
O. Beaumont, "HiRemate: hierarchical approach for efficient re-materialization of neural networks", 2025,
https://proceedings.mlr.press/v267/gusak25a.html, which also solves integer programs at the higher levels.

Complexity: `rotor` on at most `STAGES` stages per level, and about fifteen small plans per distinct block: for a graph
of equal layers, the time hardly grows with their number. In a graph with few repetitions, most blocks get only minimum
cuts and their smallest segmented plan. Nothing is optimal. Left out: parallel branches (each level is a chain), and
sharing parts of the dynamic programming table between equal stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve._greedy import fit, lowered
from fckpt.solve._min_cut import cheapest
from fckpt.solve._rotor import PRICES, Curve, best, tables
from fckpt.solve.chains.blocks import cut_out, cut_positions, with_rest, without_rest
from fckpt.solve.chains.stages import Stages
from fckpt.solve.core.rules import Order, Rules, peak_of, profile_of, seconds_of
from fckpt.solve.core.starts import (
    Start,
    backward_orders,
    measured,
    save_everything,
    save_everything_orders,
    segmented,
)

__all__ = ["Chain", "ChainSolver", "hierarchy"]

STAGES = 60
"""The largest number of stages of the chain on each level."""
SLOTS = 2000
"""The number of memory slots of a chain's table. Each stage's memory is rounded up to whole slots, so that fewer slots
would waste memory."""
SMALL = 200
"""Blocks of at most this many operations are not cut again."""
PEAKS = (0.0, 0.3, 1.0)
"""Budgets for a block's peak, as positions between the least peak that is found and the peak of saving everything."""
HELD = (0.0, 0.1, 0.25, 0.5, 0.75)
"""Budgets for what a block holds between its passes, as positions between what other blocks read of it and what saving
everything holds."""
REPEATED = 0.5
"""A graph counts as repeating itself if this fraction of its operations is in blocks that occurred before."""
EFFORT = 2000
"""The total number of operations of the blocks that are planned for pairs of budgets. Blocks that cover most of a chain
come first, and their inner blocks before them."""


class Chain:
    """A graph as a chain of blocks."""

    def __init__(self, rules: Rules):
        cuts = cut_positions(rules, save_everything(rules).forward, STAGES - 1)
        self.stages = Stages(rules, backward_orders(rules)[-1], cuts)
        self.blocks = [cut_out(self.stages, i) for i in range(len(self.stages))]
        first: dict[tuple[Graph, tuple[tuple[int, ...], ...]], int] = {}
        self.stages.twin = [first.setdefault((block.graph, block.edges), i) for i, block in enumerate(self.blocks)]
        self.count = Counter(block.graph for block in self.blocks)
        """By distinct block: how often it occurs."""

    @property
    def divides(self) -> bool:
        """Whether no block has more than half of the operations."""
        sizes = [len(block.nodes) for block in self.blocks]
        return 2 * max(sizes, default=0) <= sum(sizes)

    @property
    def repeats(self) -> bool:
        """Whether the chain divides the graph, and most operations are in blocks that occurred before."""
        every = sum(len(block.nodes) for block in self.blocks)
        return self.divides and sum(len(graph.nodes) for graph in self.count) <= (1 - REPEATED) * every


class ChainSolver:
    """Plans chains of blocks, and each distinct block once for all chains."""

    def __init__(self) -> None:
        self._known: dict[Graph, list[Order]] = {}
        self._left = EFFORT

    def curves(self, chain: Chain, budget: int | None = None) -> list[Curve]:
        """Returns the best plans of a chain, given the plans of its blocks, for all memory limits or near a budget."""
        for block in sorted(chain.count, key=lambda graph: -chain.count[graph] * len(graph.nodes)):
            self._plan(block)
        for i, block in enumerate(chain.blocks):
            for plan in self._known[block.graph]:
                chain.stages.add(i, [block.nodes[k] for k in plan.backward])
        return tables(chain.stages, SLOTS, budget)

    def _plan(self, block: Graph) -> None:
        """Finds plans of a block: with little memory held, with low peaks, with little time, and between these."""
        if block in self._known:
            return
        rules = Rules(with_rest(block, 0))
        found = [cheapest(rules, price) for price in PRICES]
        within = self._within(rules)
        starts = [*save_everything_orders(rules), *(within or segmented(rules))]
        least = min(starts, key=lambda order: peak_of(rules, order))
        if len(block.nodes) <= self._left:
            self._left -= len(block.nodes)
            least, _ = lowered(rules, least)
            found += _pairs(block, rules, starts, peak_of(rules, least))
        else:
            found += within
        plans = (without_rest(block, plan) for plan in (*found, least))
        self._known[block] = list({tuple(plan.backward): plan for plan in plans}.values())

    def _within(self, rules: Rules) -> list[Order]:
        """Returns plans of a large block as a chain of smaller blocks; none if it is small or does not divide."""
        chain = Chain(rules) if len(rules.graph.nodes) > SMALL else None
        if chain is None or not chain.divides:
            return []
        return [order for curve in self.curves(chain) for order in curve.spread()]


def _pairs(block: Graph, rules: Rules, starts: Sequence[Order], low: int) -> Iterator[Order]:
    """Yields plans of a block for pairs of budgets.

    Args:
        block: the block.
        rules: the rules of `with_rest(block, 0)`; the plans contain its additional node.
        starts: plans; the first one saves everything.
        low: the least peak that is known, in bytes.
    """
    whole = starts[0]
    high, fewest, most = peak_of(rules, whole), sum(rules.nbytes[v] for v in block.outputs), _held(rules, whole)
    known = [(start, _held(rules, start.order)) for start in measured(rules, starts)]
    for budget in (int(low + part * (high - low)) for part in PEAKS):
        for held in (int(fewest + part * (most - fewest)) for part in HELD):
            if held <= budget:
                rest = budget - held
                inner = Rules(with_rest(block, rest))
                raised = [s._replace(peak_nbytes=max(s.peak_nbytes, between + rest)) for s, between in known]
                plans = (fit(inner, order, budget)[0] for order in _near(whole, raised, budget))
                found = [plan for plan in plans if plan is not None]
                if found:
                    yield min(found, key=lambda plan: seconds_of(inner, plan))


def _held(rules: Rules, order: Order) -> int:
    """Returns the bytes held between the passes of a block."""
    return int(profile_of(rules, order)[len(order.forward) - 1])


def _near(whole: Order, starts: Sequence[Start], budget: int) -> list[Order]:
    """Returns `whole`, the fastest plan that fits, and the smallest of the faster plans, without duplicates."""
    inside = min((s for s in starts if s.peak_nbytes <= budget), key=lambda start: start.seconds, default=None)
    faster = (s for s in starts if inside is None or s.seconds < inside.seconds)
    outside = min(faster, key=lambda start: start.peak_nbytes, default=None)
    found = [start.order for start in (inside, outside) if start is not None]
    return [whole, *(order for order in found if order is not whole)]


def hierarchy(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule that dynamic programming finds for the graph as a chain of blocks.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no schedule that is found fits.
    """
    rules = Rules(graph)
    whole = save_everything_orders(rules)[0]
    if budget is None or peak_of(rules, whole) <= budget:
        return schedule_of(graph, *whole)
    return best(rules, ChainSolver().curves(Chain(rules)), budget, "hierarchy", [whole])
