"""Temporary replacement of parts of Dynamo during a capture: methods of its classes, and handlers of instructions."""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import BuiltinVariable
from torch._dynamo.variables.base import VariableTracker

__all__ = ["builtins_patched", "instructions_patched", "lookups_patched", "patched", "with_subclasses"]

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def patched(owner: Any, name: str, wrapped: Wrapper) -> Iterator[None]:
    """Replaces a function, which the class or module `owner` itself must define, by `wrapped` of it within the body."""
    method = vars(owner)[name]
    setattr(owner, name, wrapped(method))
    try:
        yield
    finally:
        setattr(owner, name, method)


@contextlib.contextmanager
def lookups_patched(reading: Wrapper, asking: Wrapper) -> Iterator[None]:
    """Wraps, within the body, how Dynamo reads attributes (`var_getattr`) and how it asks for them (`hasattr`)."""
    with contextlib.ExitStack() as stack:
        for cls in with_subclasses((VariableTracker,)):
            for name, wrapped in (("var_getattr", reading), ("call_obj_hasattr", asking)):
                if name in vars(cls):
                    stack.enter_context(patched(cls, name, wrapped))
        yield


@contextlib.contextmanager
def instructions_patched(wrapped: Mapping[str, Wrapper]) -> Iterator[None]:
    """Wraps, within the body, how Dynamo evaluates the bytecode instructions with these names."""
    with contextlib.ExitStack() as stack:
        for owner in with_subclasses((InstructionTranslatorBase,)):
            table = owner.dispatch_table
            stack.callback(operator.setitem, table, slice(None), list(table))
            for name, wrap in wrapped.items():
                table[dis.opmap[name]] = wrap(table[dis.opmap[name]])
        yield


@contextlib.contextmanager
def builtins_patched(wrapped: Mapping[Callable[..., Any], Wrapper]) -> Iterator[None]:
    """Wraps, within the body, how Dynamo evaluates calls of these built-in functions."""
    wrappers = {id(fn): wrap for fn, wrap in wrapped.items()}

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_function(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            wrap = wrappers.get(id(this.fn))
            call = original if wrap is None else wrap(original)
            return call(this, tx, args, kwargs)

        return call_function

    with patched(BuiltinVariable, "call_function", calling):
        yield


@functools.cache
def with_subclasses(owners: tuple[type, ...]) -> list[Any]:
    """Returns classes, and all classes that inherit from them."""
    found = list(owners)
    for cls in found:  # grows meanwhile
        found += [sub for sub in cls.__subclasses__() if sub not in found]
    return found
