"""Generators that a function leaves before their end: Python then runs their `finally` clauses, and Dynamo does not.

A function that leaves one which has such a clause, or a `with` statement, is not captured. Nor is a function that
returns or keeps a generator or an iterator of a list, in whose place Dynamo would put another kind of iterator. Seen on
torch 2.11 and 2.13: `LocalGeneratorObjectVariable`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.iter import FilterVariable, MapVariable, ZipVariable
from torch._dynamo.variables.lists import ListIteratorVariable

from fckpt._capture.patching import patched

__all__ = ["unfinished_generators_refused"]

_CAUGHT = {"BaseException", "GeneratorExit"}
"""What an `except` clause must name to run when a generator is left."""


@contextlib.contextmanager
def unfinished_generators_refused() -> Iterator[None]:
    """Raises a `LookupError` after the body if Dynamo has left a generator that would clean up."""
    started: list[Any] = []

    def making(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            started.append(this)

        return make

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(LocalGeneratorObjectVariable, "__init__", making))
        within: list[Any] = []
        for owner in (ZipVariable, MapVariable, FilterVariable):
            if "reconstruct" in vars(owner):
                stack.enter_context(patched(owner, "reconstruct", functools.partial(_holding, within)))
        for owner in (LocalGeneratorObjectVariable, ListIteratorVariable):
            stack.enter_context(patched(owner, "reconstruct", functools.partial(_refusing, within)))
        yield
    for generator in started:
        if generator._is_generator_exhausted() or generator._is_generator_just_started():
            continue
        if _cleans_up(generator.code):
            raise LookupError(f"the function leaves the generator {generator.code.co_name} before its end")


def _holding(within: list[Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the method that makes a `zip` or a `map`: nobody sees which iterators these hold."""

    @functools.wraps(original)
    def reconstruct(this: Any, *args: Any, **kwargs: Any) -> Any:
        within.append(this)
        try:
            return original(this, *args, **kwargs)
        finally:
            within.pop()

    return reconstruct


def _refusing(within: list[Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reconstruct(this: Any, *args: Any, **kwargs: Any) -> Any:
        if not within:
            raise LookupError("the function returns or keeps an iterator")
        return original(this, *args, **kwargs)

    return reconstruct


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
