"""Warnings about functions that `torch.compile` gives up, so that they run without the budget."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import Unsupported

from fckpt.errors import BudgetWarning

__all__ = ["watch"]


def watch() -> None:
    """Warns from now on if Dynamo compiles no part of a function that has a budget: the backend is not called then."""
    known = callback_handler.end_callbacks
    if not isinstance(known, _Callbacks):
        callback_handler.end_callbacks = _Callbacks([*known, _warn])


class _Callbacks(list[Callable[[Any], None]]):
    """The functions that Dynamo calls at the end of each compilation.

    `torch._dynamo.reset()` clears the list. The warnings of fckpt remain in it.
    """

    def clear(self) -> None:
        self[:] = [_warn]


def _warn(_: Any) -> None:
    """Warns if the compilation that ends has failed. Dynamo says nothing, and runs the function without a compiler."""
    error = sys.exc_info()[1]
    if not isinstance(error, Unsupported):
        return
    frame = _compiling(sys._getframe())
    if frame is None:
        return
    known = frame.f_locals
    if known.get("one_graph") or not _has_budget(known.get("compiler_fn")):
        return
    code: CodeType = known["code"]
    reason = str(error).partition("\n")[0]
    warnings.warn(
        f"torch.compile gives up {code.co_qualname} at {code.co_filename}:{code.co_firstlineno}, which runs without a "
        f"compiler and without the budget: {reason}. fullgraph=True shows the line and what to do. Without "
        "torch.compile, fckpt.remat keeps the budget.",
        BudgetWarning,
        stacklevel=2,
    )


def _compiling(frame: FrameType | None) -> FrameType | None:
    """Returns the frame in which Dynamo compiles a function; None if this version of torch has no such frame."""
    while frame is not None and frame.f_code.co_name != "_compile":
        frame = frame.f_back
    return frame


def _has_budget(backend: Any) -> bool:
    options = getattr(backend, "kwargs", {}).get("options") or {}
    return getattr(backend, "compiler_name", "") == "fckpt" and options.get("budget") is not None
