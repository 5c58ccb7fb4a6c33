"""Integers that a function reads from other places than its arguments: constants until they change.

Sizes of tensors and integers in the arguments are symbols from the first capture on. Integers elsewhere are mostly
options (the number of heads, the width of a head). If each of them in each layer were a symbol, the capture of a
transformer would take ten times as long, nearly all of it for proofs about quotients of options. So they are constants
with a guard. If one of them changes (a counter of steps), it is a symbol from the next capture on.

Seen on torch 2.11 and 2.13: `VariableBuilder.wrap_symint`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config
from torch._dynamo.variables.builder import VariableBuilder

from fckpt._capture.patching import patched
from fckpt._capture.wrapped import name_of

__all__ = ["options_constant"]

_PASSED = re.compile(r"L\['(?:args|kwargs)'\](?:\[[^\]]+\])*")


def _constant_at_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(builder: Any, value: int, *args: Any, **kwargs: Any) -> Any:
        if _PASSED.fullmatch(name_of(builder.source)):
            return original(builder, value, *args, **kwargs)
        with config.patch(assume_static_by_default=True):
            return original(builder, value, *args, **kwargs)

    return wrap


@contextmanager
def options_constant() -> Iterator[None]:
    """Makes Dynamo capture integers outside of the arguments as constants, unless they have changed."""
    with patched(VariableBuilder, "wrap_symint", _constant_at_first):
        yield
