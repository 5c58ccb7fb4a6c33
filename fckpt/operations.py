"""The operations behind a graph: what is called, on which tensors, and what goes in and comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fckpt.graph import Graph

__all__ = [
    "Call",
    "Layout",
    "Recorded",
    "Ref",
    "TensorSpec",
    "Trace",
    "indices_of",
    "is_dense",
    "statistics_of",
    "written_by",
]

aten = torch.ops.aten


class Ref(NamedTuple):
    """Stands for a tensor of a trace, in the arguments of a call: its number."""

    tensor: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: int
    """The storage that it looks at, as a number of `Graph.values`; -1 if the graph has no use for it."""
    offset: int = 0
    """Where in the storage it begins, in elements."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of the trace, on tensors that are refs."""

    op: Any
    """A `torch._ops.OpOverload`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    """The tensors that it returns, flat; None for what is none."""
    node: int | None
    """The node of the graph; None for a view, which makes no storage."""


class Layout(NamedTuple):
    """A tensor to be traced: enough to make a fake one of it, and part of the key under which plans are kept."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    accumulates: bool
    """Whether its gradient goes to `.grad`: a leaf of autograd."""


@dataclass(frozen=True)
class Trace:
    """The graph, the operations behind its nodes, and what goes in and comes out, as numbers of tensors."""

    graph: Graph
    calls: tuple[Call, ...]
    tensors: tuple[TensorSpec, ...]
    operands: tuple[int, ...] = ()
    """The arguments' tensors, then those closed over."""
    constants: tuple[tuple[int, torch.Tensor], ...] = ()
    """Tensors that the function makes of Python numbers, with their data."""
    spec: Any = None
    """The structure of the result."""
    leaves: tuple[Any, ...] = ()
    """Its leaves: ('out', i), ('in', i) for the i-th argument, or what is no tensor."""
    outputs: tuple[int, ...] = ()
    flags: tuple[bool, ...] = ()
    """By output: whether it requires grad."""
    cotangents: tuple[int | None, ...] = ()
    """By output; None where it does not require grad."""
    gradients: tuple[int | None, ...] = ()
    """By operand; None where it does not require grad, or nothing depends on it."""
    regions: tuple[tuple[frozenset[int], Any], ...] = ()
    """Rematerialised functions inside, inner ones first: the nodes whose results stay inside, and the policy."""

    def producers(self) -> dict[int, Call]:
        """Returns the call that makes each tensor."""
        return {t: call for call in self.calls for t in call.outputs if t is not None}


_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
_STATISTICS = dict.fromkeys(_NORMS, (3, 4))


class Recorded(NamedTuple):
    """A call as it was recorded, before anything is known of the graph."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    is_view: bool
    source: str


def statistics_of(call: Call | Recorded) -> tuple[int, ...]:
    """The positions of running statistics that `call` writes (and does not read), unknown to its schema.

    The same operation without them computes the same: so it is run again.
    """
    positions = _STATISTICS.get(call.op, ())
    training = bool(positions) and call.args[5] is True
    return tuple(i for i in positions if training and call.args[i] is not None)


def written_by(call: Call) -> list[int]:
    """The tensors that a call of the graph changes in place."""
    if call.op is aten.copy_.default:
        return list(indices_of(call.args[0]))
    return [t for i in statistics_of(call) for t in indices_of(call.args[i])]


def indices_of(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.tensor
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from indices_of(inner)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements with these strides fill memory without gaps or repetitions, in any order of dimensions."""
    extent = 1
    for step, size in sorted((st, n) for n, st in zip(shape, stride, strict=True) if n != 1):
        if step != extent:
            return False
        extent *= size
    return True
