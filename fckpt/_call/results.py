"""The result of a function, split into its distinct tensors and a structure that refers to them by number.

An output that shares memory with an argument or with another output is described by the view operations that make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from fckpt import _tree as tree
from fckpt.errors import OpaqueOutputError, region_name

__all__ = ["Flat", "Rebuilt", "Returned", "View", "is_number", "number_of", "numbered"]

Flat = list[Any]  # tensors, or None where there is none


class Returned(NamedTuple):
    """The result of a function without its tensors."""

    spec: tree.TreeSpec
    leaves: Sequence[Any]
    """The leaves, as in `UserCall.leaves`."""
    shapes: list[tuple[torch.Size, torch.dtype]]
    """The shape and dtype of each tensor."""


class View(NamedTuple):
    """A view operation, and which of its results is meant."""

    number: int
    """Identifies the call: views with the same number are made by one call."""
    op: Any
    args: tuple[Any, ...]
    """The arguments after the viewed tensor."""
    kwargs: dict[str, Any]
    result: int
    """The index of the result."""


class Rebuilt(NamedTuple):
    """An output that shares memory with an argument or another output, and is made again as a view of it."""

    source: tuple[str, int]
    """The tensor that is viewed: ('out', i) or ('in', i)."""
    tracked: bool
    """Whether gradients flow through the view; otherwise it is detached."""
    steps: tuple[View, ...]
    """The view operations, in order of application."""
    unrecorded: bool = False
    """Whether the view was made under `no_grad`: no gradients flow through it, and autograd refuses writes to it."""
    refuses_writes: bool = False
    """Whether autograd refuses writes to the view, as it does for views that a custom `autograd.Function` returns."""

    def of(self, tensor: torch.Tensor, made: dict[Any, Any]) -> torch.Tensor:
        """Returns the view of `tensor`; `made` holds the results of calls that several views share."""
        with torch.no_grad() if self.unrecorded else nullcontext():
            if self.refuses_writes:
                tensor = _Unwritable.apply(tensor)
            elif not self.tracked or not self.steps:
                tensor = tensor.view_as(tensor) if self.tracked else tensor.detach()
            path: tuple[Any, ...] = (self.source, self.tracked, self.unrecorded)
            for number, op, args, kwargs, index in self.steps:
                path = (*path, number)
                if path not in made:
                    made[path] = op(tensor, *args, **kwargs)
                found = made[path]
                tensor = found if isinstance(found, torch.Tensor) else found[index]
                path = (*path, index)
            return tensor


class _Unwritable(torch.autograd.Function):
    """Returns a view to which autograd refuses writes, as to all views that custom functions return."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # `setup_context` has the ctx
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # torch.func asks for it
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0])


def numbered(leaves: list[Any], known: dict[int, tuple[str, int]], fn: Any = None) -> Flat:
    """Replaces the tensors in `leaves` by numbers, in place; returns the distinct tensors that are not in `known`."""
    outputs: Flat = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in known:
                known[id(leaf)] = ("out", len(outputs))
                outputs.append(leaf)
            leaves[position] = known[id(leaf)]
        elif _hides_tensors(leaf):
            raise OpaqueOutputError(
                f"{region_name(fn)} returned an object of type {type(leaf).__name__}, which holds tensors and is not a "
                "pytree, so torch.func cannot differentiate through it. Return a tuple or a dict, or register the "
                "type with optree.register_pytree_node."
            )
    return outputs


def is_number(leaf: Any) -> bool:
    return type(leaf) is tuple and len(leaf) == 2 and leaf[0] in ("out", "in")


def number_of(leaf: Any) -> tuple[str, int, bool] | None:
    """Returns the number of the tensor for which a leaf stands, or of the one that it views, and whether gradients flow
    to it; None for other leaves.
    """
    if isinstance(leaf, Rebuilt):
        return (*leaf.source, leaf.tracked and not leaf.unrecorded)
    return (*leaf, True) if is_number(leaf) else None


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex, str, bytes, torch.nn.Module)) or callable(leaf):
        return False
    attributes = leaf.values() if isinstance(leaf, dict) else getattr(leaf, "__dict__", {}).values()
    return any(isinstance(value, torch.Tensor) for value in attributes)
