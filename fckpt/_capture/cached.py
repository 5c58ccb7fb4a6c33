"""Functions under `functools.lru_cache` in a captured call.

Dynamo looks through the cache: it captures what the function would compute now, at each call. The plain function
returns the object that it made at its first call with the same arguments. Here, the cache's entry is an object that the
captured function reads, like one in a dict: it is guarded, and may be a tensor, or be changed. An entry that the cache
does not have yet is made during the capture, if nothing but its value can depend on when it is made. An argument is a
constant, or an object that equals no other one, such as the module of a method.

Other calls of cached functions end the capture. Their caller is then traced by running its Python code, which asks the
cache. Seen on torch 2.11 and 2.13: `WrapperUserFunctionVariable`, `CallFunctionNoArgsSource`.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, GlobalSource
from torch._dynamo.variables import SymNodeVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from fckpt._call.caches import entries_of, is_cache, is_packaged, key_for, results_in
from fckpt._call.closure import global_names
from fckpt._call.facts import attribute, is_library
from fckpt._call.places import PLAIN
from fckpt._call.rng import RandomState
from fckpt._capture.patching import patched

__all__ = ["caches_asked"]


@contextlib.contextmanager
def caches_asked() -> Iterator[None]:
    """Makes Dynamo read the caches of the user's functions, within the body, or raise a `LookupError`."""
    with patched(WrapperUserFunctionVariable, "call_function", _calling):
        yield


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        cached = this.wrapper_obj
        if not is_cache(cached) or cached.cache_parameters()["maxsize"] == 0:
            return original(this, tx, args, kwargs)
        given = [value.realize() for value in (*this.self_args(), *args)]
        named = {name: value.realize() for name, value in kwargs.items()}
        if is_packaged(cached) and not _holds_tensors(cached, (*given, *named.values())):
            return original(this, tx, args, kwargs)
        objects = [value for value in (*given, *named.values()) if _is_unequalled(value)]
        if not all(value in objects or _is_constant(value) for value in (*given, *named.values())):
            raise LookupError(f"the cached function `{_name(cached)}` takes a tensor, or an object that may change")
        if any(map(_varies, (*given, *named.values()))):
            if objects:
                raise LookupError(f"the cached function `{_name(cached)}` takes an object, and a size that varies")
            if not _makes_tensors(cached):
                return _computed(cached, original(this, tx, args, kwargs))
            given = [_of_this_size(value) for value in given]  # each size has another entry
            named = {name: _of_this_size(value) for name, value in named.items()}
        if this.source is None:
            raise LookupError(f"the cached function `{_name(cached)}` is made in the captured function")
        # What is read of an object is its method, made at each reading.
        place = AttrSource(this.source, "__func__") if this.self_args() else this.source
        for source in (place, *[value.source for value in objects]):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        held = lambda value: weakref.ref(value.value) if value in objects else value.as_python_constant()
        entry = _entry(cached, tuple(map(held, given)), {name: held(value) for name, value in named.items()})
        if entry() is _ABSENT:
            if objects:
                _check_objects(tx, cached, [value.value for value in objects])
            _fill(cached, entry)
        tx.output.global_scope[entry.name] = entry
        return VariableTracker.build(tx, entry(), CallFunctionNoArgsSource(GlobalSource(entry.name)))

    return call


def _varies(variable: Any) -> bool:
    """Whether an argument is a size that varies, or a tuple with one."""
    inner = variable.items if isinstance(variable, TupleVariable) else ()
    return isinstance(variable, SymNodeVariable) or any(_varies(item.realize()) for item in inner)


