"""Strides of results as torch's kernels make them, where those of fake tensors may be others.

Torch computes the strides of fake results in Python. For dimensions of size 1 they may differ from those of the kernels
(`view` of a permuted batch of one, `bmm`, batch normalisation of one pixel; torch 2.11 and 2.13), which torch considers
harmless. But kernels for images choose their memory format by all strides. After one that differs, others follow in
larger dimensions, dropout masks are laid out in another order, and `contiguous()` copies or does not copy.

So operations whose results have dimensions of size 1 run once, on zeros with the layouts of their operands.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fckpt._call.levels import out_of_reach
from fckpt._call.rng import RandomState
from fckpt._trace.operations import is_random, mapped

__all__ = ["with_real_strides"]

_Strides = tuple[tuple[int, ...] | None, ...]

_MOST_NBYTES = 2**30
"""The bytes of operands and results up to which an operation runs."""
_MOST = 4096
_KNOWN: OrderedDict[Any, _Strides | None] = OrderedDict()
"""By operation and layouts of its operands: the strides of its results; None if it does not run on zeros."""


def with_real_strides(mode: FakeTensorMode, func: Any, args: Any, kwargs: dict[str, Any], result: Any, key: Any) -> Any:
    """Returns a result of an operation on fake tensors with the strides that the kernel gives it.

    Args:
        mode: the mode of the fake tensors. Layouts with symbols are returned as they are.
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
        result: its result: a fake tensor, or a tuple or list of them and of other values.
        key: everything on which the layouts of the results depend; None if that is not known.
    """
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    given: list[Any] = []
    mapped((*args, *kwargs.values()), given.append)
    made = [t for t in results if _is_laid_out(t) and not any(t is other for other in given)]
    unclear = any(1 in t.shape and t.numel() > 1 for t in made)
    if not unclear or mode.shape_env is not None or getattr(func, "namespace", "") != "aten":
        return result
    if not all(map(_is_laid_out, given)) or any(t.device.type == "meta" for t in (*given, *made)):
        return result
    if key is None or key not in _KNOWN:
        strides = _run(func, args, kwargs, [*given, *made])
        if key is not None:
            _KNOWN[key] = strides
            if len(_KNOWN) > _MOST:
                _KNOWN.popitem(last=False)
    else:
        strides = _KNOWN[key]
    if strides is None or len(strides) != len(results):
        return result
    real = [
        _relaid(mode, t, stride) if any(t is other for other in made) else t
        for t, stride in zip(results, strides, strict=True)
    ]
    return type(result)(real) if isinstance(result, (list, tuple)) else real[0]


def _is_laid_out(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.layout is torch.strided and not value.is_quantized


def _run(func: Any, args: Any, kwargs: dict[str, Any], used: Sequence[FakeTensor]) -> _Strides | None:
    """Returns the strides of the results of an operation on zeros; None if it does not run on them."""
    if sum(t.untyped_storage().nbytes() for t in used) > _MOST_NBYTES:
        return None

    def zeros(fake: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()
        if fake.is_conj():
            torch._C._set_conj(made, True)
        if fake.is_neg():
            torch._C._set_neg(made, True)
        return made

    sent = {k: None if isinstance(v, torch.Generator) else v for k, v in kwargs.items()}
    before = RandomState.capture({t.device for t in used}) if is_random(func) else None
    with out_of_reach(), _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = func(*mapped(tuple(args), zeros), **{k: mapped(v, zeros) for k, v in sent.items()})
        except Exception:  # a kernel may raise any exception on zeros
            return None
        finally:
            if before is not None:
                before.drawn().rewind()
    found = results if isinstance(results, (list, tuple)) else [results]
    return tuple([t.stride() if isinstance(t, torch.Tensor) and t.layout is torch.strided else None for t in found])


def _relaid(mode: FakeTensorMode, fake: FakeTensor, stride: tuple[int, ...] | None) -> FakeTensor:
    """Returns a fake tensor with other strides on the same storage."""
    if stride is None or stride == fake.stride() or len(stride) != fake.dim():
        return fake
    last = sum((size - 1) * step for size, step in zip(fake.shape, stride, strict=True))
    if (fake.storage_offset() + last + 1) * fake.dtype.itemsize > fake.untyped_storage().nbytes():
        return fake
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        tensor = torch.empty(0, dtype=fake.dtype, device="meta")
        tensor.set_(fake.untyped_storage(), fake.storage_offset(), tuple(fake.shape), stride)
        if fake.is_conj():
            torch._C._set_conj(tensor, True)
        if fake.is_neg():
            torch._C._set_neg(tensor, True)
    return FakeTensor(mode, tensor, fake.device)
