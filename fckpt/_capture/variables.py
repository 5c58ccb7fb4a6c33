"""Variables that a function may read, and that may change between calls."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from typing import Any

import torch

from fckpt._call.closure import global_names
from fckpt._call.facts import is_library

__all__ = ["changeable", "variable_read"]


def variable_read(code: types.CodeType, scope: dict[str, Any], cells: Any, depth: int = 4) -> str:
    """Returns the name of a changeable variable that a function may read; empty if the function reads none."""
    if is_library(str(scope.get("__name__", ""))):
        return ""
    names = global_names(code)
    held = [(name, scope[name]) for name in names if name in scope]
    for name, cell in zip(code.co_freevars, cells or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            held.append((name, cell.cell_contents))
    for owner in [value for _, value in held if _has_own_names(value)]:
        held += [(name, vars(owner)[name]) for name in names if name in vars(owner)]
    return changeable(held, code, depth)


def changeable(held: Sequence[tuple[str, Any]], code: types.CodeType, depth: int = 4) -> str:
    """Returns the name of the first of these variables of `code` that may change; empty if none may."""
    for name, value in held:
        if type(value) is types.FunctionType and depth and value.__code__ is not code:
            if found := variable_read(value.__code__, value.__globals__, value.__closure__, depth - 1):
                return found
        elif not callable(value) and not isinstance(value, _CONSTANT):
            return name
    return ""


_CONSTANT = (types.ModuleType, torch.Tensor, torch.dtype, staticmethod, classmethod)


def _has_own_names(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return not is_library(value.__name__)
    return isinstance(value, type) and not is_library(value.__module__)