def _of_this_size(variable: Any) -> Any:
    """Returns an argument with numbers for sizes, to which the captured function is limited then."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return ConstantVariable.create(variable.evaluate_expr())
    if isinstance(variable, TupleVariable) and _varies(variable):
        return TupleVariable([_of_this_size(item) for item in variable.items])
    return variable


def _makes_tensors(cached: Any) -> bool:
    """Whether a cached function has made tensors or, if it has made nothing yet, uses torch."""
    if entries_of(cached):
        return any(isinstance(value, torch.Tensor) for value in results_in(cached))
    code = attribute(cached.__wrapped__, "__code__")
    return code is not None and "torch" in global_names(code)


def _holds_tensors(cached: Any, values: tuple[Any, ...]) -> bool:
    """Whether a cached function of a library takes constants and makes tensors, which take memory if made anew.

    Its other results are those that it would compute, and Dynamo captures how.
    """
    return _makes_tensors(cached) and all(map(_is_constant, values)) and not _state(cached.__wrapped__, [])


def _computed(cached: Any, result: Any) -> Any:
    """Returns the result of a function that Dynamo has called with sizes, which are variables of the graph."""
    if found := _state(cached.__wrapped__, []):
        raise LookupError(f"the cached function `{_name(cached)}` reads `{found}`, and takes a size that varies")
    if not _is_constant(result):
        raise LookupError(f"the cached function `{_name(cached)}` makes an object for a size that varies")
    return result


def _name(cached: Any) -> str:
    return str(getattr(cached, "__name__", "function"))


def _is_constant(variable: Any) -> bool:
    """Whether Dynamo knows a value, which cannot change, or computes it from sizes."""
    variable = variable.realize()
    if isinstance(variable, TupleVariable):
        return all(map(_is_constant, variable.items))
    return isinstance(variable, SymNodeVariable) or (
        variable.is_python_constant() and _is_unchangeable(variable.as_python_constant())
    )


def _is_unchangeable(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_unchangeable, value))
    return type(value) in PLAIN or isinstance(value, _UNCHANGEABLE)


def _is_unequalled(variable: Any) -> bool:
    """Whether a variable is an object from outside of the function, compared and hashed by its identity."""
    held = attribute(variable, "value")
    kind = type(held)
    found = variable.source is not None and isinstance(variable, UserDefinedObjectVariable) and held is not None
    return found and kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__


_UNCHANGEABLE = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)


# -- entries -----------------------------------------------------------------------------------------------------


class _Entry:
    """The entry of a cache for certain arguments. A call returns its value, or `_ABSENT` if there is no entry now."""

    _numbers = itertools.count()

    def __init__(self, cached: Any, args: Any, kwargs: Any):
        self._cached = weakref.ref(cached)
        self._args, self._kwargs = args, kwargs
        shown = _name(cached) if _name(cached).isidentifier() else "function"
        self.name = f"__fckpt_cached_{next(_Entry._numbers)}_{shown}"
        """The global name under which Dynamo's code finds the entry."""

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of the function. None stands for an argument that has been deleted."""
        return list(map(_referent, self._args)), {name: _referent(value) for name, value in self._kwargs.items()}

    def __call__(self) -> Any:
        cached = self._cached()
        if cached is None:
            return _ABSENT
        args, kwargs = self.arguments()
        return cached(*args, **kwargs) if key_for(cached, args, kwargs) in entries_of(cached) else _ABSENT


class _Absent:
    """Stands for the value of an entry that a cache does not have."""


_ABSENT = _Absent()
_entries: weakref.WeakKeyDictionary[Any, dict[Any, _Entry]] = weakref.WeakKeyDictionary()
"""By function with a cache: its entries that captured functions read, by the cache's own keys."""


