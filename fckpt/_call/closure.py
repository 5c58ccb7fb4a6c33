"""The closure of a function: the modules, tensors, generators and other values that it reads besides its arguments.

Autograd differentiates captured tensors by itself. A recompute needs more: the captured tensors must be unchanged,
module buffers must not be written a second time, and generators must be reset. It also needs the places of these
values, because it may have to find other tensors there.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fckpt._call.facts import LARGE, VIEWS, Unguarded, attribute, fact, is_library, is_small, is_user_class
from fckpt._call.places import (
    ABSENT,
    ARRAYS,
    BUILTIN,
    PLAIN,
    SEQUENCES,
    Slot,
    content,
    entries,
    is_inert,
    referent,
    same_place,
)
from fckpt._call.rng import generator_types
from fckpt._call.snapshots import Snapshot
from fckpt.errors import ArgumentTypeError

__all__ = [
    "DEPTH",
    "RECORDS",
    "Closure",
    "check_scripted",
    "class_attributes",
    "closure_of",
    "global_names",
    "imported",
    "is_compilers",
    "method_globals",
    "slot_names",
]

DEPTH = 4
_NOTED = 20_000  # largest container whose entries are compared, which takes 0.2 ms
_MOST = 4000  # most values that one walk visits

Attributes = Iterable[tuple[dict[str, Any], str]]


class Closure:
    """The result of a walk through the closure of a function."""

    __slots__ = ("generators", "given", "kinds", "modules", "own", "slots")

    def __init__(self) -> None:
        self.own = Snapshot()
        """The values in the function's cells, defaults and globals, tensors or not."""
        self.given = Snapshot()
        """The values in the static arguments, or in attributes of modules."""
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self.kinds: dict[type, None] = {}
        """The user's classes, except module classes."""
        self.slots: list[Slot] = []
        """All cells, and all other places that hold tensors, except places inside `modules`."""

    def extend(self, other: Closure) -> None:
        """Adds the contents of `other`."""
        self.own.extend(other.own)
        self.given.extend(other.given)
        self.modules += other.modules
        self.generators += other.generators
        self.kinds |= other.kinds
        self.slots += other.slots


def closure_of(
    fn: list[Callable[..., Any]],
    statics: Iterable[Any] = (),
    *,
    attributes: Attributes = (),
    scopes: Iterable[tuple[types.CodeType, dict[str, Any]]] = (),
    facts: list[Any] | None = None,
) -> Closure:
    """Walks a function's cells, bound object, partial arguments and defaults, and the globals that its code refers to.

    Containers and plain objects are searched `DEPTH` levels deep, and without `facts`, which a plan compares at every
    call, as many levels again. Large ones are not searched at all; functions at any depth. The walk is fast
    (microseconds for a lambda) and runs at every call, because cells and attributes change.

    Args:
        fn: the function, in a list, so that it is itself in a place (it may be a method of a tensor).
        statics: the arguments of the call that are not tensors, such as modules and objects.
        attributes: (dict, name) of module attributes that are neither parameters nor buffers.
        scopes: further code objects, each with the globals in which it looks up names.
        facts: a list that receives a hashable fact about each value that is found: numbers, code, structure.
    """
    walk = _Walk(facts)
    walk.items_of(fn, DEPTH)
    if walk.state is not None:
        del walk.state.lists[:1]  # the list that holds `fn`
        walk.state = walk.found.given
    for value in statics:
        walk.visit(None, value, DEPTH)
    for held, name in attributes:
        value = held.get(name)
        if walk.state is not None:
            walk.state.places.append((held, name, value))
        walk.visit((held, name, value), value, DEPTH)
    for code, scope in scopes:
        walk.globals_of(scope, global_names(code), DEPTH)
    walk.contents_of_imported()
    walk.visit_deeper()
    return walk.found


