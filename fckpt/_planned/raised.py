"""Errors that the user's function raises while it is traced. A plain call then raises them, with all it does before."""

from __future__ import annotations

import contextlib
import dis
import signal
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from fckpt._trace.results import Results
from fckpt._trace.stand_ins import WAY_OUT
from fckpt.errors import FckptError, TraceError

__all__ = ["RaisedError", "errors_marked"]


class RaisedError(FckptError):
    """The function's Python code raised an error while it was traced. What it did before has been undone."""

    def __init__(self, error: BaseException):
        super().__init__(str(error))
        self.error = error
        code = Results.differentiate.__code__
        self.in_backward = any(found.tb_frame.f_code is code for found in _tracebacks(error))
        """Whether the backward pass raised it: the forward pass had returned."""
        self.is_urgent = not isinstance(error, Exception)
        """Whether it must not be lost, because it may have come from outside after all."""

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    def only_here(self) -> NoReturn:
        """Raises a `TraceError`: the function has raised no error in a plain call. An urgent error is raised itself."""
        if self.is_urgent:
            raise self.error
        raise TraceError(
            f"the function raises an error while it is traced, although not in a plain call. {WAY_OUT} The error "
            f"is {self}"
        ) from self.error


@contextlib.contextmanager
def errors_marked(refusals: dict[Any, str]) -> Iterator[None]:
    """Turns an error of the function that the body traces into a `RaisedError`.

    An error that comes from outside (Ctrl-C) is raised as it is: the call has then done nothing.

    Args:
        refusals: why the function cannot be captured. It is cleared: the next call may raise no error, and be captured.
    """
    try:
        yield
    except (FckptError, Warning):  # a warning that the user has made an error
        raise
    except BaseException as error:
        refusals.clear()
        if _is_from_outside(error):
            raise
        raise RaisedError(error) from error


def _is_from_outside(error: BaseException) -> bool:
    """Whether a signal raised an error, and not the program.

    Python's own handler raises `KeyboardInterrupt` between two instructions, where the program needs a `raise`.
    """
    tracebacks = _tracebacks(error)
    if isinstance(error, KeyboardInterrupt) and not (tracebacks and _is_at_raise(tracebacks[-1])):
        return True
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    return any(found.tb_frame.f_code in handlers for found in tracebacks)


def _tracebacks(error: BaseException) -> list[types.TracebackType]:
    found, last = [], error.__traceback__
    while last is not None:
        found.append(last)
        last = last.tb_next
    return found


def _is_at_raise(found: types.TracebackType) -> bool:
    instruction = found.tb_frame.f_code.co_code[found.tb_lasti]
    return dis.opname[instruction] == "RAISE_VARARGS"
