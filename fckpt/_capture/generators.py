"""Generators that a function leaves before their end: Python then runs their `finally` clauses, and Dynamo does not.

A function that leaves one which has such a clause, or a `with` statement, is not captured. Seen on torch 2.11 and 2.13:
`LocalGeneratorObjectVariable`.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.variables.functions import LocalGeneratorObjectVariable

from fckpt._capture.patching import patched

__all__ = ["unfinished_generators_refused"]

_CAUGHT = {"BaseException", "GeneratorExit"}
"""What an `except` clause must name to run when a generator is left."""


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
        if _cleans_up(generator.code):
            raise LookupError(f"the function leaves the generator {generator.code.co_name} before its end")


def _cleans_up(code: types.CodeType) -> bool:
    """Whether a generator does something when it is left: all handlers but `except` clauses for other errors."""
    instructions = list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        if instruction.opname == "CHECK_EXC_MATCH" and instructions[i - 1].argval in _CAUGHT:
            return True
        if instruction.opname == "PUSH_EXC_INFO":  # the start of a handler
            following = (found.opname for found in instructions[i + 1 :])
            first = next(name for name in following if not name.startswith(("LOAD_", "BUILD_TUPLE")))
            if first != "CHECK_EXC_MATCH":
                return True
    return False