class _Walk:
    __slots__ = ("deep", "deeper", "facts", "found", "generators", "imported", "names", "seen", "state")

    def __init__(self, facts: list[Any] | None) -> None:
        self.facts = facts
        self.deep = False
        """Whether the walk is below the first `DEPTH` levels."""
        self.deeper: list[tuple[Slot | None, Any, Snapshot | None]] = []
        """Values deeper than `DEPTH` levels, each with its place and the snapshot that its contents belong to."""
        self.imported: list[types.ModuleType] = []
        """The user's imported modules that cells, attributes and containers hold."""
        self.names: set[str] = set()
        """The names to which the code that is found refers."""
        self.found = Closure()
        self.state: Snapshot | None = self.found.own
        self.generators = generator_types()
        self.seen: dict[int, int] = {}
        """The objects that have been visited, by address, each with its number."""

    def visit(self, slot: Slot | None, value: Any, depth: int) -> None:
        """Visits `value`, which is in the place `slot`, directly or inside an immutable value."""
        kind = type(value)
        if kind in weakref.ProxyTypes:  # Lightning's modules and trainers refer to each other by proxies
            value = referent(value)
            kind = type(value)
        if self.facts is not None:
            self.facts.append(fact(value))
        if is_inert(kind):
            if issubclass(kind, types.ModuleType) and self.facts is not None:
                self.imported.append(value)
            elif kind is type and id(value) not in self.seen:
                self.seen[id(value)] = len(self.seen)
                self.constants(value)
            return
        if depth < 0 or len(self.seen) > _MOST:
            self.skip(slot, value)
            return
        if isinstance(value, torch.Tensor):
            slots = self.found.slots
            if slot is not None and not (slots and same_place(slots[-1], slot)):
                slots.append(slot)
            if self.facts is not None and vars(value):
                self.items(vars(value), depth - 1)
        elif kind in (types.MethodType, types.BuiltinMethodType):
            self.visit(slot, value.__self__, depth)
            if kind is types.MethodType and not str(attribute(value.__func__, "__module__")).startswith("torch.nn."):
                self.visit(None, value.__func__, depth)
        elif isinstance(value, tuple):
            if len(value) <= LARGE:
                for item in value:
                    self.visit(slot, item, depth - 1)
            if kind is not tuple and self.facts is not None:
                self.items(getattr(value, "__dict__", {}), depth - 1)
                self.constants(kind)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self.visit(slot, item, depth)
            if vars(value):
                self.items(vars(value), depth - 1)
        elif id(value) in self.seen:
            if self.facts is not None:  # it is the same object again
                self.facts.append(self.seen[id(value)])
        else:
            self.seen[id(value)] = len(self.seen)
            if isinstance(value, torch.jit.ScriptModule):
                check_scripted(value)
            elif isinstance(value, nn.Module):
                self.found.modules.append(value)
            elif isinstance(value, self.generators):
                self.found.generators.append(value)
            else:
                self.mutable(value, kind, depth)

    def skip(self, slot: Slot | None, value: Any) -> None:
        """Notes that `value` is too deep, or behind too many others, to be looked into."""
        if self.facts is None:
            if len(self.deeper) <= _MOST:
                self.deeper.append((slot, value, self.state))
        elif not _is_leaf(value):
            where = f"deeper than {DEPTH} levels or behind {_MOST} others"
            self.facts.append(Unguarded(f"a {type(value).__name__}, {where}"))

    def visit_deeper(self) -> None:
        """Visits what lies up to `DEPTH` levels below the values that were too deep.

        That comes last: what is close to the function must not be left out because of many values far from it. Objects
        of torch's own classes are not searched: those of `fully_shard`, for example, keep tensors whose memory is
        freed.
        """
        self.deep = True
        deeper, self.deeper = self.deeper, []
        for slot, value, self.state in deeper:
            self.visit(slot, value, DEPTH - 1)

    def mutable(self, value: Any, kind: type, depth: int) -> None:
        if kind is types.FunctionType:
            self.function(value, depth)  # functions are searched at any depth
        elif isinstance(value, (dict, list, collections.deque, set, frozenset)):
            self.container(value, kind, depth - 1)
        elif isinstance(value, ARRAYS):
            if self.state is not None and is_small(value):
                self.state.values.append((value, content(value, None)))
        elif isinstance(value, weakref.ref):
            self.visit(None, value(), depth)
        elif isinstance(value, types.MappingProxyType):
            self.items(dict(value), depth - 1)
        elif kind in VIEWS:
            self.items(dict(value.mapping), depth - 1)
        elif isinstance(value, type):
            self.constants(value)
        elif isinstance(value, torch.library.CustomOpDef):  # its other attributes do not change what a trace contains
            for name in ("_setup_context_fn", "_backward_fn", "_vmap_fn"):
                self.visit(None, attribute(value, name), depth)
        elif not isinstance(value, logging.Logger) and not (self.deep and _is_torchs(kind)):
            state = self.state
            if not is_user_class(kind) and kind not in RECORDS:
                self.state = None  # not data: a lock, a thread, a file
            elif state is not None:
                state.kinds.append((value, kind))
            attributes = attribute(value, "__dict__")
            if type(attributes) is dict:
                self.items(attributes, depth - 1)
            for name in slot_names(kind):
                held = attribute(value, name, ABSENT)
                self.place((value, name, held), depth - 1)
            self.constants(kind)
            self.state = state

    def place(self, slot: Slot, depth: int) -> None:
        """Visits the value in a place that is not an entry of a dict or a list."""
        if self.state is not None:
            self.state.places.append(slot)
        _, _, value = slot
        if value is not ABSENT:
            self.visit(slot, value, depth)

    def container(self, value: Any, kind: type, depth: int) -> None:
        """Visits the entries of a dict, a list, a deque or a set, and the attributes that a subclass adds."""
        if isinstance(value, dict):
            self.items(value, depth)
        elif isinstance(value, SEQUENCES):
            self.items_of(value, depth)
        elif len(value) <= self.most:
            if isinstance(value, set) and self.state is not None:
                self.state.values.append((value, content(value, None)))
            if any(isinstance(item, torch.Tensor) for item in value):
                self.refuse_lookups(kind)
            for item in value if len(value) <= LARGE else ():
                self.visit(None, item, depth)
        if kind not in BUILTIN:
            attributes = attribute(value, "__dict__")
            if type(attributes) is dict:
                self.items(attributes, depth)
            self.constants(kind)

    def constants(self, kind: type) -> None:
        """Records the attributes of a class."""
        if is_user_class(kind):
            self.found.kinds[kind] = None
        if self.facts is not None:
            for base, name in class_attributes(kind):
                self.visit(None, vars(base).get(name), DEPTH)
        if self.state is not None:
            self.state.places += [(base, name, vars(base).get(name)) for base, name in class_attributes(kind)]

    def items_of(self, holder: Any, depth: int) -> None:
        if len(holder) > self.most:
            return
        held = content(holder, None)
        slot = (holder, None, held)
        if self.state is not None:
            self.state.lists.append(slot)
        if len(holder) <= LARGE:
            for item in held:
                self.visit(slot, item, depth)

    def refuse_lookups(self, kind: type) -> None:
        """Notes a set or a dict in which the tensors of a trace would not be found."""
        if self.facts is not None:
            self.facts.append(
                Unguarded(f"a {kind.__name__} that holds tensors; a trace has other tensors, which are not in it")
            )

    def items(self, holder: dict[Any, Any], depth: int) -> None:
        if len(holder) > self.most:
            return
        if isinstance(next(iter(holder), None), torch.Tensor) and type(holder) is dict:  # not an optimizer's state
            self.refuse_lookups(dict)
        held = entries(holder)
        if self.state is not None:
            self.state.dicts.append((holder, held))
        if len(holder) <= LARGE:
            for key, item in list(held.items()):
                self.visit((holder, key, item), item, depth)

    @property
    def most(self) -> int:
        """The most entries of a container whose contents are recorded.

        Containers with more than `LARGE` entries are compared as a whole, but their entries are not searched.
        """
        return LARGE if self.state is None else _NOTED

    def function(self, fn: types.FunctionType, depth: int) -> None:
        state = self.state
        if is_compilers(fn):
            self.state = None
        self.parts_of_function(fn, depth)
        self.state = state

    def parts_of_function(self, fn: types.FunctionType, depth: int) -> None:
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
            if self.state is self.found.given:  # a counter of a function that a module holds
                self.found.given.places.append(slot)
            if isinstance(held, type):
                self.constants(held)
            state = self.state
            if _OWN_NOTES.get(str(fn.__globals__.get("__name__"))) is type(held):
                self.state = None
            self.visit(slot, held, depth)
            self.state = state
        # The globals that library code reads are not settings of the user.
        if not is_library(str(fn.__globals__.get("__name__", ""))):
            self.globals_of(fn.__globals__, global_names(fn.__code__), depth)
        if not fn.__dict__:
            return
        if is_library(fn.__module__ or ""):  # its attributes belong to the library
            self.visit(None, fn.__dict__.get("__wrapped__"), depth)
        else:
            self.items(fn.__dict__, depth)

    def globals_of(self, scope: dict[str, Any], names: Sequence[str], depth: int) -> None:
        """Visits the globals with these names, and the attributes with these names of modules imported there."""
        self.names.update(names)
        for name in names:
            held = scope.get(name, ABSENT)  # for example if it is the name of a built-in function
            if isinstance(held, types.ModuleType):
                self.module(held, names, depth)
            else:
                self.place((scope, name, held), depth)
                if isinstance(held, type):
                    self.constants(held)

    def contents_of_imported(self) -> None:
        """Visits the data in imported modules that are held elsewhere than in globals, by all names in the code."""
        asked: dict[int, set[str]] = {}
        again = True
        while again:  # what is found there may refer to further names
            again = False
            for module in self.imported:
                names = self.names - asked.setdefault(id(module), set())
                if names and not is_library(module.__name__):
                    asked[id(module)] |= names
                    self.module(module, sorted(names), DEPTH)
                    again = True

    def module(self, module: types.ModuleType, names: Sequence[str], depth: int, levels: int = 2) -> None:
        """Visits the data with these names in an imported module, and in the user's modules that it imports."""
        for slot in imported(module, names):
            self.place(slot, depth)
        if is_library(module.__name__):
            return
        for name in names:
            held = vars(module).get(name)
            if isinstance(held, type):
                self.place((vars(module), name, held), depth)
                self.constants(held)
            elif levels and isinstance(held, types.ModuleType):
                self.module(held, names, depth, levels - 1)


