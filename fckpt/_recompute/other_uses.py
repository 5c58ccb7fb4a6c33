"""Detects that the caller, too, uses an operand whose gradient a planned call has added up.

Plain autograd adds the contributions to a gradient in the order in which their operations are reached. A planned call
adds its own contributions first. If the caller's contribution comes before them, the order differs, and so may the last
bits. Autograd does not say who else contributes to a gradient. But if nobody does, it passes on the very tensor that
the planned call has returned; and if others contribute later, it adds to that tensor in place where it can. That is
the plain order, unless a result of the call is a view of the operand, which autograd differentiates outside of the
call: plain autograd may reach that view between two operations of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fckpt._call.levels import is_legacy_batch, unwrapped
from fckpt._recompute.primitives import Planned

__all__ = ["is_of_user", "watch_sums"]


def watch_sums(operands: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], planned: Planned) -> None:
    """Watches operands for gradients whose contributions come in another order than in plain autograd.

    For each of them, `planned.used_elsewhere` is called.

    Operands with hooks of their own, which may change gradients, are left out.

    Args:
        operands: the operands of the planned call.
        grads: the gradients that the planned call is about to return.
        planned: the call.
    """
    for place, even_last in planned.summed.items():
        operand, grad = operands[place], grads[place]
        if grad is None or is_legacy_batch(grad):  # `is_grads_batched`: a batch has no memory of its own
            continue
        if not any(map(is_of_user, (operand._backward_hooks or {}).values())):
            _Sum(operand, grad, even_last, functools.partial(planned.used_elsewhere, place))


def is_of_user(hook: Any) -> bool:
    """Whether a hook of a tensor is not one of `watch_sums`."""
    return not isinstance(hook, _Sum)


class _Sum:
    """A hook of an operand, for one backward pass: it compares the gradient of the operand with that of the call."""

    def __init__(self, operand: torch.Tensor, grad: torch.Tensor, even_last: bool, differs: Callable[[], None]) -> None:
        self.address = unwrapped(grad).data_ptr()
        self.version = grad._version if even_last else None
        self.differs = differs
        self.task = torch._C._current_graph_task_id()
        self.handle: Any = operand.register_hook(self)

    def __call__(self, grad: torch.Tensor) -> None:
        self.handle.remove()
        if self.task != torch._C._current_graph_task_id():
            return  # left from a backward pass that ended early
        if unwrapped(grad).data_ptr() != self.address or self.version not in (None, grad._version):
            self.differs()
