"""Errors that the user's function raises while it is traced. A plain call then raises them, with all it does before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from fckpt._trace.stand_ins import WAY_OUT
from fckpt.errors import FckptError, TraceError

__all__ = ["RaisedError", "errors_marked"]


class RaisedError(Exception):
    """The function's Python code raised an error while it was traced. What it did before has been undone."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error

    def only_here(self) -> NoReturn:
        """Raises a `TraceError`: the function has raised no error in a plain call."""
        raise TraceError(
            f"the function raises an error while it is traced, although not in a plain call. {WAY_OUT} The error "
            f"is {type(self.error).__name__}: {self.error}"
        ) from self.error


@contextlib.contextmanager
def errors_marked(refusals: dict[Any, str]) -> Iterator[None]:
    """Turns an error of the function that the body traces into a `RaisedError`.

    Args:
        refusals: why the function cannot be captured. It is cleared: the next call may raise no error, and be captured.
    """
    try:
        yield
    except (FckptError, Warning):  # a warning that the user has made an error
        raise
    except Exception as error:
        refusals.clear()
        raise RaisedError(error) from error
