"""Functions under `functools.lru_cache` in a captured call.

Dynamo looks through the cache: it captures what the function would compute now. The plain function returns what it
computed at its first call with the same arguments. The two differ if the function reads state that changes, so such a
function must not be captured.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

from fckpt._call.closure import global_names
from fckpt._capture.sources import is_users

__all__ = ["cached_reader"]

_WRAPPED = ".__wrapped__"


def cached_reader(guards: Any, scope: dict[str, Any], local: dict[str, Any]) -> str:
    """Returns the name of a cached function of the user that reads state which may change; empty if there is none.

    Args:
        guards: Dynamo's guards.
        scope: the globals in which the sources of the guards are evaluated.
        local: the local variables likewise.
    """
    names = {guard.name.removesuffix(_WRAPPED) for guard in guards if guard.name.endswith(_WRAPPED)}
    for name in sorted(names):
        try:
            found = eval(name, {"L": local, "G": scope})
        except Exception:  # a source that only Dynamo's own guards can evaluate
            continue
        found = getattr(found, "__func__", found)  # of a method
        if isinstance(found, functools._lru_cache_wrapper) and _reads_state(found.__wrapped__):
            return str(getattr(found, "__name__", name))
    return ""


def _reads_state(fn: Any) -> bool:
    """Whether a function of the user reads variables that hold neither functions, nor classes, nor modules, or reads
    attributes of its arguments, as a method does.
    """
    if not isinstance(fn, types.FunctionType) or not is_users(fn.__code__.co_filename):
        return False
    if "-packages" in fn.__code__.co_filename:
        return False
    if any(a.startswith("LOAD_FAST") and b in _ATTRIBUTE for a, b in itertools.pairwise(_instructions(fn))):
        return True
    return not all(isinstance(value, _CODE) for value in _read(fn))


_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


def _instructions(fn: types.FunctionType) -> list[str]:
    return [instruction.opname for instruction in dis.get_instructions(fn)]


def _read(fn: types.FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            continue
    for name in global_names(fn.__code__):
        if name in fn.__globals__:
            yield fn.__globals__[name]


_CODE = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType, functools._lru_cache_wrapper)
