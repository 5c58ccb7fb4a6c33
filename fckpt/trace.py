"""A function and example arguments to the graph of its forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fckpt.graph import Graph

__all__ = ["Call", "Ref", "TensorSpec", "Trace"]


class Ref(NamedTuple):
    """Stands for tensor number `index` of a trace, in the arguments of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: int
    """The storage that it looks at, as a number of `Graph.values`."""
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


@dataclass(frozen=True)
class Trace:
    """The graph, and the operations behind its nodes."""

    graph: Graph
    calls: tuple[Call, ...]
    tensors: tuple[TensorSpec, ...]
