"""Zeros without memory: the tangents of constants in forward mode, as in the plain function.

Torch has no memory for them, skips products and sums with them, and fills in zeros only for operations that cannot do
without. A trace records what is left. So `0 * inf` is 0 there, as in the plain function, and the peaks are equal.

Left out: zeros in the backward pass, which may become gradients that the caller writes to, and those in traces with
symbolic sizes or for another device. They are recorded with memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["Zeros", "with_memory"]

_MAKE = torch.ops.aten._efficientzerotensor.default


class Zeros:
    """Decides which operations of a trace run as in the plain function, unrecorded."""

    def __init__(self, owns: Callable[[Any], bool], allowed: Callable[[], bool]):
        """Begins without zeros.

        Args:
            owns: whether a tensor belongs to the trace.
            allowed: whether zeros need no memory now.
        """
        self._owns, self._allowed = owns, allowed
        self.made = False

    def concern(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operation makes zeros or views of zeros, or computes the shape of a product with zeros."""
        if func is _MAKE:
            self.made = self.made or self._allowed()
            return self._allowed()
        if not self.made:
            return False
        given = [*_tensors(args), *_tensors(kwargs.values())]
        if any(t._is_zerotensor() for t in given):
            return True
        # Torch computes the shape of a product on the meta device.
        if any(t.is_meta and not self._owns(t) for t in given):
            return True
        to_meta = any(isinstance(x, torch.device) and x.type == "meta" for x in (*args, *kwargs.values()))
        return bool(given) and to_meta and func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def with_memory(leaf: Any) -> Any:
    """Returns a leaf of a function's result; zeros without memory become a tensor that the trace records."""
    if isinstance(leaf, torch.Tensor) and leaf._is_zerotensor():
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return leaf
