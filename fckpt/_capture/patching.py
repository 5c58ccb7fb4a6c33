"""Temporary replacement of methods of Dynamo's classes during a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["patched"]


@contextlib.contextmanager
def patched(owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a function, which the class or module `owner` itself must define, by `wrapped` of it within the body."""
    method = vars(owner)[name]
    setattr(owner, name, wrapped(method))
    try:
        yield
    finally:
        setattr(owner, name, method)
