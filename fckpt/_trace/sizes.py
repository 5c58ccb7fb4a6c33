"""Symbolic sizes in a trace: tensors whose sizes are symbols of a `ShapeEnv`, and layouts that have such sizes.

Torch computes the sizes of results as expressions of the symbols. Wherever it, or the tracer, compares two sizes, the
environment records a guard. So the trace is valid for all sizes that satisfy the guards (`sized.py`).

Seen on torch 2.11 and 2.13: `ShapeEnv`, `SymNode.expr`; the Python function for `aten.constant_pad_nd` that torch has,
but does not use for fake tensors; the shortcut of indexing by a full slice, which symbolic sizes do not get.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fckpt._trace.operations import mapped

__all__ = [
    "FullSlices",
    "hashable",
    "is_size",
    "run_in",
    "storage_of_size",
    "viewing_symbolically",
]

aten = torch.ops.aten


def hashable(sizes: Any) -> Any:
    """Returns sizes, or tuples of sizes, with expressions in place of symbolic sizes, which have no hash."""
    if isinstance(sizes, tuple):
        return tuple([hashable(size) for size in sizes])
    return sizes.node.expr if isinstance(sizes, torch.SymInt) else sizes


def is_size(number: Any) -> bool:
    """Whether a number is an int or a known expression of the symbols; otherwise it depends on the data of tensors."""
    return type(number) is int or (isinstance(number, torch.SymInt) and number.node.has_hint())


def storage_of_size(nbytes: Any) -> torch.UntypedStorage:
    """Returns a storage without memory on the meta device, of a size that may be symbolic."""
    if type(nbytes) is int:
        return torch.UntypedStorage(nbytes, device="meta")
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch.empty((nbytes,), dtype=torch.uint8, device="meta").untyped_storage()


def viewing_symbolically(storage: torch.UntypedStorage, fake: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Returns a tensor on `storage` with the layout of `fake`, like `stand_ins.viewing` for layouts with symbols."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        tensor = torch.empty(0, dtype=fake.dtype, device="meta")
        tensor.set_(storage, fake.storage_offset(), tuple(fake.shape), fake.stride())
        if fake.is_conj():
            torch._C._set_conj(tensor, True)
        if fake.is_neg():
            torch._C._set_neg(tensor, True)
    return FakeTensor(mode, tensor, fake.device)


def _run_on_zeros(mode: FakeTensorMode, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    """Returns fakes, on this device, of the results of an operation on zeros with the layouts of its fake arguments."""
    cpu = torch.device("cpu")
    zeros = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=cpu).zero_()
    fake_of = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    with _disable_current_modes(), torch.no_grad():
        sent = {k: cpu if isinstance(v, torch.device) else mapped(v, zeros) for k, v in kwargs.items()}
        results = func(*mapped(tuple(args), zeros), **sent)
    with mode, torch.no_grad():
        return mapped(results, fake_of)


def run_in(mode: FakeTensorMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on fake tensors, whose sizes may be symbolic."""
    env: Any = mode.shape_env
    if env is None:
        try:
            with mode:
                return func(*args, **kwargs)
        except (ZeroDivisionError, TypeError):
            # Some of torch's Python code fails for empty tensors: it divides by the number of elements (`mse_loss`), or
            # takes a number for a bool (`interpolate`), where the kernel does not.
            given: list[torch.Tensor] = []
            mapped((*args, *kwargs.values()), given.append)
            if func._schema.is_mutable or all(t.numel() for t in given):
                raise
            return _run_on_zeros(mode, func, args, kwargs, given[0].device)
    env.computes_layouts = True  # see `symbols.float_arithmetic_refused`
    try:
        with mode:
            return _with_symbolic_sizes(func)(*args, **kwargs)
    finally:
        env.computes_layouts = False


def _with_symbolic_sizes(func: Any) -> Any:
    """Returns the function that computes the layout of an operation's result."""
    if func is aten.expand.default:
        return _expanded
    if func is aten.constant_pad_nd.default:
        from torch._refs import constant_pad_nd  # imports sympy and more

        return constant_pad_nd
    return func


def _expanded(tensor: torch.Tensor, size: Sequence[Any], *, implicit: bool = False) -> torch.Tensor:
    """Expands a tensor with the strides that torch's kernel gives to dimensions of size 1."""
    new = len(size) - tensor.dim()
    sizes, strides = list(size), [0] * len(size)
    for i in range(len(size) - 1, -1, -1):
        if i >= new:
            have, strides[i] = tensor.shape[i - new], tensor.stride()[i - new]
        else:
            have, strides[i] = 1, sizes[i + 1] * strides[i + 1] if i + 1 < len(size) else 1
        if type(sizes[i]) is int and sizes[i] == -1:
            sizes[i] = have
        elif have != sizes[i]:
            strides[i] = 0
    return tensor.as_strided(sizes, strides, tensor.storage_offset())


class FullSlices(TorchFunctionMode):
    """A mode in which `x[:, i]` skips the full slices, as torch does for sizes that are not symbolic."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            args = (args[0], _ending(args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _ending(tensor: torch.Tensor, index: Any) -> Any:
    """Returns an index in which full slices end at the size of their dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, slice) for part in parts):
        return index
    taken = [_dims_of(part) for part in parts]
    dim, ended = 0, []
    for part, count in zip(parts, taken, strict=True):
        if part is ...:
            count = tensor.dim() - sum(taken)
        full = isinstance(part, slice) and (part.start or 0, part.stop, part.step or 1) == (0, None, 1)
        ended.append(slice(0, tensor.shape[dim]) if full else part)
        dim += count
    return tuple(ended) if isinstance(index, tuple) else ended[0]


def _dims_of(part: Any) -> int:
    """Returns the number of dimensions that a part of an index takes, except an ellipsis."""
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 0 if part is None or part is ... or isinstance(part, bool) else 1
