"""What a function reaches besides its arguments: modules, tensors and generators that it closes over.

Autograd differentiates closed-over tensors by itself; what needs to be known is what a recompute must not
see changed (tensors), must not change again (the buffers of modules) and must draw from again (generators).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fckpt.rng import generator_types

__all__ = ["Closure", "closure_of", "exchanged"]

_DEPTH = 4
_LARGE = 1000  # entries of a container that is data rather than state
_MOST = 4000  # values looked at in one walk


class Closure:
    """Modules, tensors and generators that a function closes over."""

    __slots__ = ("generators", "modules", "tensors")

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Any] = []


def closure_of(fn: Callable[..., Any], *statics: Any) -> Closure:
    """Walks `fn`'s cells, bound object, partial arguments, defaults and the globals that its code names.

    The same for `statics`, arguments that are no tensors: a module, or the object of a method.

    Containers and plain objects are looked into `_DEPTH` levels deep, large ones not at all. The walk is quick
    (microseconds for a lambda) and is made at every call, because cells and attributes change.
    """
    found = Closure()
    seen: set[int] = set()
    kinds = generator_types()
    for value in (fn, *statics):
        _visit(value, found, kinds, seen, _DEPTH)
    return found


def _visit(value: Any, found: Closure, generators: tuple[type, ...], seen: set[int], depth: int) -> None:
    kind = type(value)
    if kind in _INERT or depth < 0 or id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        found.tensors.append(value)
    elif isinstance(value, nn.Module):
        found.modules.append(value)
    elif isinstance(value, generators):
        found.generators.append(value)
    else:
        for inner in _parts(value, kind):
            _visit(inner, found, generators, seen, depth - 1)


def _parts(value: Any, kind: type) -> Any:
    if kind is types.FunctionType:
        return _function_parts(value)
    if kind is types.MethodType:
        return (value.__self__, value.__func__)
    if kind in (list, tuple, set, frozenset, dict):
        if len(value) > _LARGE:
            return ()
        return value.values() if kind is dict else value
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if kind is types.ModuleType or isinstance(value, type):
        return ()
    return tuple(getattr(value, "__dict__", {}).values())


def _function_parts(fn: types.FunctionType) -> list[Any]:
    parts: list[Any] = list(fn.__defaults__ or ())
    for cell in fn.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    names = _global_names(fn.__code__)
    if names:
        scope = fn.__globals__
        parts += [scope[name] for name in names if name in scope]
    wrapped = getattr(fn, "__wrapped__", None)
    if wrapped is not None:
        parts.append(wrapped)
    return parts


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(_global_names(const))
    return tuple(sorted(names))


_INERT = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, types.ModuleType, types.BuiltinFunctionType,
        types.BuiltinMethodType, type, torch.dtype, torch.device, torch.Size,
    }
)  # fmt: skip


@contextlib.contextmanager
def exchanged(fn: Callable[..., Any], substitutes: dict[int, torch.Tensor]) -> Iterator[None]:
    """Puts other tensors in the places where `fn` finds those it closes over, for the time of the body.

    Args:
        fn: its cells, bound object, modules and globals are searched, as `closure_of` does.
        substitutes: by the id of the tensor that they replace.
    """
    undo: list[Callable[[], None]] = []
    try:
        if substitutes:
            _exchange(fn, substitutes, undo, set(), _DEPTH)
        yield
    finally:
        for step in reversed(undo):
            step()


def _exchange(value: Any, new: dict[int, torch.Tensor], undo: list[Any], seen: set[int], depth: int) -> None:
    kind = type(value)
    if kind in _INERT or depth < 0 or id(value) in seen or len(seen) > _MOST or isinstance(value, torch.Tensor):
        return
    seen.add(id(value))
    if kind is types.FunctionType:
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                _put(cell.cell_contents, new, undo, functools.partial(setattr, cell, "cell_contents"))
        scope = value.__globals__
        for name in _global_names(value.__code__):
            if name in scope:
                _put(scope[name], new, undo, functools.partial(scope.__setitem__, name))
    elif isinstance(value, nn.Module):
        for module in value.modules():
            for entries in (module._parameters, module._buffers):
                for name, tensor in list(entries.items()):
                    _put(tensor, new, undo, functools.partial(entries.__setitem__, name))
        return
    elif kind not in (list, tuple, set, frozenset, dict, types.MethodType):
        attributes = getattr(value, "__dict__", {})
        if not isinstance(value, type) and type(attributes) is dict:
            for name, held in list(attributes.items()):
                _put(held, new, undo, functools.partial(attributes.__setitem__, name))
    for inner in _parts(value, kind):
        _exchange(inner, new, undo, seen, depth - 1)


def _put(held: Any, new: dict[int, torch.Tensor], undo: list[Any], put: Callable[[Any], None]) -> None:
    replaced = _replaced(held, new, _DEPTH)
    if replaced is not held:
        undo.append(functools.partial(put, held))
        put(replaced)


def _replaced(value: Any, new: dict[int, torch.Tensor], depth: int) -> Any:
    """`value`, with tensors in it replaced; the same object if there are none."""
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    kind = type(value)
    if depth < 0 or kind not in (list, tuple, dict) or len(value) > _LARGE:
        return value
    items = list(value.values()) if kind is dict else list(value)
    replaced = [_replaced(item, new, depth - 1) for item in items]
    if all(a is b for a, b in zip(items, replaced, strict=True)):
        return value
    return dict(zip(value, replaced, strict=True)) if kind is dict else kind(replaced)
