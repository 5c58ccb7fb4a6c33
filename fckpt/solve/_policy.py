"""Follows the policy exactly, like JAX's `jax.checkpoint(policy=...)`.

See https://docs.jax.dev/en/latest/gradient-checkpointing.html. Nothing is optimised; values without a decision are
recomputed. O(nodes + edges).
"""

from __future__ import annotations

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.rules import from_saved, within_budget

__all__ = ["policy"]

SAVED = ("must_save", "prefer_save")


def policy(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that saves the values that the policy decided to save, if the backward pass needs them.

    Raises:
        BudgetError: the schedule needs more than `budget` bytes.
    """
    made = [graph.values[v] for node in graph.nodes[: graph.boundary] for v in node.outputs]
    saved = [value.id for value in made if value.decision in SAVED]
    return within_budget(graph, from_saved(graph, saved), budget, "policy")
