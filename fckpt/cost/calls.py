"""One operation of a trace as text, as a cost, and as an entry of the registry of users' kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fckpt._trace.operations import DECLARED_PURE, Call, Ref, TensorSpec, text_of
from fckpt.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "CostSource",
    "OpCost",
    "extent",
    "is_custom",
    "is_pure",
    "named",
    "packet",
    "refs",
    "register_cost",
    "register_pure",
    "registered",
    "signature",
    "valid",
]


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one operation takes."""

    seconds: float
    flops: int
    temporary_nbytes: int
    """Most bytes that it holds at once while it runs, besides its outputs."""
    storages: tuple[int, ...] = field(default=(), repr=False)
    """By output: the bytes that its memory was seen to take, 0 where that is an earlier output's; empty if it is not
    known, and taken to be what shapes and strides say."""


class CostSource(Protocol):
    """Prices one operation."""

    def __call__(self, call: Call, specs: Sequence[TensorSpec]) -> OpCost:
        """Returns the cost of `call`, whose refs are positions in `specs`."""
        ...


def refs(value: Any) -> Iterator[Ref]:
    """Yields the refs in the arguments of a call, in order, each as often as it occurs."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs(item)
    elif isinstance(value, dict):
        yield from refs(list(value.values()))


def named(call: Call) -> dict[str, Any]:
    """The arguments by their names in the schema; by position where there is no schema."""
    schema = getattr(call.op, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else [str(i) for i in range(len(call.args))]
    return dict(zip(names, call.args, strict=False)) | call.kwargs


def packet(call: Call) -> str:
    """The operation without its overload: `aten.mm`."""
    return str(getattr(call.op, "overloadpacket", call.op))


def extent(spec: TensorSpec) -> int:
    """How many elements of its storage a tensor spans, gaps included; what is expanded counts once."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))


def signature(call: Call, specs: Sequence[TensorSpec]) -> str:
    """Writes everything that the cost of a call depends on, the same in every process.

    That is the operation, the shapes, strides, dtypes and devices of its tensors, which of them are the same one, and
    its other arguments. Generators and the tensors' places in the trace are left out.

    Args:
        call: the operation.
        specs: the tensors that its refs stand for.

    Example:
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
    """Makes `fn` the price of an operation, for the measured and the analytic source alike.

    Meant for kernels that cannot run on made-up data, or whose work a roofline over their arguments misses.

    Args:
        op: a `torch.library.custom_op`, an `OpOverload`, an `OpOverloadPacket` (all of its overloads), or the name of
            one: "mylib::scan", "mylib::scan.default".
        fn: called with the call and the specs of the trace's tensors; returns an `OpCost`.

    Raises:
        ArgumentTypeError: `op` is none of these, or `fn` cannot be called.

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
    """The cost that the user gave for this operation; None if there is none."""
    fn = _REGISTRY.get(str(call.op)) or _REGISTRY.get(packet(call))
    if fn is None:
        return None
    cost = fn(call, specs)
    if not isinstance(cost, OpCost) or not valid(cost):
        raise ArgumentValueError(
            f"the cost registered for {call.op} is {cost!r}: it takes an OpCost of finite seconds and whole numbers of "
            "FLOPs and bytes, none of them negative."
        )
    return cost


def valid(cost: OpCost) -> bool:
    """Whether a cost can be one: seconds that are finite, counts that are ints, nothing negative."""
    counts = (cost.flops, cost.temporary_nbytes, *cost.storages)
    seconds = isinstance(cost.seconds, (int, float)) and not isinstance(cost.seconds, bool)
    return seconds and 0 <= cost.seconds < 1e9 and all(type(n) is int and n >= 0 for n in counts)


def register_pure(op: Any) -> None:
    """Declares that an operation of your own may be run on made-up data, to be measured.

    Nobody but its author knows what a custom kernel does with data that it was not made for, and what else it does: it
    may count its calls, write a file, wait for another rank. So custom operations (all whose namespace is not one of
    torch's) are not run when a plan is made, but estimated, with a warning, unless they are declared pure or have a
    cost of their own (`register_cost`). Measurements of them are not kept on disk: a kernel may be edited.

    Args:
        op: as for `register_cost`.

    Raises:
        ArgumentTypeError: `op` is no operation.

    Example:
        >>> register_pure("mylib::scan")
    """
    DECLARED_PURE.add(_name(op))


def is_custom(op: Any) -> bool:
    """Whether an operation is the user's, or a library's that fckpt knows nothing of."""
    return isinstance(op, torch._ops.OpOverload) and op.namespace not in _KNOWN


def is_pure(call: Call) -> bool:
    """Whether an operation may run on made-up data."""
    return not is_custom(call.op) or not DECLARED_PURE.isdisjoint((str(call.op), packet(call)))


_KNOWN = {"aten", "prims", "quantized", "mkldnn", "torchvision", "torchaudio"}
"""Namespaces of kernels that do nothing but compute."""


def _name(op: Any) -> str:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, str):
        return op.replace("::", ".")
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(op)
    raise ArgumentTypeError(
        f"an operation is an OpOverload, an OpOverloadPacket, a custom_op or a name, not {type(op).__name__}: {op!r}."
    )