def check_scripted(module: torch.jit.ScriptModule) -> None:
    """Raises `ArgumentTypeError` for a TorchScript module that a recompute would change: its state is in C++."""
    if module.training and any(True for _ in module.buffers()):
        raise ArgumentTypeError(
            "the rematerialised function uses a TorchScript module in training mode that has buffers "
            f"({next(name for name, _ in module.named_buffers())!r}): a recompute would write them again. Use the "
            "original module instead of the scripted one, call it outside of the function, or put it in eval mode."
        )


def imported(module: types.ModuleType, names: Iterable[str]) -> Iterator[Slot]:
    """Yields the attributes of an imported module with these names that are data; for a library, only plain values,
    tensors and modules; for a module of Python, small lists and dicts too (`sys.path`, not `sys.modules`).
    """
    scope = vars(module)
    kinds = (torch.Tensor, nn.Module) if is_library(module.__name__) else _DATA
    pythons = module.__name__.partition(".")[0] in sys.stdlib_module_names
    for name in names:
        held = scope.get(name)
        users = kinds is _DATA and not isinstance(held, type) and is_user_class(type(held))
        users = users or (pythons and isinstance(held, (list, dict)) and len(held) <= LARGE)
        if held is not None and (users or type(held) in PLAIN or isinstance(held, kinds)):
            yield scope, name, held


