"""Facts about values, apart from the tensors in them: hashable, so that a guard can compare a value at two times."""

from __future__ import annotations

import abc
import collections
import contextvars
import copyreg
import decimal
import enum
import functools
import io
import logging
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from fckpt._call.caches import is_cache, is_packaged, results_in
from fckpt._call.places import ARRAYS, PLAIN
from fckpt._tree import STRUCTURE

__all__ = [
    "LARGE",
    "SCRIPT",
    "VIEWS",
    "Unguarded",
    "attribute",
    "fact",
    "is_library",
    "is_small",
    "is_user_class",
    "levels_of",
    "see_caches",
]

LARGE = 1000
"""The most entries of a container that counts as state; a larger container is data."""
SCRIPT = "TorchScript, which has its own derivative formulas"


class Unguarded:
    """A value about which no fact tells whether a plan made with it is still valid."""

    __slots__ = ("what",)

    def __init__(self, what: str):
        self.what = what


_COMPARED = (torch.dtype, torch.device, torch.Size, type, Fraction, STRUCTURE)
"""Types of immutable values that compare by contents, and of which equal ones are alike."""


_WRITTEN = (torch.memory_format, torch.layout, torch.qscheme, torch.finfo, torch.iinfo)
"""Types of immutable values whose text says all."""


def fact(value: Any) -> Any:
    """Returns a hashable fact about a value, without the tensors in it; equal for values that a function treats alike.

    `Unguarded` if no fact about the value is sufficient.
    """
    kind = type(value)
    if kind in PLAIN:
        return (kind, repr(value)) if kind in (float, complex) else (kind, value)  # repr, so that NaN equals itself
    if kind is types.FunctionType:
        return value.__code__
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    if issubclass(kind, _COMPARED):  # `isinstance` would ask the object, which may answer anything
        return (kind, value)
    if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return Unguarded(SCRIPT)
    if issubclass(kind, decimal.Decimal):  # 1.5 equals 1.50
        return (kind, *decimal.Decimal.as_tuple(value))
    if issubclass(kind, _WRITTEN) or hasattr(kind, "__members__"):  # the latter are enums of C++
        return (kind, str(value))
    if kind in (types.CodeType, types.ModuleType):
        return (kind, id(value))
    if kind in (slice, range):
        return (kind, fact(value.start), fact(value.stop), fact(value.step))
    if isinstance(value, (list, tuple, dict, set, frozenset, collections.deque)):
        return _fact_of_container(value, kind)
    if isinstance(value, (torch.Generator, types.BuiltinFunctionType)):
        return (kind, id(value))
    if is_cache(value):
        if not is_packaged(value) and (held := next(filter(_is_changeable, results_in(value)), None)) is not None:
            return Unguarded(f"a {type(held).__name__} that the cache of {attribute(value, '__name__')} holds")
        return (kind, *_entries_of(value))
    if isinstance(value, contextvars.ContextVar):
        return (kind, fact(value.get(None)))
    if issubclass(kind, (Iterator, io.IOBase)) and not is_user_class(kind):
        return Unguarded(f"a {kind.__name__}, which changes when it is read")
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if isinstance(value, np.ndarray):
        if value.dtype == object or value.nbytes > _BYTES:
            return Unguarded(f"a NumPy array of {value.nbytes} bytes")
        return (kind, value.shape, str(value.dtype), value.tobytes())
    for base in (int, float, complex, str, bytes):
        if isinstance(value, base):  # an instance of a user's subclass
            return (kind, _converted(value, base))
    if isinstance(value, types.MappingProxyType):
        return _fact_of_container(dict(value), kind)
    if isinstance(value, BaseException):
        return (kind, fact(value.args))
    if isinstance(value, logging.Logger):
        return (kind, value.name, *levels_of(value))
    if "ctypes" in sys.modules and isinstance(value, sys.modules["ctypes"]._SimpleCData.__base__):
        return Unguarded(f"a {kind.__name__} of ctypes, whose memory anything may change")
    if kind is memoryview:
        return (kind, value.tobytes()) if value.nbytes <= _BYTES else Unguarded(f"a memoryview of {value.nbytes} bytes")
    return _fact_of_pythons(value, kind)


def _entries_of(cache: Any) -> tuple[int, int]:
    """Returns how often a cache was seen to have been cleared, and how many entries it has been given since."""
    now = cache.cache_info()
    cleared, hits, misses = _SEEN.get(cache, (0, 0, 0))
    if now.hits < hits or now.misses < misses:
        cleared += 1
    _SEEN[cache] = cleared, now.hits, now.misses
    return cleared, now.misses


