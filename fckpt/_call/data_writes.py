"""Writes through `.data` by the function itself, which no version of a tensor shows.

A momentum encoder is often updated so: `q.data.mul_(m).add_(p.data, alpha=1 - m)`. A recompute would update it again.
Watching every operation of a forward takes time, so a forward is watched only if the code that it may reach names an
attribute `data`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fckpt._call.closure import global_names
from fckpt._call.facts import attribute, is_library
from fckpt._call.levels import version
from fckpt._call.modules import storage_of
from fckpt._call.places import content
from fckpt.errors import MutationError, region_name

__all__ = ["DataWrites", "names_data", "written_tensors"]

_Classes = tuple[frozenset[type], ...]
_MOST = 1000  # functions that are looked at
_known: dict[tuple[types.CodeType | None, _Classes], bool] = {}


def names_data(fn: Callable[..., Any], classes: _Classes) -> bool:
    """Whether the code of a function, or code that it may reach, names an attribute `data`.

    Args:
        fn: the function.
        classes: the classes of the modules and of the objects that it uses.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    key = getattr(getattr(fn, "__func__", fn), "__code__", None), classes
    if key not in _known:
        while len(_known) >= _MOST:
            _known.pop(next(iter(_known)), None)
        _known[key] = _names_data(fn, classes)
    return _known[key]


def _names_data(fn: Callable[..., Any], classes: _Classes) -> bool:
    users = [c for kind in frozenset().union(*classes) for c in kind.__mro__ if not is_library(c.__module__)]
    methods: dict[str, list[types.FunctionType]] = {}
    for c in dict.fromkeys(users):
        for name, value in vars(c).items():
            for found in _functions(value):
                methods.setdefault(name, []).append(found)
    todo = [*_functions(fn), *methods.get("forward", ()), *methods.get("__call__", ())]
    seen: set[types.CodeType] = set()
    while todo and len(seen) < _MOST:
        reached = todo.pop()
        if reached.__code__ in seen or is_library(reached.__module__ or ""):
            continue
        seen.add(reached.__code__)
        names = global_names(reached.__code__)
        if "data" in names:
            return True
        for name in names:
            todo += [*methods.get(name, ()), *_functions(reached.__globals__.get(name))]
        held = [content(cell, None) for cell in reached.__closure__ or ()]
        todo += [function for value in held for function in _functions(value)]
    return False


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yields the Python functions of a function, a method, a partial or a property. Other objects are not asked."""
    while isinstance(value, _WRAPPERS):
        value = next((held for name in _WRAPPED if (held := getattr(value, name, None)) is not None), None)
    if isinstance(value, property):
        value = value.fget
    if type(value) is types.FunctionType:
        yield value
        yield from _functions(vars(value).get("__wrapped__"))


_WRAPPERS = (
    types.MethodType, staticmethod, classmethod, functools.partial, functools.partialmethod, functools.cached_property,
    functools._lru_cache_wrapper,
)  # fmt: skip
_WRAPPED = ("__func__", "func", "__wrapped__")


def written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an operation changes in place, according to its schema."""
    schema = attribute(func, "_schema")  # operators of higher order have none
    found: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [t for t in values if isinstance(t, torch.Tensor)]
    return found


class DataWrites(TorchDispatchMode):
    """Raises `MutationError` if one of these tensors is written or replaced without a change of its version."""

    supports_higher_order_operators = True

    def __init__(self, fn: Any, tensors: Iterable[tuple[str, torch.Tensor]]):
        super().__init__()
        self.fn = fn
        self.tensors = [(name, tensor, storage) for name, tensor in tensors if (storage := storage_of(tensor))]
        self.by_storage = {storage: (name, tensor) for name, tensor, storage in self.tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        storages = map(storage_of, written_tensors(func, args, kwargs))
        written = [self.by_storage[storage] for storage in storages if storage in self.by_storage]
        before = [version(tensor) for _, tensor in written]
        result = func(*args, **kwargs)
        for (name, tensor), then in zip(written, before, strict=True):
            if version(tensor) == then:
                raise self._error(name, tensor)
        return result

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if error is None:
            for name, tensor, storage in self.tensors:
                if storage_of(tensor) != storage:  # `tensor.data = ...`
                    raise self._error(name, tensor)

    def _error(self, name: str, tensor: torch.Tensor) -> MutationError:
        what = f"the parameter `{name}`" if name else "a captured tensor"
        return MutationError(
            f"{region_name(self.fn)} changed {what} (shape {list(tensor.shape)}, {tensor.dtype}) through `.data`: its "
            "recompute would change it again. Change it outside, or register the tensor as a buffer of a module."
        )
