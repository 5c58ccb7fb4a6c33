"""The operations that may be computed in a compiled kernel.

`exact`: arithmetic that IEEE 754 rounds once (or that does not round), and selection. Its results do not depend on the
order or the width of the loop, so a compiled loop gives the bits of torch's kernel. Not in the class are sums (their
order may differ), functions such as exp and tanh (implementations differ in the last bit; torch's sqrt is MKL's), half
precision (a compiled chain of operations does not round in between), and operations whose results by torch depend on
the place in a tensor (`uniform.is_uniform`: `maximum` and `minimum` of zeros, for example, on most CPUs).

`fused`: also other pointwise operations, and normalisations and softmax along dimensions.
"""

from __future__ import annotations

from typing import Any

import torch

from fckpt._fuse.uniform import is_uniform
from fckpt._trace.operations import Call, TensorSpec, is_dense, is_random, tensors_of
from fckpt.cost.calls import named
from fckpt.graph.graph import Node

__all__ = ["fusible"]

aten = torch.ops.aten

_EXACT = {
    aten.abs.default, aten.neg.default, aten.relu.default, aten.sgn.default, aten.sign.default,
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor,
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.reciprocal.default, aten.rsqrt.default,
    aten.pow.Tensor_Scalar, aten.maximum.default, aten.minimum.default,
    aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default,
    aten.hardtanh.default, aten.hardtanh_backward.default, aten.leaky_relu.default, aten.leaky_relu_backward.default,
    aten.threshold.default, aten.threshold_backward.default,
    aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    aten.floor.default, aten.ceil.default, aten.trunc.default,
    aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar,
    aten.le.Tensor, aten.le.Scalar, aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar,
    aten.logical_not.default, aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
    aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.isnan.default,
    aten._to_copy.default, aten.clone.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip
_EXACT_TYPES = {torch.float32, torch.float64, torch.bool, torch.int64, torch.int32}
_POWERS = (2, 3)
"""Exponents for which torch multiplies."""

_REDUCING = {
    aten._softmax.default, aten._softmax_backward_data.default, aten._log_softmax.default,
    aten._log_softmax_backward_data.default, aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
    aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var_mean.correction,
}  # fmt: skip
_DEVICES = ("cpu", "cuda")
_FUSED_TYPES = _EXACT_TYPES | {torch.bfloat16, torch.float16}


def fusible(node: Node, call: Call, specs: tuple[TensorSpec, ...], *, exact: bool) -> bool:
    """Whether a call, the only one of its node, may be part of a compiled kernel.

    Args:
        node: the node.
        call: its call.
        specs: the specs of the tensors, by number.
        exact: whether the kernel must give the bits of torch's kernels.
    """
    if node.once or node.random or node.writes or call.replaced or is_random(call.op):
        return False
    made = [t for t in call.outputs if t is not None]
    used = [specs[t] for t in (*made, *tensors_of(call))]
    types = _EXACT_TYPES if exact else _FUSED_TYPES
    if len({s.device for s in used}) != 1 or used[0].device.type not in _DEVICES:
        return False
    if any(s.dtype not in types or s.conj or s.neg or 0 in s.shape for s in used):
        return False
    whole = all(
        specs[t].offset == 0 and specs[t].value >= 0 and is_dense(specs[t].shape, specs[t].stride) for t in made
    )
    if not whole or not made:
        return False
    return _is_exact(call, specs) and is_uniform(call, specs) if exact else _is_fused(call)


def _is_exact(call: Call, specs: tuple[TensorSpec, ...]) -> bool:
    if call.op not in _EXACT:
        return False
    given = named(call)
    if given.get("alpha", 1) != 1:  # torch's kernel multiplies and adds with one rounding
        return False
    if call.op is aten.pow.Tensor_Scalar:
        return given["exponent"] in _POWERS
    if call.op is aten._to_copy.default:  # a float that an int cannot represent may become any int
        source = specs[given["self"].tensor].dtype  # vmap passes it by name
        made = next(specs[t].dtype for t in call.outputs if t is not None)
        return not source.is_floating_point or made.is_floating_point or made is torch.bool
    return True


def _is_fused(call: Call) -> bool:
    op: Any = call.op
    return op in _EXACT or op in _REDUCING or (torch.Tag.pointwise in op.tags and op.namespace == "aten")
