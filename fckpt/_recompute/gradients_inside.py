"""Backward passes inside of a function that is recomputed: they must not accumulate into `.grad` from outside.

A function may differentiate inside, and use the gradient: its recompute does the same again. But a backward pass that
adds to the `.grad` of a parameter, or of another tensor from outside, would add to it again in the recompute; a plan
would add nothing to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from fckpt._call.levels import unseen
from fckpt.errors import MutationError, region_name

__all__ = ["Gradients", "refuse_accumulated", "state_of_grad"]


class Gradients:
    """The `.grad` of some tensors, as they are before a function runs."""

    __slots__ = ("held",)

    def __init__(self, tensors: Iterable[torch.Tensor]):
        with unseen():
            accumulate = [t for t in tensors if t.requires_grad and (t.is_leaf or t.retains_grad)]
            self.held = [(t, *state_of_grad(t)) for t in accumulate]

    def check(self, fn: Any, *, differentiated: bool) -> None:
        """Raises `MutationError` if a `.grad` has changed.

        Args:
            fn: the function that has run.
            differentiated: whether it is known to have differentiated something. If not, and there are other threads,
                nothing is checked: another thread may be running a backward pass of its own.
        """
        if not differentiated and threading.active_count() > 1:
            return
        with unseen():
            changed = [t for t, grad, then in self.held if state_of_grad(t) != (grad, then)]
        if changed:
            raise grad_changed(fn, changed[0], "its recompute would add to `.grad` again")


def refuse_accumulated(fn: Any, operands: Iterable[torch.Tensor]) -> None:
    """Raises `MutationError` if the trace of a function has accumulated into `.grad` of an operand."""
    with unseen():
        changed = next((t for t in operands if t.is_leaf and t.grad is not None), None)
    if changed is not None:
        raise grad_changed(fn, changed, "a plan would add nothing to `.grad`")


def grad_changed(fn: Any, tensor: torch.Tensor, consequence: str) -> MutationError:
    """Returns the error for a function that accumulates into `.grad` of a tensor from outside."""
    return MutationError(
        f"{region_name(fn)} changed `.grad` of a tensor from outside of it (shape {list(tensor.shape)}, "
        f"{tensor.dtype}), as `loss.backward()` does: {consequence}. Use `torch.autograd.grad(loss, tensors)`, which "
        "returns gradients and accumulates nothing, or `loss.backward(inputs=[...])` with tensors that the function "
        "makes; or call backward() outside of the rematerialised function."
    )


def state_of_grad(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Identifies the gradient that a tensor has accumulated; any gradient that is added changes it."""
    grad = tensor.grad
    return (None, 0) if grad is None else (id(grad), grad._version)
