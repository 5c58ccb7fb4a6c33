"""Costs of operations at new sizes, derived from measured ones.

Calls of a function with other sizes run the same operations on larger or smaller tensors. Once a few sizes have been
measured, the time at a new size lies between its neighbours'. Times decide which plan is the fastest; whether a plan
keeps its budget does not depend on them.

A budget depends on the memory of operations, which is measured at each size unless other sizes determine it. Pointwise
operations of torch allocate memory besides their results only to convert operands of other dtypes and Python numbers.
So one that needed none at the measured sizes needs none at any size, and one that needed the same number of bytes at a
smaller and at a larger size needs that number in between. Of most other operations, one that needed none at a larger
size needs none at a smaller size. A size is larger if no tensor is smaller in any dimension. All this holds for
kernels on the CPU and for tensors of similar strides. On accelerators, and everywhere for convolutions, recurrent
networks, Fourier transforms and resizing with antialiasing (which does nothing where the size stays), the sizes choose
between algorithms.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fckpt._trace.operations import Call, Ref, TensorSpec, tensors_of
from fckpt.cost.analytic import flops_of
from fckpt.cost.calls import OpCost, named

__all__ = ["CostsBySize", "Operation"]

_ENOUGH = 3
"""The number of measured sizes of an operation from which other sizes are interpolated."""

_MOST = 64
"""The number of sizes of an operation whose memory is remembered."""

_SCALARS = 64
"""The most bytes that are taken for numbers that a kernel puts into tensors: `mean` divides by one, for example."""

_BY_SIZE = re.compile("conv|mkldnn|miopen|cudnn|rnn|lstm|gru|fft|sparse|quantized|_aa")
"""Names of operations whose sizes choose between algorithms."""

_Place = tuple[Any, ...]
"""What identifies an operation among calls of other sizes: the number of calls, its position, and its arguments.

Calls of one function may have different backward passes.
"""
_Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The numbers of dimensions of some tensors, and all their sizes."""


class Operation:
    """A call at a position of a trace, with what its costs depend on."""

    def __init__(self, calls: Sequence[Call], position: int, specs: Sequence[TensorSpec]) -> None:
        """Describes the call at `position` in `calls`, the calls of a trace, whose tensors have these specs."""
        self.call, self.specs = calls[position], specs
        self.number = len(calls), position
        inputs = tensors_of(self.call)
        self.tensors = [*inputs, *(t for t in self.call.outputs if t is not None)]
        """The numbers of the tensors that the call reads and makes."""

    @functools.cached_property
    def place(self) -> _Place:
        """What identifies the operation among calls of other sizes."""
        same = _fixed_numbers(self.call.op)
        pairs = named(self.call).items()
        arguments = tuple([value if name in same else _described(value, self.specs) for name, value in pairs])
        dtypes = tuple([None if t is None else self.specs[t].dtype for t in self.call.outputs])
        return *self.number, self.call.op, arguments, dtypes

    @functools.cached_property
    def shapes(self) -> _Shapes:
        """The shapes of the tensors."""
        shapes = [self.specs[t].shape for t in self.tensors]
        return tuple(map(len, shapes)), tuple(itertools.chain.from_iterable(shapes))

    @functools.cached_property
    def flops(self) -> int:
        """The floating point operations."""
        return flops_of(self.call, self.specs)

    @functools.cached_property
    def work(self) -> int:
        """A number that grows with the sizes of an operation: the bytes of its tensors, and its FLOPs."""
        return sum([self.specs[t].nbytes for t in {*self.tensors}]) + self.flops

    @functools.cached_property
    def results(self) -> tuple[int, ...]:
        """The bytes of the results if each has a storage of its own."""
        return tuple([0 if t is None else self.specs[t].nbytes for t in self.call.outputs])


