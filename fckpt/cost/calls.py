"""One operation of a trace as text, as a cost, and as an entry of the registry of users' kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fckpt.errors import ArgumentTypeError
from fckpt.trace import Call, Ref, TensorSpec

__all__ = ["CostSource", "OpCost", "extent", "named", "packet", "refs", "register_cost", "registered", "signature"]


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one operation takes."""

    seconds: float
    flops: int
    temporary_nbytes: int
    """Most bytes that it holds at once while it runs, besides its outputs."""


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
    texts = [_text(arg, specs, seen) for arg in call.args]
    texts += [f"{k}={_text(v, specs, seen)}" for k, v in sorted(call.kwargs.items()) if k != "generator"]
    return f"{call.op}({', '.join(texts)})"


def _text(value: Any, specs: Sequence[TensorSpec], seen: dict[int, int]) -> str:
    if isinstance(value, Ref):
        if value.tensor in seen:
            return f"%{seen[value.tensor]}"
        number = seen[value.tensor] = len(seen)
        return f"%{number}={_spec_text(specs[value.tensor])}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, specs, seen) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_text(v, specs, seen)}' for k, v in value.items())}}}"
    if isinstance(value, torch.Generator):
        return "None"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    return str(value)  # dtypes, devices, layouts, memory formats


def _spec_text(spec: TensorSpec) -> str:
    shape, stride = (",".join(map(str, numbers)) for numbers in (spec.shape, spec.stride))
    return f"{str(spec.dtype).removeprefix('torch.')}[{shape}]({stride}){spec.device}"


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
    return None if fn is None else fn(call, specs)


def _name(op: Any) -> str:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, str):
        return op.replace("::", ".")
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(op)
    raise ArgumentTypeError(
        f"an operation is an OpOverload, an OpOverloadPacket, a custom_op or a name, not {type(op).__name__}: {op!r}."
    )
