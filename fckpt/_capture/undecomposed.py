"""Operations that Dynamo would decompose into others that round differently; a capture contains the originals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

__all__ = ["undecomposed"]

_REPLACED = (torch.addcdiv, torch._foreach_lerp_)
"""Decomposed operations that `config.enable_dynamo_decompositions` does not control."""


@contextmanager
def undecomposed() -> Iterator[None]:
    """Makes Dynamo capture these operations without decomposing them."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    before = {op: handlers.pop(op) for op in _REPLACED if op in handlers}
    try:
        yield
    finally:
        handlers.update(before)
