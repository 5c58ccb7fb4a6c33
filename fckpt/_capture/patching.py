"""Replaces methods of Dynamo's classes for the time of a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["patched"]


@contextlib.contextmanager
def patched(owner: type, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Puts `wrapped(method)` in the place of a method that a class itself defines, for the body."""
    method = vars(owner)[name]
    setattr(owner, name, wrapped(method))
    try:
        yield
    finally:
        setattr(owner, name, method)
