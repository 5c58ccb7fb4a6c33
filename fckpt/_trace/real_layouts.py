"""Strides and dtypes of results as torch's kernels make them, where those of fake tensors may be others.

Torch computes the strides of fake results in Python. They may differ from those of the kernels (torch 2.11 and 2.13) if
an operand is not contiguous (`logsigmoid` of a transposed matrix, batch normalisation of permuted sequences), and in
dimensions of size 1 (`view` of a permuted batch of one, `bmm`). Torch considers the latter harmless, but kernels for
images choose their memory format by all strides. After one that differs, others follow; dropout masks are laid out in
another order, and `contiguous()` copies or does not copy.

Nor are their dtypes always those of the kernels, if an operand in half precision meets one in single precision, as the
input and the weight of a normalisation do under autocast: the kernels keep statistics in single precision.

So such operations run once, on zeros. Those that are too large, or do not run on
zeros, are checked as they run in a planned call.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fckpt._trace.on_zeros import hinted, run_on_zeros
from fckpt._trace.operations import OPAQUE, Call, TensorSpec, mapped, strides_of, tensors_of
from fckpt._trace.sizes import fake_on
from fckpt._trace.stand_ins import WAY_OUT
from fckpt.errors import TraceError

__all__ = ["checked", "with_real_layouts"]

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Operations whose results are contiguous whatever their operands are, except for dimensions of size 1."""

_Layouts = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
"""By result of an operation: its strides and dtype; None for a result that is not a dense tensor."""

_MOST_NBYTES = 2**30
"""The bytes of operands and results up to which an operation runs."""
_MOST = 4096
_KNOWN: OrderedDict[Any, _Layouts | None] = OrderedDict()
"""By operation and layouts of its operands: the layouts of its results; None if it does not run on zeros."""
_UNCHECKED: OrderedDict[Any, None] = OrderedDict()
"""The operations, with layouts of their operands, that did not run on zeros."""


