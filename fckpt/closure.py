"""What a function reaches besides its arguments: modules, tensors and generators that it closes over.

Autograd differentiates closed-over tensors by itself; what needs to be known is what a recompute must not
see changed (tensors), must not change again (the buffers of modules) and must draw from again (generators);
and in which places they lie, because a recompute may have to find other tensors there.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fckpt.rng import generator_types

__all__ = [
    "PLAIN",
    "Closure",
    "Slot",
    "closure_of",
    "content",
    "fact",
    "frozen",
    "moved",
    "placed",
    "present",
    "replaced",
    "tensors_in",
]

_DEPTH = 4
_LARGE = 1000  # entries of a container that is data rather than state
_MOST = 4000  # values looked at in one walk

Attributes = Iterable[tuple[dict[str, Any], str]]
Slot = tuple[Any, Any, Any]
"""A place and what it holds: (cell, None, content), (dict, key, value), (object, attribute, value), or
(list, None, its items). The value is a tensor, or something immutable that may hold tensors (a tuple, a method)."""


class Closure:
    """What a function closes over."""

    __slots__ = ("containers", "generators", "modules", "slots")

    def __init__(self) -> None:
        self.containers: list[Any] = []
        """Dicts (attributes of objects among them) and lists; with `facts` only."""
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self.slots: list[Slot] = []
        """All cells, and the other places that hold tensors (those inside of `modules` apart)."""


def closure_of(
    fn: list[Callable[..., Any]],
    statics: Iterable[Any] = (),
    *,
    attributes: Attributes = (),
    facts: list[Any] | None = None,
) -> Closure:
    """Walks a function's cells, bound object, partial arguments, defaults and the globals that its code names.

    Containers and plain objects are looked into `_DEPTH` levels deep, large ones not at all; functions at any depth.
    The walk is quick (microseconds for a lambda) and is made at every call, because cells and attributes change.

    Args:
        fn: the function, in a list, so that it lies in a place too (it may be a tensor's method).
        statics: the arguments of its call that are no tensors: modules, objects.
        facts: a list to which what is found besides tensors is added, hashable: numbers, code, structure.
        attributes: (dict, name) of attributes of modules that are neither parameters nor buffers.
    """
    walk = _Walk(facts)
    walk.items_of(fn, _DEPTH)
    for value in statics:
        walk.visit(None, value, _DEPTH)
    for held, name in attributes:
        value = held.get(name)
        walk.visit((held, name, value), value, _DEPTH)
    return walk.found


class _Walk:
    __slots__ = ("facts", "found", "generators", "seen")

    def __init__(self, facts: list[Any] | None) -> None:
        self.facts = facts
        self.found = Closure()
        self.generators = generator_types()
        self.seen: set[int] = set()

    def visit(self, slot: Slot | None, value: Any, depth: int) -> None:
        """Visits `value`, which lies in `slot`, by itself or inside of something immutable."""
        kind = type(value)
        if self.facts is not None:
            self.facts.append(fact(value))
        if kind in _INERT or depth < 0:
            return
        if isinstance(value, torch.Tensor):
            slots = self.found.slots
            if slot is not None and not (slots and _same_place(slots[-1], slot)):
                slots.append(slot)
        elif kind in (types.MethodType, types.BuiltinMethodType):
            self.visit(slot, value.__self__, depth)
            if kind is types.MethodType and not (value.__func__.__module__ or "").startswith("torch.nn."):
                self.visit(None, value.__func__, depth)
        elif isinstance(value, tuple):
            if len(value) <= _LARGE:
                for item in value:
                    self.visit(slot, item, depth - 1)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self.visit(slot, item, depth - 1)
        elif id(value) not in self.seen and len(self.seen) <= _MOST:
            self.seen.add(id(value))
            if isinstance(value, nn.Module):
                self.found.modules.append(value)
            elif isinstance(value, self.generators):
                self.found.generators.append(value)
            else:
                self.mutable(value, kind, depth)

    def mutable(self, value: Any, kind: type, depth: int) -> None:
        if kind is types.FunctionType:
            self.function(value, depth)  # functions are no data, and are looked into however deep
        elif kind is list:
            self.items_of(value, depth - 1)
        elif kind is dict:
            self.items(value, depth - 1)
        elif kind in (set, frozenset):
            if len(value) <= _LARGE:
                for item in value:
                    self.visit(None, item, depth - 1)
        elif not isinstance(value, type):
            attributes = _attribute(value, "__dict__")
            if type(attributes) is dict:
                self.items(attributes, depth - 1)
            for name in _slot_names(kind):
                held = _attribute(value, name)
                self.visit((value, name, held), held, depth - 1)

    def items_of(self, holder: list[Any], depth: int) -> None:
        if len(holder) <= _LARGE:
            if self.facts is not None:
                self.found.containers.append(holder)
            slot = (holder, None, tuple(holder))
            for item in slot[2]:
                self.visit(slot, item, depth)

    def items(self, holder: dict[Any, Any], depth: int) -> None:
        if len(holder) <= _LARGE:
            if self.facts is not None:
                self.found.containers.append(holder)
            for key, item in list(holder.items()):
                self.visit((holder, key, item), item, depth)

    def function(self, fn: types.FunctionType, depth: int) -> None:
        if fn.__defaults__:
            self.visit((fn, "__defaults__", fn.__defaults__), fn.__defaults__, depth)
        if fn.__kwdefaults__:
            self.items(fn.__kwdefaults__, depth)
        for cell in fn.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            slot = (cell, None, held)
            self.found.slots.append(slot)
            self.visit(slot, held, depth)
        names = _global_names(fn.__code__)
        if names:
            scope = fn.__globals__
            for name in names:
                held = scope.get(name)
                if type(held) is types.ModuleType:
                    self.imported(held, names, depth)
                else:
                    self.visit((scope, name, held), held, depth)
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self.visit(None, wrapped, depth)

    def imported(self, module: types.ModuleType, names: Iterable[str], depth: int) -> None:
        scope = vars(module)
        for name in names:
            held = scope.get(name)
            if isinstance(held, (torch.Tensor, nn.Module)):
                self.visit((scope, name, held), held, depth)


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # a lazy proxy, say, that cannot be resolved
        return None


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(_global_names(const))
    return tuple(sorted(names))


@functools.lru_cache(maxsize=4096)
def _slot_names(kind: type) -> tuple[str, ...]:
    """The `__slots__` of classes written in Python."""
    names: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        names += [own] if isinstance(own, str) else own
    return tuple(name for name in names if not name.startswith("__"))


def fact(value: Any) -> Any:
    """What can be told of a value without the tensors in it: hashable, and equal for what a function treats alike."""
    kind = type(value)
    if kind in PLAIN:
        return (kind, repr(value)) if kind in (float, complex) else (kind, value)  # NaN equals itself here
    if kind is types.FunctionType:
        return value.__code__
    if kind is tuple and len(value) <= _LARGE:
        return (kind, tuple(map(fact, value)))
    if kind in (dict, list, tuple):
        return (kind, tuple(value) if kind is dict and all(type(k) in PLAIN for k in value) else len(value))
    if isinstance(value, (torch.Generator, types.BuiltinFunctionType)):
        return (kind, id(value))
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    return value if isinstance(value, (type, torch.dtype, torch.device)) else kind


PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_INERT = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, types.ModuleType, type, torch.dtype, torch.device,
        torch.Size,
    }
)  # fmt: skip


# -- places ------------------------------------------------------------------------------------------------


_ABSENT: Any = object()


def _same_place(a: Slot, b: Slot) -> bool:
    return a[0] is b[0] and a[1] == b[1]


def present(slot: Slot) -> bool:
    """Whether the place still holds what it held."""
    holder, key, value = slot
    if isinstance(holder, dict):
        return holder.get(key, _ABSENT) is value
    held = content(holder, key)
    if type(holder) is list:
        return len(held) == len(value) and all(a is b for a, b in zip(held, value, strict=True))
    return held is value


def moved(slots: Iterable[Slot]) -> list[Slot]:
    """The slots whose places hold something else by now."""
    return [slot for slot in slots if not present(slot)]


def content(holder: Any, key: Any) -> Any:
    """What lies in a place."""
    if isinstance(holder, dict):
        return holder.get(key, _ABSENT)
    if type(holder) is list:
        return tuple(holder)
    if type(holder) is types.CellType:
        try:
            return holder.cell_contents
        except ValueError:
            return _ABSENT
    return getattr(holder, key, _ABSENT)


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        if value is _ABSENT:
            holder.pop(key, None)
        else:
            holder[key] = value
    elif type(holder) is list:
        holder[:] = value
    elif type(holder) is types.CellType:
        if value is _ABSENT:
            del holder.cell_contents
        else:
            holder.cell_contents = value
    elif value is _ABSENT:
        delattr(holder, key)
    else:
        object.__setattr__(holder, key, value)  # frozen dataclasses too


@contextlib.contextmanager
def placed(slots: list[Slot]) -> Iterator[None]:
    """Puts values into places, and what lies there now back after the body."""
    before = [(holder, key, content(holder, key)) for holder, key, _ in slots]
    try:
        for slot in slots:
            _put(*slot)
        yield
    finally:
        for slot in reversed(before):
            _put(*slot)


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
    if type(value) in _INERT or type(value) is types.FunctionType:
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


def replaced(value: Any, new: dict[int, torch.Tensor]) -> Any:
    """The value of a slot with other tensors in it, by the id of those that they replace."""
    if isinstance(value, torch.Tensor):
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
