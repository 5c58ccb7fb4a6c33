"""Attributes of classes that a captured function assigns, and reads again in another way than it wrote them.

Dynamo remembers an assigned attribute of a class until the end of the call. It finds the new value if the attribute is
read from the same class, but not if it is read through an instance or a subclass. Here it finds it there as well. Where
that would need Python's whole lookup (methods, special names, `super()`), the function is not captured.

Seen on torch 2.11 and 2.13: `SideEffects.store_attr`, `UserDefinedObjectVariable.var_getattr`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.misc import SuperVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

from fckpt._capture.absences import guard_absence
from fckpt._capture.patching import lookups_patched, patched

__all__ = ["class_writes_found"]


@contextlib.contextmanager
def class_writes_found() -> Iterator[None]:
    """Makes Dynamo find assigned attributes of classes through instances and subclasses, within the body."""
    written: set[str] = set()  # names, so that all other lookups cost nothing

    def storing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def store(effects: Any, item: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(item, UserDefinedClassVariable):
                if name.startswith("__") or _is_descriptor(value):
                    raise LookupError(f"the function assigns `{name}` to the class {item.value.__qualname__}")
                written.add(name)
            return original(effects, item, name, value, *args, **kwargs)

        return store

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(this: Any, tx: Any, name: str) -> Any:
            found = _assigned(this, tx.output.side_effects, name) if name in written else None
            return original(this, tx, name) if found is None else found

        return read

    def asking(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def ask(this: Any, tx: Any, name: str) -> Any:
            if name in written and inspect.getattr_static(getattr(this, "value", None), name, None) is None:
                raise LookupError(f"the function asks for the attribute `{name}`, which it assigns to a class")
            return original(this, tx, name)

        return ask

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(this: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            if name in written:
                raise LookupError(f"the function reads `super().{name}`, which it assigns to a class")
            return original(this, tx, name, *args, **kwargs)

        return call

    with (
        patched(SideEffects, "store_attr", storing),
        lookups_patched(reading, asking),
        patched(SuperVariable, "call_method", calling),
    ):
        yield


def _is_descriptor(value: Any) -> bool:
    try:
        return hasattr(value.python_type(), "__get__")
    except NotImplementedError:  # Dynamo does not know the type
        return True


def _assigned(this: Any, effects: Any, name: str) -> Any:
    """Returns what the function has assigned to a class, if a lookup through `this` finds that; otherwise None."""
    if isinstance(this, SuperVariable):
        raise LookupError(f"the function reads `super().{name}`, which it assigns to a class")
    value = getattr(this, "value", None)
    if isinstance(this, UserDefinedClassVariable):
        classes = (*this.value.__mro__, *type(this.value).__mro__)
    elif isinstance(this, UserDefinedObjectVariable):
        if effects.has_pending_mutation_of_attr(this, name) or name in getattr(value, "__dict__", ()):
            return None
        classes = type(value).__mro__
    else:
        return None
    for cls in classes:
        holder = effects.id_to_variable.get(id(cls))
        if holder is not None and effects.has_pending_mutation_of_attr(holder, name):
            if holder is this:
                return None
            if this.source and not isinstance(value, type) and hasattr(value, "__dict__"):
                guard_absence(this.source, name)
            return effects.load_attr(holder, name)
        if name in vars(cls):
            return None
    return None
