"""Comparison of two modules, object by object: whether one has everything that the other has, in the same places.

The blocks of a network are made by the same code, and most of them differ only in the values of their parameters and in
a few numbers and names, such as their own index. Code that reads none of these numbers and names runs in the same way
with one block or another: see `repeated_blocks.py`.
"""

from __future__ import annotations

import enum
import functools
import math
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import nn

from fckpt._call.places import PLAIN

__all__ = ["Twins", "exactly", "is_constant", "is_plain", "layout"]


def exactly(value: Any) -> Any:
    """Returns a form of the value with the types and signs of its numbers, so that 0.0 and -0.0 differ."""
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(exactly, value))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(exactly, value))
    if isinstance(value, (float, complex)):
        return type(value), math.copysign(1.0, value.real), math.copysign(1.0, value.imag), repr(value)
    return type(value), value


def is_constant(value: Any) -> bool:
    """Whether a value is a number, a string or the like, or a tuple of such values."""
    if type(value) in (tuple, torch.Size):
        return all(map(is_constant, value))
    return type(value) in PLAIN or isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format))


def is_plain(value: Any) -> bool:
    """Whether Dynamo sees whatever code reads of a value: each attribute of an object, by itself.

    It does not see what code takes from containers and iterators that it has seen before. Containers that hold only
    constants and code are plain too.
    """
    if is_constant(value) or isinstance(value, (*_CODE, torch.Tensor, nn.Module, enum.Enum)):
        return True
    if isinstance(value, (dict, list, set, frozenset, tuple, deque, types.MappingProxyType)):
        items = [*value.items()] if isinstance(value, (dict, types.MappingProxyType)) else [(v, None) for v in value]
        return len(items) <= _MOST and all(is_constant(v) or isinstance(v, _CODE) for pair in items for v in pair)
    if not hasattr(value, "__dict__") or hasattr(type(value), "__next__"):
        return False
    return not hasattr(type(value), "__iter__") or all(map(is_plain, vars(value).values()))


_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_MOST = 1000
"""The most items of a container that are looked at."""


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns all that code can learn of a tensor but its data, its identity and its name."""
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tuple(map(_size, tensor.shape)),
        tuple(map(_size, tensor.stride())) if tensor.layout is torch.strided else None,
        _size(tensor.storage_offset()) if tensor.layout is torch.strided else None,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._is_view(),
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def _size(value: Any) -> Any:
    """Returns an int, or the expression of a symbolic one, in a form that can be compared without a guard."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


class Twins:
    """The correspondence of two objects and of all that they refer to, as far as it goes.

    Numbers and strings may differ: whoever uses the correspondence must compare those that matter.
    """

    def __init__(self, first: Any, second: Any):
        self._partners: dict[int, Any] = {}
        """By id of an object that the first one refers to: what the second one has in its place."""
        self._origins: dict[int, Any] = {}
        """By id of an object that the second one refers to: what the first one has in its place."""
        self._alive: list[Any] = []
        self.own: set[int] = set()
        """The ids of all objects to which only one of the two refers, or to which they refer in different places."""
        try:
            self.alike = self._match(first, second)
        except (RecursionError, ValueError):  # a long chain of objects; an empty cell
            self.alike = False
        """Whether the objects correspond."""

    def correspond(self, first: Any, second: Any) -> bool:
        """Whether two values found in the same place are equal constants or corresponding objects."""
        if is_constant(first) or is_constant(second):
            return exactly(first) == exactly(second)
        return self._match(first, second)

    def partner(self, number: int) -> Any:
        """Returns the object that corresponds to one of the first one's, given by its id; None if there is none."""
        return self._partners.get(number)

    def concern(self, value: Any) -> bool:
        """Whether a value belongs to one of the objects, and not to both in the same place."""
        return id(value) in self.own

    def _match(self, first: Any, second: Any) -> bool:
        if type(first) is not type(second):
            return False
        if is_constant(first):
            return True
        if id(first) in self._partners or id(second) in self._origins:
            return self._partners.get(id(first)) is second and self._origins.get(id(second)) is first
        self._alive += [first, second]  # so that no other object gets the id of one that was compared
        self._partners[id(first)], self._origins[id(second)] = second, first
        if first is second:
            return True
        self.own |= {id(first), id(second)}
        return self._match_contents(first, second)

    def _match_contents(self, first: Any, second: Any) -> bool:
        kind = type(first)
        if isinstance(first, torch.Tensor):
            ordinary = _is_ordinary(first) and _is_ordinary(second)
            return ordinary and layout(first) == layout(second) and self._match(vars(first), vars(second))
        if kind in (dict, OrderedDict, defaultdict):
            pairs = zip(first.items(), second.items(), strict=True)
            factories = getattr(first, "default_factory", None) is getattr(second, "default_factory", None)
            return factories and len(first) == len(second) and all(self._match_items(*pair) for pair in pairs)
        if kind in (list, tuple):
            return len(first) == len(second) and all(map(self._match, first, second))
        if kind in (set, frozenset):  # the order may differ between equal sets
            return all(map(is_constant, first)) and [*map(exactly, first)] == [*map(exactly, second)]
        if kind is types.MethodType:
            return self._match(first.__func__, second.__func__) and self._match(first.__self__, second.__self__)
        if kind is types.FunctionType:
            return first.__code__ is second.__code__ and all(
                map(self._match, _of_function(first), _of_function(second))
            )
        if kind is functools.partial:
            return all(map(self._match, _of_partial(first), _of_partial(second)))
        if kind is weakref.ref:
            return self._match(first(), second())
        # Other objects may have state that Python does not show.
        return isinstance(first, nn.Module) and self._match(vars(first), vars(second))

    def _match_items(self, first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
        key, other = first[0], second[0]
        keys = exactly(key) == exactly(other) if is_constant(key) else self._match(key, other)
        return keys and self._match(first[1], second[1])


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one, without hooks."""
    kinds = (torch.Tensor, nn.Parameter)
    return type(tensor) in kinds and not tensor._backward_hooks and tensor.layout is torch.strided


def _of_function(fn: types.FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    return [cells, fn.__defaults__, fn.__kwdefaults__, vars(fn), fn.__globals__, fn.__name__]


def _of_partial(partial: functools.partial[Any]) -> list[Any]:
    return [partial.func, list(partial.args), partial.keywords, vars(partial)]
