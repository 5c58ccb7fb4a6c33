"""Temporary memory of the fused attention kernels on CUDA, by the allocations in torch's source.

Backward accumulates the gradient of the query in float32, and sums each row of the output times its gradient. Source,
in `aten/src/ATen/native/transformers/cuda` of torch: `flash_attn/flash_api.cpp` (`mha_bwd`), `attention_backward.cu`.
cuDNN does not publish its workspace, which is taken to be that of flash attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fckpt._trace.operations import Call, TensorSpec
from fckpt.cost.calls import named, packet

__all__ = ["attention_nbytes"]

_PREFIX = "aten._scaled_dot_product_"
_FLOAT = 4


def attention_nbytes(call: Call, specs: Sequence[TensorSpec], grain: int) -> int:
    """Returns the most bytes that a call of a fused attention kernel holds besides its results; 0 for other calls."""
    name = packet(call).removeprefix(_PREFIX)
    if name not in ("flash_attention_backward", "efficient_attention_backward", "cudnn_attention_backward"):
        return 0
    given = named(call)
    tensor = lambda key: specs[given[key].tensor]
    grad = tensor("grad_out_" if "grad_out_" in given else "grad_out")
    query, key, out = tensor("query"), tensor("key"), tensor("out")
    rounded = lambda elements, size=_FLOAT: -(-elements * size // grain) * grain
    batch, heads, length, width = query.shape
    if name.startswith("efficient"):
        delta = rounded(batch * heads * length)
        rows, last = -(-length // 64) * 64, -(-width // 32) * 32
        workspace = rounded(batch * heads * rows * last)
        product = rounded(math.prod(out.shape)) + delta if query.dtype.itemsize == _FLOAT else 0
        copied = 0 if _is_rows_of_heads(grad) else rounded(math.prod(grad.shape), query.dtype.itemsize)
        return delta + max(workspace, product) + copied
    rows, last = -(-length // 128) * 128, 256 if width > 192 else -(-width // 32) * 32
    nbytes = rounded(batch * heads * rows) + rounded(batch * rows * heads * last)
    if key.shape[1] != heads:  # gradients of the heads that share a key, before their sum
        nbytes += 2 * rounded(batch * key.shape[2] * heads * width, query.dtype.itemsize)
    if name.startswith("flash"):
        copied = [spec for spec in (grad, out) if not _is_rows_of_heads(spec)]
    else:
        copied = [grad] if grad.stride != out.stride else []
    return nbytes + sum(rounded(math.prod(spec.shape), spec.dtype.itemsize) for spec in copied)


def _is_rows_of_heads(spec: TensorSpec) -> bool:
    """Whether memory holds, row by row, all heads of a row: the layout that flash attention reads without a copy."""
    _, heads, length, width = spec.shape
    expected = (length * heads * width, width, heads * width, 1)
    return all(n == 1 or step == want for n, step, want in zip(spec.shape, spec.stride, expected, strict=True))
