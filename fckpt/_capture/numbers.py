"""Integers that a function reads from other places than its arguments: constants until they change.

Sizes of tensors and integers in the arguments are symbols from the first capture on. Integers elsewhere are mostly
options (the number of heads, the width of a head). If each of them in each layer were a symbol, the capture of a
transformer would take ten times as long, nearly all of it for proofs about quotients of options. So they are constants
with a guard. If one of them changes (a counter of steps), it is a symbol from the next capture on. Dynamo does that for
what local variables lead to, and here it does so for what global variables lead to as well.

Seen on torch 2.11 and 2.13: `VariableBuilder.wrap_symint`, `is_int_specialization_case`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config
from torch._dynamo.source import is_from_defaults
from torch._dynamo.variables import builder
from torch._dynamo.variables.builder import VariableBuilder

from fckpt._capture.patching import patched
from fckpt._capture.wrapped import name_of

__all__ = ["options_constant"]

_PASSED = re.compile(r"L\['(?:args|kwargs)'\](?:\[[^\]]+\])*")


def _constant_at_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(this: Any, value: int, *args: Any, **kwargs: Any) -> Any:
        if _PASSED.fullmatch(name_of(this.source)):
            return original(this, value, *args, **kwargs)
        with config.patch(assume_static_by_default=True):
            return original(this, value, *args, **kwargs)

    return wrap


def _globals_like_locals(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_always_constant(value: Any, source: Any) -> bool:
        return original(value, source) if source.guard_source.is_local() else is_from_defaults(source)

    return is_always_constant


@contextmanager
def options_constant() -> Iterator[None]:
    """Makes Dynamo capture integers outside of the arguments as constants, unless they have changed."""
    with (
        patched(VariableBuilder, "wrap_symint", _constant_at_first),
        patched(builder, "is_int_specialization_case", _globals_like_locals),
    ):
        yield
