"""Answers of Dynamo that are not Python's: corrected, or refused.

* An object that two places lead to, one through a global variable and one through an argument, gets no guard that it
  is one object.
* `s -= t` changes a set that an argument leads to, but the change is not repeated after the graph.
* The value of `yield from` is what the generator returns, not None.
* An argument that is given by position and by keyword is an error, as is a keyword that is given twice.
* A sum that no operand knows how to compute is an error, and not the constant `NotImplemented`.
* What `Class[key]` gives depends on what the code of the class reads.
* `n in range(5)` is True or False, and not how often the range contains the number.
* A number that `random.random()` draws is another one in each call.
* `torch.utils.checkpoint` is no function that a torch function mode sees. The mode sees what it runs.
* That an attribute is deleted depends on whether it is there.
* A class may get or lose methods such as `__len__` between two captures.

Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import (
    ConstantVariable,
    SetVariable,
    builder,
    functions,
    misc,
    user_defined,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.lists import RangeVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch.utils._device import DeviceContext

from fckpt._capture.numbers import known
from fckpt._capture.patching import builtins_patched, instructions_patched, patched

__all__ = ["answers_corrected"]


def _of_one_object(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_guard(source: Any, other: Any) -> Any:
        guard = original(source, other)
        if guard is None and other and other != source:
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
        return guard

    return make_guard


def _subtracting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def subtract(this: Any, tx: Any, other: Any) -> Any:
        this.should_reconstruct_all = True
        return original(this, tx, other)

    return subtract


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(tx: Any, inst: Any) -> None:
        receiver, following = tx.stack[-2], tx.instruction_pointer
        original(tx, inst)
        if tx.instruction_pointer != following and isinstance(receiver, LocalGeneratorObjectVariable):  # it has ended
            tx.pop()
            tx.push(receiver.inline_tracer.symbolic_result)

    return send


def _merging(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def merge(tx: Any, inst: Any) -> None:
        added, known = tx.stack[-1].realize(), tx.stack[-1 - inst.arg].realize()
        if isinstance(added, ConstDictVariable) and not added.items.keys().isdisjoint(known.items.keys()):
            raise TypeError("a keyword argument is given twice")
        original(tx, inst)

    return merge


def _binding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bind(fn: Any, tx: Any, source: Any, args: Any, kwargs: Any) -> Any:
        code = fn.__code__
        positional = code.co_varnames[code.co_posonlyargcount : code.co_argcount][
            : max(0, len(args) - code.co_posonlyargcount)
        ]
        if not kwargs.keys().isdisjoint(positional):
            raise TypeError("an argument is given by position and by keyword")
        return original(fn, tx, source, args, kwargs)

    return bind


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add(tx: Any, inst: Any) -> None:
        original(tx, inst)
        result = tx.stack[-1]
        if result.is_python_constant() and result.as_python_constant() is NotImplemented:
            raise LookupError("the result of an operation on objects is not known")

    return add


def _deleting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def delete(tx: Any, inst: Any) -> None:
        _check_there(tx, tx.stack[-1].realize(), ConstantVariable.create(inst.argval))
        original(tx, inst)

    return delete


def _check_there(tx: Any, holder: Any, name: Any) -> None:
    """Guards that an object has an attribute.

    Raises:
        LookupError: it has none.
    """
    there = VariableTracker.build(tx, hasattr).call_function(tx, [holder, name], {})
    if not there.is_python_constant() or not there.as_python_constant():
        raise LookupError(f"the attribute {name.as_python_constant()!r}, which is deleted, is not known")


def _indexing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def index(tx: Any, inst: Any) -> None:
        holder = tx.stack[-2].realize()
        if isinstance(holder, UserDefinedClassVariable):
            cls = holder.value
            own = getattr(getattr(cls, "__class_getitem__", None), "__func__", None)
            of_class = getattr(type(cls), "__getitem__", None)
            by_class = isinstance(of_class, types.FunctionType) and not issubclass(cls, enum.Enum)
            if by_class or (isinstance(own, types.FunctionType) and own.__module__ != "typing"):
                raise LookupError(f"an item of the class {cls.__name__} is not known")
        original(tx, inst)

    return index


def _checkpointing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_function(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(this, CheckpointHigherOrderVariable):
            modes = [mode.realize() for mode in tx.symbolic_torch_function_state.mode_stack]
            reentrant = kwargs.get("use_reentrant")
            if any(type(mode.value) is not DeviceContext for mode in modes) and (
                reentrant is None or not reentrant.is_python_constant() or reentrant.as_python_constant() is not False
            ):
                raise LookupError("a recompute of torch.utils.checkpoint is not seen by a torch function mode")
            return this._call_function(tx, args, kwargs)
        return original(this, tx, args, kwargs)

    return call_function


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        raise LookupError("the function draws from a random.Random, and a graph would repeat the same numbers")

    return draw


def _range_containing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def contains(this: Any, tx: Any, asked: Any, *args: Any) -> Any:
        of_method = isinstance(asked, str) and asked != "__contains__"
        found = original(this, tx, asked if isinstance(asked, str) else known(asked), *args)
        if of_method or not found.is_python_constant() or type(found.as_python_constant()) is not int:
            return found
        return ConstantVariable.create(bool(found.as_python_constant()))

    return contains


def _delete_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_delattr(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if len(args) == 2:
            _check_there(tx, args[0].realize(), args[1].realize())
        return original(this, tx, args, kwargs)

    return call_delattr


try:
    _SLOTS: Any = importlib.import_module("torch._dynamo.variables.object_protocol")._get_cached_slots
except ImportError:  # torch 2.11, which remembers nothing of classes
    _SLOTS = None
_SUBTRACT = "nb_inplace_subtract_impl"
"""The method of Dynamo for `s -= t`; torch 2.11 has none, and takes it for `difference_update`."""
_HANDLERS: dict[str, Callable[..., Any]] = {
    "BINARY_OP": _adding,
    "BINARY_SUBSCR": _indexing,
    "DELETE_ATTR": _deleting,
    "DICT_MERGE": _merging,
    "SEND": _sending,
}
_INSTRUCTIONS = {name: wrapped for name, wrapped in _HANDLERS.items() if name in dis.opmap}


@contextlib.contextmanager
def answers_corrected() -> Iterator[None]:
    """Makes Dynamo answer, within the body, like Python."""
    if _SLOTS is not None:
        _SLOTS.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(builder, "make_dupe_guard", _of_one_object))
        if _SUBTRACT in vars(SetVariable):
            stack.enter_context(patched(SetVariable, _SUBTRACT, _subtracting))
        stack.enter_context(instructions_patched(_INSTRUCTIONS))
        stack.enter_context(patched(functions, "bind_args_cached", _binding))
        owner = next(cls for cls in CheckpointHigherOrderVariable.__mro__ if "call_function" in vars(cls))
        stack.enter_context(patched(owner, "call_function", _checkpointing))
        for module in (misc, user_defined):
            stack.enter_context(patched(module, "call_random_fn", _drawing))
        for name in ("sq_contains", "call_method"):
            if name in vars(RangeVariable):
                stack.enter_context(patched(RangeVariable, name, _range_containing))
        stack.enter_context(builtins_patched({delattr: _delete_function}))
        yield
