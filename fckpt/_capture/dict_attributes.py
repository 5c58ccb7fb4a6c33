"""Guards for the attributes of dicts, such as configurations and results of Hugging Face's and diffusers' models, and
for the orders of `OrderedDict`s and `defaultdict`s, and the lengths to which deques are limited.

Dynamo's guards for an object of a subclass of `dict` compare its items. Guards on its attributes, and on everything
that was read through them, are lost. So the attributes are compared here, as far as they can be; a function that reads
others is not captured. Nor does Dynamo guard the order of an `OrderedDict` or a `defaultdict` that is copied or
compared. (Whether the keys are there is guarded.) Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fckpt._call.modules import INTERNAL
from fckpt._call.places import ABSENT
from fckpt._capture.classes import classes_of
from fckpt._capture.patching import lookups_patched
from fckpt._capture.wrapped import layout_of, name_of, reader

__all__ = ["DictAttributes", "has_dict_attributes", "keep_factories"]

_MOST = 1000
"""The most items of a container that are compared."""
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, range)
_ORDERED = (collections.OrderedDict, collections.defaultdict)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType)


def has_dict_attributes(value: Any) -> bool:
    """Whether a value is a dict that may have attributes."""
    return isinstance(value, dict) and hasattr(value, "__dict__")


class DictAttributes:
    """The attributes of dicts that a capture has read, or has asked for."""

    def __init__(self, scope: dict[str, Any]) -> None:
        """Begins with nothing. Dynamo's expressions for objects refer to the entry's globals `scope` as `G`."""
        self._scope = scope
        self.uses = 0
        """How often an attribute was read."""
        self._known: dict[tuple[str, str], tuple[Callable[[dict[str, Any]], tuple[Any, ...]], Any]] = {}
        """By expression for a dict, and name of an attribute: how to read the dict, and a fact about the attribute."""
        self._orders: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[Any, None]]] = []
        """For each such dict: how to read it, and its keys."""
        self._limits: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], int | None]] = []
        """For each deque: how to read it, and its `maxlen`."""

    def hold(self, places: dict[str, Any]) -> bool:
        """Whether the attributes are the same in a call with these arguments."""
        return not (self._known or self._orders or self._limits) or not self.changed(places)

    def changed(self, places: dict[str, Any]) -> str:
        """Returns a description of an attribute that has changed; empty if there is none."""
        for (_, name), (read, then) in self._known.items():
            (held,) = read(places)
            if _fact(_attributes(held).get(name, ABSENT)) != then:
                return f"the attribute {name} of a dict has changed"
        for read, keys in self._orders:
            (held,) = read(places)
            if [key for key in held if key in keys] != [key for key in keys if key in held]:
                return f"the order of the keys of a {type(held).__name__} has changed"
        for read, limit in self._limits:
            (held,) = read(places)
            if held.maxlen != limit:
                return "a deque is limited to another length"
        return ""

    def add_orders(self, guards: Iterable[Any], places: dict[str, Any]) -> None:
        """Notes the orders of all `OrderedDict`s and `defaultdict`s to which Dynamo's guards refer, and the `maxlen` of
        deques.

        It leaves out the hooks of modules, and large dicts, whose comparison at each call would take too long.
        """
        kinds = (*_ORDERED, collections.deque)
        ordered = [guard for guard in guards if any(issubclass(cls, kinds) for cls in classes_of(guard))]
        names = {name_of(guard) for guard in ordered}
        for expression in (name for name in names if name.rpartition(".")[2] not in INTERNAL):
            with contextlib.suppress(Exception):  # only Dynamo's own guards can evaluate it
                read = reader([expression], self._scope)
                (held,) = read(places)
                if isinstance(held, collections.deque):
                    self._limits.append((read, held.maxlen))
                elif isinstance(held, _ORDERED) and len(held) <= _MOST:
                    self._orders.append((read, dict.fromkeys(held)))

    def add(self, variable: Any, name: str) -> None:
        """Notes that the capture reads an attribute of a dict, unless the capture itself made the dict.

        Raises:
            LookupError: no fact describes the attribute.
        """
        value = getattr(variable, "value", None)
        if not variable.source or not has_dict_attributes(value):
            return
        self.uses += 1
        expression = name_of(variable.source)
        if (expression, name) not in self._known:
            fact = _fact(_attributes(value).get(name, ABSENT))
            if name == "__dict__" or fact is None:
                raise LookupError(f"the attribute {name} of a {type(value).__name__} cannot be guarded")
            self._known[expression, name] = reader([expression], self._scope), fact

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Records, within the body, what Dynamo reads."""

        def asking(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def ask(variable: Any, tx: Any, name: str) -> Any:
                self.add(variable, name)
                return original(variable, tx, name)

            return ask

        return lookups_patched(asking, asking)


def keep_factories(ordered: set[Any], scope: dict[str, Any], places: dict[str, Any]) -> None:
    """Takes the `defaultdict`s out of the dicts whose keys Dynamo guards in their order: see `add_orders`.

    With these guards, those on what a factory reads would be lost.

    Args:
        ordered: Dynamo's sources of the dicts.
        scope: the globals of the entry, to which its expressions refer as `G`.
        places: the arguments of the entry, to which they refer as `L`.
    """
    for source in list(ordered):
        with contextlib.suppress(Exception):  # only Dynamo's own guards can evaluate it
            (held,) = reader([name_of(source)], scope)(places)
            if isinstance(held, collections.defaultdict):
                ordered.discard(source)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _fact(value: Any) -> Any:
    """Returns what is compared of an attribute; None if its changes could go unnoticed."""
    if value is ABSENT or isinstance(value, _CODE):
        return id(value), value
    if isinstance(value, torch.Tensor):
        return (type(value), layout_of(value)) if value.layout is torch.strided else None
    return (type(value), repr(value)) if _is_plain(value, [_MOST]) else None


def _is_plain(value: Any, left: list[int]) -> bool:
    """Whether a value consists of numbers, strings and the like, in at most `left` items."""
    left[0] -= 1
    if left[0] < 0:
        return False
    if isinstance(value, dict):
        return all(_is_plain(key, left) and _is_plain(held, left) for key, held in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(held, left) for held in value)
    return isinstance(value, _PLAIN)
