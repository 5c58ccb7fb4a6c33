"""Guards that Dynamo omits: on built-in names, on the sign of zero, and on environment variables read through `os`.

* Python looks up a built-in name in the globals first, where a later assignment (`max = my_max`) hides the built-in.
* 0.0 equals -0.0, but the two can give different results; (1.0, 0.0) equals (True, False), and {1} equals {1.0}.
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
from torch._dynamo.guards import DictGuardManager, GuardBuilder, GuardManagerType, get_key_index_source
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from fckpt._call.facts import is_library
from fckpt._capture.patching import patched
from fckpt._capture.twins import exactly, is_constant
from fckpt._capture.wrapped import name_of

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
    """Whether a different value may compare equal to this one: -0.0 to 0.0, or (True, 0.0) to (1.0, 0.0)."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(isinstance(v, (int, float, complex)) or _may_equal_another(v) for v in value)
    return isinstance(value, (float, complex)) and 0.0 in (value.real, value.imag)


def _guarding_sign(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def match(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        original(self, guard, *args, **kwargs)
        value, manager = self.get(guard), self.get_guard_manager(guard)
        if isinstance(manager, DictGuardManager):  # each key of an ordered dict has a guard
            if original.__name__ != "DICT_KEYS_MATCH":
                return
            for index, key in enumerate(dict.keys(value)):
                place = get_key_index_source(name_of(guard.originating_source), index)
                if _may_equal_another((key,)):
                    kind = GuardManagerType.GUARD_MANAGER
                    of_key = manager.get_key_manager(
                        index=index, source=place, example_value=key, guard_manager_enum=kind
                    )
                    _add(of_key, key, guard)
            return
        if isinstance(value, (set, frozenset)) or original.__name__ == "DICT_KEYS_MATCH":
            value = _constants(value)
        elif original.__name__ != "EQUALS_MATCH":  # a list's length: each item has a guard
            return
        if _may_equal_another(value) and not (_are_ints(value) and _is_option(self, guard.originating_source)):
            _add(manager, value, guard)

    return match


def _add(manager: Any, value: Any, guard: Any) -> None:
    """Adds a guard that a value, or the keys of a dict, are exactly these."""
    then = exactly(value)
    # An immutable value is recognised by identity, which is fast; lists and sets may have changed.
    known = value if isinstance(value, (tuple, frozenset)) else None
    form = lambda now: exactly(_constants(now) if isinstance(now, (dict, set, frozenset)) else now)
    same = lambda now: (now is known and known is not None) or form(now) == then
    parts = [f"the signs and kinds of the numbers in {value!r}"]
    try:
        manager.add_lambda_guard(same, parts, guard.user_stack)
    except TypeError:  # torch 2.11
        manager.add_lambda_guard(same, parts)


def _constants(held: Any) -> frozenset[Any]:
    """Returns the constants among the items of a set, or the keys of a dict."""
    return frozenset(filter(is_constant, dict.keys(held) if isinstance(held, dict) else held))


def _are_ints(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(type(item) is int for item in value)


def _is_option(guards: Any, source: Any) -> bool:
    """Whether a place is an attribute of one of torch's own modules. A model has hundreds of strides, sizes etc."""
    base = getattr(source, "base", None)
    return base is not None and type(guards.get(base)).__module__.startswith("torch.nn.")


_COMPARING = ("EQUALS_MATCH", "DICT_KEYS_MATCH", "SEQUENCE_LENGTH")
"""Guards that compare by value."""


def _without_os(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda module: module is not os and original(module)


@contextlib.contextmanager
def shadows_guarded() -> Iterator[BuiltinNames]:
    """Makes Dynamo guard the sign of zero and `os` within the body; yields the built-in names that code looks up."""
    names = BuiltinNames()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(InstructionTranslatorBase, "load_builtin_from_argval", _noting(names)))
        stack.enter_context(patched(symbolic_convert, "is_stdlib", _without_os))
        for name in _COMPARING:
            if name in vars(GuardBuilder):
                stack.enter_context(patched(GuardBuilder, name, _guarding_sign))
        yield names
