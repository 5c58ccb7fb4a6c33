"""Generators that a function leaves before their end: Python then runs their `finally` clauses, and Dynamo does not.

A function that leaves one which has such a clause, or a `with` statement, is not captured. Seen on torch 2.11 and 2.13:
`LocalGeneratorObjectVariable`.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.variables.functions import LocalGeneratorObjectVariable

from fckpt._capture.patching import patched

__all__ = ["unfinished_generators_refused"]

_CLEANING = {"PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH", "BEFORE_WITH", "LOAD_SPECIAL"}
"""Instructions, by version of Python, of functions with `finally`, `except` or `with`."""


@contextmanager
def unfinished_generators_refused() -> Iterator[None]:
    """Raises a `LookupError` after the body if Dynamo has left a generator that would clean up."""
    started: list[Any] = []

    def making(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            started.append(this)

        return make

    with patched(LocalGeneratorObjectVariable, "__init__", making):
        yield
    for generator in started:
        if generator._is_generator_exhausted() or generator._is_generator_just_started():
            continue
        if any(instruction.opname in _CLEANING for instruction in dis.get_instructions(generator.code)):
            raise LookupError(f"the function leaves the generator {generator.code.co_name} before its end")
