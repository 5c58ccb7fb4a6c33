"""Guards that Dynamo omits: on built-in names, on the sign of zero, and on environment variables read through `os`.

* Python looks up a built-in name in the globals first, where a later assignment (`max = my_max`) hides the built-in.
* 0.0 equals -0.0, but the two can give different results; (1.0, 0.0) equals (True, False).
* Dynamo does not guard the globals of Python's own modules, and `os.getenv` reads the environment through one of them.

Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from fckpt._call.facts import is_library
from fckpt._capture.patching import patched
from fckpt._capture.twins import exactly

__all__ = ["BuiltinNames", "shadows_guarded"]


class BuiltinNames:
    """The built-in names that code looked up, by the globals of the code, which did not contain them."""

    __slots__ = ("_scopes",)

    def __init__(self) -> None:
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}

    def note(self, scope: dict[str, Any], name: str) -> None:
        """Notes the lookup of a name. Lookups by libraries are not noted, because their globals do not change."""
        if not is_library(str(scope.get("__name__", ""))):
            self._scopes.setdefault(id(scope), (scope, set()))[1].add(name)

    def hold(self) -> bool:
        """Whether the globals still do not contain the names."""
        return all(scope.keys().isdisjoint(names) for scope, names in self._scopes.values())

    def changed(self) -> str:
        """Returns a description of the first name that the globals contain now; empty if there is none."""
        found = [name for scope, names in self._scopes.values() for name in sorted(names) if name in scope]
        return f"a global variable hides the built-in {found[0]!r}" if found else ""


def _noting(names: BuiltinNames) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(self: Any, name: str) -> Any:
            names.note(self.f_globals, name)
            return original(self, name)

        return load

    return wrapped


def _may_equal_another(value: Any) -> bool:
    """Whether a different value may compare equal to this one: -0.0 to 0.0, or (True, 0.0) to (1.0, 0.0).

    Containers of ints only, which are mostly strides and sizes, get no further guard, because there are hundreds.
    """
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(isinstance(v, (bool, float, complex)) or _may_equal_another(v) for v in value)
    return isinstance(value, (float, complex)) and 0.0 in (value.real, value.imag)


def _guarding_sign(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def match(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        original(self, guard, *args, **kwargs)
        value = self.get(guard)
        if _may_equal_another(value):
            then = exactly(value)
            # An immutable value is recognised by identity, which is fast; lists and sets may have changed.
            known = value if isinstance(value, (tuple, frozenset)) else None
            same = lambda now: (now is known and known is not None) or exactly(now) == then
            add = self.get_guard_manager(guard).add_lambda_guard
            parts = [f"the signs and kinds of the numbers in {value!r}"]
            try:
                add(same, parts, guard.user_stack)
            except TypeError:  # torch 2.11
                add(same, parts)

    return match


def _without_os(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda module: module is not os and original(module)


@contextlib.contextmanager
def shadows_guarded() -> Iterator[BuiltinNames]:
    """Makes Dynamo guard the sign of zero and `os` within the body; yields the built-in names that code looks up."""
    names = BuiltinNames()
    with (
        patched(InstructionTranslatorBase, "load_builtin_from_argval", _noting(names)),
        patched(GuardBuilder, "EQUALS_MATCH", _guarding_sign),
        patched(symbolic_convert, "is_stdlib", _without_os),
    ):
        yield names
