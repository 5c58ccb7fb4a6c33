"""Guards on the layouts of tensors inside transforms of torch.func, where a function sees wrapped tensors.

Dynamo's guards on tensors also compare dispatch keys, and would reject a wrapper where the capture saw a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import guards, mark_static

__all__ = ["WrappedTensors", "layout_of", "mark_static", "name_of", "reader", "without_tensors"]


class WrappedTensors:
    """The tensors that a capture read, and their layouts."""

    def __init__(self, names: Sequence[str], scope: dict[str, Any], places: dict[str, Any]):
        """Reads the tensors.

        Args:
            names: Dynamo's expressions for the tensors, which refer to `G` and `L`.
            scope: `G`, the globals.
            places: `L`, the arguments of the entry.
        """
        self._read = reader(names, scope)
        self._layouts = list(map(layout_of, self._read(places)))

    def same(self, places: dict[str, Any]) -> bool:
        """Whether all layouts are unchanged."""
        try:
            found = self._read(places)
        except (AttributeError, LookupError, TypeError):
            return False
        return list(map(layout_of, found)) == self._layouts


def layout_of(value: Any) -> Any:
    """Returns what guards compare of a tensor; None for another value."""
    if not isinstance(value, torch.Tensor):
        return None
    stride = value.stride() if value.layout is torch.strided else ()
    return (value.shape, stride, value.dtype, value.device, value.layout, value.requires_grad)


def without_tensors(entries: Sequence[Any], names: list[str]) -> list[bool]:
    """Returns, by guard, whether to keep it. Guards on tensors are dropped, and their names appended to `names`."""
    keep = [entry.guard_type != "TENSOR_MATCH" for entry in entries]
    names += [name_of(e.orig_guard.originating_source) for e, kept in zip(entries, keep, strict=True) if not kept]
    return keep


def reader(names: Sequence[str], scope: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Returns a function of the entry's arguments that reads objects.

    Args:
        names: Dynamo's expressions for the objects, see `name_of`. They refer to the arguments as `L`.
        scope: the globals of the entry, to which they refer as `G`.
    """
    known = {**guards._get_closure_vars(), "G": scope}
    return eval(f"lambda L: ({''.join(name + ', ' for name in names)})", known)


def name_of(source: Any) -> str:
    """Returns Dynamo's expression for the object of a guard or input."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a method on torch 2.11
