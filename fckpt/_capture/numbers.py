"""Numbers that may change: integers outside of the arguments, and code that needs the value of a number.

Sizes of tensors and integers in the arguments are symbols from the first capture on. Integers elsewhere are mostly
options (the number of heads, the width of a head). If each of them in each layer were a symbol, the capture of a
transformer would take ten times as long, nearly all of it for proofs about quotients of options. So they are constants
with a guard. If one of them changes (a counter of steps), it is a symbol from the next capture on. Dynamo does that for
what local variables lead to, and here it does so for what global variables lead to as well.

Code may ask of a number, or of the outcome of a comparison, what only its value tells: whether a container holds it,
whether it is `True`, its text (`texts.py`). Then a capture is for this value. Dynamo gives a wrong answer: in its view
no list contains a constant as the value of a symbol.

Seen on torch 2.11 and 2.13: `VariableBuilder.wrap_symint`, `is_int_specialization_case`, `iter_contains`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._dynamo import config
from torch._dynamo.source import is_from_defaults
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SymNodeVariable, builder, dicts, lists
from torch._dynamo.variables.builder import VariableBuilder

from fckpt._capture.patching import builtins_patched, instructions_patched, patched
from fckpt._capture.wrapped import name_of

__all__ = ["known", "options_constant", "values_asked"]

_PASSED = re.compile(r"L\['(?:args|kwargs)'\](?:\[[^\]]+\])*")


def _constant_at_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(this: Any, value: int, *args: Any, **kwargs: Any) -> Any:
        if _PASSED.fullmatch(name_of(this.source)):
            return original(this, value, *args, **kwargs)
        with config.patch(assume_static_by_default=True):
            return original(this, value, *args, **kwargs)

    return wrap


def _globals_like_locals(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_always_constant(value: Any, source: Any) -> bool:
        return original(value, source) if source.guard_source.is_local() else is_from_defaults(source)

    return is_always_constant


@contextlib.contextmanager
def options_constant() -> Iterator[None]:
    """Makes Dynamo capture integers outside of the arguments as constants, unless they have changed."""
    with (
        patched(VariableBuilder, "wrap_symint", _constant_at_first),
        patched(builder, "is_int_specialization_case", _globals_like_locals),
    ):
        yield


def known(variable: Any) -> Any:
    """Returns a variable; if it is a number that may change, the constant that it is in this capture, with a guard."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return ConstantVariable.create(variable.evaluate_expr())
    return variable


def _is_operation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def is_same(tx: Any, inst: Any) -> Any:
        tx.stack[-2:] = _outcomes_known(tx.stack[-2:])
        return original(tx, inst)

    return is_same


def _is_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_is(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return original(this, tx, _outcomes_known(args), kwargs)

    return call_is


def _range_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_range(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not all(map(_is_integral, args)):
            raise TypeError("range of something that is no integer")
        return original(this, tx, args, kwargs)

    return call_range


def _is_integral(variable: Any) -> bool:
    """Whether a variable may stand for an integer."""
    try:
        return not issubclass(variable.realize().python_type(), (float, complex, str, bytes, type(None)))
    except NotImplementedError:  # Dynamo does not know the type
        return True


def _outcomes_known(variables: Sequence[Any]) -> list[Any]:
    """Returns variables, with constants for outcomes of comparisons of numbers that may change."""
    is_outcome = lambda v: isinstance(v, SymNodeVariable) and v.python_type() is bool
    return [known(v) if is_outcome(v.realize()) else v for v in variables]


def _containing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def contains(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        if not search.is_python_constant() or all(item.is_python_constant() for item in items):
            return original(items, search, tx, *args, **kwargs)
        for item in items:
            if _is_itself_only(item):
                continue
            same = known(BuiltinVariable(operator.eq).call_function(tx, [item, search], {}))
            if not same.is_python_constant():
                raise LookupError("whether a container holds a number is not known, since it holds tensors")
            if same.as_python_constant():
                return ConstantVariable.create(True)
        return ConstantVariable.create(False)

    return contains


def _is_itself_only(variable: Any) -> bool:
    """Whether a variable stands for an object that equals no number or string."""
    try:
        return variable.realize().python_type().__eq__ is object.__eq__
    except NotImplementedError:  # Dynamo does not know the type
        return False


_FUNCTIONS = {
    operator.is_: _is_function,
    operator.is_not: _is_function,
    range: _range_function,
}


@contextlib.contextmanager
def values_asked() -> Iterator[None]:
    """Makes Dynamo guard, within the body, the values of numbers where code depends on nothing less."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(instructions_patched({"IS_OP": _is_operation}))
        stack.enter_context(builtins_patched(_FUNCTIONS))
        for module in (lists, dicts):
            if hasattr(module, "iter_contains"):
                stack.enter_context(patched(module, "iter_contains", _containing))
        yield
