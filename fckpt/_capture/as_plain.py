"""What code is told when it asks, during a capture, whether it is being compiled.

Libraries ask `torch.compiler.is_compiling()` before they look at the data of tensors (transformers leaves out a mask of
ones if it is not compiled), and also before they use Python features that Dynamo does not support. A plan must do what
the plain function does, so such code is told that it is not compiled. If the capture then fails, the place that asked
last gets the other answer. A method that uses a `ContextVar` if it is not compiled gets the other answer at once,
because Dynamo cannot call a `ContextVar`, and half a capture would be made in vain.

Only installed libraries get the other answer: they compute the same either way. The user's own code may compute
something else, so it is always told that it is not compiled; if it then cannot be captured, it is traced by running it,
or refused. That includes code to which a library passes the answer on. So a place gets the other answer only if the
capture fails within the same call of a library, and no function of the user runs between that call and the failure. The
code of torch and of fckpt, which asks in order to be captured, is always told that it is compiled, with two exceptions:
`nn.MultiheadAttention` and `nn.TransformerEncoder`, whose fast paths in evaluation mode round differently, and return
zeros where the input is padding.

Seen on torch 2.11 and 2.13: `TorchInGraphFunctionVariable._get_handlers`.
"""

from __future__ import annotations

import contextlib
import functools
import sysconfig
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
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
_TRACED = torch.nn.modules.activation._is_make_fx_tracing
"""`nn.MultiheadAttention` asks this, and `True` keeps it from its fast path."""
_STREAMS = (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing)
"""Functions that Dynamo cannot call. Each is false unless a device graph is being recorded, in which no branch on data
can be captured (`branches.py`).
"""


_MOST_CONCESSIONS = 16
"""The most places that get the other answer."""
_Place = tuple[tuple[str, int | None], ...]
"""A file and line that ask, then the files and lines of the calls that lead there."""


