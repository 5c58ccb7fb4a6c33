"""Costs of operations at new sizes, derived from measured ones.

Calls of a function with other sizes run the same operations on larger or smaller tensors. Once a few sizes have been
measured, the time at a new size lies between its neighbours'. Times decide which plan is the fastest; whether a plan
keeps its budget does not depend on them.

A budget depends on the memory of operations, which is measured at each size unless other sizes determine it. Pointwise
operations of torch allocate memory besides their results only to convert operands of other dtypes and Python numbers,
so one that needed none at the measured sizes needs none at any size. Most other operations need no less memory for
larger tensors. If one needed none at a larger size, it needs none at a smaller size; and if it needed the same number
of bytes at a smaller and at a larger size, it needs that number in between. A size is larger if no tensor is smaller in
any dimension. All this holds for kernels on the CPU and for tensors of similar strides. On accelerators, and for
convolutions, recurrent networks and Fourier transforms everywhere, libraries choose between algorithms by size.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fckpt._trace.operations import Call, Ref, TensorSpec
from fckpt.cost.analytic import flops_of
from fckpt.cost.calls import OpCost, named, refs

__all__ = ["CostsBySize"]

_ENOUGH = 3
"""The number of measured sizes of an operation from which other sizes are interpolated."""

_MOST = 64
"""The number of sizes of an operation whose memory is remembered."""

_LIBRARIES = re.compile("conv|mkldnn|miopen|cudnn|rnn|lstm|gru|fft|sparse|quantized")
"""Names of operations for which libraries choose between algorithms by size."""

_Place = tuple[int, int, Any, str]
"""What identifies an operation among calls of other sizes: the number of calls, its position, and its arguments.

Calls of one function may have different backward passes.
"""
_Shapes = tuple[tuple[int, ...], ...]


class CostsBySize:
    """The measured costs of the operations of a function, by the sizes of its calls."""

    def __init__(self) -> None:
        self._settings = ""
        self._times: dict[_Place, list[tuple[int, float]]] = {}
        """By operation: pairs of work and seconds."""
        self._temporaries: dict[_Place, dict[_Shapes, int]] = {}
        """By operation and shapes: the bytes besides the results."""
        self._unforeseen: set[_Place] = set()
        """The operations that needed other memory for their results than expected."""

    def under(self, settings: str) -> None:
        """Forgets all costs if they were measured under other settings (`environment`), such as a number of threads."""
        if settings != self._settings:
            self._settings = settings
            for known in (self._times, self._temporaries, self._unforeseen):
                known.clear()

    def add(
        self, calls: Sequence[Call], position: int, specs: Sequence[TensorSpec], cost: OpCost, *, timed: bool = True
    ) -> None:
        """Adds the measured cost of the call at a position of a trace.

        Args:
            calls: the calls of the trace.
            position: the position of the call in `calls`.
            specs: the specs of the tensors, by number.
            cost: the cost.
            timed: whether the time of the call was measured, and not only the memory.
        """
        place, call = _place(calls, position, specs), calls[position]
        points, work = self._times.setdefault(place, []), _work(call, specs)
        if timed and all(known != work for known, _ in points):
            bisect.insort(points, (work, cost.seconds))
        if _used(call, cost.storages) != _used(call, _results(call, specs)):
            self._unforeseen.add(place)
        known = self._temporaries.setdefault(place, {})
        known[_shapes(call, specs)] = cost.temporary_nbytes
        if len(known) > _MOST:
            del known[next(iter(known))]

    def seconds(self, calls: Sequence[Call], position: int, specs: Sequence[TensorSpec]) -> float | None:
        """Returns the time of a call, see `add`; None if too few sizes have been measured."""
        return self._seconds(_place(calls, position, specs), _work(calls[position], specs))

    def _seconds(self, place: _Place, work: int) -> float | None:
        points = self._times.get(place, [])
        if len(points) < _ENOUGH:
            return None
        right = min(max(1, bisect.bisect_left(points, (work, 0.0))), len(points) - 1)
        (less, shorter), (more, longer) = points[right - 1], points[right]
        found = shorter + (longer - shorter) * (work - less) / (more - less)
        return max(found, min(seconds for _, seconds in points) / 2)

    def cost(self, calls: Sequence[Call], position: int, specs: Sequence[TensorSpec]) -> OpCost | None:
        """Returns the whole cost of a call, see `add`, if its memory is known too; None if it has to be measured."""
        call, place = calls[position], _place(calls, position, specs)
        temporary = None if place in self._unforeseen else self._temporary(place, call, specs)
        if temporary is None:
            return None
        flops = flops_of(call, specs)
        seconds = self._seconds(place, _nbytes(call, specs) + flops)
        return None if seconds is None else OpCost(seconds, flops, temporary, _results(call, specs))

    def _temporary(self, place: _Place, call: Call, specs: Sequence[TensorSpec]) -> int | None:
        """Returns the bytes that a call needs besides its results, if other sizes determine them."""
        known = self._temporaries.get(place, {})
        if getattr(call.op, "namespace", "") != "aten":
            return None
        if torch.Tag.pointwise in call.op.tags and not any(known.values()):
            return 0 if known else None
        if _LIBRARIES.search(str(call.op)) or any(specs[t].device.type != "cpu" for t in _tensors(call)):
            return None
        shapes = _shapes(call, specs)
        most = min((nbytes for larger, nbytes in known.items() if _is_within(shapes, larger)), default=None)
        least = max((nbytes for smaller, nbytes in known.items() if _is_within(smaller, shapes)), default=0)
        return most if most == least else None


def _place(calls: Sequence[Call], position: int, specs: Sequence[TensorSpec]) -> _Place:
    call = calls[position]
    same = _fixed_numbers(call.op)
    arguments = [value if name in same else _described(value, specs) for name, value in named(call).items()]
    results = [None if t is None else specs[t].dtype for t in call.outputs]
    return len(calls), position, call.op, f"{arguments} {results}"


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
        return [_described(part, specs) for part in value]
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


def _tensors(call: Call) -> list[int]:
    """Returns the numbers of the tensors that a call reads and makes."""
    return [*(ref.tensor for ref in refs((call.args, call.kwargs))), *(t for t in call.outputs if t is not None)]


def _shapes(call: Call, specs: Sequence[TensorSpec]) -> _Shapes:
    return tuple([tuple(specs[t].shape) for t in _tensors(call)])


def _is_within(shapes: _Shapes, larger: _Shapes) -> bool:
    """Whether no tensor is larger in any dimension."""
    return all(
        len(ours) == len(theirs) and all(a <= b for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in zip(shapes, larger, strict=True)
    )


def _work(call: Call, specs: Sequence[TensorSpec]) -> int:
    """Returns a number that grows with the sizes of an operation: the bytes of its tensors, and its FLOPs."""
    return _nbytes(call, specs) + flops_of(call, specs)


def _nbytes(call: Call, specs: Sequence[TensorSpec]) -> int:
    return sum([prod(specs[t].shape) * specs[t].dtype.itemsize for t in {*_tensors(call)}])


def _results(call: Call, specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Returns the bytes of the results if each has a storage of its own."""
    return tuple([0 if t is None else prod(specs[t].shape) * specs[t].dtype.itemsize for t in call.outputs])


def _used(call: Call, storages: Sequence[int]) -> list[int]:
    """Returns the bytes of those results that are tensors of the trace."""
    return [nbytes for t, nbytes in zip(call.outputs, storages, strict=False) if t is not None]
