"""Texts of values: f-strings, `str`, `repr`, `format`, and what else makes a text of a value.

In a text, Dynamo takes the number `n` for a symbol, forgets the limit of a deque and on torch 2.11 the class of a dict
or set, writes objects in a dict as they were before the call, and takes the text of a class for a constant, though a
metaclass may compute it. So a function is captured for the values of the numbers that it writes, and is not captured if
it writes one of the others. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SetVariable, UserDefinedObjectVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable, DictViewVariable, MappingProxyVariable
from torch._dynamo.variables.lists import BaseListVariable, DequeVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from fckpt._capture.containers import container_of
from fckpt._capture.numbers import known
from fckpt._capture.patching import builtins_patched, patched, with_subclasses
from fckpt._capture.sources import is_users

__all__ = ["texts_like_pythons"]

_DICTS = (ConstDictVariable, DictViewVariable, MappingProxyVariable, SetVariable)
_METHODS = ("__repr__", "__str__", "__format__")


@contextlib.contextmanager
def texts_like_pythons() -> Iterator[None]:
    """Makes Dynamo write values as Python does, within the body, or raise a `LookupError`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(InstructionTranslatorBase, "_format_value", _formatting))
        stack.enter_context(patched(StringFormatVariable, "create", _filling))
        stack.enter_context(builtins_patched(_FUNCTIONS))
        for owner in with_subclasses((VariableTracker,)):
            if "call_method" in vars(owner):
                stack.enter_context(patched(owner, "call_method", _method))
        yield


def _written(variable: Any, in_dict: bool = False) -> Any:
    """Returns a variable of which a text is made, with constants for the numbers in it that may change.

    Raises:
        LookupError: its text is not known.
    """
    variable = known(variable)
    if isinstance(variable, UserDefinedClassVariable):
        texts = (getattr(type(variable.value), name) for name in _METHODS)
        if any(is_users(text.__code__.co_filename) for text in texts if hasattr(text, "__code__")):
            raise LookupError(f"the text of the class {variable.value.__name__} is not known")
    if isinstance(variable, UserDefinedObjectVariable) and isinstance(variable.value, tuple):
        _written(container_of(variable), in_dict)
    if isinstance(variable, BaseListVariable):
        if isinstance(variable, DequeVariable) and getattr(variable, "fckpt_limit", None) is not None:
            raise LookupError("the text of a deque that is limited in length is not known")
        items = [_written(item, in_dict) for item in variable.items]
        return variable if items == variable.items else variable.clone(items=items)
    kind = _kind(variable)
    if isinstance(variable, _DICTS) or _is_written_in_c(kind):
        if kind not in (dict, set):
            raise LookupError(f"the text of a container of type {kind.__name__} is not known")
        if isinstance(variable, ConstDictVariable):
            variable.unpack_var_sequence(InstructionTranslator.current_tx())  # which guards the keys
        for key, value in getattr(variable, "items", {}).items():
            _written(key.vt, True)
            _written(value, True)
    elif in_dict and isinstance(variable, UserDefinedObjectVariable):
        raise LookupError(f"the text of an object of {kind.__name__} in a dict is not known")
    return variable


def _is_written_in_c(kind: type) -> bool:
    """Whether a class is a dict whose text another function than dict's, not written in Python, makes."""
    write = kind.__repr__
    return issubclass(kind, dict) and write is not dict.__repr__ and not hasattr(write, "__code__")


def _kind(variable: Any) -> type:
    try:
        return variable.python_type()
    except NotImplementedError:  # Dynamo does not know the type
        return object


def _formatting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def format_value(tx: Any, *args: Any) -> Any:
        tx.push(_written(tx.pop()))
        return original(tx, *args)

    return format_value


def _filling(original: Any) -> Any:
    def create(cls: Any, text: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        named = {name: _written(value) for name, value in kwargs.items()}
        return original.__func__(cls, text, [*map(_written, args)], named)

    return classmethod(create)


def _function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_function(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if this.fn is str and len(args) == 1 and isinstance(given := args[0].realize(), UserDefinedObjectVariable):
            kind = type(given.value)
            if kind.__str__ is object.__str__ and kind.__repr__ is not object.__repr__:  # Dynamo has a constant
                return BuiltinVariable(repr).call_function(tx, [given], {})
        return original(this, tx, [*map(_written, args)], kwargs)

    return call_function


def _format(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_format(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:  # Dynamo takes it for `str.format`
        given = [*map(_written, args)]
        if not all(variable.is_python_constant() for variable in given):
            raise LookupError("the text of an object is not known")
        return ConstantVariable.create(format(*[variable.as_python_constant() for variable in given]))

    return call_format


def _remainder(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_mod(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        pattern = args[0].realize()
        if pattern.is_python_constant() and type(pattern.as_python_constant()) is str:
            args = [pattern, _written(args[1])]
        return original(this, tx, args, kwargs)

    return call_mod


def _method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_method(this: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _METHODS:
            _written(this)
        return original(this, tx, name, args, kwargs)

    return call_method


_FUNCTIONS = {
    str: _function,
    repr: _function,
    ascii: _function,
    format: _format,
    operator.mod: _remainder,
    operator.imod: _remainder,
}