_DATA = (torch.Tensor, nn.Module, list, dict, tuple, set, collections.deque, types.FunctionType)


def _is_torchs(kind: type) -> bool:
    return (getattr(kind, "__module__", None) or "").partition(".")[0] == "torch"


def is_compilers(fn: types.FunctionType) -> bool:
    """Whether a function is compiler code, which compares its captured values by identity."""
    return str(fn.__globals__.get("__name__", "")).startswith(("torch._dynamo", "torch._compile"))


RECORDS = (
    types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap,
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
)  # fmt: skip
"""Standard library classes that hold data of the user."""


@functools.lru_cache(maxsize=4096)
def class_attributes(kind: type) -> tuple[tuple[type, str], ...]:
    """Returns (class, name) of the attributes that hold data and that a user's class defines or inherits."""
    return tuple(
        (base, name)
        for base in kind.__mro__
        if is_user_class(base)
        for name, value in vars(base).items()
        if not name.startswith("__") and (type(value) in PLAIN or isinstance(value, _HELD_BY_CLASSES))
    )


_HELD_BY_CLASSES = (tuple, list, dict, set, frozenset, collections.deque, functools.partial, *ARRAYS, *RECORDS)
"""Types of class attributes that are data, besides plain values, and not methods or descriptors."""


@functools.lru_cache(maxsize=4096)
def method_globals(kind: type) -> tuple[tuple[dict[str, Any], str], ...]:
    """Returns (scope, name) of the globals that hold data and that methods of a user's class, or functions they call,
    refer to.
    """
    todo: list[Any] = [value for base in kind.__mro__ if is_user_class(base) for value in vars(base).values()]
    seen: set[int] = set()
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    while todo and len(seen) < LARGE:
        fn = todo.pop()
        fn = attribute(fn, "__func__") or attribute(fn, "fget") or fn
        if type(fn) is not types.FunctionType or id(fn) in seen or (fn.__module__ or "").startswith("torch."):
            continue
        seen.add(id(fn))
        todo += [cell.cell_contents for cell in fn.__closure__ or () if content(cell, None) is not ABSENT]
        names = global_names(fn.__code__)
        imported_here = [held for name in names if isinstance(held := fn.__globals__.get(name), types.ModuleType)]
        users = [vars(module) for module in imported_here if not is_library(module.__name__)]
        for scope, name in itertools.product((fn.__globals__, *users), names):
            held = scope.get(name, ABSENT)
            if type(held) is types.FunctionType:
                todo.append(held)
            elif type(held) in PLAIN or _is_librarys(held) or (not isinstance(held, _CODE) and is_data(held)):
                found[id(scope), name] = (scope, name)
    return tuple(found.values())


