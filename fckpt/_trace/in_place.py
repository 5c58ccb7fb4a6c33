"""Operations that can write their result over an operand that is not read afterwards.

These are pointwise operations whose kernels read each element before they write it, so the result is bitwise the same,
and operations that write to some elements of their first operand. Overwriting saves the memory of the result during the
operation, and the time to map fresh memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fckpt._trace.operations import Call, Ref, TensorSpec, indices_of, is_dense, tensors_of

__all__ = ["builds_gradient", "out_of_place", "overwritable", "writer_of"]

aten = torch.ops.aten

_OUT = (
    aten.abs.out, aten.add.out, aten.addcdiv.out, aten.addcmul.out, aten.clamp.out, aten.clamp_max.out,
    aten.clamp_min.out, aten.cos.out, aten.div.out, aten.elu.out, aten.erf.out, aten.exp.out, aten.gelu.out,
    aten.gelu_backward.grad_input, aten.hardtanh.out, aten.leaky_relu.out, aten.lerp.Scalar_out, aten.lerp.Tensor_out,
    aten.log.out, aten.maximum.out, aten.minimum.out, aten.mish.out, aten.mul.out, aten.neg.out,
    aten.pow.Tensor_Scalar_out, aten.pow.Tensor_Tensor_out, aten.reciprocal.out, aten.rsqrt.out, aten.sigmoid.out,
    aten.sigmoid_backward.grad_input, aten.silu.out, aten.silu_backward.grad_input, aten.sin.out, aten.softplus.out,
    aten.sqrt.out, aten.sub.out, aten.tanh.out, aten.tanh_backward.grad_input, aten.threshold.out,
    aten.threshold_backward.grad_input, aten.where.self_out,
)  # fmt: skip
"""Kernels with an output argument, which may be one of the operands."""
_SELF = {
    aten.relu.default: aten.relu_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
}
"""Operations without an output argument that can write over their first operand, with their in-place variants."""
_SCATTERING = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.put.default: aten.put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
"""The same for operations that write to some elements, by numbers that they read in another order. Autograd's formulas
build a gradient in this way, in place, but by other operations where the tensors are traced."""
_ZEROS = {str(op) for op in (aten.new_zeros.default, aten.zeros_like.default, aten.zeros.default)}


def _functional(op: Any) -> Any:
    """Returns the variant of an out-operation that returns a new tensor instead of writing to its last argument."""
    takes = [(a.name, str(a.type)) for a in op._schema.arguments[:-1]]
    packet = op.overloadpacket
    for name in packet.overloads():
        schema = getattr(packet, name)._schema
        if [(a.name, str(a.type)) for a in schema.arguments] == takes:
            return getattr(packet, name)
    raise AssertionError(f"{op} has no functional variant")


_EXACT = {aten.add.Tensor, aten.neg.default, aten.sub.Tensor, aten.where.self}
"""Operations on complex numbers with the same bits in place. The compiler has made two versions of other kernels, of
which the one for operands that overlap rounds products in another way (`mul`, `div`; torch 2.13 on a CPU)."""
_WRITERS = {_functional(op): (op, op._schema.arguments[-1].name) for op in _OUT}
_WRITERS |= {op: (writer, "") for op, writer in (_SELF | _SCATTERING).items()}


def writer_of(op: Any) -> tuple[Any, str]:
    """Returns the operation that writes the result of `op` over an operand, and the keyword of the operand, if any.

    It is `op` itself, without a keyword, if there is no such operation.
    """
    return _WRITERS.get(op, (op, ""))


def out_of_place(call: Call, specs: Sequence[TensorSpec]) -> Call | None:
    """Returns the call of the functional variant of an in-place operation; None if that computes something else.

    Args:
        call: a call that writes the whole of its first operand, and nothing else.
        specs: the specs of the tensors, by number.
    """
    if len(call.replaced) != 1 or any(t is not None for t in call.outputs):
        return None
    if not isinstance(call.op, torch._ops.OpOverload) or call.op.namespace != "aten":
        return None
    ((old, new),) = call.replaced
    functional = getattr(getattr(aten, call.op._opname.removesuffix("_"), None), call.op._overloadname, None)
    args = tuple(Ref(old) if a == Ref(new) else a for a in call.args)
    if call.args[:1] != (Ref(new),) or functional in (None, call.op):
        return None
    found = dataclasses.replace(call, op=functional, args=args, outputs=(new,), replaced=())
    read = tensors_of(found)
    if any(specs[t].value == specs[new].value for t in read):
        return None  # another view of the memory that is written
    given = {t: _on_meta(specs[t]) for t in read}
    try:
        made = functional(*(given[a.tensor] if isinstance(a, Ref) else a for a in args), **call.kwargs)
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return None
    spec = specs[new]
    layout = (made.shape, made.stride(), made.dtype) if isinstance(made, torch.Tensor) else None
    return found if layout == (spec.shape, spec.stride, spec.dtype) else None


def _on_meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def overwritable(op: Any, args: Sequence[Any], tensors: Sequence[Any], storages: Sequence[int], out: int) -> list[int]:
    """Returns the positions in `args` of the operands that the result may overwrite.

    Args:
        op: an `OpOverload`.
        args: the arguments of the operation; tensors are refs.
        tensors: by number, an object with the layout of the tensor.
        storages: by number, the storage of the tensor.
        out: the number of the result.
    """
    if op not in _WRITERS:
        return []
    result = _layout(tensors[out])
    if not _is_whole(tensors[out]):
        return []
    if tensors[out].dtype.is_complex and _WRITERS[op][1] and op not in _EXACT:
        return []
    found = []
    for position, arg in enumerate(args[:1] if not _WRITERS[op][1] else args):
        if not isinstance(arg, Ref) or _layout(tensors[arg.tensor]) != result or not _is_whole(tensors[arg.tensor]):
            continue
        # Any other view of the same memory would be read after its elements are overwritten.
        others = [t for t in indices_of(list(args)) if storages[t] == storages[arg.tensor]]
        if len(others) == 1 or (op not in _SCATTERING and all(_layout(tensors[t]) == result for t in others)):
            found.append(position)
    return found


def builds_gradient(op: Any, maker: str) -> bool:
    """Whether an operation of a backward pass is one that autograd runs in place.

    Args:
        op: the operation.
        maker: the operation that makes its first operand.
    """
    return op in _SCATTERING and maker in _ZEROS


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset())


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether `tensor` covers its whole storage, without gaps or repetitions."""
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes() == nbytes > 0 and is_dense(tensor.shape, tensor.stride())