def _referent(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def _entry(cached: Any, args: Any, kwargs: Any) -> _Entry:
    known = _entries.setdefault(cached, {})
    return known.setdefault(key_for(cached, args, kwargs), _Entry(cached, args, kwargs))


def _fill(cached: Any, entry: _Entry) -> None:
    """Makes an entry of a cache.

    Raises:
        LookupError: it would matter that the entry is made before the captured function runs.
    """
    if found := _state(cached.__wrapped__, []):
        raise LookupError(f"the cached function `{_name(cached)}` reads `{found}`, and has not been called before")
    random = RandomState.capture([torch.device("cuda")] if torch.cuda.is_initialized() else ())
    args, kwargs = entry.arguments()
    cached.__wrapped__(*args, **kwargs)
    if random.moved():
        random.rewind()
        raise LookupError(f"the cached function `{_name(cached)}` draws random numbers, and has not been called before")
    cached(*args, **kwargs)


def _check_objects(tx: Any, cached: Any, objects: list[Any]) -> None:
    """Raises `LookupError` if it would matter that a cached function of objects is called before the captured function
    runs: the captured function has changed something before it calls the cached one, or the cached one changes them.
    """
    effects = tx.output.side_effects
    known = [v for v in list(effects.id_to_variable.values()) if isinstance(v.mutation_type, _EXISTING)]
    changed = any(map(effects.is_modified, known))
    if changed or any(map(_writes, tx.output.graph.nodes)):
        raise LookupError(f"the cached function `{_name(cached)}` takes an object, and is called after a change")
    todo = [cached.__wrapped__]
    for fn in todo:  # grows meanwhile
        code = getattr(fn, "__code__", None)
        if code is None or any(instruction.opname in _STORES for instruction in dis.get_instructions(code)):
            raise LookupError(f"the cached function `{_name(cached)}` takes an object, and assigns attributes")
        methods = [attribute(type(held), name) for held in objects for name in code.co_names]
        todo += [method for method in methods if isinstance(method, types.FunctionType) and method not in todo]


_STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL")


def _writes(node: Any) -> bool:
    """Whether a node of a captured graph may write to a tensor."""
    target = node.target
    name = target if node.op == "call_method" else getattr(target, "__name__", "") if node.op == "call_function" else ""
    in_place = getattr(operator, str(name), None) is target and name.startswith("i") and hasattr(operator, name[1:])
    return name.endswith("_") or target is operator.setitem or in_place or not node.kwargs.keys().isdisjoint(_WRITTEN)


_WRITTEN = ("out", "inplace")
_EXISTING = (AttributeMutationExisting, ValueMutationExisting)


# -- what a function reads ---------------------------------------------------------------------------------------


def _state(fn: Any, seen: list[Any]) -> str:
    """Returns the name of a variable that a function may read, or of a function of a library that it may call, whose
    value or result may change; empty if there is none. Follows the calls of the user's functions.

    Args:
        fn: the function.
        seen: the functions that have been looked at.
    """
    if not isinstance(fn, types.FunctionType) or fn in seen:
        return ""
    seen.append(fn)
    return next((found for name, value, owner in _held(fn) if (found := _changing(name, value, owner, seen))), "")


def _changing(name: str, value: Any, owner: str, seen: list[Any]) -> str:
    """Returns the name under which `_held` found a value, or a name that the value reads, if it may change."""
    value = getattr(value, "__func__", value)  # of a method
    if isinstance(value, _CALLED):
        module = str(getattr(value, "__module__", ""))
        if not is_library(module):
            return _state(value, seen)
        return "" if module.partition(".")[0] in _PURE and value not in _WITH_EFFECTS else name
    if isinstance(value, (type, types.ModuleType)) or is_cache(value):
        return ""
    return "" if is_library(owner) and _is_unchangeable(value) else name


_CALLED = (types.FunctionType, types.BuiltinFunctionType)
_PURE = ("math", "cmath", "operator", "_operator", "functools", "_functools", "itertools", "builtins", "torch", "numpy")
"""Libraries whose functions have no effect that matters, apart from random numbers."""
_WITH_EFFECTS = (print, input, open, exec, eval, setattr, delattr)
"""Built-in functions that are not pure."""


def _held(fn: types.FunctionType) -> Iterator[tuple[str, Any, str]]:
    """Yields name, value, and the name of the module of what a function may read outside of its arguments."""
    names, module = global_names(fn.__code__), fn.__module__ or ""
    held = [(name, fn.__globals__[name]) for name in names if name in fn.__globals__]
    held += [(f.__name__, f) for f in _WITH_EFFECTS if f.__name__ in names and f.__name__ not in fn.__globals__]
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            held.append((name, cell.cell_contents))
    found = [(name, value, module) for name, value in held]
    for name, owner, _ in found:  # grows meanwhile
        yield name, owner, _
        for base in getattr(owner, "__mro__", (owner,)) if isinstance(owner, _NAMESPACES) else ():
            where = base.__name__ if isinstance(base, types.ModuleType) else str(base.__module__)
            if not (isinstance(base, type) and is_library(where)):
                new = [(n, vars(base)[n], where) for n in names if n in vars(base)]
                found += [item for item in new if not any(item[1] is value for _, value, _ in found)]
    for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        if not _is_unchangeable(value):
            yield "a default", value, module


_NAMESPACES = (types.ModuleType, types.FunctionType, type)
