"""Two levels of torch.func in a trace: a `vmap`, and inside it the transform that differentiates.

`vmap(grad(f))` is traced as it runs: autograd records at the inner level, on tensors that the outer level batches. The
recorded operations work on the batched tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import (
    _add_batch_dim,
    _unwrap_batched,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._functorch.eager_transforms import _create_differentiable, grad_increment_nesting
from torch._functorch.vmap import vmap_increment_nesting

from fckpt._trace.operations import Batch

__all__ = ["Levels", "at_a_level", "batch_dim", "under_vmap"]


class Levels:
    """The two levels of a trace, while they are active."""

    def __init__(self, outer: int, inner: int):
        self.outer = outer
        self.inner = inner
        self.dims: Sequence[int | None] = ()

    def wrapped(
        self, tensors: Sequence[torch.Tensor], tracked: Sequence[bool], computed: Sequence[bool]
    ) -> list[torch.Tensor]:
        """Wraps batched operands as the function sees them; those that are `tracked` require grad.

        Args:
            tensors: the batched operands.
            tracked: by operand, whether it requires grad.
            computed: by operand, whether it must not be a leaf; see `Layout.computed`.
        """
        found = []
        for tensor, dim, flag, not_leaf in zip(tensors, self.dims, tracked, computed, strict=True):
            batched = tensor if dim is None else _add_batch_dim(tensor, dim, self.outer)
            seen = _wrap_for_grad(batched, self.inner)
            leaf = _create_differentiable(seen, self.inner) if flag else seen
            found.append(leaf.view_as(leaf) if not_leaf else leaf)
        return found

    def batched(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Wraps a cotangent for the inner level."""
        return _wrap_for_grad(tensor if dim is None else _add_batch_dim(tensor, dim, self.outer), self.inner)

    def below(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Returns the batched tensor below a wrapped one, and its batch dimension."""
        value: Any = tensor
        if is_functorch_wrapped_tensor(value) and maybe_get_level(value) == self.inner:
            value = _unwrap_for_grad(value, self.inner)
        return _unwrap_batched(value, self.outer)


@contextlib.contextmanager
def under_vmap(batch: Batch) -> Iterator[Levels]:
    """Activates the two levels within the body."""
    with vmap_increment_nesting(batch.size, batch.randomness) as outer, grad_increment_nesting() as inner:
        levels = Levels(outer, inner)
        levels.dims = batch.dims
        yield levels


def at_a_level(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `fn` at a level of torch.func, where torch composes a few functions of other operations."""
    with grad_increment_nesting() as level:
        seen = lambda value: _wrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value
        return _unwrap_for_grad(fn(*map(seen, args), **{k: seen(v) for k, v in kwargs.items()}), level)


def batch_dim(tensor: torch.Tensor, level: int) -> int | None:
    """Returns the dimension of a tensor's memory that the `vmap` of this level batches."""
    while is_functorch_wrapped_tensor(tensor):
        if maybe_get_level(tensor) == level:
            return maybe_get_bdim(tensor) if is_batchedtensor(tensor) else None
        tensor = get_unwrapped(tensor)
    return None