@dataclass
class _Measured:
    """What is known of an operation."""

    times: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of work and seconds."""
    temporaries: dict[_Shapes, int] = field(default_factory=dict)
    """By shapes: the bytes besides the results."""
    constant: int | None = None
    """These bytes, if they have been the same at all sizes."""
    unforeseen: bool = False
    """Whether the operation needed other memory for its results than expected."""


class CostsBySize:
    """The measured costs of the operations of a function, by the sizes of its calls."""

    def __init__(self) -> None:
        self._settings = ""
        self._known: dict[_Place, _Measured] = {}

    def under(self, settings: str) -> None:
        """Forgets all costs if they were measured under other settings (`environment`), such as a number of threads."""
        if settings != self._settings:
            self._settings = settings
            self._known.clear()

    def add(self, operation: Operation, cost: OpCost, *, timed: bool = True) -> None:
        """Adds the measured cost of an operation. `timed`: whether its time was measured, and not only its memory."""
        known, call, work = self._known.setdefault(operation.place, _Measured()), operation.call, operation.work
        if timed and all(other != work for other, _ in known.times):
            bisect.insort(known.times, (work, cost.seconds))
        if _used(call, cost.storages) != _used(call, operation.results):
            known.unforeseen = True
        is_same = not known.temporaries or known.constant == cost.temporary_nbytes
        known.constant = cost.temporary_nbytes if is_same else None
        known.temporaries[operation.shapes] = cost.temporary_nbytes
        if len(known.temporaries) > _MOST:
            del known.temporaries[next(iter(known.temporaries))]

    def seconds(self, operation: Operation) -> float | None:
        """Returns the time of an operation; None if too few sizes have been measured."""
        known = self._known.get(operation.place)
        if known is None:
            return None
        return _seconds(known.times, operation.work)

    def cost(self, operation: Operation) -> OpCost | None:
        """Returns the whole cost of an operation if its memory is known too; None if it has to be measured."""
        known = self._known.get(operation.place)
        if known is None or known.unforeseen:
            return None
        temporary = _temporary(known, operation)
        if temporary is None:
            return None
        seconds = _seconds(known.times, operation.work)
        if seconds is None:
            return None
        return OpCost(seconds, operation.flops, temporary, operation.results)


def _seconds(points: Sequence[tuple[int, float]], work: int) -> float | None:
    """Returns the time for some work, from pairs of work and seconds; None if there are too few."""
    if len(points) < _ENOUGH:  # an operation may have the same size in all calls
        return next((seconds for known, seconds in points if known == work), None)
    right = min(max(1, bisect.bisect_left(points, (work, 0.0))), len(points) - 1)
    (less, shorter), (more, longer) = points[right - 1], points[right]
    found = shorter + (longer - shorter) * (work - less) / (more - less)
    return max(found, min([seconds for _, seconds in points]) / 2)


def _temporary(measured: _Measured, operation: Operation) -> int | None:
    """Returns the bytes that an operation needs besides its results, if those at other sizes determine them."""
    op, known, constant = operation.call.op, measured.temporaries, measured.constant
    if getattr(op, "namespace", "") != "aten":
        return None
    is_pointwise = torch.Tag.pointwise in op.tags
    if is_pointwise and constant == 0:
        return 0
    specs = operation.specs
    if _chooses_by_size(op) or any(specs[t].device.type != "cpu" for t in operation.tensors):
        return None
    shapes = operation.shapes
    if shapes in known:
        return known[shapes]
    if constant == 0:
        return 0 if any(_is_within(shapes, larger) for larger in reversed(known)) else None
    if not is_pointwise and (constant is None or constant > _SCALARS):
        return None
    most = min((nbytes for larger, nbytes in known.items() if _is_within(shapes, larger)), default=None)
    least = max((nbytes for smaller, nbytes in known.items() if _is_within(smaller, shapes)), default=0)
    return most if most == least else None


@functools.lru_cache(1024)
def _chooses_by_size(op: torch._ops.OpOverload) -> bool:
    """Whether the sizes of an operation choose between algorithms."""
    return _BY_SIZE.search(str(op)) is not None


@functools.lru_cache(1024)
def _fixed_numbers(op: Any) -> frozenset[str]:
    """Returns the names of an operation's arguments that are an `int`, not a `SymInt`: the same at all sizes."""
    schema = getattr(op, "_schema", None)
    return frozenset(a.name for a in schema.arguments if str(a.real_type) == "int") if schema else frozenset()


def _described(value: Any, specs: Sequence[TensorSpec]) -> Any:
    """Describes an argument of a call without sizes and other numbers."""
    if isinstance(value, Ref):
        spec = specs[value.tensor]
        return spec.dtype, spec.device, spec.conj, spec.neg, _layout(spec.shape, spec.stride)
    if isinstance(value, (list, tuple)):
        return tuple([_described(part, specs) for part in value])
    return type(value) if isinstance(value, (int, float, complex, torch.Generator)) else value


@functools.lru_cache(1024)
def _layout(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """Returns the dimensions from the innermost, each with whether it is dense, has gaps, or is not laid out in memory.

    A dimension whose parts overlap comes with its stride: kernels may copy such tensors.
    """
    found, inner = [], 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], dim)):
        size, stride = shape[dim], strides[dim]
        if size <= 1 or stride == 0:
            found.append((dim, "single" if size <= 1 else "expanded"))
            continue
        found.append((dim, "dense" if stride == inner else "gaps" if stride > inner else f"overlapping {stride}"))
        inner += (size - 1) * stride
    return tuple(found)


def _is_within(shapes: _Shapes, larger: _Shapes) -> bool:
    """Whether no tensor is larger in any dimension."""
    return shapes[0] == larger[0] and all(map(operator.le, shapes[1], larger[1]))


def _used(call: Call, storages: Sequence[int]) -> list[int]:
    """Returns the bytes of those results that are tensors of the trace."""
    return [nbytes for t, nbytes in zip(call.outputs, storages, strict=False) if t is not None]
