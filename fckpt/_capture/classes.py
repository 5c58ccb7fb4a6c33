"""What code read of classes: methods and attributes in class dicts, global hooks.

Dynamo guards the class of an object, and not what lies in the class: after `Block.forward = other` or `Block.scale = 2`
on a subclass its guards still hold. So the classes that are guarded, and their bases, are looked at for the names that
occur in the code that was evaluated.
"""

from __future__ import annotations

import abc
import operator
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as nn_module

__all__ = ["ClassFacts", "classes_of", "patched_methods"]

_ABSENT = object()
_HOOKS = [value for name, value in vars(nn_module).items() if name.startswith("_global_") and isinstance(value, dict)]


class ClassFacts:
    """The entries of class dicts under the names that evaluated code mentions, as they were at the capture."""

    __slots__ = ("_abstract", "_dicts", "_hooks", "_names", "_sizes", "_values")

    def __init__(self, guarded: Iterable[type], codes: Iterable[types.CodeType]):
        names = _names_in(codes)
        classes: dict[int, type] = {id(torch.Tensor): torch.Tensor}  # whose methods are not guarded either
        for cls in guarded:
            classes.update((id(base), base) for base in cls.__mro__ if base is not object)
        mutable = [cls for cls in classes.values() if cls.__flags__ & _HEAPTYPE]
        self._dicts = [vars(cls) for cls in mutable for name in names if name in vars(cls)]
        self._names = [name for cls in mutable for name in names if name in vars(cls)]
        self._values = self._read()
        # Where a name is absent, only a new entry can bring it: then the dict grows.
        self._sizes = [(vars(cls), len(vars(cls))) for cls in mutable]
        self._hooks = [tuple(hooks.values()) for hooks in _HOOKS]
        # `ABC.register` changes what `isinstance` says of a class, and leaves no trace in it.
        self._abstract = abc.get_cache_token() if {"isinstance", "issubclass"}.intersection(names) else None

    def _read(self) -> list[Any]:
        return [held.get(name, _ABSENT) for held, name in zip(self._dicts, self._names, strict=True)]

    def hold(self) -> bool:
        """Whether all entries are the same objects still, and no class has a new one."""
        values = map(types.MappingProxyType.get, self._dicts, self._names)
        return (
            all(map(operator.is_, values, self._values))
            and all(len(held) == size for held, size in self._sizes)
            and all(tuple(hooks.values()) == then for hooks, then in zip(_HOOKS, self._hooks, strict=True))
            and self._abstract in (None, abc.get_cache_token())
        )

    def changed(self) -> str:
        """Says what differs; empty if nothing does."""
        pairs = zip(self._names, self._read(), self._values, strict=True)
        names = [name for name, now, then in pairs if now is not then]
        if names:
            return f"a class has another {names[0]!r}"
        if any(len(held) != size for held, size in self._sizes):
            return "a class has gained or lost an attribute"
        if self._abstract not in (None, abc.get_cache_token()):
            return "a class was registered with an abstract one"
        return "" if self.hold() else "global module hooks have changed"


_METHODS = dict(vars(torch.Tensor))


def patched_methods(codes: Iterable[types.CodeType]) -> list[str]:
    """Returns the methods of tensors that code names and somebody has replaced: Dynamo takes them for torch's own."""
    known = [name for name in _names_in(codes) if name in _METHODS or hasattr(torch._C.TensorBase, name)]
    return [name for name in known if vars(torch.Tensor).get(name, _ABSENT) is not _METHODS.get(name, _ABSENT)]


_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by Python code, and its dict can change


def classes_of(guard: Any) -> list[type]:
    """The classes that one of Dynamo's guards is about."""
    found = []
    for attribute in ("guarded_class_weakref", "obj_weakref"):
        reference = getattr(guard, attribute, None)
        value = reference() if callable(reference) else None
        if isinstance(value, type):
            found.append(value)
        elif attribute == "obj_weakref" and value is not None and not isinstance(value, types.ModuleType):
            found.append(type(value))
    return found


def _names_in(codes: Iterable[types.CodeType]) -> list[str]:
    names: set[str] = set()
    todo = list(codes)
    while todo:
        code = todo.pop()
        names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, str) and constant.isidentifier():
                names.add(constant)
            elif isinstance(constant, types.CodeType):
                todo.append(constant)
    names |= {"forward", "__call__", "__getattr__", "__getattribute__", "__init__", "__new__"}
    return sorted(names)
