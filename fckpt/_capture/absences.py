"""Guards for keys and attributes that a captured function looked up and did not find, and for the orders of keys.

Dynamo guards `key in mapping`, `mapping.get(key)` and `hasattr(thing, name)` for objects and modules of torch. It does
not guard `hasattr` of functions and imported modules, nor the two lookups in which an exception reports the absence:
`mapping[key]` raising `KeyError` (`os.environ.get` and `ChainMap` depend on it), and `thing.name` raising
`AttributeError`. Nor does it guard that an object lacks an attribute for which the class's `__getattr__` answers.
Without the guards added here, Dynamo's guards would still hold after the key or the attribute has appeared. (For
attributes of dicts, see `dict_attributes.py`.)

Dynamo guards the order of the keys of a dict that is iterated, but not if it is copied, or made a sequence: `d.copy()`,
`{**d}`, `f(**d)`, `list(d)`, `f(*d)`. It guards no keys at all of a dict that it passes to a built-in function:
`max(d, key=d.get)`. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, SetVariable, dicts
from torch._dynamo.variables.dicts import ConstDictVariable, DictViewVariable
from torch._dynamo.variables.functions import FunctoolsPartialVariable
from torch._dynamo.variables.user_defined import UserDefinedDictVariable

from fckpt._capture.dict_attributes import has_dict_attributes
from fckpt._capture.patching import lookups_patched, patched, with_subclasses
from fckpt._capture.sources import is_users

__all__ = ["absences_guarded", "guard_absence"]

_SUBSCRIPT = "getitem_const_raise_exception_if_absent"


def _guarded_subscript(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def subscript(self: Any, tx: Any, key: Any) -> Any:
        if key not in self:
            self.install_dict_contains_guard(tx, [key])
        return original(self, tx, key)

    return subscript


def _ordered_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("copy", "update", "__or__", "__ror__", "__ior__"):
            for held in (self, *args):
                if not held.source:
                    continue
                if _OF_OBJECTS is not None and isinstance(held.realize(), _OF_OBJECTS):
                    _refuse_own_code()
                elif isinstance(held.realize(), _DICTS):
                    tx.output.guard_on_key_order.add(held.source)
        return original(self, tx, name, args, kwargs)

    return call_method


def _ordered_sequence(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unpack_var_sequence(self: Any, tx: Any) -> Any:
        source = getattr(self, "dv_dict", self).source
        if source and not isinstance(self, SetVariable):
            if _OF_OBJECTS is not None and isinstance(self, _OF_OBJECTS):
                _refuse_own_code()
            tx.output.guard_on_key_order.add(source)
        return original(self, tx)

    return unpack_var_sequence


def _guarded_constant(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def as_python_constant(self: Any) -> Any:
        if self.source:
            self.install_dict_keys_match_guard()
            InstructionTranslator.current_tx().output.guard_on_key_order.add(self.source)
        return original(self)

    return as_python_constant


_DICTS = (ConstDictVariable, UserDefinedDictVariable)
_OF_OBJECTS = getattr(dicts, "DunderDictVariable", None)
"""The class of `__dict__`s of objects; None on torch 2.11."""


def _refuse_own_code() -> None:
    """Raises `LookupError` if the user's own code asks which attributes an object has. Code of a library may ask."""
    filename = InstructionTranslator.current_tx().output.current_tx.f_code.co_filename
    if is_users(filename) and "-packages" not in filename:
        raise LookupError("which attributes an object has is not known")


def _guarded_attribute(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def install_dict_contains_guard(self: Any, tx: Any, keys: Any) -> None:
        if self.source and not (keys[0].is_python_constant() and keys[0].as_python_constant() in self.items):
            guard_absence(self.source.base, keys[0].as_python_constant())

    return install_dict_contains_guard


def _refused_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def install_dict_keys_match_guard(self: Any) -> None:
        if self.source:
            _refuse_own_code()

    return install_dict_keys_match_guard


def guard_absence(source: Any, name: str) -> None:
    """Installs a guard that fails as soon as the `__dict__` of an object contains this name."""
    install_guard(source.make_guard(functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)))


class _Presences:
    """Guards that objects still have, or still lack, attributes."""

    def __init__(self) -> None:
        self._known: set[tuple[Any, str]] = set()

    def add(self, variable: Any, name: str) -> None:
        """Installs a guard for an attribute, unless the capture itself made the object.

        Raises:
            LookupError: Dynamo's guards do not notice such an attribute.
        """
        source = variable.source
        if source and (source, name) not in self._known:
            self._known.add((source, name))
            if has_dict_attributes(getattr(variable, "value", None)) or isinstance(variable, ConstantVariable):
                return  # constants are compared, and equal ones have the same attributes
            if isinstance(variable, FunctoolsPartialVariable) and name not in dir(functools.partial):
                raise LookupError(f"whether a partial has an attribute {name} is not known")
            if "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
                install_guard(source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))
            else:  # torch 2.11
                install_guard(AttrSource(source, name).make_guard(GuardBuilder.HASATTR))

    def of_absent(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def var_getattr(variable: Any, tx: Any, name: str) -> Any:
            if name == "__dict__" and variable.source and _OF_OBJECTS is None:
                _refuse_own_code()
            try:
                found = original(variable, tx, name)
            except ObservedAttributeError:
                self.add(variable, name)
                raise
            if variable.source and _is_answered(getattr(variable, "value", None), name):
                guard_absence(variable.source, name)
            return found

        return var_getattr

    def of_asked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_obj_hasattr(variable: Any, tx: Any, name: str) -> Any:
            self.add(variable, name)
            return original(variable, tx, name)

        return call_obj_hasattr


def _is_answered(value: Any, name: str) -> bool:
    """Whether a `__getattr__` of the user answers for an attribute that an object lacks."""
    answering = inspect.getattr_static(type(value), "__getattr__", None)
    if answering in (None, torch.nn.Module.__getattr__) or isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return name not in vars(value) and inspect.getattr_static(type(value), name, None) is None


@contextlib.contextmanager
def absences_guarded() -> Iterator[None]:
    """Makes Dynamo guard absent keys and attributes, and orders of keys, within the body."""
    presences = _Presences()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(ConstDictVariable, _SUBSCRIPT, _guarded_subscript))
        stack.enter_context(patched(ConstDictVariable, "as_python_constant", _guarded_constant))
        for cls in (ConstDictVariable, DictViewVariable):
            stack.enter_context(patched(cls, "unpack_var_sequence", _ordered_sequence))
        for cls in with_subclasses(_DICTS):
            if "call_method" in vars(cls):
                stack.enter_context(patched(cls, "call_method", _ordered_copies))
        if _OF_OBJECTS is not None:
            stack.enter_context(patched(_OF_OBJECTS, "install_dict_contains_guard", _guarded_attribute))
            stack.enter_context(patched(_OF_OBJECTS, "install_dict_keys_match_guard", _refused_keys))
        stack.enter_context(lookups_patched(presences.of_absent, presences.of_asked))
        yield
