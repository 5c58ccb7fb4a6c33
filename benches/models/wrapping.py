"""Wraps each block of a network, for example by `fckpt.remat` or by PyTorch's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["TorchCheckpoint", "wrap_blocks"]

ModelT = TypeVar("ModelT", bound=nn.Module)


class TorchCheckpoint(nn.Module):
    """Runs `inner` under `torch.utils.checkpoint(use_reentrant=False)`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False)


def wrap_blocks(
    model: ModelT, wrap: Callable[[nn.Module], nn.Module], *, kind: type[nn.Module] | None = None
) -> ModelT:
    """Replaces every block of `model`, in place, by `wrap(block)` and returns `model`.

    Args:
        model: one of the networks here, or any module if `kind` is given.
        wrap: turns a module into a module that computes the same, e.g. `fckpt.remat`.
        kind: the class of the modules to wrap; by default `model.block`. Blocks in a wrapped block are not wrapped.

    Raises:
        ValueError: `model` has no module of that class.
    """
    block = kind or getattr(model, "block", None)
    if block is None:
        raise ValueError(f"{type(model).__name__} has no `block`: pass kind=")
    if _wrap_children(model, wrap, block) == 0:
        raise ValueError(f"no {block.__name__} in {type(model).__name__}: nothing to wrap")
    return model


def _wrap_children(parent: nn.Module, wrap: Callable[[nn.Module], nn.Module], kind: type[nn.Module]) -> int:
    wrapped = 0
    for name, child in list(parent.named_children()):
        if isinstance(child, kind):
            setattr(parent, name, wrap(child))
            wrapped += 1
        else:
            wrapped += _wrap_children(child, wrap, kind)
    return wrapped
