"""Chooses what to save by a knapsack, like `activation_memory_budget` of `torch.compile`, but for the simulated peak.

`torch._functorch._activation_checkpointing.knapsack` (PyTorch 2.13): each value that may be saved or recomputed is
worth the cost of its node (there FLOPs by default, here seconds) and weighs its bytes; the most valuable set within a
weight limit is saved. Optimal in that model, up to weights rounded to 1/4000 of the total. The model is inaccurate in
two ways: a recomputation may require further recomputations, and the bytes saved are not the peak. Unlike torch, this
solver simulates the peak for a series of weight limits, and returns the fastest plan that fits.

Complexity: O(4000 values), and one simulation per weight limit. Left out: torch's choice between several knapsack
algorithms.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.rules import Rules, fastest, replay
from fckpt.solve.core.starts import save_everything

__all__ = ["choices", "knapsack"]

UNITS = 4000
STEPS = 40
"""The number of weight limits that are tried."""


def knapsack(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule that fits, among the most valuable sets of saved values for several weight limits.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no weight limit gives a schedule that fits.
    """
    rules = Rules(graph)
    values = choices(rules)
    chosen = _Table(
        [rules.seconds[graph.values[v].producer or 0] for v in values], [graph.values[v].nbytes for v in values]
    )
    capacities = sorted({round(UNITS * k / STEPS) for k in range(STEPS + 1)}, reverse=True)
    plans = []
    for capacity in capacities if budget is not None else capacities[:1]:
        saved = values if capacity == UNITS else [values[k] for k in chosen.at(capacity)]
        plans.append(replay(rules, saved))
    return fastest(rules, plans, budget, "knapsack")


def choices(rules: Rules) -> list[int]:
    """Returns the forward values that the backward pass reads and that may be either saved or recomputed."""
    graph = rules.graph
    read = {v for index in save_everything(rules).backward for v in graph.nodes[index].inputs}
    return [
        v
        for node in graph.nodes[: graph.boundary]
        if not rules.pinned[node.id]
        for v in node.outputs
        if v in read and v not in rules.permanent and v not in rules.unsaved
    ]


class _Table:
    """The most valuable set of items for every capacity, up to all items."""

    def __init__(self, worth: list[float], nbytes: list[int]):
        total = sum(nbytes) or 1
        ends = [0, *(before * UNITS // total for before in accumulate(nbytes))]
        self.weights = [end - start for start, end in pairwise(ends)]  # their sum is exactly UNITS
        self.takes = np.zeros((len(worth), UNITS + 1), dtype=bool)
        best = np.zeros(UNITS + 1)
        for k, (gain, weight) in enumerate(zip(worth, self.weights, strict=True)):
            with_it = best[: UNITS + 1 - weight] + gain
            self.takes[k, weight:] = with_it > best[weight:]
            best[weight:] = np.maximum(best[weight:], with_it)

    def at(self, capacity: int) -> list[int]:
        """Returns the items of the best set for `capacity`, in units of 1/`UNITS` of the total weight."""
        taken = []
        for k in range(len(self.weights) - 1, -1, -1):
            if self.takes[k, capacity]:
                taken.append(k)
                capacity -= self.weights[k]
        return taken[::-1]
