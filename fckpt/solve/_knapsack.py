"""Chooses what to save by a knapsack, as `torch.compile` does for its `activation_memory_budget`, but for the peak.

`torch._functorch._activation_checkpointing.knapsack` (PyTorch 2.13): each value that there is a choice about is worth
what its node takes (there FLOPs by default, here seconds) and weighs its bytes; the most valuable set within a weight
is saved.
Optimal in that model, up to weights rounded to 1/4000 of the total. The model is wrong twice: what is computed
again may need other things computed again, and bytes saved are not the peak. Unlike torch, this solver looks at the
simulated peak for a row of weights, and takes the fastest plan that fits.

Complexity: O(4000 values), and a simulation per weight. Left out: torch's choice between several knapsacks.
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
"""How many weights are tried."""


def knapsack(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that saves the most seconds' worth of values, of those weights whose peak fits.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no weight leads to a peak that fits.
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
    """Returns the forward values that the backward pass reads and that there is a choice about."""
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
    """The most valuable choice of items, for every capacity up to all of them."""

    def __init__(self, worth: list[float], nbytes: list[int]):
        total = sum(nbytes) or 1
        ends = [0, *(before * UNITS // total for before in accumulate(nbytes))]
        self.weights = [end - start for start, end in pairwise(ends)]  # sums to UNITS, however many there are
        self.takes = np.zeros((len(worth), UNITS + 1), dtype=bool)
        best = np.zeros(UNITS + 1)
        for k, (gain, weight) in enumerate(zip(worth, self.weights, strict=True)):
            with_it = best[: UNITS + 1 - weight] + gain
            self.takes[k, weight:] = with_it > best[weight:]
            best[weight:] = np.maximum(best[weight:], with_it)

    def at(self, capacity: int) -> list[int]:
        """Returns the items to take, of `capacity` of `UNITS` parts of the total weight."""
        taken = []
        for k in range(len(self.weights) - 1, -1, -1):
            if self.takes[k, capacity]:
                taken.append(k)
                capacity -= self.weights[k]
        return taken[::-1]
