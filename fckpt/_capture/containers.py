"""Sets, deques and ordered dicts, which Dynamo models in another way than Python.

Python iterates over a set in the order of its hash table, and Dynamo in the order in which items were added. Dynamo's
model of `set(items)`, for a list of constants, is put in Python's order. A function that iterates over another set that
it makes is not captured if the two orders differ, or may differ: the order of a set that has lost items, or is made
from sets, depends on the size of its hash table. Dynamo also forgets the limit (`maxlen`) of a deque, and that
`move_to_end` has changed a dict. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables import ConstantVariable, ConstDictVariable, SetVariable, user_defined
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import CommonListMethodsVariable, DequeVariable, TupleVariable

from fckpt._capture.numbers import known
from fckpt._capture.patching import builtins_patched, patched
from fckpt._capture.sources import TORCH

__all__ = ["BASES", "container_of", "containers_like_pythons"]

_ANY_ORDER = (len, set, frozenset, sorted, min, max, any, all, bool)
"""Functions whose result does not depend on the order of a set."""
_METHODS = {
    "append", "appendleft", "clear", "count", "extend", "extendleft", "index", "insert", "pop", "popleft", "remove",
    "reverse", "rotate", "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__",
}  # fmt: skip
"""Methods of deques that return no deque."""
_OPERATORS = [f"nb_{place}{name}_impl" for place in ("", "inplace_") for name in ("and", "or", "subtract", "xor")]
BASES = ("_base_vt", "_dict_vt", "_list_vt", "_tuple_vt", "_set_vt")
"""The fields for the list, dict, tuple or set that an object of a subclass is: the first, on torch 2.11 the others."""
_MARKS = ("fckpt_combined", "fckpt_order", "fckpt_limit")
"""The attributes in which this module keeps, on Dynamo's variables, what their classes forget."""
_ITERATING = ("unpack_var_sequence", "tp_iter_impl")


