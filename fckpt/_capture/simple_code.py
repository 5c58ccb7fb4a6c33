"""Whether a block's code is so simple that its calls may be copied for another block: see `repeated_blocks.py`.

A copy is right if nothing that the code asks has another answer in the other block. Objects have the same contents
(`twins.py`), but they are other objects, Dynamo knows more of some tensors than their layout, and Python has many ways
to ask: `TABLE[self]`, `lst.index(self.norm)`, `sys.exc_info()`, `int(n)` of a tensor that holds a constant. So what
follows are not the instructions and functions that ask too much, but those that are known not to: attributes, items by
constant keys, arithmetic, branches on constants and sizes, calls of Python functions, modules and tensor operations. A
block in which anything else runs is not copied.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable, builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import (
    FunctoolsPartialVariable,
    InspectSignatureVariable,
    NestedUserFunctionVariable,
    PolyfilledFunctionVariable,
    UserFunctionVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable, SliceVariable
from torch._dynamo.variables.misc import GetAttrVariable, NullVariable, PythonModuleVariable
from torch._dynamo.variables.nn_module import NNModuleVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from fckpt._capture.block_records import is_of_class
from fckpt._capture.patching import patched

__all__ = ["code_watched"]

_FREE = (
    "BEGIN_", "BINARY_OP", "BUILD_", "CACHE", "CALL", "CALL_", "COPY", "DELETE_FAST", "DICT_MERGE", "DICT_UPDATE",
    "END_FOR", "EXTENDED_ARG", "FOR_ITER", "GET_ITER", "GET_LEN", "INPLACE_", "JUMP", "JUMP_", "KW_NAMES",
    "LIST_APPEND", "LIST_EXTEND", "LIST_TO_TUPLE", "LOAD_", "MAKE_CELL", "MAKE_FUNCTION", "MAP_ADD", "NOP", "NOT_TAKEN",
    "POP_ITER", "POP_TOP", "PRECALL", "PUSH_NULL", "RESUME", "RETURN_CONST", "RETURN_GENERATOR", "RETURN_VALUE",
    "SET_FUNCTION_ATTRIBUTE", "STORE_FAST", "SWAP", "UNARY_INVERT", "UNARY_NEGATIVE", "UNPACK_",
    "YIELD_VALUE",
)  # fmt: skip
"""Instructions, or beginnings of their names, that only move values, compute new ones, or call functions."""
_NOT_FREE = ("LOAD_BUILD_CLASS", "LOAD_LOCALS", "LOAD_FROM_DICT_OR_", "LOAD_SPECIAL", "CALL_INTRINSIC_2")
_BRANCHES = ("POP_JUMP_", "JUMP_IF_", "UNARY_NOT", "TO_BOOL")
_FACTS = {"shape", "dtype", "device", "ndim", "layout", "is_cuda"}
"""Attributes that depend on the layout of a tensor alone."""
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}
_METHODS_OF_FACTS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "element_size", "get_device",
}  # fmt: skip
_BUILTINS: tuple[Any, ...] = (
    isinstance, issubclass, len, callable, getattr, hasattr, super, type, list, tuple, dict, range, enumerate, zip,
    reversed, slice, iter,
)  # fmt: skip
_OF_VALUES: tuple[Any, ...] = (int, float, bool, str, min, max, abs, round, sum, divmod, pow, operator.index)
"""Functions that are known for numbers and strings only."""
_ARITHMETIC: tuple[Any, ...] = (
    operator.add, operator.sub, operator.mul, operator.matmul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.neg,
)  # fmt: skip
_OF_SETTINGS: tuple[Any, ...] = (
    torch.jit.is_scripting, torch.jit.is_tracing, torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting, torch._C._get_tracing_state, torch.is_grad_enabled, torch.is_tensor,
    torch.are_deterministic_algorithms_enabled, torch._C._has_torch_function, torch._C._has_torch_function_unary,
    torch._C._has_torch_function_variadic,
)  # fmt: skip
_ANSWERED = (*_OF_SETTINGS, *vars(math).values())
"""Functions whose results are no tensors, and the same in another block."""
_COMPARING = {"index", "count", "remove", "__contains__", "__eq__", "__ne__", "__hash__"}
_LOOKUPS = {"get", "__getattribute__", "__getattr__"}
_OF_PYTHON = (UserFunctionVariable, UserMethodVariable, NestedUserFunctionVariable, FunctoolsPartialVariable)
_BUILTIN: Any = getattr(builtin, "BaseBuiltinVariable", builtin.BuiltinVariable)
_CLASSES = (type, torch.dtype, torch.device, torch.layout, torch.memory_format)


@contextlib.contextmanager
def code_watched(
    is_recording: Callable[[], bool], refuse: Callable[[], None], reads: Callable[[Any], None]
) -> Iterator[None]:
    """Watches, within the body, the code that Dynamo evaluates.

    Args:
        is_recording: whether a block is being recorded; nothing is watched otherwise.
        refuse: called if a block does more than what is known to be simple.
        reads: called with each place whose value the code gets.
    """
    depth: list[None] = []

    def stepping(original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def step(tx: Any) -> bool:
            if depth or not is_recording() or tx.instruction_pointer is None:
                return original(tx)
            inst = tx.instructions[tx.instruction_pointer]
            if not _is_simple(tx, inst):
                refuse()
            with_tensors = inst.opname == "COMPARE_OP" and any(map(_is_tensor, tx.stack[-2:]))
            going = original(tx)
            top = tx.stack[-1] if tx.stack else None
            if with_tensors and not _is_tensor(top):  # the outcome is certain
                refuse()
            if isinstance(top, VariableTracker) and top.source is not None:
                reads(top.source)
            return going

        return step

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_function(tx: Any, fn: Any, args: Any, kwargs: Any) -> Any:
            if depth or not is_recording():
                return original(tx, fn, args, kwargs)
            fn = fn.realize()
            if isinstance(fn, InspectSignatureVariable):  # much code that depends on one function
                with _unwatched(depth):
                    return original(tx, fn, args, kwargs)
            if not _is_simple_call(tx, fn, args, kwargs):
                refuse()
            original(tx, fn, args, kwargs)
            if not _is_known(fn, tx.stack[-1]):
                refuse()
            return None

        return call_function

    with (
        patched(InstructionTranslatorBase, "step", stepping),
        patched(InstructionTranslatorBase, "call_function", calling),
    ):
        yield


@contextlib.contextmanager
def _unwatched(depth: list[None]) -> Iterator[None]:
    depth.append(None)
    try:
        yield
    finally:
        depth.pop()


# -- instructions ------------------------------------------------------------------------------------------------


def _is_simple(tx: Any, inst: Any) -> bool:
    name, stack = inst.opname, tx.stack
    if name.startswith(_BRANCHES):
        return not _is_tensor(stack[-1])
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        return _has_simple_attribute(tx, stack[-1], inst.argval)
    if name in ("BINARY_SUBSCR", "BINARY_SLICE"):
        keys = stack[-1:] if name == "BINARY_SUBSCR" else stack[-2:]
        return _is_tensor(stack[-1 - len(keys)]) or all(map(_is_key, keys))
    if name == "BINARY_OP" and inst.argrepr == "[]":  # since Python 3.14
        return _is_tensor(stack[-2]) or _is_key(stack[-1])
    if name == "STORE_SUBSCR":
        return _is_tensor(stack[-2])
    if name == "STORE_DEREF":
        return inst.argval in tx.f_code.co_cellvars  # and not of a function around it
    if name == "COMPARE_OP":
        return all(_is_tensor(v) or _is_number(v) for v in stack[-2:])  # see `code_watched` for tensors
    if name == "IS_OP":
        return any(_is_singleton(v) for v in stack[-2:])
    if name == "CONTAINS_OP":
        return _is_constant(stack[-2])
    if name.startswith(("FORMAT_", "CONVERT_")):
        return _is_constant(stack[-1])
    if name == "CALL_INTRINSIC_1":
        return inst.argrepr in ("INTRINSIC_LIST_TO_TUPLE", "INTRINSIC_UNARY_POSITIVE")
    return name.startswith(_FREE) and not name.startswith(_NOT_FREE)


def _has_simple_attribute(tx: Any, variable: Any, name: str) -> bool:
    if not _is_tensor(variable):
        return True  # of an object of the block, with a guard, or of a container or a module of Python
    if variable.realize() in tx.output.side_effects.store_attr_mutations:
        return False
    if name in _FACTS or name in _VIEWS:
        return True
    return callable(inspect.getattr_static(torch.Tensor, name, None))  # a method


# -- calls -------------------------------------------------------------------------------------------------------


def _is_simple_call(tx: Any, fn: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    given = [*args, *kwargs.values()]
    if type(fn) in _OF_PYTHON or isinstance(fn, (NNModuleVariable, UnspecializedNNModuleVariable)):
        return True  # Dynamo evaluates its code
    if isinstance(fn, TorchInGraphFunctionVariable):
        return True  # see `_is_known`
    if isinstance(fn, UserDefinedClassVariable):
        return fn.value in (torch.finfo, torch.iinfo)
    if isinstance(fn, PolyfilledFunctionVariable):
        return any(fn.fn is known for known in _BUILTINS)
    if isinstance(fn, GetAttrVariable):
        return _is_simple_method(fn.obj.realize(), fn.name, given)
    if isinstance(fn, _BUILTIN):
        called = fn.as_python_constant()
        if any(called is known for known in _OF_VALUES):
            return all(map(_is_number, given))
        if called in (getattr, hasattr):
            if called is hasattr and _is_tensor(given[0]):
                return False
            return _is_constant(given[1]) and _has_simple_attribute(tx, given[0], given[1].as_python_constant())
        if any(called is known for known in _BUILTINS):
            return True
        return any(called is known for known in _ARITHMETIC) and all(_is_tensor(v) or _is_number(v) for v in given)
    return False


def _is_simple_method(holder: Any, name: str, given: list[Any]) -> bool:
    if isinstance(holder, TensorVariable):
        return True  # see `_is_known`
    if name in _LOOKUPS:
        return bool(given) and _is_constant(given[0])
    if isinstance(holder, ConstDictVariable):
        return name not in _COMPARING and (not given or name == "update" or _is_key(given[0]))
    return isinstance(holder, (BaseListVariable, ConstantVariable, PythonModuleVariable)) and name not in _COMPARING


def _is_known(fn: Any, result: Any) -> bool:
    """Whether the result of a call of torch is a result of the graph, or depends on layouts or settings alone."""
    if isinstance(fn, TorchInGraphFunctionVariable):
        return any(fn.value is known for known in _ANSWERED) or _is_computed(result)
    if isinstance(fn, GetAttrVariable) and isinstance(fn.obj.realize(), TensorVariable):
        return fn.name in _METHODS_OF_FACTS or _is_computed(result)
    return True


# -- values ------------------------------------------------------------------------------------------------------


def _is_computed(variable: Any) -> bool:
    variable = variable.realize()
    if isinstance(variable, BaseListVariable):
        return all(map(_is_computed, variable.items))
    return isinstance(variable, TensorVariable)


def _is_tensor(variable: Any) -> bool:
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return isinstance(variable.peek_value(), torch.Tensor)
    return isinstance(variable.realize(), TensorVariable)


def _is_constant(variable: Any) -> bool:
    """Whether a variable stands for a number, a string, None, or a class."""
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        value = variable.peek_value()
        return value is None or isinstance(value, (int, float, complex, str, bytes, *_CLASSES))
    variable = variable.realize()
    return isinstance(variable, (ConstantVariable, NullVariable)) or (
        variable.is_python_constant() and isinstance(variable.as_python_constant(), _CLASSES)
    )


def _is_number(variable: Any, container: type = BaseListVariable) -> bool:
    """Whether a variable stands for a constant, a number, or lists and tuples (or another container) of these."""
    if _is_constant(variable):
        return True
    if _is_tensor(variable):
        return False
    variable = variable.realize()
    if isinstance(variable, container):
        return all(_is_number(item, container) for item in variable.items)
    return isinstance(variable, SymNodeVariable)


def _is_key(variable: Any) -> bool:
    return _is_number(variable, SliceVariable)


def _is_singleton(variable: Any) -> bool:
    """Whether another object of the same contents is the same object as what a variable stands for."""
    if _is_of_python(variable):
        return is_of_class(variable.source)
    if not _is_constant(variable):
        return False
    value = _peek(variable)
    return value is None or isinstance(value, (bool, *_CLASSES))


def _is_of_python(variable: Any) -> bool:
    """Whether a variable stands for a function written in Python."""
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return isinstance(variable.peek_value(), types.FunctionType)
    return type(variable.realize()) is UserFunctionVariable


def _peek(variable: Any) -> Any:
    """Returns a constant."""
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return variable.peek_value()
    return variable.realize().as_python_constant()
