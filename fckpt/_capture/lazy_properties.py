"""The lazy properties of `torch.distributions`, for which Dynamo makes guards that never hold.

Dynamo reads such a property through the class, which gives another object than the entry of the class. `ClassFacts`
compares the entries of classes. Seen on torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any

from fckpt._capture.wrapped import name_of, reader

__all__ = ["drop_lazy_properties"]


def drop_lazy_properties(guards: Any, scope: dict[str, Any], places: dict[str, Any]) -> None:
    """Drops Dynamo's guards on the lazy properties of `torch.distributions`, which never hold.

    Args:
        guards: the guards of a capture.
        scope: see `reader`.
        places: the arguments of the entry.
    """
    names = _names()

    def is_lazy(source: Any) -> bool:
        if getattr(source, "member", None) not in names:
            return False
        with contextlib.suppress(AttributeError, LookupError):
            (holder,) = reader([name_of(source.base)], scope)(places)
            return isinstance(holder, type) and _is_lazy(inspect.getattr_static(holder, source.member))
        return False

    def reads_lazy(source: Any) -> bool:
        while source is not None and not is_lazy(source):
            source = getattr(source, "base", None)
        return source is not None

    for guard in list(guards) if names else ():
        create = guard.create_fn
        compared = [*create.args, *create.keywords.values()] if isinstance(create, functools.partial) else []
        if any(map(reads_lazy, [guard.originating_source, *compared])):
            guards.inner.discard(guard)


def _names() -> set[str]:
    """Returns the names of the lazy properties of all classes of distributions."""
    module = sys.modules.get("torch.distributions.distribution")
    todo: list[type] = [] if module is None else [module.Distribution]
    names: set[str] = set()
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        names |= {name for name, value in vars(kind).items() if _is_lazy(value)}
    return names


def _is_lazy(value: Any) -> bool:
    return (type(value).__module__, type(value).__name__) == ("torch.distributions.utils", "lazy_property")
