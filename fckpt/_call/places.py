"""Places where values lie (cells, dicts, lists, attributes): what is there, putting something else there for a while.

A recompute finds its tensors in the places where the forward found them; a trace finds stand-ins there.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = [
    "ABSENT",
    "ARRAYS",
    "BUILTIN",
    "FORGOTTEN",
    "INERT",
    "PLAIN",
    "SEQUENCES",
    "Slot",
    "content",
    "entries",
    "frozen",
    "moved",
    "placed",
    "present",
    "put",
    "replaced",
    "same_place",
    "tensors_in",
]

Slot = tuple[Any, Any, Any]
"""A place and what it holds: (cell, None, content), (dict, key, value), (object, attribute, value), or
(list, deque, set, array of bytes or numbers; None; its items). The value is a tensor, or something immutable that may
hold tensors (a tuple, a method)."""

BUILTIN = frozenset({dict, list, set, frozenset, collections.deque, collections.OrderedDict, collections.Counter})
"""Containers that are nothing but what they contain."""
SEQUENCES = (list, collections.deque)
ARRAYS = (bytearray, array.array, np.ndarray)
"""What holds numbers and no objects (NumPy's arrays of objects apart)."""

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
INERT = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, types.ModuleType, type, torch.dtype, torch.device,
        torch.Size,
    }
)  # fmt: skip

ABSENT: Any = object()
FORGOTTEN: Any = object()


def same_place(a: Slot, b: Slot) -> bool:
    """Whether two slots are one place."""
    return a[0] is b[0] and a[1] == b[1]


def present(slot: Slot) -> bool:
    """Whether the place still holds what it held."""
    holder, key, value = slot
    if isinstance(holder, dict):
        return dict.get(holder, key, ABSENT) is value
    held = content(holder, key)
    if key is None and isinstance(holder, SEQUENCES):
        return len(held) == len(value) and all(a is b for a, b in zip(held, value, strict=True))
    if key is None and isinstance(holder, (set, *ARRAYS)):
        return bool(held == value)
    return held is value


def moved(slots: Iterable[Slot]) -> list[Slot]:
    """The slots whose places hold something else by now."""
    return [slot for slot in slots if not present(slot)]


def content(holder: Any, key: Any) -> Any:
    """What lies in a place."""
    if type(holder) is types.CellType:
        try:
            return holder.cell_contents
        except ValueError:
            return ABSENT
    if isinstance(holder, dict):
        return dict.get(holder, key, ABSENT)
    if key is None:
        return _items(holder)
    if isinstance(holder, type):
        return vars(holder).get(key, ABSENT)
    return getattr(holder, key, ABSENT)


def entries(holder: dict[Any, Any]) -> dict[Any, Any]:
    """What lies in a dict, past what a subclass does when an item is asked for (it may make it of what lies there)."""
    if type(holder) is dict:
        return holder.copy()
    keys: Any = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
    return {key: dict.__getitem__(holder, key) for key in keys.__iter__(holder)}


def _items(holder: Any) -> Any:
    """What lies in a list, a deque, a set or an array."""
    if isinstance(holder, ARRAYS):
        return bytes(holder) if isinstance(holder, bytearray) else holder.tobytes()
    if isinstance(holder, set):
        return frozenset(set.__iter__(holder))
    return tuple(list.__iter__(holder) if isinstance(holder, list) else collections.deque.__iter__(holder))


def put(holder: Any, key: Any, value: Any) -> None:
    """Puts a value into a place, past what a subclass of a container does when an item is set."""
    if isinstance(holder, dict):
        kind: Any = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
        if value is ABSENT:
            kind.pop(holder, key, None)
        else:
            kind.__setitem__(holder, key, value)
    elif type(holder) is types.CellType:
        if value is ABSENT:
            del holder.cell_contents
        else:
            holder.cell_contents = value
    elif key is None:
        _fill(holder, value)
    elif isinstance(holder, type):
        setattr(holder, key, value)
    elif value is ABSENT:
        delattr(holder, key)
    else:
        object.__setattr__(holder, key, value)  # frozen dataclasses too


