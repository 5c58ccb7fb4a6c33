"""Saves everything that the backward pass reads: PyTorch's behaviour without rematerialisation.

Optimal in time if it fits. O(nodes + edges). Nothing is left out; the order of the backward pass is the recorded one.
"""

from __future__ import annotations

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.rules import from_saved, within_budget

__all__ = ["save_all"]


def save_all(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that recomputes nothing, except values that a policy requires to be recomputed.

    Raises:
        BudgetError: the schedule needs more than `budget` bytes.
    """
    saved = [v for node in graph.nodes[: graph.boundary] for v in node.outputs]
    return within_budget(graph, from_saved(graph, saved), budget, "save_all")