class Answers:
    """The answers that code gets during the captures of one call."""

    def __init__(self) -> None:
        self._conceded: set[_Place] = set()
        """The places that are told that they are compiled."""
        self._asked: list[tuple[list[Any], _Place]] = []
        """For each question of a library in the last capture: the frames, the innermost first, and their place then."""
        self._failure: tuple[BaseException | None, list[Any]] = None, []
        """The error that ended the last capture, and the frames in which it occurred, the innermost first."""

    @property
    def exceptions(self) -> tuple[str, ...]:
        """The lines of libraries that are told that they are compiled, because a capture failed without."""
        return tuple(sorted({f"{file}:{line}" for *_, (file, line) in self._conceded}))

    def concede(self) -> bool:
        """After a capture that failed, changes the answer at the last place where that may make a difference.

        Returns:
            Whether an answer has changed, so that another capture may succeed.
        """
        asked, failed = self._asked, self._failure[1]
        self._asked, self._failure = [], (None, [])
        if len(self._conceded) < _MOST_CONCESSIONS:
            for frames, lines in reversed(asked):
                place = lines[: _shared(frames, failed)]
                if place and place not in self._conceded:
                    self._conceded.add(place)
                    return True
        return False

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Makes Dynamo give these answers within the body."""
        handlers = TorchInGraphFunctionVariable._get_handlers()
        before = {question: handlers[question] for question in _QUESTIONS if question in handlers}
        handlers.update({question: self._answering(handler) for question, handler in before.items()})
        if _TRACED in handlers:
            before[_TRACED], handlers[_TRACED] = handlers[_TRACED], lambda *_, **__: ConstantVariable.create(False)
        self._asked, self._failure = [], (None, [])
        try:
            with (
                patched(TorchInGraphFunctionVariable, "call_function", _knowing_streams),
                patched(SkipFunctionVariable, "call_function", _knowing_streams),
                patched(InstructionTranslatorBase, "run", self._noting_failures),
            ):
                yield
        finally:
            handlers.update(before)
            self._failure = None, self._failure[1]  # an error refers to the frames that raised it, and so to itself

    def _answering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def answer(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_on_fast_path(tx):
                return ConstantVariable.create(False)
            if _package(tx) in ("torch", "fckpt"):
                return original(variable, tx, *args, **kwargs)
            if not _is_of_library(tx):
                return ConstantVariable.create(False)
            frames = _outwards(tx)
            place = tuple([(frame.f_code.co_filename, frame.lineno) for frame in frames])
            self._asked.append((frames, place))
            conceded = any(place[: len(known)] == known for known in self._conceded)
            compiled = conceded or any(map(_uses_context_variable, _of_asking_file(frames)))
            return original(variable, tx, *args, **kwargs) if compiled else ConstantVariable.create(False)

        return answer

    def _noting_failures(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tx: Any) -> None:
            try:
                original(tx)
            except BaseException as error:
                if not _is_from(error, self._failure[0]):  # not an error of an inner frame
                    self._failure = error, _outwards(tx)
                raise

        return run


def _is_from(error: BaseException | None, other: BaseException | None) -> bool:
    """Whether an error is `other`, or was raised while `other` was handled."""
    while error is not None and error is not other:
        error = error.__cause__ or error.__context__
    return error is not None


def _knowing_streams(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if any(variable.value is question for question in _STREAMS):
            return ConstantVariable.create(False)
        return original(variable, tx, *args, **kwargs)

    return call


def _outwards(tx: Any) -> list[Any]:
    """Returns a frame and the frames that called it, the innermost first."""
    found = [tx]
    while tx.parent is not None:
        tx = tx.parent
        found.append(tx)
    return found


def _shared(asking: list[Any], failed: list[Any]) -> int:
    """Returns the number of frames from a question to the innermost frame in which a failure occurred as well.

    Returns:
        The number; 0 if a function of the user may have decided by the answer. That is so if no such frame exists, or
        if that frame, or any frame that it called on the way to the question or to the failure, runs the user's code.
    """
    for depth, tx in enumerate(asking):
        if not _is_of_library(tx):
            return 0
        inside = next((i for i, other in enumerate(failed) if other is tx), None)
        if inside is not None:
            return depth + 1 if all(map(_is_of_library, failed[:inside])) else 0
    return 0


_INSTALLED = ("site-packages", "dist-packages")


def _is_of_library(tx: Any) -> bool:
    """Whether a frame runs code that is installed, or belongs to Python, torch or fckpt."""
    path = tx.f_code.co_filename
    return _package(tx) in ("torch", "fckpt") or _is_installed(path)


@functools.lru_cache(1024)
def _is_installed(path: str) -> bool:
    file = Path(path)
    return not {*_INSTALLED}.isdisjoint(file.parts) or file.is_relative_to(sysconfig.get_path("stdlib"))


def _package(tx: Any) -> str:
    return str(tx.f_globals.get("__name__", "")).partition(".")[0]


def _of_asking_file(frames: list[Any]) -> Iterator[Any]:
    """Yields the frames of libraries that lead to a question, up to the first outside of the file that asks.

    Libraries have helper functions that ask.
    """
    for tx in frames:
        if not _is_of_library(tx):
            return
        yield tx
        if tx.f_code.co_filename != frames[0].f_code.co_filename:
            return


def _uses_context_variable(tx: Any) -> bool:
    """Whether the frame is of a method that calls a `ContextVar` held by its object."""
    names = tx.f_code.co_names
    if not {"get", "set", "reset"}.intersection(names):
        return False
    value = _value(tx.symbolic_locals.get("self"))
    held = getattr(value, "__dict__", {})
    return any(isinstance(held.get(name), ContextVar) for name in names)


def _is_on_fast_path(tx: Any) -> bool:
    """Whether a frame runs an `nn.TransformerEncoder` that may turn its input into a nested tensor.

    The encoder does so only if no parameter requires grad or grad mode is off, and then looks at the data of the mask,
    unless it is compiled.
    """
    if tx.f_code is not torch.nn.TransformerEncoder.forward.__code__:
        return False
    module = _value(tx.symbolic_locals.get("self"))
    layers = module.layers[:1] if isinstance(module, torch.nn.TransformerEncoder) else ()
    return not torch.is_grad_enabled() or not any(p.requires_grad for layer in layers for p in layer.parameters())


def _value(variable: Any) -> Any:
    """Returns the object that a variable of Dynamo stands for; None if it is not known."""
    if isinstance(variable, LazyVariableTracker):
        return variable.peek_value()
    return getattr(variable, "value", None)
