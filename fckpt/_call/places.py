"""Places that hold values (cells, dicts, lists, attributes): reading them, and replacing their values temporarily.

A recompute finds its tensors in the places where the forward found them. A trace finds its stand-ins there.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fckpt._tree import STRUCTURE

__all__ = [
    "ABSENT",
    "ARRAYS",
    "BUILTIN",
    "FORGOTTEN",
    "PLAIN",
    "SEQUENCES",
    "Slot",
    "content",
    "entries",
    "frozen",
    "is_inert",
    "moved",
    "placed",
    "present",
    "put",
    "referent",
    "replaced",
    "same_place",
    "tensors_in",
]


def referent(proxy: Any) -> Any:
    """Returns the object of a `weakref.proxy`, which has no hash and no weak references itself; None if it is gone."""
    try:
        return proxy.__dir__.__self__
    except (ReferenceError, AttributeError):
        return None


Slot = tuple[Any, Any, Any]
"""A place and its value, as (holder, key, value): (cell, None, content), (dict, key, value), (object, attribute name,
value), or (list, deque, set or array; None; its items). The value is a tensor, or something immutable that may hold
tensors, such as a tuple or a bound method. A plain tuple, because thousands may be made per call."""

BUILTIN = frozenset({dict, list, set, frozenset, collections.deque, collections.OrderedDict, collections.Counter})
"""Container types without state besides their items."""
SEQUENCES = (list, collections.deque)
ARRAYS = (bytearray, array.array, np.ndarray)
"""Types that hold numbers and no objects (except NumPy arrays of dtype object)."""

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_INERT = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, types.ModuleType, type, torch.dtype, torch.device,
        torch.Size, STRUCTURE,
    }
)  # fmt: skip


def is_inert(kind: type) -> bool:
    """Whether values of this type are not searched. Modules are not, even if they have a class of their own."""
    return kind in _INERT or issubclass(kind, types.ModuleType)


ABSENT: Any = object()
FORGOTTEN: Any = object()


def same_place(a: Slot, b: Slot) -> bool:
    """Whether two slots refer to the same place."""
    return a[0] is b[0] and a[1] == b[1]


def present(slot: Slot) -> bool:
    """Whether the place still holds the value of the slot."""
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
    """Returns the slots whose places now hold another value."""
    return [slot for slot in slots if not present(slot)]


def content(holder: Any, key: Any) -> Any:
    """Returns the value in a place; ABSENT if it is empty."""
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
    """Returns the items of a dict, read without the `__getitem__` and `__iter__` of a subclass, which may compute other
    values.
    """
    if type(holder) is dict:
        return holder.copy()
    keys: Any = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
    return {key: dict.__getitem__(holder, key) for key in keys.__iter__(holder)}


def _items(holder: Any) -> Any:
    """Returns the items of a list, a deque, a set or an array."""
    if isinstance(holder, ARRAYS):
        return bytes(holder) if isinstance(holder, bytearray) else holder.tobytes()
    if isinstance(holder, set):
        return frozenset(set.__iter__(holder))
    return tuple(list.__iter__(holder) if isinstance(holder, list) else collections.deque.__iter__(holder))


def put(holder: Any, key: Any, value: Any) -> None:
    """Sets the value in a place, bypassing the `__setitem__` of a container subclass."""
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
    elif value is ABSENT:
        delattr(holder, key)
    elif isinstance(holder, type):
        setattr(holder, key, value)
    else:
        object.__setattr__(holder, key, value)  # also works for frozen dataclasses


def _fill(holder: Any, items: Any) -> None:
    """Replaces the items of a container."""
    if isinstance(holder, np.ndarray):
        holder[...] = np.frombuffer(items, holder.dtype).reshape(holder.shape)
    elif isinstance(holder, array.array):
        del holder[:]
        holder.frombytes(items)
    elif isinstance(holder, bytearray):
        holder[:] = items
    else:
        kind = next(base for base in (list, collections.deque, set) if isinstance(holder, base))
        method = functools.partial(getattr, kind)  # bypasses the methods of a subclass
        method("clear")(holder)
        method("update" if kind is set else "extend")(holder, items)


@contextlib.contextmanager
def placed(slots: list[Slot]) -> Iterator[None]:
    """Sets the values of `slots` for the body, and restores the previous values after it; dicts keep their order."""
    before = [(holder, key, content(holder, key)) for holder, key, _ in slots]
    shortened = {id(holder): holder for holder, _, value in slots if value is ABSENT and isinstance(holder, dict)}
    orders = [(holder, list(entries(holder))) for holder in shortened.values()]
    try:
        for slot in slots:
            put(*slot)
        yield
    finally:
        for slot in reversed(before):
            put(*slot)
        for holder, order in orders:
            _reorder(holder, order)


def _reorder(holder: dict[Any, Any], order: list[Any]) -> None:
    """Gives the keys of a dict the order that they had; other keys come last."""
    held = entries(holder)
    wanted = dict.fromkeys(key for key in (*order, *held) if key in held)
    moving = list(itertools.dropwhile(lambda pair: pair[0] is pair[1], zip(wanted, held, strict=True)))
    for key, _ in moving:  # taken out one at a time: another thread may read the rest
        put(holder, key, ABSENT)
        put(holder, key, held[key])


def frozen(fn: Callable[..., Any], slots: list[Slot]) -> tuple[Callable[..., Any], list[Slot]]:
    """Copies `fn`, and the functions in its cells, onto new cells with the contents that `slots` give.

    A function that is stored for a recompute would keep alive whatever its caller later assigns to the variables in its
    cells. In a loop `x = remat(lambda h: h + x)(h)` that is the result of the recomputed function itself: a reference
    cycle through autograd that Python cannot collect.

    Returns:
        The function, and the slots with the new cells instead of the old ones.
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
    """Copies functions onto new cells."""

    def __init__(self, held: dict[int, Any]):
        self.held = held
        self.cells: dict[int, types.CellType] = {}
        self.clones: dict[int, types.FunctionType] = {}

    def own_cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) not in self.held:
            return cell  # assigned by the function itself, or never assigned
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
    """Returns the tensors in the value of a slot."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_inert(type(value)) or type(value) is types.FunctionType:
        return []
    return [tensor for part in _parts(value) for tensor in tensors_in(part)]


def _parts(value: Any) -> Iterable[Any]:
    """Returns the parts of an immutable value."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    return ()


def replaced(value: Any, new: dict[int, Any]) -> Any:
    """Returns the value of a slot with tensors or objects replaced; `new` maps the id of each replaced one to its
    replacement.
    """
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
