"""Keeps nothing but inputs and outputs: one segment in the sense of T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training
Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.

Optimal in what lives between the passes; the backward pass then holds as much as without rematerialisation, so the
peak falls only where something else binds. At most one more forward pass. O(nodes + edges).
"""

from __future__ import annotations

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.rules import from_saved, within_budget

__all__ = ["recompute_all"]


def recompute_all(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that keeps only what it must: outputs, what runs once, what the policy obliges to save.

    Raises:
        BudgetError: it needs more than `budget` bytes.
    """
    return within_budget(graph, from_saved(graph, ()), budget, "recompute_all")
