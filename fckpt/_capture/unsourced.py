"""Guards for functions and classes of which Dynamo does not guard what it reads.

Dynamo does not know how to find the methods of objects that the captured function makes. It takes the defaults of such
a method, and the variables that the method closes over, for constants without a guard, and forgets what is written to
them. Here such a function gets a global name, which refers to the function weakly. Defaults and variables are then
found, guarded and written as those of any other function. That the class still has the same method is checked by
`classes.py`.

Dynamo also does not guard which class it finds through a variable that a function closes over. All variables of a
region's function are of that kind. It has no guard at all for methods of built-in types (`torch.Tensor.exp`), compares
by value what may be equal and yet differ (`Decimal("1.5")` and `Decimal("1.50")`), and of a function that
`torch.no_grad()` or the like decorates it does not guard which context manager that is.

Seen on torch 2.11 and 2.13: `UserFunctionVariable.bind_args`, `is_from_closure_source`, `VariableBuilder._wrap`.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import itertools
import re
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, GlobalWeakRefSource
from torch._dynamo.variables import builder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch.utils._contextlib import _DecoratorContextManager

from fckpt._capture.patching import lookups_patched, patched
from fckpt._capture.sources import TORCH, is_users

__all__ = ["functions_named", "unsourced_guarded"]

_PREFIX = "__fckpt_function"
_numbers = itertools.count()
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The global name of each function that got one. No two functions ever have the same name."""


@contextlib.contextmanager
def unsourced_guarded(folded: set[str]) -> Iterator[None]:
    """Makes Dynamo guard, within the body, what functions without a known place read, and classes in closures.

    Args:
        folded: receives the names of attributes that Dynamo reads without a guard.
    """

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(this: Any, tx: Any, name: str) -> Any:
            found = original(this, tx, name)
            if found.source is None or isinstance(found, GetAttrVariable):
                folded.add(name)
            return found

        return read

    with (
        lookups_patched(noting, lambda original: original),
        patched(UserFunctionVariable, "bind_args", _binding_with_source),
        patched(builder, "is_from_closure_source", lambda _: lambda source: False),
        patched(VariableBuilder, "_wrap", _wrapping),
    ):
        yield


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(this: Any, value: Any) -> Any:
        found = original(this, value)
        if isinstance(value, _BY_IDENTITY):
            install_guard(this.source.make_guard(GuardBuilder.ID_MATCH))
        elif type(value) is types.MethodType and isinstance(value.__self__, _DecoratorContextManager):
            install_guard(AttrSource(this.source, "__self__").make_guard(GuardBuilder.ID_MATCH))
        return found

    return wrap


_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_BY_IDENTITY = (*_IN_C, decimal.Decimal, datetime.datetime, datetime.time)
"""Types of values of which Dynamo has no guard, or compares them by value although equal ones may differ."""


def functions_named(text: str) -> str:
    """Replaces the global names of functions, and of entries of caches, by the functions' names, in an expression of
    Dynamo.
    """
    return re.sub(r"G\['__fckpt_(?:function|cached)_\d+_(\w+)'\]\(\)", r"\1", text)


def _binding_with_source(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bind_args(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if this.get_source() is not None or not _reads(this.fn):
            return original(this, tx, *args, **kwargs)
        held = {name: getattr(this, name) for name in ("source", "source_fn") if hasattr(this, name)}
        this.source = _source(tx, this.fn)
        if isinstance(this, UserMethodVariable):
            this.source_fn = this.source
        try:
            return original(this, tx, *args, **kwargs)
        finally:
            for name, value in held.items():
                setattr(this, name, value)

    return bind_args


def _reads(fn: Any) -> bool:
    """Whether a function has defaults or closed-over variables that may change."""
    if not isinstance(fn, types.FunctionType):
        return False
    file = fn.__code__.co_filename
    if fn.__closure__:
        return not file.startswith(TORCH + "_dynamo")
    return bool(fn.__defaults__ or fn.__kwdefaults__) and is_users(file)


def _source(tx: Any, fn: types.FunctionType) -> GlobalWeakRefSource:
    """Returns the source of a function by its global name, with a guard that the function has not been deleted."""
    scope = tx.output.global_scope
    name = _names.get(fn)
    if name is None:
        shown = fn.__name__ if fn.__name__.isidentifier() else "function"
        name = _names[fn] = f"{_PREFIX}_{next(_numbers)}_{shown}"
    if name not in scope:
        for other in [key for key, ref in scope.items() if key.startswith(_PREFIX) and ref() is None]:
            del scope[other]
        scope[name] = weakref.ref(fn)
    source = GlobalWeakRefSource(name)
    install_guard(source.make_guard(GuardBuilder.WEAKREF_ALIVE))
    return source
