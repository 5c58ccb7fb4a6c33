"""Guards for a function that is traced by running its Python code: everything the code may have read.

During a trace, `Reads` records which code ran, and the classes of the objects that the code received. The guards cover
all that this code can refer to besides its arguments: globals, attributes of imported modules and of classes, methods,
defaults, cells, the contents of containers and objects found there, environment variables, levels of loggers, and new
entries in caches.
The guarded set is a superset of what was read: an irrelevant change may cause another trace, but no plan can be stale.
`Reads` also notes the values in all places that the code may assign, just before it runs.
Functions that Dynamo captures have narrower and faster guards (`captured.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import decimal
import functools
import gc
import logging
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fckpt._call.closure import Closure, class_attributes, closure_of, global_names
from fckpt._call.facts import Unguarded, fact, is_library, is_user_class, levels_of, see_caches
from fckpt._call.modules import facts_of
from fckpt._call.snapshots import Snapshot
from fckpt._capture.classes import ClassFacts, functions_in

__all__ = ["Guards", "Reads", "is_beneath_operation", "is_faking", "receiver"]


class Reads:
    """Recorder of the user's code that runs during a trace, and of the classes of the objects that it receives."""

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, dict[str, Any]] = {}
        """By code object that ran: the globals of its function."""
        self.classes: dict[int, type] = {}
        self.environment: dict[str, str | None] = {}
        """The environment variables that were read, and their values."""
        self.names_in_environment: list[str] | None = None
        """The names of all environment variables, if the code has listed them."""
        self.loggers: dict[str | None, tuple[Any, ...]] = {}
        """The loggers that were looked up, by name, and their settings."""
        self.registered: dict[types.CodeType, list[Any]] = {}
        """By code of a function of a custom operation: the functions with this code, and the object of a method."""
        self._held: Snapshot | None = None
        self._seen: set[int] = set()

    @contextlib.contextmanager
    def holding(self, held: Snapshot) -> Iterator[None]:
        """Adds, within the body, the values in places that the code may change.

        Args:
            held: the values in places that are known before. The places that a function may change are added when it is
                called for the first time, and those of a class when a function gets an object of it for the first time.
        """
        self._held, self._seen = held, set()
        try:
            yield
        finally:
            self._held = None  # it may hold tensors of the trace

    def note(self, frame: types.FrameType) -> None:
        """Records the call of a function."""
        scope = frame.f_globals
        if frame.f_code is _LOOKUP and isinstance(key := frame.f_locals.get("key"), str):
            self.environment[key] = os.environ.get(key)
        if frame.f_code in _LISTINGS:
            self.names_in_environment = list(os.environ)
        if frame.f_code is _LOGGER and isinstance(name := frame.f_locals.get("name"), str | None):
            self.loggers[name] = levels_of(logging.getLogger(name))
        if is_library(str(scope.get("__name__", ""))):
            return
        self.codes[frame.f_code] = scope
        if frame.f_code not in self.registered and _is_registered(frame):
            self.registered[frame.f_code] = _holders(frame)
        for value in frame.f_locals.values():
            self._add(value if isinstance(value, type) else type(value))
        if self._held is not None and id(frame.f_code) not in self._seen:
            self._seen.add(id(frame.f_code))
            self._hold(closure_of([], scopes=[(frame.f_code, scope)]))

    def _add(self, cls: type) -> None:
        meta: type = type(cls)
        for base in (*cls.__mro__, *meta.__mro__):
            if base is not object and base is not type:
                self.classes[id(base)] = base
                if self._held is not None and id(base) not in self._seen and is_user_class(base):
                    self._seen.add(id(base))
                    self._held.classes.append((base, frozenset(vars(base))))
                    functions = [fn for value in list(vars(base).values()) for fn in functions_in(value)]
                    data = [vars(base)[k] for holder, k in class_attributes(base) if holder is base and k in vars(base)]
                    self._held.places += [(base, name, value) for name, value in vars(base).items() if _is_open(name)]
                    self._hold(closure_of([*filter(_has_state, functions), *data]))

    def _hold(self, found: Closure) -> None:
        assert self._held is not None
        self._held.extend(found.own.again())
        self._held.extend(found.given.again())

    def guards(self, facts: Iterable[Any]) -> Guards:
        """Returns guards on the current state. It is the state of the trace too, because a trace changes nothing.

        Args:
            facts: what the walk of the closure found, including the classes of objects and modules.
        """
        see_caches()
        for value in (*_globals(self.codes), *facts):
            if isinstance(value, type):
                self._add(value)
        return Guards(self)


_BUILTINS = vars(builtins)
_LOOKUP = type(os.environ).__getitem__.__code__
_LISTINGS = {getattr(type(os.environ), name).__code__ for name in ("__iter__", "__len__", "__repr__")}
_LOGGER = logging.getLogger.__code__


def _globals(codes: dict[types.CodeType, dict[str, Any]]) -> Iterator[Any]:
    for code, scope in codes.items():
        yield from (scope[name] for name in global_names(code) if name in scope)


