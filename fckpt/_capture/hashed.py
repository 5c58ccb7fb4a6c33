"""Objects in sets, and keys of dicts, of classes with their own `__eq__` or `__hash__`.

Dynamo takes two objects of users' classes for equal, in a set or as keys of a dict, if they are one object. Only frozen
dataclasses are compared by their fields. A function that uses a set or a dict with objects that have their own equality
is traced by running its Python code. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.variables import dicts
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.user_defined import FrozenDataClassVariable, UserDefinedObjectVariable

from fckpt._capture.patching import patched

__all__ = ["hashes_compared"]

_HASHED: Any = getattr(dicts, "HashableTracker", None) or dicts.ConstDictVariable._HashableTracker
"""Dynamo's class for items of sets and keys of dicts; the second is of torch 2.11."""


@contextlib.contextmanager
def hashes_compared() -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, at a set or a dict with objects that have their own equality."""

    def wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrap(this: Any, variable: Any) -> None:
            _check(variable)
            original(this, variable)

        return wrap

    with patched(_HASHED, "__init__", wrapping):
        yield


def _check(variable: Any) -> None:
    """Raises `LookupError` for an object with its own equality, or a tuple of such objects."""
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            return _check_value(variable.original_value())
        variable = variable.realize()
    if isinstance(variable, UserDefinedObjectVariable):
        _check_class(type(variable.value))
    for item in variable.items if isinstance(variable, BaseListVariable) else _fields(variable):
        _check(item)


def _check_value(value: Any) -> None:
    _check_class(type(value))
    for item in value if isinstance(value, (tuple, frozenset)) else ():
        _check_value(item)


def _check_class(cls: type) -> None:
    is_named = issubclass(cls, tuple) and cls not in (tuple, torch.Size)  # Dynamo does not find it for the equal tuple
    if is_named or _has_equality(cls):
        raise LookupError(
            f"an object of {cls.__qualname__}, which has its own equality, is in a set or a key of a dict"
        )


def _fields(variable: Any) -> list[Any]:
    """Returns the fields of a frozen dataclass; none of another object."""
    if type(variable) is not FrozenDataClassVariable:
        return []
    known: Any = getattr(variable, "fields", None)
    if known is not None:  # torch 2.11
        return list(known.values())
    fields: Any = dataclasses.fields
    return [variable._get_field_vt(field.name) for field in fields(variable.value)]


def _has_equality(cls: type) -> bool:
    """Whether a class defines `__eq__` or `__hash__` in Python, and Dynamo does not know these methods."""
    methods = [getattr(cls, name) for name in ("__eq__", "__hash__")]
    own = [method for method in methods if isinstance(method, types.FunctionType)]
    if all(method.__module__ == "enum" or method.__module__.startswith("torch.") for method in own):
        return False
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen or any(m.__code__.co_filename != "<string>" for m in own):
        return True
    return not (parameters.eq and all(f.compare and f.hash is not False for f in dataclasses.fields(cls)))
