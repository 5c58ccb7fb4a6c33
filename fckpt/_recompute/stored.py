"""What becomes of the gradients of leaves: whether autograd stores them in `.grad` without showing them to anyone.

Autograd stores a gradient in memory of its own that is laid out like the leaf. But `torch.autograd.grad` returns, and
hooks of the leaf see, gradients in the layout in which they were computed, and gradients of several tensors may be one.
The sum of a gradient, for example, has other last bits in another layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fckpt._call.levels import is_legacy_batch
from fckpt._recompute.other_uses import is_of_user

__all__ = ["are_stored", "each_once", "is_seen"]


def are_stored(receivers: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients of leaves are stored in `.grad`, and no hook sees them before. Called in a backward pass.

    Args:
        receivers: the operands of a planned call: leaves, aliases of leaves (see `delivery`), and other tensors.
    """
    leaves = [leaf for leaf in map(_leaf, receivers) if leaf is not None]
    return not any(is_seen(leaf) or _is_returned(leaf) for leaf in leaves)


def each_once(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Returns gradients with one tensor in place of several that are the same part of memory.

    Autograd takes a gradient over as `.grad` without a copy if nothing else refers to that tensor, even if another
    tensor has the same memory. Two leaves would then have one `.grad`.
    """
    made: dict[Any, torch.Tensor] = {}

    def only(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None or is_legacy_batch(grad) or grad.layout is not torch.strided:
            return grad
        place = grad.data_ptr(), grad.dtype, tuple(grad.shape), grad.stride(), grad.is_conj(), grad.is_neg()
        return made.setdefault(place, grad) if grad.numel() else grad

    return [only(grad) for grad in grads]


def is_seen(operand: torch.Tensor) -> bool:
    """Whether a hook of the user sees the gradient of an operand, a leaf or an alias of one."""
    leaf = _leaf(operand)
    return leaf is not None and any(map(is_of_user, (leaf._backward_hooks or {}).values()))


def _leaf(operand: torch.Tensor) -> torch.Tensor | None:
    """Returns the leaf that is the operand, or of which it is an alias; None if there is none."""
    if not operand.requires_grad or operand.is_leaf:
        return operand if operand.requires_grad else None
    node: Any = operand.grad_fn
    before = node.next_functions[0][0] if node.name() == "AliasBackward0" else None
    return getattr(before, "variable", None)


def _is_returned(leaf: torch.Tensor) -> bool:
    """Whether the running backward pass is one of `torch.autograd.grad`, and returns the gradient of a leaf."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what it raises for such leaves
        return True
    return False
