"""Temporary replacement of methods of Dynamo's classes during a capture."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables.base import VariableTracker

__all__ = ["lookups_patched", "patched"]

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def patched(owner: Any, name: str, wrapped: Wrapper) -> Iterator[None]:
    """Replaces a function, which the class or module `owner` itself must define, by `wrapped` of it within the body."""
    method = vars(owner)[name]
    setattr(owner, name, wrapped(method))
    try:
        yield
    finally:
        setattr(owner, name, method)


@contextlib.contextmanager
def lookups_patched(reading: Wrapper, asking: Wrapper) -> Iterator[None]:
    """Wraps, within the body, how Dynamo reads attributes (`var_getattr`) and how it asks for them (`hasattr`)."""
    with contextlib.ExitStack() as stack:
        for cls in _variables():
            for name, wrapped in (("var_getattr", reading), ("call_obj_hasattr", asking)):
                if name in vars(cls):
                    stack.enter_context(patched(cls, name, wrapped))
        yield


@functools.cache
def _variables() -> list[type]:
    """Returns the classes by which Dynamo represents values."""
    found: list[type] = [VariableTracker]
    for cls in found:  # grows meanwhile
        found += [sub for sub in cls.__subclasses__() if sub not in found]
    return found