def _is_changeable(value: Any) -> bool:
    """Whether something may be changed that a walk through the closure does not reach. A tensor is found when it is
    used.
    """
    if isinstance(value, _CHANGEABLE):
        return True
    parameters = getattr(type(value), "__dataclass_params__", None)
    frozen = isinstance(value, (enum.Enum, torch.Tensor)) or getattr(parameters, "frozen", False)
    return is_user_class(type(value)) and not frozen


_CHANGEABLE = (list, dict, set, collections.deque, bytearray, np.ndarray, types.SimpleNamespace)


def see_caches() -> None:
    """Notes that calls have been made to functions with a cache, so that a later clearing is noticed."""
    for cache in list(_SEEN):
        _entries_of(cache)


_SEEN: weakref.WeakKeyDictionary[Any, tuple[int, int, int]] = weakref.WeakKeyDictionary()
"""By function with a cache: how often the cache was cleared, and its hits and misses when it was last seen."""


def _fact_of_pythons(value: Any, kind: type) -> Any:
    """Returns a fact about an object: its class, and the data that pickle would write if the object's state is in C.

    This covers all data of `datetime`, `Path`, `re.Pattern`, `bytearray` and similar types. An object that cannot be
    pickled is a lock or the like, or has contents that cannot be compared (a database, a queue, a mapped file). The
    walk through the closure reads the contents of a `__dict__`.
    """
    if kind.__module__.partition(".")[0] not in sys.stdlib_module_names or type(attribute(value, "__dict__")) is dict:
        return kind
    if isinstance(value, ARRAYS) and not is_small(value):
        return Unguarded(f"a {kind.__name__} of {len(value)} entries")
    try:
        reduce = copyreg.dispatch_table.get(kind)
        parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:
        return kind if issubclass(kind, _STATELESS) else Unguarded(f"a {kind.__name__}, whose contents are hidden")
    return (kind, *map(_fact_within, parts)) if isinstance(parts, tuple) else kind


_DICTS: tuple[Any, ...] = ({}, collections.OrderedDict())
VIEWS = tuple(type(view) for held in _DICTS for view in (held.keys(), held.values(), held.items()))
"""Types of views on a dict, whose contents the walk through the closure reads."""
_STATELESS = (
    type(threading.Lock()), type(threading.RLock()), types.ModuleType, types.CodeType, types.FrameType,
    types.TracebackType, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.MethodDescriptorType, types.ClassMethodDescriptorType, types.CellType,
    types.BuiltinFunctionType, types.MethodType, property, classmethod, staticmethod, weakref.ref,
    functools.cached_property, threading.local, contextvars.Token, contextvars.Context,
    type(vars(abc.ABC)["_abc_impl"]), *VIEWS,
)  # fmt: skip
"""Types of Python that have no contents, or whose contents are read elsewhere."""


def levels_of(logger: logging.Logger) -> tuple[Any, ...]:
    """Returns the settings on which it depends whether a logger is enabled."""
    return logger.level, logger.getEffectiveLevel(), logger.manager.disable, logger.disabled


def _fact_within(value: Any) -> Any:
    """Returns the fact about the data that pickle would write, and about the contents of its containers."""
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_fact_within, value))
    if isinstance(value, dict):
        return (dict, *[(_fact_within(k), _fact_within(v)) for k, v in value.items()])
    return fact(value)


def _converted(value: Any, base: Any) -> Any:
    """Returns the plain number or string of an instance of a subclass."""
    plain = base(value)
    return repr(plain) if base in (float, complex) else plain


def _fact_of_container(value: Any, kind: type) -> Any:
    if len(value) > LARGE:
        return Unguarded(f"a {kind.__name__} of {len(value)} entries")
    if isinstance(value, tuple):
        return (kind, tuple(map(fact, value)))
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(map(fact, value)))
    if isinstance(value, dict) and all(type(k) in PLAIN for k in value):
        return (kind, tuple(map(fact, value)))
    return (kind, len(value))


_BYTES = 1 << 16


def is_small(value: Any) -> bool:
    """Whether an array is small and holds no objects."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= _BYTES and not value.dtype.hasobject
    return len(value) * getattr(value, "itemsize", 1) <= _BYTES


def is_user_class(kind: type) -> bool:
    """Whether a class belongs neither to Python nor to torch or another library."""
    return not is_library(getattr(kind, "__module__", None) or "")


def is_library(module: str) -> bool:
    """Whether a module is part of Python, of torch or of another dependency of fckpt."""
    return module.partition(".")[0] in _LIBRARIES


_DEPENDENCIES = ("torch", "numpy", "optree", "fckpt", "sympy", "mpmath")
_LIBRARIES = frozenset({*sys.stdlib_module_names, *_DEPENDENCIES}) - {"__main__"}


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """Returns an attribute of any object, or the default."""
    try:
        return getattr(value, name, default)
    except Exception:  # for example a lazy proxy that cannot be resolved
        return default
