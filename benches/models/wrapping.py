"""Wraps each block of a network, for example by `fckpt.remat` or by PyTorch's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class TorchCheckpoint(nn.Module):
    """Runs `inner` under `torch.utils.checkpoint(use_reentrant=False)`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False)


def wrap_blocks(parent: nn.Module, wrap: Callable[[nn.Module], nn.Module], kind: type[nn.Module]) -> None:
    """Replaces every module of class `kind` in `parent`, in place, by `wrap(module)`; not those within another."""
    for name, child in list(parent.named_children()):
        if isinstance(child, kind):
            setattr(parent, name, wrap(child))
        else:
            wrap_blocks(child, wrap, kind)
