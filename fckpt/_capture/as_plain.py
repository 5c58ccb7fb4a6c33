"""What code is told when it asks, during a capture, whether it is being compiled.

Libraries ask `torch.compiler.is_compiling()` before they look at the data of tensors (transformers leaves out a mask of
ones if it is not compiled), and also before they use Python features that Dynamo does not support. A plan must do what
the plain function does, so such code is told that it is not compiled. If the capture then fails, the place that asked
last gets the other answer. A method that uses a `ContextVar` if it is not compiled gets the other answer at once,
because Dynamo cannot call a `ContextVar`, and half a capture would be made in vain.

Only installed libraries get the other answer: they compute the same either way. The user's own code may compute
something else, so it is always told that it is not compiled; if it then cannot be captured, it is traced by running it,
or refused. The code of torch and of fckpt, which asks in order to be captured, is always told that it is compiled.

Seen on torch 2.11 and 2.13: `TorchInGraphFunctionVariable._get_handlers`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from fckpt._capture.patching import patched

__all__ = ["Answers"]

_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._dynamo.external_utils.is_compiling,
    torch._utils.is_compiling,
)
_STREAMS = (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing)
"""Functions that Dynamo cannot call. Each is false unless a device graph is being recorded, in which no branch on data
can be captured (`branches.py`).
"""


_MOST_CONCESSIONS = 8
"""The most places that get the other answer before all of them do."""
_Place = tuple[tuple[str, int | None], ...]


class Answers:
    """The answers that code gets during the captures of one call."""

    def __init__(self) -> None:
        self._conceded: set[_Place] = set()
        """The places that are told that they are compiled."""
        self._all = False
        self._last: _Place | None = None

    def concede(self) -> bool:
        """After a capture that failed, changes the answer at the place that asked last.

        Returns:
            Whether any answer has changed, so that another capture may succeed.
        """
        if self._last is None or self._all:
            return False
        self._all = self._last in self._conceded or len(self._conceded) >= _MOST_CONCESSIONS
        self._conceded.add(self._last)
        return True

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Makes Dynamo give these answers within the body."""
        handlers = TorchInGraphFunctionVariable._get_handlers()
        before = {question: handlers[question] for question in _QUESTIONS if question in handlers}
        handlers.update({question: self._answering(handler) for question, handler in before.items()})
        self._last = None
        try:
            with (
                patched(TorchInGraphFunctionVariable, "call_function", _knowing_streams),
                patched(SkipFunctionVariable, "call_function", _knowing_streams),
            ):
                yield
        finally:
            handlers.update(before)

    def _answering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def answer(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if str(tx.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "fckpt"):
                return original(variable, tx, *args, **kwargs)
            asking = _asking(tx)
            if not _is_of_library(asking):
                return ConstantVariable.create(False)
            self._last = tuple((tx.f_code.co_filename, tx.lineno) for tx in asking)
            compiled = self._all or self._last in self._conceded or any(map(_uses_context_variable, asking))
            return original(variable, tx, *args, **kwargs) if compiled else ConstantVariable.create(False)

        return answer


def _knowing_streams(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if any(variable.value is question for question in _STREAMS):
            return ConstantVariable.create(False)
        return original(variable, tx, *args, **kwargs)

    return call


def _asking(tx: Any) -> list[Any]:
    """Returns the frames that lead to a question, up to the first outside of the file that asks.

    Libraries have helper functions that ask.
    """
    found = [tx]
    while tx.parent is not None and found[-1].f_code.co_filename == found[0].f_code.co_filename:
        tx = tx.parent
        found.append(tx)
    return found


def _is_of_library(asking: list[Any]) -> bool:
    """Whether the code that decides by the answer is installed. Functions named `is_...` only pass the answer on."""
    deciding = next((tx for tx in asking if not tx.f_code.co_name.startswith("is_")), asking[-1])
    return "-packages" in deciding.f_code.co_filename


def _uses_context_variable(tx: Any) -> bool:
    """Whether the frame is of a method that calls a `ContextVar` held by its object."""
    names = tx.f_code.co_names
    if not {"get", "set", "reset"}.intersection(names):
        return False
    value = _value(tx.symbolic_locals.get("self"))
    held = getattr(value, "__dict__", {})
    return any(isinstance(held.get(name), ContextVar) for name in names)


def _value(variable: Any) -> Any:
    """Returns the object that a variable of Dynamo stands for; None if it is not known."""
    if isinstance(variable, LazyVariableTracker):
        return variable.peek_value()
    return getattr(variable, "value", None)
