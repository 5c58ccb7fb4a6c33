"""Data that a trace knows: tensors computed from nothing but numbers and sizes.

Some of torch's functions look at such data. `torch.cov` asks whether there is more than one observation, and
`torch.istft` whether the windows cover the signal. Traced tensors have no data, so their operations run once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fckpt._call.levels import below_all
from fckpt._trace.operations import Recorded, Ref, indices_of, is_random, tensors_of

__all__ = ["LOOKING", "UnknownData", "held_data", "looked_at", "refuse_number"]

aten = torch.ops.aten

LOOKING = {aten.equal.default, aten.is_nonzero.default, aten._local_scalar_dense.default}
"""Operations that return data."""
_UNTAGGED = {aten._nested_tensor_from_mask_left_aligned.default, aten._choose_qparams_per_tensor.default}
"""Operations that return data although torch does not tag them so."""
_SMALLEST_BLOCK = 512
"""The bytes of the smallest block of memory on a GPU."""
_MOST_CALLS = 64
_MOST_ELEMENTS = 1 << 20
"""The most elements of a tensor that is computed once more."""


class UnknownData(Exception):
    """The data depend on more than numbers and sizes."""


def held_data(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the data that a trace holds for a tensor of Python numbers, which each call copies to a device.

    They are on the CPU, in memory that torch's allocator does not know. The smallest ones are on the device: a copy
    from the CPU would take longer than they are worth.
    """
    if (device.type != "cpu" and data.nbytes <= _SMALLEST_BLOCK) or not data.numel() or data.is_meta:
        return data.to(device)
    if isinstance(data, FakeTensor):
        return data.cpu()
    with _disable_current_modes():
        copied = bytearray(data.cpu().reshape(-1).view(torch.uint8).numpy())
        return torch.frombuffer(copied, dtype=data.dtype).reshape(data.shape)


def refuse_number(func: Any) -> None:
    """Raises torch's error for operations that look at data if `func`, which returned a number, may be one.

    ATen's others only describe tensors: `is_pinned`, `_fused_sdp_choice`. What custom operations return is not known.
    """
    if func in _UNTAGGED or func.namespace not in ("aten", "prims"):
        raise DataDependentOutputException(func)


def looked_at(
    func: Any,
    args: Sequence[Any],
    calls: Sequence[Recorded],
    constants: Mapping[int, torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> Any:
    """Returns the result of an operation in `LOOKING`.

    Args:
        func: the operation.
        args: its arguments, with refs in place of tensors.
        calls: the operations of the trace so far.
        constants: the constants of the trace, by tensor.
        tensors: by tensor of the trace: a tensor with its layout.

    Raises:
        UnknownData: the data depend on an operand, on random numbers or on a write; or they are large.
    """
    known = dict(constants)

    def data(value: Any) -> Any:
        if isinstance(value, Ref):
            return known[value.tensor]
        return type(value)([data(v) for v in value]) if isinstance(value, (list, tuple)) else value

    with _disable_current_modes(), below_all(), torch.no_grad():
        for call in _needed(args, calls, constants, tensors):
            result = call.op(*data(call.args), **{k: data(v) for k, v in call.kwargs.items()})
            results = result if isinstance(result, (list, tuple)) else (result,)
            known.update((t, r) for t, r in zip(call.outputs, results, strict=True) if t is not None)
        return func(*data(tuple(args)))


def _needed(
    args: Sequence[Any],
    calls: Sequence[Recorded],
    constants: Mapping[int, torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> list[Recorded]:
    """Returns the calls that make the arguments of an operation, in their order."""
    made_by = {t: i for i, call in enumerate(calls) for t in call.outputs if t is not None}
    needed = set[int]()
    waiting = list(indices_of(args))
    while waiting:
        t = waiting.pop()
        if t in constants or made_by.get(t) in needed:
            continue
        if t not in made_by or tensors[t].numel() > _MOST_ELEMENTS or len(needed) == _MOST_CALLS:
            raise UnknownData
        call = calls[made_by[t]]
        if call.replaced or is_random(call.op) or call.op is aten.empty_strided.default:
            raise UnknownData
        needed.add(made_by[t])
        waiting += tensors_of(call)
    return [calls[i] for i in sorted(needed)]
