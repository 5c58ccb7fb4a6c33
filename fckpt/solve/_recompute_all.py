"""Saves only inputs and outputs: one segment in the sense of Chen et al.

T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
https://arxiv.org/abs/1604.06174.

Optimal in the bytes that live between the passes. The backward pass then holds as much as without rematerialisation, so
the peak falls only if it was elsewhere. At most one additional forward pass. O(nodes + edges).
"""

from __future__ import annotations

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.rules import from_saved, within_budget

__all__ = ["recompute_all"]


def recompute_all(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that saves only what it must: outputs, outputs of nodes that run once, and must-save values.

    Raises:
        BudgetError: the schedule needs more than `budget` bytes.
    """
    return within_budget(graph, from_saved(graph, ()), budget, "recompute_all")
