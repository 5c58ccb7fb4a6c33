"""The order in which a planned call gives leaves their gradients, and so the order in which hooks of leaves run.

Plain autograd gives a leaf its gradient as soon as it is complete: hooks of the last layer run first. A planned call is
one node of autograd's graph, which returns all gradients together. The engine would then accumulate them in any order.
Hooks may depend on the order: they draw random numbers, write a log, or read the gradients of other parameters.

Of the nodes that are ready, the engine runs the one that was made last. So each leaf gets a node of its own between it
and the planned call, and the node of the leaf that comes first is made last. A node that accumulates precedes all
others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["delivered_in_order"]


def delivered_in_order(operands: Sequence[torch.Tensor], order: Sequence[int]) -> Sequence[torch.Tensor]:
    """Returns tensors for a node of autograd to take in place of `operands`, some of them aliases.

    Args:
        operands: the operands of a planned call.
        order: the places of operands that plain autograd gives their gradients in this order. If none of them has a
            hook, the order does not matter.
    """
    if not any(operands[i]._backward_hooks or operands[i]._post_accumulate_grad_hooks for i in order):
        return operands
    given = list(operands)
    for i in reversed(order):
        if given[i].requires_grad and given[i].is_leaf:
            given[i] = torch.ops.aten.alias(given[i])
    return given
