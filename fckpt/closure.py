"""What a function reaches besides its arguments: modules, tensors and generators that it closes over.

Autograd differentiates closed-over tensors by itself; what needs to be known is what a recompute must not
see changed (tensors), must not change again (the buffers of modules) and must draw from again (generators).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fckpt.rng import generator_types

__all__ = ["Closure", "closure_of"]

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
