"""Analytic costs: roofline estimates from the shapes of tensors and a device profile.

In the roofline model, an operation takes as long as its arithmetic or its memory traffic, whichever is longer.

Reference: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", 2009, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fckpt._trace.operations import Call, Ref, TensorSpec, tensors_of
from fckpt.cost.attention import attention_nbytes
from fckpt.cost.calls import OpCost, extent, packet, registered
from fckpt.cost.devices import DeviceProfile

__all__ = ["Analytic", "flops_of"]


@dataclass(frozen=True)
class Analytic:
    """Cost source that estimates `max(flops / peak, bytes moved / bandwidth) + launch`; it does not need the device.

    Temporaries are estimates. For CPU tensors they are the allocations that were observed for the main kernels. For
    other devices they cover operations that torch composes of several kernels and the fused kernels of attention, not
    the workspaces of cuDNN and cuBLAS. If a budget must hold to the byte, use `Measured`.

    Example:
        >>> cpu = torch.device("cpu")
        >>> x = TensorSpec((1024, 1024), (1024, 1), torch.float32, cpu, value=0)
        >>> y = TensorSpec((1024, 1024), (1024, 1), torch.float32, cpu, value=1)
        >>> call = Call(torch.ops.aten.mm.default, (Ref(0), Ref(0)), {}, (1,), 0)
        >>> machine = DeviceProfile("mine", {torch.float32: 2e12}, 1e11, launch_seconds=1e-6, memory_nbytes=2**33)
        >>> Analytic(machine)(call, [x, y])                  # 2 * 1024**3 / 2e12 s, and 1 us
        OpCost(seconds=0.001074741824, flops=2147483648, temporary_nbytes=0)
    """

    profile: DeviceProfile

    def __call__(self, call: Call, specs: Sequence[TensorSpec]) -> OpCost:
        """Returns the estimated cost of `call`, or its registered cost if there is one."""
        known = registered(call, specs)
        if known is not None:
            return known
        flops = flops_of(call, specs)
        dtype = _compute_dtype(call, specs)
        traffic = _moved(call, specs) / self.profile.bytes_per_second * _slowdown(call, specs)
        seconds = max(flops / self.profile.flops_of(dtype), traffic)
        grain = self.profile.allocation_granularity
        temporary = _temporary(call, specs) or attention_nbytes(call, specs, grain)
        return OpCost(seconds + self.profile.launch_seconds, flops, -(-temporary // grain) * grain)


def flops_of(call: Call, specs: Sequence[TensorSpec]) -> int:
    """Counts floating point operations with torch's FLOP counter, or else as one per element of the largest tensor."""
    formula = _formula_of(call.op)
    if formula is not None:
        try:
            args, kwargs = _shapes(call.args, specs), _shapes(call.kwargs, specs)
            outputs = tuple(None if i is None else _Shape(specs[i].shape) for i in call.outputs)
            result = outputs[0] if len(outputs) == 1 else outputs
            on_shapes = getattr(formula, "__wrapped__", None)  # most formulas first look for shapes, which takes longer
            return int(
                on_shapes(*args, **kwargs, out_shape=result) if on_shapes else formula(*args, **kwargs, out_val=result)
            )
        except (AssertionError, AttributeError, IndexError, TypeError, ValueError):
            pass  # the formula does not support this call, so its elements are counted below
    inputs = _inputs(call, specs)[packet(call) in _GATHERS :]
    tensors = [*inputs, *(specs[i] for i in call.outputs if i is not None)]
    return max((math.prod(spec.shape) for spec in tensors), default=0)


@functools.lru_cache(1024)
def _formula_of(op: Any) -> Callable[..., Any] | None:
    """Returns the formula of torch's FLOP counter for an operation, if there is one."""
    from torch.utils import flop_counter

    formula, name = flop_counter.flop_registry.get(getattr(op, "overloadpacket", op)), str(op)
    if formula is not None or not name.startswith(_FLASH_CPU):
        return formula
    return flop_counter.sdpa_backward_flop if "backward" in name else flop_counter.sdpa_flop


_FLASH_CPU = "aten._scaled_dot_product_flash_attention_for_cpu"


class _Shape(tuple[int, ...]):
    """A tensor for the formulas of torch's FLOP counter, which read only shapes."""

    @property
    def shape(self) -> _Shape:
        return self


def _shapes(value: Any, specs: Sequence[TensorSpec]) -> Any:
    if isinstance(value, Ref):
        return _Shape(specs[value.tensor].shape)
    if isinstance(value, (list, tuple)):
        return [_shapes(item, specs) for item in value]
    if isinstance(value, dict):
        return {k: _shapes(v, specs) for k, v in value.items()}
    return value