def with_real_layouts(mode: FakeTensorMode, func: Any, args: Any, kwargs: dict[str, Any], result: Any, key: Any) -> Any:
    """Returns a result of an operation on fake tensors with the strides and dtypes that the kernel gives it.

    Args:
        mode: the mode of the fake tensors. Strides with symbols are returned as they are.
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
    symbolic = mode.shape_env is not None
    unclear = _mixes_precisions(func, given) or (not symbolic and _is_unclear(func, given, made))
    if func.namespace != "aten" or not made or not unclear:
        return result
    if (
        _reads_opaque(func, args, kwargs)
        or not all(map(_is_laid_out, given))
        or any(t.device.type == "meta" for t in (*given, *made))
    ):
        return result
    if key is None or key not in _KNOWN:
        layouts = _run(func, args, kwargs, [*given, *made])
        if key is not None:
            _remember(_KNOWN, key, layouts)
    else:
        layouts = _KNOWN[key]
    if layouts is None or len(layouts) != len(results):
        if not symbolic:
            _remember(_UNCHECKED, _place(func, given), None)
        return result
    real = [
        _relaid(mode, t, layout) if layout is not None and any(t is other for other in made) else t
        for t, layout in zip(results, layouts, strict=True)
    ]
    return type(result)(real) if isinstance(result, (list, tuple)) else real[0]


def _remember(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    if len(table) > _MOST:
        table.popitem(last=False)


def checked(run: Callable[..., Any], call: Call, specs: Sequence[TensorSpec]) -> Callable[..., Any]:
    """Returns the function that runs a call of a trace. If its layouts are not certain, the function checks them.

    Args:
        run: runs the operation of the call.
        call: the call.
        specs: the specs of the tensors of the trace.

    The function raises a `TraceError` if a result has other strides than in the trace.
    """
    if not _UNCHECKED or _place(call.op, [specs[t] for t in tensors_of(call)]) not in _UNCHECKED:
        return run
    wanted = tuple([None if t is None else strides_of(specs[t].shape, specs[t].stride) for t in call.outputs])
    return _checking(run, str(call.op), wanted)


@functools.lru_cache(256)
def _checking(run: Callable[..., Any], name: str, wanted: tuple[Any, ...]) -> Callable[..., Any]:
    def run_checked(*args: Any, **kwargs: Any) -> Any:
        results = run(*args, **kwargs)
        found = results if isinstance(results, (list, tuple)) else [results]
        for made, strides in zip(found, wanted, strict=True):
            if strides is not None and strides_of(made.shape, made.stride()) != strides:
                raise TraceError(
                    f"{name} returns a tensor of shape {list(made.shape)} with strides {made.stride()}, where torch "
                    f"predicts {strides} for a plan. Make its operands contiguous: x.contiguous(). {WAY_OUT}"
                )
        return results

    return run_checked


def _place(func: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    strides = [t.stride() if isinstance(t, torch.Tensor) else t.stride for t in operands]
    return func, *[(tuple(t.shape), stride) for t, stride in zip(operands, strides, strict=True)]


def _is_unclear(func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
    """Whether the strides of fake results may be others than those of real ones."""
    if any(1 in t.shape and t.numel() > 1 for t in made):
        return True
    returns = func._schema.returns
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return bool(made) and not views and func not in _PRODUCTS and not all(t.is_contiguous() for t in given)


def _mixes_precisions(func: Any, given: Sequence[torch.Tensor]) -> bool:
    """Whether the dtypes of fake results may be others than those of real ones."""
    return len({t.dtype for t in given if t.is_floating_point()}) > 1 and torch.Tag.pointwise not in func.tags


def _reads_opaque(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation reads an opaque tensor: zeros in it could crash the process.

    The strides of such results stay those of the stand-ins. They are gradients of the operands of recurrent layers and
    of attention, which are matrices or rows of heads.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = (*zip(names, args, strict=False), *kwargs.items())
    return not OPAQUE.isdisjoint({name for name, value in given if value is not None})


def _is_laid_out(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.layout is torch.strided and not value.is_quantized


def _run(func: Any, args: Any, kwargs: dict[str, Any], used: Sequence[FakeTensor]) -> _Layouts | None:
    """Returns the layouts of the results of an operation on zeros; None if it does not run on them."""
    if sum(hinted(t.untyped_storage().nbytes()) for t in used) > _MOST_NBYTES:
        return None
    try:
        results = run_on_zeros(func, args, kwargs)
    except Exception:  # a kernel may raise any exception on zeros
        return None
    found = results if isinstance(results, (list, tuple)) else [results]
    dense = [isinstance(t, torch.Tensor) and t.layout is torch.strided for t in found]
    return tuple([(t.stride(), t.dtype) if known else None for t, known in zip(found, dense, strict=True)])


def _relaid(mode: FakeTensorMode, fake: FakeTensor, layout: tuple[tuple[int, ...], torch.dtype]) -> FakeTensor:
    """Returns a fake tensor with another dtype, or with other strides on the same storage."""
    stride, dtype = layout if mode.shape_env is None else (fake.stride(), layout[1])
    if len(stride) != fake.dim():
        return fake
    if dtype != fake.dtype:
        with mode, torch.no_grad():
            # Within the mode, `empty_strided` returns a FakeTensor, which its annotation does not say.
            return torch.empty_strided(fake.shape, stride, dtype=dtype, device=fake.device)  # type: ignore[return-value]
    if stride == fake.stride():
        return fake
    last = sum((size - 1) * step for size, step in zip(fake.shape, stride, strict=True))
    if (fake.storage_offset() + last + 1) * fake.dtype.itemsize > fake.untyped_storage().nbytes():
        return fake
    place = fake.storage_offset(), tuple(fake.shape), stride
    storage = fake.untyped_storage()
    return fake_on(mode, storage, place, fake.dtype, fake.device, conj=fake.is_conj(), neg=fake.is_neg())
