"""Exceptions that a captured function catches.

Dynamo raises errors with other texts than Python's: `KeyError` without its key, `OSError` without its subclass. Its
`str` of an exception is that of the first argument. A function that looks at the text or the arguments of an exception,
or keeps it, is traced by running its Python code. One that only catches it is captured. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables import BuiltinVariable, ExceptionVariable
from torch._dynamo.variables.user_defined import UserDefinedExceptionObjectVariable

from fckpt._capture.patching import patched

__all__ = ["exceptions_only_caught"]

_CLASSES = (ExceptionVariable, UserDefinedExceptionObjectVariable)
_KEEPING = ("repr_impl", "reconstruct")
_TEXTS = ("args", "__str__", "__repr__", "__format__", "__reduce__", "__dict__")


@contextlib.contextmanager
def exceptions_only_caught() -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, where the text of an exception or the exception itself is used."""
    with contextlib.ExitStack() as stack:
        for owner in _CLASSES:
            for name in _KEEPING:
                if name in vars(owner):
                    stack.enter_context(patched(owner, name, _refusing))
            for name in ("var_getattr", "call_method"):
                if name in vars(owner):
                    stack.enter_context(patched(owner, name, _refusing_texts))
        for name in ("call_str", "call_repr"):
            stack.enter_context(patched(BuiltinVariable, name, _of_exception))
        stack.enter_context(patched(ExceptionVariable, "__init__", _making))
        yield


def _refuse(exception: Any) -> None:
    name = exception.python_type().__name__
    raise LookupError(f"the function uses the text of a {name} that it caught, or keeps it")


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda this, *args, **kwargs: _refuse(this)


def _refusing_texts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(this: Any, tx: Any, name: str, *args: Any) -> Any:
        return _refuse(this) if name in _TEXTS else original(this, tx, name, *args)

    return read


def _of_exception(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def text(this: Any, tx: Any, value: Any) -> Any:
        return _refuse(value) if isinstance(value, _CLASSES) else original(this, tx, value)

    return text


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(this: Any, kind: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        original(this, kind, args, *rest, **kwargs)
        if kind is OSError and len(args) > 1:
            raise LookupError("the function makes an OSError with a number, which decides the error's class")

    return make