def _inputs(call: Call, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Returns the specs of the tensors that a call reads, each once."""
    return [specs[i] for i in dict.fromkeys(tensors_of(call))]


def _compute_dtype(call: Call, specs: Sequence[TensorSpec]) -> torch.dtype:
    tensors = [*_inputs(call, specs), *(specs[i] for i in call.outputs if i is not None)]
    return next((spec.dtype for spec in tensors if spec.dtype.is_floating_point), torch.float32)


def _nbytes(spec: TensorSpec) -> int:
    """Returns the bytes that a read or write of a tensor moves: expanded elements count once, gaps do not count."""
    return min(math.prod(spec.shape), extent(spec)) * spec.dtype.itemsize


# These operations read only as many elements of their first argument as they return.
_GATHERS = {
    f"aten.{name}" for name in ("embedding", "gather", "index", "index_select", "take", "_unsafe_index", "slice_copy")
}


def _moved(call: Call, specs: Sequence[TensorSpec]) -> int:
    inputs = _inputs(call, specs)
    written = sum(_nbytes(specs[i]) for i in call.outputs if i is not None)
    if packet(call) in _GATHERS and inputs:
        return written + min(written, _nbytes(inputs[0])) + sum(map(_nbytes, inputs[1:]))
    return written + sum(map(_nbytes, inputs))


def _temporary(call: Call, specs: Sequence[TensorSpec]) -> int:
    """Returns the observed temporary bytes on CPU; on other devices, only those of operations composed by torch."""
    on_cpu = all(specs[i].device.type == "cpu" for i in call.outputs if i is not None)
    name, inputs = packet(call), _inputs(call, specs)
    if not inputs or not (on_cpu or name in _COMPOSED):
        return 0
    first, written = _nbytes(inputs[0]), [_nbytes(specs[i]) for i in call.outputs if i is not None]
    if name.startswith("aten.upsample_"):
        return first + written[0]
    if name in ("aten.convolution", "aten.convolution_backward"):
        return _convolution(call, specs)
    return int(_TEMPORARIES.get(name, 0) * first) + (written[0] if name == "aten.logsumexp" else 0)


_TEMPORARIES = {
    "aten.logsumexp": 1,
    "aten.mse_loss": 1,
    "aten.smooth_l1_loss": 1,
    "aten.huber_loss": 1,
    "aten.binary_cross_entropy_with_logits": 2,
    "aten.native_dropout": 1,
    "aten.native_dropout_backward": 1,
    "aten.native_batch_norm_backward": 1,
    "aten.linalg_inv_ex": 1,
    "aten._safe_softmax": 0.25,
    "aten._cdist_forward": 2,
}
"""Temporaries in multiples of the first argument, as measured on an x86 CPU with torch 2.13."""
_COMPOSED = {
    "aten.logsumexp",
    "aten.mse_loss",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.binary_cross_entropy_with_logits",
}
"""The operations among them that torch composes of other operations on every device."""


def _convolution(call: Call, specs: Sequence[TensorSpec]) -> int:
    """Returns the temporaries of a convolution: reordered copies of oneDNN, or image columns in float64."""
    backward = packet(call).endswith("backward")
    tensors = _inputs(call, specs)
    grad, x, weight = tensors[:3] if backward else (specs[call.outputs[0] or 0], *tensors[:2])
    if x.dtype is torch.float64:
        return math.prod((x.shape[0], *weight.shape[1:], *grad.shape[2:])) * x.dtype.itemsize
    if backward:
        return _nbytes(grad) + _nbytes(x)
    if math.prod(weight.shape[2:]) == 1:
        return 0
    transposed = call.args[6]
    reordered, out = _nbytes(x) + _nbytes(weight), _nbytes(grad)
    return reordered + out if transposed else max(reordered, out)


def _slowdown(call: Call, specs: Sequence[TensorSpec]) -> float:
    """Returns the ratio of the time of an operation to the time of its memory traffic, on CPU."""
    on_cpu = all(specs[i].device.type == "cpu" for i in call.outputs if i is not None)
    return _SLOWDOWNS.get(packet(call), 1.0) if on_cpu else 1.0


_SLOWDOWNS = {
    **dict.fromkeys(["aten.exp", "aten.gelu_backward", "aten.cumsum", "aten.native_dropout_backward"], 2.5),
    **dict.fromkeys(["aten._softmax", "aten._log_softmax", "aten.gelu", "aten.silu", "aten.silu_backward"], 1.7),
    **dict.fromkeys(["aten.log_sigmoid_forward", "aten._adaptive_avg_pool2d"], 3.0),
    **dict.fromkeys(["aten.native_batch_norm", "aten._native_batch_norm_legit", "aten.argmax", "aten.max"], 5.0),
    **dict.fromkeys(["aten._native_batch_norm_legit_functional", "aten.logaddexp"], 5.0),
    **dict.fromkeys(["aten.logsumexp", "aten.where", "aten.masked_fill", "aten.topk", "aten.avg_pool2d"], 7.0),
    **dict.fromkeys(["aten.binary_cross_entropy_with_logits", "aten.randn_like", "aten._safe_softmax"], 11.0),
    **dict.fromkeys(["aten.upsample_bilinear2d", "aten.upsample_nearest2d"], 11.0),
    "aten.max_pool2d_with_indices": 14.0,
    **dict.fromkeys(["aten.var", "aten.var_mean", "aten.std", "aten.native_dropout", "aten.bernoulli"], 30.0),
    **dict.fromkeys(["aten.sort", "aten.binary_cross_entropy"], 90.0),
}
"""Seconds divided by the seconds of the memory traffic, as measured on an x86 CPU with one thread and torch 2.13.
Operations that are not listed agree with the roofline within a factor of about 2.5."""