def _is_librarys(held: Any) -> bool:
    """Whether a value is a class of a library, such as `numpy.float32`, for which a variable may hold another."""
    return isinstance(held, type) and not is_user_class(held)


_OWN_NOTES = {"functools": weakref.WeakKeyDictionary, "dataclasses": set, "reprlib": set}
"""By module of Python: the class of the notes that its functions keep in their closures, of the choices of
`functools.singledispatch`, or of the objects whose text is being made."""
_CODE = (type, types.ModuleType, types.BuiltinFunctionType)


def is_data(value: Any) -> bool:
    """Whether a value may affect a function's result: a container, a tensor, a module, a random generator, an object of
    a user's class.
    """
    held = isinstance(value, (list, dict, set, tuple, torch.Tensor, nn.Module)) or is_user_class(type(value))
    return held or isinstance(value, generator_types())


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    names = set(code.co_names)
    dynamic = not names.isdisjoint(("getattr", "hasattr", "attrgetter", "vars", "__dict__"))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(global_names(const))
        elif dynamic and isinstance(const, str) and const.isidentifier():  # getattr(settings, "scale")
            names.add(const)
    return tuple(sorted(names))


@functools.lru_cache(maxsize=4096)
def slot_names(kind: type) -> tuple[str, ...]:
    """Returns the names in the `__slots__` of a class and its bases, except names that a subclass made a property."""
    names: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        for name in [own] if isinstance(own, str) else own:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    found = lambda name: next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return tuple(n for n in names if not n.startswith("__") and type(found(n)) is types.MemberDescriptorType)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.Generator, type, types.FunctionType, types.BuiltinFunctionType))
