"""Copies of whatever a test compares, and what differs between two of them, named by its place."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_ATOMS = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, range, slice)
_CALLS = {"forward", "_compiled_call_impl"}
"""How a module is called, which a rematerialised one keeps apart from the module that it shares its attributes with."""
_INNER = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


def snapshot(thing: Any, gradients: bool = False, _seen: frozenset[int] = frozenset()) -> Any:
    """Copies `thing` into tuples and clones of tensors, which later changes do not reach.

    Functions and what has no contents to compare become None. Order counts in mappings.
    """
    if type(thing) in _ATOMS:
        return thing
    base = next((atom for atom in _ATOMS if isinstance(thing, atom)), None)
    if base is not None:  # the class is another object in each copy of a program
        return type(thing).__name__, base.__repr__(thing)
    if isinstance(thing, type):
        return "the class", thing.__name__
    if isinstance(thing, enum.Enum):
        return type(thing).__name__, thing.name
    if id(thing) in _seen:
        return "a cycle"
    below = _seen | {id(thing)}
    copy = lambda value: snapshot(value, gradients, below)
    if isinstance(thing, Tensor):
        return _of_tensor(thing, gradients)
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, np.ndarray | np.generic):
        return type(thing).__name__, str(thing.dtype), thing.shape, thing.tobytes()
    if isinstance(thing, nn.Module):
        return _of_module(thing, copy)
    if isinstance(thing, RemovableHandle):
        return "a handle of a hook"  # numbered through the whole process
    if isinstance(thing, dict | types.MappingProxyType | collections.UserDict):
        return type(thing).__name__, tuple((copy(k), copy(v)) for k, v in thing.items())
    if isinstance(thing, list | tuple | collections.deque):
        return type(thing).__name__, tuple(map(copy, thing))
    if isinstance(thing, set | frozenset):
        return type(thing).__name__, sorted(map(repr, thing))
    if callable(thing) and (not hasattr(thing, "__dict__") or hasattr(thing, "__wrapped__")):
        return None
    if dataclasses.is_dataclass(thing):
        return type(thing).__name__, tuple((f.name, copy(getattr(thing, f.name))) for f in dataclasses.fields(thing))
    if hasattr(thing, "__dict__") and not isinstance(thing, types.FunctionType | types.MethodType | types.ModuleType):
        return type(thing).__name__, tuple((k, copy(v)) for k, v in vars(thing).items())
    return None


def _of_tensor(tensor: Tensor, gradients: bool) -> tuple[Any, ...]:
    if type(tensor) not in (Tensor, nn.Parameter) or torch._is_functional_tensor(tensor):
        return "a tensor of", type(tensor).__name__, "of a trace" if is_fake(tensor) else ""
    parts = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.detach().clone())
    if not gradients or not tensor.is_leaf:
        return parts
    return *parts, None if tensor.grad is None else _of_tensor(tensor.grad, False)


def _of_module(module: nn.Module, copy: Any) -> tuple[Any, ...]:
    parts: list[Any] = []
    for name, sub in module.named_modules():
        own = {k: v for k, v in vars(sub).items() if k not in _INNER and "_hooks" not in k}
        own = {k: v for k, v in own.items() if not isinstance(v, nn.Module) and k not in _CALLS}
        state = {**sub._parameters, **sub._buffers}
        parts.append((name, tuple((k, copy(v)) for k, v in (*state.items(), *own.items()))))
    return tuple(parts)


def differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Names the places where two snapshots differ; NaN equals NaN."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        keys = {**expected, **actual}
        return [d for k in keys for d in differences(expected.get(k), actual.get(k), f"{path}.{k}" if path else str(k))]
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        return [] if _same(expected, actual) else [f"{path}: off by {_distance(expected, actual)}"]
    if isinstance(expected, tuple) and isinstance(actual, tuple) and type(expected) is type(actual):
        if len(expected) != len(actual):
            return [f"{path}: {len(expected)} parts expected, {len(actual)} found"]
        named = enumerate(zip(expected, actual, strict=True))
        return [d for i, (a, b) in named for d in differences(a, b, _step(path, i, a))]
    same = expected is actual or (type(expected) is type(actual) and (expected == actual or expected != expected))
    return [] if same else [f"{path}: expected {_short(expected)}, found {_short(actual)}"]


def _step(path: str, index: int, part: Any) -> str:
    named = isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) and part[0]
    return f"{path}.{part[0]}" if named else f"{path}[{index}]"


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) < 80 else text[:77] + "..."


def _same(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _distance(a: Tensor, b: Tensor) -> str:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{list(a.shape)} {a.dtype} against {list(b.shape)} {b.dtype}"
    return f"{float((a.double() - b.double()).abs().max()):.2g}"


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is one of a trace, without data."""
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor") or torch._is_functional_tensor(tensor)


def fakes_in(thing: Any, path: str, _seen: set[int] | None = None, depth: int = 6) -> Iterator[str]:
    """Names the places below `thing` where tensors of a trace lie: fake or functional ones."""
    seen = set() if _seen is None else _seen
    if depth < 0 or id(thing) in seen or isinstance(thing, _ATOMS):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if is_fake(thing):
            yield path
        return
    parts: list[tuple[str, Any]] = []
    if isinstance(thing, dict):
        parts += [(f"{path}[{_short(k)}]", v) for k, v in list(thing.items())]
    elif isinstance(thing, list | tuple | set | frozenset | collections.deque):
        parts += [(f"{path}[{i}]", v) for i, v in enumerate(thing)]
    elif isinstance(thing, types.FunctionType):
        parts += [(f"{path}.{n}", c) for n, c in zip(thing.__code__.co_freevars, _contents(thing), strict=True)]
    if hasattr(thing, "__dict__") and not isinstance(thing, types.ModuleType):
        parts += [(f"{path}.{k}", v) for k, v in list(vars(thing).items())]
    for place, value in parts:
        yield from fakes_in(value, place, seen, depth - 1)


def _contents(function: types.FunctionType) -> list[Any]:
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # empty
            contents.append(None)
    return contents
