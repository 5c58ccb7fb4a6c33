"""Guards for keys and attributes that a captured function looked up and did not find.

Dynamo guards `key in mapping`, `mapping.get(key)` and `hasattr`. It does not guard the two lookups in which an
exception reports the absence: `mapping[key]` raising `KeyError` (`os.environ.get` and `ChainMap` depend on it), and
`thing.name` raising `AttributeError`. Without the guards added here, Dynamo's guards would still hold after the key or
the attribute has appeared. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.misc import PythonModuleVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from fckpt._capture.patching import patched

__all__ = ["absences_guarded"]

_SUBSCRIPT = "getitem_const_raise_exception_if_absent"


def _guarded_subscript(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def subscript(self: Any, tx: Any, key: Any) -> Any:
        if key not in self:
            self.install_dict_contains_guard(tx, [key])
        return original(self, tx, key)

    return subscript


def _guarded_attribute(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        try:
            return original(self, tx, name)
        except ObservedAttributeError:
            if self.source:
                install_guard(_absence(self.source, name))
            raise

    return var_getattr


def _absence(source: Any, name: str) -> Any:
    """Returns a guard that the object at `source` has no attribute called `name`."""
    if "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
        return source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name))
    return AttrSource(source, name).make_guard(GuardBuilder.HASATTR)  # torch 2.11


@contextlib.contextmanager
def absences_guarded() -> Iterator[None]:
    """Makes Dynamo guard absent keys and attributes within the body."""
    with (
        patched(ConstDictVariable, _SUBSCRIPT, _guarded_subscript),
        patched(UserDefinedObjectVariable, "var_getattr", _guarded_attribute),
        patched(PythonModuleVariable, "var_getattr", _guarded_attribute),
    ):
        yield
