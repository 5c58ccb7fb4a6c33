"""Keeps everything that the backward pass reads: what PyTorch does without rematerialisation.

Optimal in time whenever it fits. O(nodes + edges). Nothing is left out: the backward order is the recorded one.
"""

from __future__ import annotations

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.rules import from_saved, within_budget

__all__ = ["save_all"]


def save_all(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that computes nothing twice, except what a policy obliges to.

    Raises:
        BudgetError: it needs more than `budget` bytes.
    """
    saved = [v for node in graph.nodes[: graph.boundary] for v in node.outputs]
    return within_budget(graph, from_saved(graph, saved), budget, "save_all")