def _functions_of_modules(codes: dict[types.CodeType, dict[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """Yields the functions of imported modules that code may call, such as `F.relu`, and the built-in functions."""
    for code, scope in codes.items():
        names = global_names(code)
        for held in [scope[name] for name in names if isinstance(scope.get(name), types.ModuleType)]:
            found = vars(held)
            yield from ((found, name, found[name]) for name in names if callable(found.get(name)))
        yield from ((_BUILTINS, name, _BUILTINS[name]) for name in names if name not in scope and name in _BUILTINS)


def _is_registered(frame: types.FrameType) -> bool:
    """Whether torch calls a function because it is registered for a custom operation, to compute values."""
    return frame.f_back is not None and _module_of(frame.f_back).startswith(_CALLING) and not is_faking(frame)


_CALLING = ("torch._ops", "torch._library.")


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def is_beneath_operation(frame: types.FrameType) -> bool:
    """Whether a frame is beneath a call of an operation. Others may be of libraries: of progress bars, for example."""
    return any(module.startswith(_CALLING) for module in _modules_above(frame))


def is_faking(frame: types.FrameType) -> bool:
    """Whether a frame is beneath a run on tensors without data, which only determines layouts."""
    return "torch._subclasses.fake_tensor" in _modules_above(frame)


def _modules_above(frame: types.FrameType | None) -> Iterator[str]:
    """Yields the names of the modules of a frame and of its callers."""
    while frame is not None:
        yield _module_of(frame)
        frame = frame.f_back


def _holders(frame: types.FrameType) -> list[Any]:
    """Returns all functions with the code of a frame, whose cells only the registry of torch reaches; and the object of
    a method.
    """
    code = frame.f_code
    found: list[Any] = [fn for fn in gc.get_referrers(code) if type(fn) is types.FunctionType and fn.__code__ is code]
    return found if (owner := receiver(frame)) is None else [*found, owner]


def receiver(frame: types.FrameType) -> Any:
    """Returns the object whose method runs in a frame, if its class is the user's; otherwise None."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return owner if is_user_class(type(owner)) and not isinstance(owner, _OF_CALL) else None


_OF_CALL = (torch.autograd.function.FunctionCtx, torch.Tensor)
"""Classes of objects that belong to one call, of which the user may have subclasses."""


class Guards:
    """The values that the code of a trace may have read, as they were at the trace."""

    def __init__(self, reads: Reads):
        self._environment = reads.environment
        self._names_in_environment = reads.names_in_environment
        self._loggers = reads.loggers
        self._decimals = _decimals()
        self._scopes = list(reads.codes.items())
        self._called = [*_called(reads), *(held for found in reads.registered.values() for held in found)]
        self._attributes = list(_functions_of_modules(reads.codes))
        self._lists_subclasses = any("__subclasses__" in code.co_names for code in reads.codes)
        self._lineages = [(cls, self._lineage(cls)) for cls in reads.classes.values()]
        self._caches = [(c, fact(c)) for c in _caches(reads)]
        self._facts = facts_of(self._called, self._scopes)
        facts = (*self._facts, *(found for _, found in self._caches))
        self.unguarded = next((found for found in facts if isinstance(found, Unguarded)), None)
        """A fact that cannot be guarded, or None."""
        classes = [found for found in self._facts if isinstance(found, type)]
        self._classes = ClassFacts([*reads.classes.values(), *classes], reads.codes)

    def hold(self) -> bool:
        """Whether a trace would read the same values now."""
        return not self.changed()

    def changed(self) -> str:
        """Returns a description of the first difference; empty if there is none."""
        if not self._classes.hold():
            return self._classes.changed()
        for cls, lineage in self._lineages:
            if self._lineage(cls) != lineage:
                return f"{cls.__qualname__} has another name, other base classes, or other subclasses"
        for held, name, value in self._attributes:
            if held.get(name) is not value:
                return f"{held.get('__name__', 'a module')}.{name} was replaced by another function"
        for key, then in self._environment.items():
            if os.environ.get(key) != then:
                return f"the environment variable {key} has changed"
        if self._names_in_environment not in (None, list(os.environ)):
            return "there are other environment variables"
        for name, settings in self._loggers.items():
            if levels_of(logging.getLogger(name)) != settings:
                return f"the level of the logger {name!r} has changed"
        if _decimals() != self._decimals:
            return "the context of decimal has changed"
        for cache, then in self._caches:
            if fact(cache) != then:
                return f"the cache of {getattr(cache, '__name__', 'a function')} has a new entry, or was cleared"
        same = facts_of(self._called, self._scopes) == self._facts
        return "" if same else "a global variable, or its contents, have changed"

    def _lineage(self, cls: type) -> tuple[Any, ...]:
        subclasses = map(id, type.__subclasses__(cls)) if self._lists_subclasses else ()
        return cls.__name__, cls.__qualname__, cls.__mro__, *subclasses


def _decimals() -> tuple[Any, ...]:
    """Returns the settings of decimal arithmetic."""
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp


def _is_open(name: str) -> bool:
    """Whether a name is that of an attribute of a class that code may assign."""
    return not name.startswith(("__", "_abc_"))


def _has_state(fn: types.FunctionType) -> bool:
    return bool(fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)


def _called(reads: Reads) -> Iterator[Any]:
    """Yields the functions that ran, as far as classes and globals hold them, and instances of user descriptors."""
    found: dict[int, types.FunctionType] = {}
    for cls in reads.classes.values():
        for value in list(vars(cls).values()):
            if not isinstance(value, type) and is_user_class(type(value)):
                yield value
            for fn in functions_in(value):
                found[id(fn)] = fn
    for value in _globals(reads.codes):
        for fn in functions_in(value):
            found[id(fn)] = fn
    yield from (fn for fn in found.values() if fn.__code__ in reads.codes)


def _caches(reads: Reads) -> Iterator[Any]:
    """Yields the functions with a cache that code refers to. A cache hit makes no call, so its reads are not seen."""
    held = [*_globals(reads.codes), *(v for cls in reads.classes.values() for v in list(vars(cls).values()))]
    return (value for value in held if isinstance(value, functools._lru_cache_wrapper))