@contextlib.contextmanager
def containers_like_pythons() -> Iterator[None]:
    """Makes Dynamo treat sets and deques as Python does, within the body, or raise a `LookupError`."""
    free: list[Any] = []  # sets whose order does not matter to the function that is being evaluated

    def iterating(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterate(this: Any, tx: Any) -> Any:
            if isinstance(this, SetVariable) and not any(this is known for known in free):
                _check_order(this, tx)
            return original(this, tx)

        return iterate

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if kwargs:
                return original(this, tx, args, kwargs)
            with _added(free, args):
                made = original(this, tx, args, kwargs)
            if this.fn in (set, frozenset) and len(args) == 1:
                given = args[0].realize()
                if isinstance(given, SetVariable):
                    _combined(made)
                elif type(made) is SetVariable:
                    _order_like_python(made, given)
            return made

        return call

    def calling_method(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(this: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name == "pop":
                _check_order(this, tx)
            if name not in ("add", "__contains__", "__len__"):
                this.fckpt_combined = True
            with _added(free, args):
                return _combined(original(this, tx, name, args, kwargs))

        return call

    def extending(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(this: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            given = args[0].realize() if name == "extend" and args else None
            if isinstance(given, SetVariable):
                _check_order(given, tx)
            elif isinstance(given, ConstDictVariable):
                given.unpack_var_sequence(tx)  # which guards the keys
            return original(this, tx, name, args, kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner in filter(None, (ConstDictVariable, getattr(user_defined, "OrderedDictVariable", None))):
            stack.enter_context(patched(owner, "call_method", _moving))
        for name in _ITERATING:
            owner = next((cls for cls in SetVariable.__mro__ if name in vars(cls)), None)
            if owner is not None:
                stack.enter_context(patched(owner, name, iterating))
        for name in _OPERATORS:
            if name in vars(SetVariable):
                stack.enter_context(patched(SetVariable, name, _combining))
        stack.enter_context(patched(VariableTracker, "clone", _cloning))
        stack.enter_context(builtins_patched(dict.fromkeys(_ANY_ORDER, calling)))
        stack.enter_context(patched(SetVariable, "call_method", calling_method))
        stack.enter_context(patched(CommonListMethodsVariable, "call_method", extending))
        stack.enter_context(patched(VariableBuilder, "wrap_listlike", _with_limit))
        for name, wrapped in _DEQUES.items():
            if name in vars(DequeVariable):
                stack.enter_context(patched(DequeVariable, name, wrapped))
        yield


def container_of(variable: Any) -> Any:
    """Returns Dynamo's model of the container that an object of a subclass extends; None for other objects."""
    found = (vars(variable).get(name) for name in BASES)
    return next((model for model in found if model is not None), None)


def _combining(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def combine(*args: Any, **kwargs: Any) -> Any:
        return _combined(original(*args, **kwargs))

    return combine


def _combined(made: Any) -> Any:
    """Marks a set that is made from sets, or has lost items: its order depends on the sizes of their hash tables."""
    if isinstance(made, SetVariable):
        made.fckpt_combined = True
    return made


def _in_any_table(items: list[Any]) -> bool:
    """Whether a set of these items has this order in a hash table of any size: small integers that increase, mostly."""
    slots = [[hash(item) % (8 << n) for item in items] for n in range(16) if 8 << n > len(items)]
    return all(sorted({*row}) == row for row in slots)


def _moving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(this: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("move_to_end", "popitem"):  # whose argument `last` Dynamo takes for True unless it is a constant
            args, kwargs = [known(arg) for arg in args], {key: known(value) for key, value in kwargs.items()}
        found = original(this, tx, name, args, kwargs)
        if name == "move_to_end":  # Dynamo writes only entries that are new, or all
            getattr(this, "_base_vt", this).should_reconstruct_all = True
        return found

    return call


@contextlib.contextmanager
def _added(free: list[Any], args: Any) -> Iterator[None]:
    count = len(free)
    free += [variable.realize() for variable in args]
    try:
        yield
    finally:
        del free[count:]


def _order_like_python(made: Any, given: Any) -> None:
    """Orders the items of a new set as Python does, if the set is made from a list or tuple of constants."""
    if not isinstance(given, CommonListMethodsVariable | TupleVariable):
        return
    try:
        items = [item.as_python_constant() for item in given.items]
        keys = {key.vt.as_python_constant(): key for key in made.items}
    except NotImplementedError:
        return
    made.fckpt_order = list(set(items))
    made.fckpt_combined = False
    made.items = {keys[item]: made.items[keys[item]] for item in made.fckpt_order}


def _check_order(this: Any, tx: Any) -> None:
    """Raises `LookupError` for a set that may be iterated over in another order than Dynamo's.

    Torch's own code iterates over sets of names (in `torch.func.functional_call`), whose order does not matter.
    """
    if tx.f_code.co_filename.startswith(TORCH):
        return
    if this.python_type() not in (set, frozenset) or len(this.items) < 2:
        return
    if this.source and not getattr(this.mutation_type, "is_modified", False):
        return  # in the order of the set itself, which Dynamo guards
    try:
        items = [key.vt.as_python_constant() for key in this.items]
    except NotImplementedError:  # items that are no constants, whose hashes may be addresses
        items = []
    if this.source or getattr(this, "fckpt_combined", False):
        is_known = _in_any_table(items)
    else:
        is_known = items in (getattr(this, "fckpt_order", None), list(set(items)))
    if not items or not is_known:
        raise LookupError("the function iterates over a set, whose order is not known before it runs")


def _with_limit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(this: Any, value: Any) -> Any:
        found = original(this, value)
        if type(value) is collections.deque and isinstance(found, DequeVariable):
            found.fckpt_limit = value.maxlen  # Dynamo refuses to write to a deque whose `maxlen` it knows
        return found

    return wrap


def _within_limit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(this: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        limit = getattr(this, "fckpt_limit", None)
        if limit is None:
            return original(this, tx, name, args, kwargs)
        if name not in _METHODS or (name == "insert" and len(this.items) == limit):
            raise LookupError(f"the function calls `{name}` of a deque that is limited to {limit} items")
        found = original(this, tx, name, args, kwargs)
        excess = max(0, len(this.items) - limit)
        this.items[:] = this.items[:limit] if name in ("appendleft", "extendleft") else this.items[excess:]
        return found

    return call


def _limit_read(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(this: Any, tx: Any, name: str) -> Any:
        if name == "maxlen" and hasattr(this, "fckpt_limit"):
            return ConstantVariable.create(this.fckpt_limit)
        return original(this, tx, name)

    return read


def _cloning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clone(this: Any, **changes: Any) -> Any:
        marks = {name: vars(this).pop(name) for name in _MARKS if name in vars(this)}  # no arguments of the class
        try:
            made = original(this, **changes)
        finally:
            vars(this).update(marks)
        vars(made).update(marks)
        return made

    return clone


def _joined(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def join(this: Any, tx: Any, other: Any) -> Any:
        if getattr(this, "fckpt_limit", None) is not None:
            raise LookupError("the function joins a deque that is limited in length to another one")
        return original(this, tx, other)

    return join


_DEQUES = {"call_method": _within_limit, "var_getattr": _limit_read, "sq_concat_impl": _joined}
"""The methods of Dynamo's model of deques that are wrapped."""
