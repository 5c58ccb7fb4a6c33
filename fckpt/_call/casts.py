"""Tensors whose casts autocast caches, and the regions that share such a cast.

Within one autocast context, autocast casts a leaf that requires grad only once, for all operations that read it, and
autograd accumulates their gradients in the lower precision, before the cast. A plan does its own casts: within one
region it does what plain PyTorch does, but the gradients of two regions that read the same leaf are accumulated in the
higher precision.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fckpt._call.ambient import without_modes
from fckpt._call.levels import below_all, transforms_active

__all__ = ["remembers_casts_of", "shared"]


def remembers_casts_of(tensor: torch.Tensor) -> bool:
    """Whether autocast caches the cast of a tensor: it must be a leaf that requires grad and not a view."""
    return tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


class _Use(NamedTuple):
    """The most recent cast of a leaf."""

    block: Any
    """A weak reference to a cached cast, which autocast drops at the end of its block."""
    call: weakref.ref[Any]


_uses: WeakIdKeyDictionary = WeakIdKeyDictionary()


def shared(tensors: Sequence[torch.Tensor], call: Any) -> list[int]:
    """Returns the indices of the tensors that an earlier call has already cast in the same autocast block.

    Args:
        tensors: the tensors that the call casts.
        call: the call; its attribute `over` says whether its backward pass has run.
    """
    device = next((d for d in {t.device.type for t in tensors} if torch.is_autocast_enabled(d)), None)
    if device is None or not torch.is_autocast_cache_enabled():
        return []
    block, found = _block(device), []
    for i, tensor in enumerate(tensors):
        if not remembers_casts_of(tensor):
            continue
        use = _uses.get(tensor)
        before = None if use is None or use.block.expired() else use.call()
        if before is not None and not before.over:
            found.append(i)
        _uses[tensor] = _Use(block, weakref.ref(call))
    return found


def _block(device: str) -> Any:
    """Returns a weak reference to an object that lives until the autocast block ends."""
    with below_all() if transforms_active() else contextlib.nullcontext(), torch.enable_grad():
        probe = _probe(device)
        product: Any = torch.mm(probe, probe).grad_fn
        return torch._C._WeakTensorRef(product._saved_self)  # type: ignore[attr-defined]  # of the autograd node


@functools.cache
def _probe(device: str) -> torch.Tensor:
    """Returns a leaf without elements: its cached cast takes no memory of a budget."""
    with without_modes():
        return torch.zeros(0, 0, device=device, requires_grad=True)
