"""Classes that decide themselves what their instances are: metaclasses with `__instancecheck__`, and protocols.

Dynamo answers `isinstance` and `issubclass` from the bases of classes. It does not evaluate the methods of a metaclass,
and has no guards on what they read. A function that asks such a class is traced by running its Python code. Seen on
torch 2.11 and 2.13.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables.builtin import BuiltinVariable

from fckpt._capture.patching import patched

__all__ = ["instance_checks_followed"]

_KNOWN = [vars(meta)[name] for meta in (type, abc.ABCMeta) for name in ("__instancecheck__", "__subclasscheck__")]


@contextlib.contextmanager
def instance_checks_followed() -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, where a class decides itself what its instances are."""

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(this: Any, tx: Any, left: Any, right: Any) -> Any:
            for cls in _classes(right.as_python_constant()):
                if _decides(cls):
                    raise LookupError(f"the class {cls.__qualname__} decides itself what its instances are")
            return original(this, tx, left, right)

        return call

    names = ("call_isinstance", "call_issubclass")
    with patched(BuiltinVariable, names[0], checked), patched(BuiltinVariable, names[1], checked):
        yield


def _classes(given: Any) -> Iterator[type]:
    """Yields the classes of the second argument of `isinstance`."""
    parts = typing.get_args(given) if isinstance(given, types.UnionType) else given
    for part in parts if isinstance(parts, tuple) else (parts,):
        if isinstance(part, (tuple, types.UnionType)):
            yield from _classes(part)
        elif isinstance(part, type):
            yield part


def _decides(cls: type) -> bool:
    meta = type(cls)
    if meta.__module__.partition(".")[0] == "torch":
        return False
    found = (getattr(meta, name) for name in ("__instancecheck__", "__subclasscheck__"))
    return any(method not in _KNOWN for method in found)
