"""Guards for what Dynamo takes for granted: built-in names, the sign of zero, and what Python's `os` remembers.

A built-in name is looked up in the globals first, and the globals may get one of that name (`max = my_max`). 0.0 equals
-0.0, and another number comes of it. Globals of Python's own modules are not guarded at all, and `os.getenv` reads the
environment by one. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from fckpt._call.facts import is_library
from fckpt._capture.patching import patched

__all__ = ["BuiltinNames", "shadows_guarded"]


class BuiltinNames:
    """Names that code found among the built-in ones, because its globals had none of that name."""

    __slots__ = ("_scopes",)

    def __init__(self) -> None:
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}

    def note(self, scope: dict[str, Any], name: str) -> None:
        """Notes that a name was looked up; nobody gives the modules of a library other built-in names."""
        if not is_library(str(scope.get("__name__", ""))):
            self._scopes.setdefault(id(scope), (scope, set()))[1].add(name)

    def hold(self) -> bool:
        """Whether the globals have no such names still."""
        return all(scope.keys().isdisjoint(names) for scope, names in self._scopes.values())

    def changed(self) -> str:
        """Says which name the globals have by now; empty if there is none."""
        found = [name for scope, names in self._scopes.values() for name in sorted(names) if name in scope]
        return f"a global {found[0]!r} stands before the built-in one" if found else ""


def _noting(names: BuiltinNames) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(self: Any, name: str) -> Any:
            names.note(self.f_globals, name)
            return original(self, name)

        return load

    return wrapped


def _is_zero(value: Any) -> bool:
    return isinstance(value, (float, complex)) and 0.0 in (value.real, value.imag)


def _signs(value: Any) -> tuple[float, float]:
    return math.copysign(1.0, value.real), math.copysign(1.0, value.imag)


def _guarding_sign(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def match(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        original(self, guard, *args, **kwargs)
        value = self.get(guard)
        if _is_zero(value):
            then = _signs(value)
            add, same = self.get_guard_manager(guard).add_lambda_guard, lambda now: _signs(now) == then
            parts = [f"the sign of a zero, which was {value}"]
            try:
                add(same, parts, guard.user_stack)
            except TypeError:  # torch 2.11
                add(same, parts)

    return match


def _without_os(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda module: module is not os and original(module)


@contextlib.contextmanager
def shadows_guarded() -> Iterator[BuiltinNames]:
    """Lets Dynamo guard, for the body, the sign of zero and the environment; yields the built-in names it looks up."""
    names = BuiltinNames()
    with (
        patched(InstructionTranslatorBase, "load_builtin_from_argval", _noting(names)),
        patched(GuardBuilder, "EQUALS_MATCH", _guarding_sign),
        patched(symbolic_convert, "is_stdlib", _without_os),
    ):
        yield names
