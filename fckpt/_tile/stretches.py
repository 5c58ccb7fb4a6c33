"""Steps of a rewriting into tiles, as data that a plan stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fckpt.errors import ArgumentValueError
from fckpt.graph.graph import checked

__all__ = ["Gathered", "Step", "Stretch", "Untileable", "step_from_json", "step_to_json"]


class Untileable(Exception):
    """A stretch cannot be cut into tiles."""


@dataclass(frozen=True)
class Stretch:
    """Nodes of a graph, and how to cut them."""

    ways: tuple[tuple[int, int], ...]
    """Nodes in ascending order, each with the number of its way among `ways.ways`."""
    count: int
    """The number of tiles."""


@dataclass(frozen=True)
class Gathered:
    """A loss over classes (`aten.nll_loss_forward`) that reads one gathered number per row instead of all classes."""

    node: int


Step = Stretch | Gathered


def step_to_json(step: Step) -> dict[str, Any]:
    """Returns a step as plain data."""
    if isinstance(step, Gathered):
        return {"gathered": step.node}
    return {"ways": [list(pair) for pair in step.ways], "count": step.count}


def step_from_json(data: dict[str, Any]) -> Step:
    """Returns the step that `step_to_json` wrote.

    Raises:
        ArgumentValueError: the data is not a step.
    """
    try:
        if "gathered" in data:
            return Gathered(checked(data["gathered"], "gathered", int))
        pairs = [(checked(n, "a node", int), checked(w, "a way", int)) for n, w in data["ways"]]
        return Stretch(tuple(pairs), checked(data["count"], "count", int, positive=True))
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentValueError(f"the data is not a step of a rewriting into tiles: {error!r}.") from error
