"""Guards for comparisons of two objects that were not the same: `a is b`, `a == b` and `a in items`.

Dynamo decides such a comparison by the objects of the captured call. It guards that two objects are the same, but not
that they are distinct. (For tensors it guards both.) Of numbers, strings and tuples it guards the values, which say
nothing about identity. Of a tensor it does not know whether it is in a set. Seen on torch 2.11 and
2.13.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
from collections.abc import Callable, Collection, Iterator, KeysView
from typing import Any

import torch
from torch._dynamo.variables import SymNodeVariable, UserDefinedObjectVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import GetAttrVariable, StringFormatVariable
from torch._dynamo.variables.tensor import TensorVariable

from fckpt._call.places import PLAIN
from fckpt._capture.containers import container_of
from fckpt._capture.patching import builtins_patched, instructions_patched
from fckpt._capture.sources import is_users
from fckpt._capture.wrapped import name_of, reader

__all__ = ["Distinct"]

_MOST = 64
"""The most items of a container with which an object is compared."""
_ITSELF = (torch.Tensor, type, *PLAIN)
"""Types of values of which Dynamo guards the identity or the value itself."""
_VALUES = {int, float, complex, str, bytes, tuple, frozenset}
"""Types of values of which equal ones may be one object or two."""


_FUNCTIONS: dict[Callable[..., Any], str] = {
    operator.is_: "IS_OP",
    operator.is_not: "IS_OP",
    operator.eq: "COMPARE_OP",
    operator.ne: "COMPARE_OP",
    operator.contains: "CONTAINS_OP",
}
"""Functions that compare, and the instructions that do the same."""


class Distinct:
    """Pairs of objects that a capture has compared, and that were distinct."""

    def __init__(self, scope: dict[str, Any], places: dict[str, Any]) -> None:
        """Begins with nothing.

        Args:
            scope: the globals of the entry, to which Dynamo's expressions for objects refer as `G`.
            places: the arguments of the entry in the captured call, to which they refer as `L`.
        """
        self._scope = scope
        self._places = places
        self.uses = 0
        """How often two objects were compared."""
        self._pairs: dict[tuple[str, str], Callable[[dict[str, Any]], tuple[Any, ...]]] = {}
        self._values: dict[tuple[str, str], tuple[Callable[[dict[str, Any]], tuple[Any, ...]], bool]] = {}
        """Pairs of numbers, strings or tuples, and whether they were one object."""

    def hold(self, places: dict[str, Any]) -> bool:
        """Whether the objects are distinct in a call with these arguments, or one as they were."""
        return not (self._pairs or self._values) or not self.changed(places)

    def changed(self, places: dict[str, Any]) -> str:
        """Describes two compared objects that have become one object, or one that has become two; otherwise empty."""
        for read in self._pairs.values():
            first, second = read(places)
            if first is second:
                return f"two objects of {type(first).__name__}, which are compared, have become one"
        for read, same in self._values.values():
            first, second = read(places)
            if (first is second) != same:
                return f"two objects of {type(first).__name__}, which are compared, have become one, or two"
        return ""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records, within the body, what Dynamo compares."""
        names = {*_FUNCTIONS.values()}
        with (
            instructions_patched({name: functools.partial(self._comparing, name=name) for name in names}),
            builtins_patched({fn: functools.partial(self._calling, name=name) for fn, name in _FUNCTIONS.items()}),
        ):
            yield
        self._places = {}  # arguments of the call must not stay alive

    def _comparing(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def compare(tx: Any, inst: Any) -> None:
            left, right = tx.stack[-2:]
            negated = name == "IS_OP" and bool(inst.argval)

            def compute() -> Any:
                original(tx, inst)
                return tx.stack[-1]

            self._compared(name, (left, right), negated, compute, is_users(tx.f_code.co_filename))

        return compare

    def _calling(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_function(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if len(args) != 2:
                return original(this, tx, args, kwargs)
            left, right = reversed(args) if name == "CONTAINS_OP" else args
            compute = functools.partial(original, this, tx, args, kwargs)
            return self._compared(name, (left, right), this.fn is operator.is_not, compute, False)

        return call_function

    def _compared(
        self, name: str, compared: tuple[Any, Any], negated: bool, compute: Callable[[], Any], by_user: bool
    ) -> Any:
        """Returns what `compute` gives for a comparison, and notes what it depends on.

        Raises:
            LookupError: Dynamo does not know the result.
        """
        left, right = compared
        by_identity = name == "IS_OP"
        for variable in (left.realize(), right.realize()):
            if isinstance(variable, GetAttrVariable):
                raise LookupError(f"an attribute {variable.name!r}, which is compared, is not known")
            if isinstance(variable, StringFormatVariable) and not by_identity:
                raise LookupError("a text that is compared is not known")
            if isinstance(variable, UserDefinedObjectVariable) and not by_identity and _is_compared_in_c(variable):
                raise LookupError(f"an object of {type(variable.value).__name__}, which is compared, has no guard")
        if name == "CONTAINS_OP" and by_user and _is_tensor(left) and _is_hashed(right):
            raise LookupError("whether a tensor is in a set or a dict is not known")
        if by_identity and _are_numbers(left, right):
            raise LookupError("whether a number that may change is the same object as another is not known")
        result = compute()
        if name == "CONTAINS_OP" and _is_tensor(result):
            raise LookupError("whether a container holds a tensor is not known")
        decisive = (left,) if name == "CONTAINS_OP" else compared
        self.uses += not any(_is_value(variable, by_identity) for variable in decisive)
        if by_identity:
            self._add_values(left, right, result, negated)
        if left.source is not None:
            right = right.realize()
            many = name == "CONTAINS_OP" and isinstance(right, BaseListVariable)
            for other in right.items[:_MOST] if many else [right]:
                self._add(left, other)
        return result

    def _add_values(self, left: Any, right: Any, result: Any, negated: bool) -> None:
        """Notes whether two values are one object.

        Raises:
            LookupError: Dynamo decides otherwise.
        """
        found = self._pair(left, right, self._values)
        if found is None:
            return
        pair, read, first, second = found
        if type(first) not in _VALUES or type(second) not in _VALUES:
            return
        same = first is second
        if result.is_python_constant() and result.as_python_constant() != (same != negated):
            raise LookupError("whether two values are one object is not known")
        self._values[pair] = read, same

    def _add(self, left: Any, right: Any) -> None:
        found = self._pair(left, right, self._pairs)
        if found is None:
            return
        pair, read, first, second = found
        if first is not second and not isinstance(first, _ITSELF) and not isinstance(second, _ITSELF):
            self._pairs[pair] = read

    def _pair(self, left: Any, right: Any, known: Collection[tuple[str, str]]) -> tuple[Any, ...] | None:
        """Returns the names of two places, a function that reads them, and what they hold; None if there is nothing to
        note.
        """
        if left.source is None or right.source is None:
            return None
        pair = name_of(left.source), name_of(right.source)
        if pair[0] == pair[1] or pair in known:
            return None
        read = reader(pair, self._scope)
        try:
            return pair, read, *read(self._places)
        except Exception:  # an expression that only Dynamo's own guards can evaluate
            return None


def _is_compared_in_c(variable: Any) -> bool:
    """Whether code that is not written in Python compares an object, so that Dynamo does not see what it reads."""
    if variable.source is None or isinstance(variable.value, enum.Enum):
        return False
    compare = getattr(type(variable.value), "__eq__", None)
    return compare not in (object.__eq__, None) and not hasattr(compare, "__code__") and container_of(variable) is None


def _is_value(variable: Any, by_identity: bool) -> bool:
    """Whether the outcome of a comparison with a variable depends on its value alone, of which Dynamo takes care."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return not by_identity
    if not variable.is_python_constant():
        return False
    return not by_identity or type(variable.as_python_constant()) not in _VALUES - {str}


def _are_numbers(*variables: Any) -> bool:
    """Whether two variables are ints, of which one is an input of the graph or computed from one."""
    found = [variable.realize() for variable in variables]
    numbers = [v for v in found if isinstance(v, SymNodeVariable) or (v.is_python_constant() and _is_int(v))]
    return len(numbers) == 2 and any(isinstance(v, SymNodeVariable) for v in numbers)


def _is_int(variable: Any) -> bool:
    return type(variable.as_python_constant()) is int


def _is_tensor(variable: Any) -> bool:
    return isinstance(variable.realize(), TensorVariable)


def _is_hashed(variable: Any) -> bool:
    """Whether a variable stands for a set, a dict, or the keys of one."""
    try:
        return issubclass(variable.realize().python_type(), (set, frozenset, dict, KeysView))
    except NotImplementedError:  # Dynamo does not know the type
        return False
