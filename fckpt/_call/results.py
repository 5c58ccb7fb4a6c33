"""What a function returns, taken apart: its distinct tensors, and its leaves with numbers in their places.

An output that shares memory with an argument or with another output is described by the views that make it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from fckpt import _tree as tree
from fckpt.errors import OpaqueOutputError

__all__ = ["Flat", "Rebuilt", "Returned", "View", "is_number", "numbered"]

Flat = list[Any]  # tensors, or None where there is none


class Returned(NamedTuple):
    """The result of a function without its tensors."""

    spec: tree.TreeSpec
    leaves: Sequence[Any]
    """The leaves, as in `UserCall.leaves`."""
    shapes: list[tuple[torch.Size, torch.dtype]]
    """The shape and dtype of each tensor."""


class View(NamedTuple):
    """An operation that makes views, and one of them."""

    number: int
    """Tells calls apart: views of one call are made together."""
    op: Any
    args: tuple[Any, ...]
    """Without the tensor that it views."""
    kwargs: dict[str, Any]
    result: int
    """Which of its results."""


class Rebuilt(NamedTuple):
    """An output that shares memory with an argument or another output: made from that one again, as a view of it."""

    source: tuple[str, int]
    """('out', i) or ('in', i)."""
    tracked: bool
    """Whether it is differentiated through; else it is detached."""
    steps: tuple[View, ...]
    """One after the other."""

    def of(self, tensor: torch.Tensor, made: dict[Any, Any]) -> torch.Tensor:
        """Makes the view; `made` keeps what views of the same call share."""
        with nullcontext() if self.tracked else torch.no_grad():
            if not self.tracked or not self.steps:
                tensor = tensor.view_as(tensor) if self.tracked else tensor.detach()
            path: tuple[Any, ...] = (self.source, self.tracked)
            for number, op, args, kwargs, index in self.steps:
                path = (*path, number)
                if path not in made:
                    made[path] = op(tensor, *args, **kwargs)
                found = made[path]
                tensor = found if isinstance(found, torch.Tensor) else found[index]
                path = (*path, index)
            return tensor


def numbered(leaves: list[Any], known: dict[int, tuple[str, int]]) -> Flat:
    """Replaces the tensors in `leaves` by their numbers; returns the distinct new ones."""
    outputs: Flat = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in known:
                known[id(leaf)] = ("out", len(outputs))
                outputs.append(leaf)
            leaves[position] = known[id(leaf)]
        elif _hides_tensors(leaf):
            raise OpaqueOutputError(
                f"a rematerialised function returned a {type(leaf).__name__}, which holds tensors and is no "
                "pytree, so torch.func cannot differentiate through it. Return a tuple or a dict, or "
                "register the type with optree.register_pytree_node."
            )
    return outputs


def is_number(leaf: Any) -> bool:
    return type(leaf) is tuple and len(leaf) == 2 and leaf[0] in ("out", "in")


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex, str, bytes, torch.nn.Module)) or callable(leaf):
        return False
    attributes = leaf.values() if isinstance(leaf, dict) else getattr(leaf, "__dict__", {}).values()
    return any(isinstance(value, torch.Tensor) for value in attributes)
