"""Layouts of results: an operation of a trace that repeats an earlier one gets the layout of the earlier result.

Torch computes the layout of a fake result in Python, which takes about a millisecond, and in a network of equal layers
most operations occur once per layer. Results are reused for operations of torch itself, on tensors of equal layouts,
with equal other arguments and under equal settings. `FakeTensorMode` has its own cache, but its results may have a
smaller storage than the real ones (aten.copy of a row, torch 2.13).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fckpt._call import ambient
from fckpt._trace.real_layouts import with_real_layouts
from fckpt._trace.sizes import fake_on, hashable, is_size, run_in, storage_of_size

__all__ = ["RepeatedCalls", "layouts_key"]


class _Layout(NamedTuple):
    """The layout of one result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage_nbytes: int
    conj: bool
    neg: bool
    views: bool
    """Whether the result is a view of the operation's only tensor."""


class _Unknown(Exception):
    """The layout of the result may depend on more than layouts and plain arguments."""


_PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class RepeatedCalls:
    """Calls operations on fake tensors, and remembers the layouts of their results."""

    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self._known: dict[Any, list[_Layout | None] | _Layout] = {}

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns the result of `func`, which writes over none of its arguments."""
        given: list[FakeTensor] = []
        key = layouts_key(func, args, kwargs, given)
        known = None if key is None else self._known.get(key)
        if known is None:
            result = with_real_layouts(self.mode, func, args, kwargs, run_in(self.mode, func, args, kwargs), key)
            if key is not None and (layouts := _layouts(result, given)) is not None:
                self._known[key] = layouts
            return result
        if isinstance(known, _Layout):
            return self._made(known, given)
        made = [None if layout is None else self._made(layout, given) for layout in known]
        return tuple(made)

    def _made(self, layout: _Layout, given: list[FakeTensor]) -> FakeTensor:
        storage = given[0].untyped_storage() if layout.views else storage_of_size(layout.storage_nbytes)
        place = layout.offset, layout.shape, layout.stride
        return fake_on(self.mode, storage, place, layout.dtype, layout.device, conj=layout.conj, neg=layout.neg)


def layouts_key(func: Any, args: Any, kwargs: dict[str, Any], given: list[FakeTensor]) -> Any:
    """Returns everything on which the layouts of results depend; None if that is not known. Adds tensors to `given`."""
    try:
        if func.namespace != "aten":
            return None
        return func, _key(args, given), _key((*kwargs.items(),), given), ambient.capture(), torch.is_grad_enabled()
    except _Unknown:
        return None


def _key(value: Any, given: list[FakeTensor]) -> Any:
    """Returns everything on which a layout may depend in an argument, and adds the tensors in it to `given`."""
    if isinstance(value, FakeTensor):
        if value.constant is not None or value.layout is not torch.strided:
            raise _Unknown
        given.append(value)
        place = (tuple(value.shape), value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
        if value.fake_mode.shape_env is not None:
            place = hashable(place)
        return (*place, value.dtype, value.device, value.is_conj(), value.is_neg(), value.requires_grad)
    if isinstance(value, (list, tuple)):
        return (type(value), *[_key(part, given) for part in value])
    if isinstance(value, torch.SymInt):
        return int, hashable(value)
    if not isinstance(value, _PLAIN):
        raise _Unknown
    if isinstance(value, torch.device) and value.index is None and value.type not in ("cpu", "meta"):
        raise _Unknown  # it means the current device, which may change
    return type(value), value


def _layouts(result: Any, given: list[FakeTensor]) -> list[_Layout | None] | _Layout | None:
    """Returns the layouts of a result; None if they cannot be remembered."""
    storages = [t.untyped_storage()._cdata for t in given]
    if isinstance(result, FakeTensor):
        return _layout(result, given, storages)
    if type(result) is not tuple:
        return None
    found: list[_Layout | None] = []
    for part in result:
        if part is None:
            found.append(None)
            continue
        layout = _layout(part, given, storages)
        if layout is None:
            return None
        found.append(layout)
        if not layout.views:
            storages.append(part.untyped_storage()._cdata)
    return found


def _layout(made: Any, given: list[FakeTensor], storages: list[int]) -> _Layout | None:
    if type(made) is not FakeTensor or made.layout is not torch.strided:  # a sparse tensor has no storage
        return None
    if made.constant is not None or any(made is t for t in given):
        return None
    storage = made.untyped_storage()
    views = storage._cdata in storages
    if views and (len(given) != 1 or storage._cdata != storages[0]):
        return None
    if not all(is_size(n) for n in (*made.shape, *made.stride(), made.storage_offset())):
        return None  # they depend on data
    offset: Any = made.storage_offset()  # an int, or symbolic if the sizes are
    place = (tuple(made.shape), made.stride(), offset, made.dtype, made.device)
    return _Layout(*place, storage.nbytes(), made.is_conj(), made.is_neg(), views)
