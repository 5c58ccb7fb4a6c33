"""Bytes that code without gradients would hold on a device, counted on tensors of the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Allocations", "rounded"]


def rounded(nbytes: int, grain: int) -> int:
    """Rounds bytes up to a multiple of `grain`, as an allocator does."""
    return -(-nbytes // grain) * grain


class Allocations(TorchDispatchMode):
    """A mode that counts the bytes of the storages that operations make in its body, while they are alive."""

    def __init__(self, kinds: Iterable[str], grain: int):
        """Prepares to count.

        Args:
            kinds: the types of the devices whose storages count.
            grain: the allocator rounds sizes up to a multiple of this many bytes.
        """
        super().__init__()
        self.kinds, self.grain = tuple(kinds), grain
        self.held = 0
        """The bytes of the counted storages that are alive."""
        self.peak = 0
        self._known: dict[int, Any] = {}

    def forget(self) -> None:
        """Resets the peak to the bytes that are held now."""
        self.peak = self.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type in self.kinds:
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        nbytes, key = rounded(storage.nbytes(), self.grain), storage._cdata
        self.held += nbytes
        self.peak = max(self.peak, self.held)

        def gone(_: Any) -> None:
            self.held -= nbytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
