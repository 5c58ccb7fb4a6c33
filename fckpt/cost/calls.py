"""Costs and signatures of single operations, and the registry of custom operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fckpt._trace.operations import DECLARED_PURE, Call, TensorSpec, text_of
from fckpt.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "CostSource",
    "OpCost",
    "extent",
    "is_custom",
    "is_pure",
    "named",
    "packet",
    "register_cost",
    "register_pure",
    "registered",
    "signature",
    "valid",
]


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of one operation."""

    seconds: float
    flops: int
    temporary_nbytes: int
    """The most bytes that the operation holds at once while it runs, besides its outputs."""
    storages: tuple[int, ...] = field(default=(), repr=False)
    """By output: the measured bytes of its storage, 0 if an earlier output has the same storage. Empty if not measured;
    then the sizes follow from shapes and strides."""


class CostSource(Protocol):
    """A function that returns the cost of one operation."""

    def __call__(self, call: Call, specs: Sequence[TensorSpec]) -> OpCost:
        """Returns the cost of `call`. Its refs are positions in `specs`."""
        ...


def named(call: Call) -> dict[str, Any]:
    """Returns the arguments of a call by name, or by position if the operation has no schema."""
    has_schema = isinstance(call.op, torch._ops.OpOverload)
    names = _names(call.op) if has_schema else [str(i) for i in range(len(call.args))]
    return dict(zip(names, call.args, strict=False)) | call.kwargs


@functools.lru_cache(1024)
def _names(op: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments]


def packet(call: Call) -> str:
    """Returns the name of the operation without its overload: `aten.mm`."""
    return _packet(call.op) if isinstance(call.op, torch._ops.OpOverload) else str(call.op)


@functools.lru_cache(1024)
def _packet(op: torch._ops.OpOverload) -> str:
    return str(op.overloadpacket)


def extent(spec: TensorSpec) -> int:
    """Returns the number of storage elements that a tensor spans, including gaps; expanded elements count once."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))


def signature(call: Call, specs: Sequence[TensorSpec]) -> str:
    """Formats everything on which the cost of a call depends, the same in every process.

    The text contains the operation, the shapes, strides, dtypes and devices of its tensors, which arguments are the
    same tensor, and the other arguments. It omits generators and the numbers of the tensors in the trace.

    Args:
        call: the operation.
        specs: the specs of the tensors, by number.

    Example:
        >>> from fckpt._trace.operations import Ref
        >>> x = TensorSpec((2, 3), (3, 1), torch.float32, torch.device("cpu"), value=0)
        >>> signature(Call(torch.ops.aten.sum.dim_IntList, (Ref(0), [1]), {}, (1,), 0), [x])
        'aten.sum.dim_IntList(%0=float32[2,3](3,1)cpu, [1])'
    """
    seen: dict[int, int] = {}
    texts = [text_of(arg, specs, seen) for arg in call.args]
    texts += [f"{k}={text_of(v, specs, seen)}" for k, v in sorted(call.kwargs.items()) if k != "generator"]
    return f"{call.op}({', '.join(texts)})"


_REGISTRY: dict[str, CostSource | Callable[[Call, Sequence[TensorSpec]], OpCost]] = {}


def register_cost(op: Any, fn: Callable[[Call, Sequence[TensorSpec]], OpCost]) -> None:
    """Sets the cost of an operation, for both `Measured` and `Analytic`.

    This is meant for kernels that cannot run on synthetic data, and for kernels whose cost a roofline estimate misses.

    Args:
        op: a `torch.library.custom_op`, an `OpOverload`, an `OpOverloadPacket` (which stands for all its overloads), or
            a name: "mylib::scan", "mylib::scan.default".
        fn: a function that takes the call and the specs of the trace's tensors, and returns an `OpCost`.

    Raises:
        ArgumentTypeError: `op` is not an operation, or `fn` is not callable.

    Example:
        >>> def scan_cost(call, specs):
        ...     x = specs[call.args[0].tensor]                      # TensorSpec: shape, stride, dtype, device
        ...     nbytes = math.prod(x.shape) * x.dtype.itemsize
        ...     return OpCost(seconds=2 * nbytes / 2e12, flops=math.prod(x.shape), temporary_nbytes=nbytes)
        >>> import math
        >>> register_cost("mylib::scan", scan_cost)
    """
    if not callable(fn):
        raise ArgumentTypeError(f"a cost is a function of a call and its specs, not {type(fn).__name__}: {fn!r}.")
    _REGISTRY[_name(op)] = fn


def registered(call: Call, specs: Sequence[TensorSpec]) -> OpCost | None:
    """Returns the registered cost of a call; None if its operation has none."""
    if not _REGISTRY:
        return None
    fn = _REGISTRY.get(str(call.op)) or _REGISTRY.get(packet(call))
    if fn is None:
        return None
    cost = fn(call, specs)
    if not isinstance(cost, OpCost) or not valid(cost):
        raise ArgumentValueError(
            f"the cost registered for {call.op} is {cost!r}. It must be an OpCost with finite seconds and whole "
            "numbers of FLOPs and bytes, none of them negative."
        )
    return cost


def valid(cost: OpCost) -> bool:
    """Whether a cost is valid: finite seconds, integer counts, nothing negative."""
    counts = (cost.flops, cost.temporary_nbytes, *cost.storages)
    seconds = isinstance(cost.seconds, (int, float)) and not isinstance(cost.seconds, bool)
    return seconds and 0 <= cost.seconds < 1e9 and all(type(n) is int and n >= 0 for n in counts)


def register_pure(op: Any) -> None:
    """Declares that a custom operation may be run on synthetic data, so that it can be measured.

    Only its author knows what a custom kernel does with unexpected data, and which side effects it has: it may count
    its calls, write a file, or wait for another rank. So fckpt does not run custom operations (those whose namespace is
    not one of torch's) to make a plan. It estimates them, with a warning, unless they are declared pure or have a
    registered cost (`register_cost`). Measurements of custom operations are not stored on disk, because their kernels
    may be edited.

    Args:
        op: as for `register_cost`.

    Raises:
        ArgumentTypeError: `op` is not an operation.

    Example:
        >>> register_pure("mylib::scan")
    """
    DECLARED_PURE.add(_name(op))


def is_custom(op: Any) -> bool:
    """Whether an operation belongs to the user, or to a library that fckpt does not know."""
    return isinstance(op, torch._ops.OpOverload) and op.namespace not in _KNOWN


def is_pure(call: Call) -> bool:
    """Whether an operation may run on synthetic data."""
    return not is_custom(call.op) or not DECLARED_PURE.isdisjoint((str(call.op), packet(call)))


_KNOWN = {"aten", "prims", "quantized", "mkldnn", "torchvision", "torchaudio"}
"""Namespaces of kernels without side effects."""


def _name(op: Any) -> str:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, str):
        return op.replace("::", ".")
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(op)
    raise ArgumentTypeError(
        f"an operation is an OpOverload, an OpOverloadPacket, a custom_op or a name, not {type(op).__name__}: {op!r}."
    )
