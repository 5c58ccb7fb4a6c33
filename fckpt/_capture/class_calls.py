"""Calls of classes that do more than to make an object.

Dynamo makes an object of a class by `__new__` and `__init__`, and does not look for a `__call__` of the metaclass. It
looks up a member of an enumeration while it captures the call, also if a method of the user (`_missing_`) answers for a
value that no member has. A function that calls such a class is traced by running its Python code.

Seen on torch 2.11 and 2.13: `UserDefinedClassVariable.call_function`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from fckpt._capture.patching import patched

__all__ = ["class_calls_followed"]

_MISSING = vars(enum.Enum)["_missing_"].__func__


@contextlib.contextmanager
def class_calls_followed() -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, where calling a class does something that Dynamo does not know."""

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            cls = this.value
            method = inspect.getattr_static(type(cls), "__call__", None)
            if isinstance(cls, enum.EnumMeta):
                if cls._missing_.__func__ is not _MISSING and not _is_member(cls, args):
                    raise LookupError(f"a method of {cls.__qualname__} looks for the member with a value")
            elif isinstance(method, types.FunctionType) and not method.__module__.startswith("torch."):
                raise LookupError(f"the metaclass of {cls.__qualname__} decides itself what a call does")
            return original(this, tx, args, kwargs)

        return call

    with patched(UserDefinedClassVariable, "call_function", calling):
        yield


def _is_member(cls: Any, args: Any) -> bool:
    try:
        return len(args) == 1 and args[0].as_python_constant() in cls._value2member_map_
    except (NotImplementedError, TypeError):  # no constant, or a value without a hash
        return False
