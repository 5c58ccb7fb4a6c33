"""Operations that Dynamo replaces by others, which round in another way: a capture is to have the function's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

__all__ = ["undecomposed"]

_REPLACED = (torch.addcdiv, torch._foreach_lerp_)
"""Those that `config.enable_dynamo_decompositions` says nothing of."""


@contextmanager
def undecomposed() -> Iterator[None]:
    """Has Dynamo take these operations as they are."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    before = {op: handlers.pop(op) for op in _REPLACED if op in handlers}
    try:
        yield
    finally:
        handlers.update(before)