def _fill(holder: Any, items: Any) -> None:
    """Gives a container of values these items in the place of its own."""
    if isinstance(holder, np.ndarray):
        holder[...] = np.frombuffer(items, holder.dtype).reshape(holder.shape)
    elif isinstance(holder, array.array):
        del holder[:]
        holder.frombytes(items)
    elif isinstance(holder, bytearray):
        holder[:] = items
    else:
        kind = next(base for base in (list, collections.deque, set) if isinstance(holder, base))
        method = functools.partial(getattr, kind)  # past those of a subclass
        method("clear")(holder)
        method("update" if kind is set else "extend")(holder, items)


@contextlib.contextmanager
def placed(slots: list[Slot]) -> Iterator[None]:
    """Puts values into places, and what lies there now back after the body."""
    before = [(holder, key, content(holder, key)) for holder, key, _ in slots]
    try:
        for slot in slots:
            put(*slot)
        yield
    finally:
        for slot in reversed(before):
            put(*slot)


def frozen(fn: Callable[..., Any], slots: list[Slot]) -> tuple[Callable[..., Any], list[Slot]]:
    """Gives `fn`, and the functions in its cells, cells of their own, with what `slots` say those hold.

    A function that is kept for a recompute would keep alive, through its cells, whatever its caller assigns to
    these variables later: the result of the recomputed function itself, in a loop `x = remat(lambda h: h + x)(h)`,
    which is a cycle that Python cannot collect.

    Returns:
        The function, and the slots with the new cells in the places of the old ones.
    """
    held = {id(holder): value for holder, _, value in slots if type(holder) is types.CellType}
    if not held:
        return fn, slots
    freezer = _Freezer(held)
    result, cells = freezer.clone(fn), freezer.cells
    return result, [
        (cells[id(holder)], None, cells[id(holder)].cell_contents) if id(holder) in cells else (holder, key, value)
        for holder, key, value in slots
    ]


class _Freezer:
    """Clones functions over new cells."""

    def __init__(self, held: dict[int, Any]):
        self.held = held
        self.cells: dict[int, types.CellType] = {}
        self.clones: dict[int, types.FunctionType] = {}

    def own_cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) not in self.held:
            return cell  # assigned by the function itself, or not at all
        if id(cell) not in self.cells:
            new = self.cells[id(cell)] = types.CellType()
            new.cell_contents = self.clone(self.held[id(cell)])
        return self.cells[id(cell)]

    def clone(self, value: Any) -> Any:
        if type(value) is not types.FunctionType or not value.__closure__:
            return value
        if id(value) not in self.clones:
            own = tuple(map(self.own_cell, value.__closure__))
            new = self.clones[id(value)] = types.FunctionType(
                value.__code__, value.__globals__, value.__name__, value.__defaults__, own
            )
            new.__kwdefaults__ = value.__kwdefaults__
            new.__dict__.update({name: self.clone(attribute) for name, attribute in value.__dict__.items()})
        return self.clones[id(value)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in the value of a slot."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in INERT or type(value) is types.FunctionType:
        return []
    return [tensor for part in _parts(value) for tensor in tensors_in(part)]


def _parts(value: Any) -> Iterable[Any]:
    """What something immutable consists of."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    return ()


def replaced(value: Any, new: dict[int, Any]) -> Any:
    """The value of a slot with other tensors (or objects) in it, by the id of those that they replace."""
    if isinstance(value, torch.Tensor) or id(value) in new:
        return new.get(id(value), value)
    parts = list(_parts(value))
    others = [replaced(part, new) for part in parts]
    if all(a is b for a, b in zip(parts, others, strict=True)):
        return value
    return _rebuilt(value, others)


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, parts[0])
    if isinstance(value, types.BuiltinMethodType):
        return getattr(parts[0], value.__name__)
    if isinstance(value, functools.partial):
        count = 1 + len(value.args)
        return functools.partial(*parts[:count], **dict(zip(value.keywords, parts[count:], strict=True)))
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
