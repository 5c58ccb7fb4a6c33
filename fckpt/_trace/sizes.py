"""Symbolic sizes in a trace: tensors whose sizes are symbols of a `ShapeEnv`, and layouts that have such sizes.

Torch computes the sizes of results as expressions of the symbols. Wherever it, or the tracer, compares two sizes, the
environment records a guard. So the trace is valid for all sizes that satisfy the guards (`sized.py`).

Seen on torch 2.11 and 2.13: `ShapeEnv`, `SymNode.expr`; `_create_grouped_mm_output_tensor`; the Python function for
`aten.constant_pad_nd` that torch has, but does not use for fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fckpt._trace.on_zeros import run_on_zeros
from fckpt._trace.operations import mapped
from fckpt._trace.stand_ins import set_lazy

__all__ = [
    "fake_on",
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
    place = fake.storage_offset(), tuple(fake.shape), fake.stride()
    return fake_on(mode, storage, place, fake.dtype, fake.device, conj=fake.is_conj(), neg=fake.is_neg())


def fake_on(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    place: tuple[Any, Any, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    conj: bool,
    neg: bool,
) -> FakeTensor:
    """Returns a fake tensor on `storage`, at a place: its offset, shape and strides."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        tensor = torch.empty(0, dtype=dtype, device="meta")
        tensor.set_(storage, *place)
        set_lazy(tensor, conj=conj, neg=neg)
    return FakeTensor(mode, tensor, device)


def run_in(mode: FakeTensorMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on fake tensors, whose sizes may be symbolic."""
    if mode.shape_env is None:
        run: Any = _ALWAYS.get(func, func)
        try:
            with mode:
                return run(*args, **kwargs)
        except (ZeroDivisionError, TypeError):
            # Some of torch's Python code fails for empty tensors: it divides by the number of elements (`mse_loss`), or
            # takes a number for a bool (`interpolate`), where the kernel does not.
            given: list[torch.Tensor] = []
            mapped((*args, *kwargs.values()), given.append)
            if func._schema.is_mutable or all(t.numel() for t in given):
                raise
            device = given[0].device
            results = run_on_zeros(func, args, kwargs, torch.device("cpu"))
            with mode, torch.no_grad():
                return mapped(results, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device))
    with mode:
        return _with_symbolic_sizes(func)(*args, **kwargs)


def _with_symbolic_sizes(func: Any) -> Any:
    """Returns the function that computes the layout of an operation's result."""
    if func is aten.constant_pad_nd.default:
        from torch._refs import constant_pad_nd  # imports sympy and more

        return constant_pad_nd
    return _LAYOUTS.get(func, _ALWAYS.get(func, func))


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns an empty result of `aten._grouped_mm`, for which torch's function takes bfloat16 only."""
    if a.dtype is torch.bfloat16:
        return aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)


def _without_generator(op: Any) -> Callable[..., torch.Tensor]:
    """Returns a random operation that ignores a generator, which torch's Python function for it does not take."""
    return lambda *args, generator=None: op(*args)


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


def _resized(tensor: torch.Tensor, new: Sequence[Any], *options: Any) -> torch.Tensor:
    """Returns an empty result of `aten.upsample_bilinear2d` and its kin, for which torch has C++ code only."""
    return _empty((*tensor.shape[:2], *new), tensor, suggest_memory_format(tensor))


def _resized_backward(gradient: torch.Tensor, new: Sequence[Any], old: Sequence[Any], *options: Any) -> torch.Tensor:
    return _empty(old, gradient, suggest_memory_format(gradient))


def _resized_backward_contiguous(
    gradient: torch.Tensor, new: Sequence[Any], old: Sequence[Any], *options: Any
) -> torch.Tensor:
    return _empty(old, gradient, torch.contiguous_format)


def _empty(shape: Sequence[Any], like: torch.Tensor, form: torch.memory_format) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=form)


_DRAWING = (
    aten.exponential, aten.exponential_, aten.cauchy, aten.cauchy_, aten.geometric, aten.geometric_, aten.log_normal,
    aten.log_normal_,
)  # fmt: skip
_ALWAYS: dict[Any, Callable[..., torch.Tensor]] = {
    aten._grouped_mm.default: _grouped_mm,
    **{op.default: _without_generator(op.default) for op in _DRAWING},
}
"""Functions that compute the layouts of results where torch's own refuse what the kernels take."""

_LAYOUTS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.expand.default: _expanded,
    aten.upsample_nearest1d_backward.default: _resized_backward,
    aten.upsample_nearest3d_backward.default: _resized_backward_contiguous,
    aten._upsample_nearest_exact1d_backward.default: _resized_backward,
    aten._upsample_nearest_exact3d_backward.default: _resized_backward_contiguous,
    aten.upsample_linear1d.default: _resized,
    aten.upsample_linear1d_backward.default: _resized_backward,
    aten.upsample_bilinear2d.default: _resized,
    aten.upsample_bilinear2d_backward.default: _resized_backward,
    aten.upsample_bicubic2d.default: _resized,
    aten.upsample_bicubic2d_backward.default: _resized_backward_contiguous,
    aten._upsample_bicubic2d_aa_backward.default: _resized_backward_contiguous,
    aten.upsample_trilinear3d.default: _resized,
    aten.upsample_trilinear3d_backward.default: _resized_backward,
}
"""Functions that compute the layouts of results, where torch's own do not take symbolic sizes or are wrong for them."""
