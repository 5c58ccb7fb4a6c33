"""Times of operations at new sizes, interpolated between measured ones.

Calls of a function with other sizes run the same operations on larger or smaller tensors. Once a few sizes have been
measured, the time at a new size lies between its neighbours', so only the memory of most operations is measured there.
Times decide which plan is the fastest; whether a plan keeps its budget does not depend on them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fckpt._trace.operations import Call, Ref, TensorSpec
from fckpt.cost.analytic import flops_of
from fckpt.cost.calls import OpCost, refs

__all__ = ["CostsBySize"]

_ENOUGH = 3
"""The number of measured sizes of an operation from which other sizes are interpolated."""


_Place = tuple[int, int, str, str]
"""What identifies an operation among calls of other sizes: the number of calls, its position, and its arguments.

Calls of one function may have different backward passes."""


class CostsBySize:
    """The measured costs of the operations of a function, by the amount of work that each size of the call means."""

    def __init__(self) -> None:
        self._measured: dict[_Place, list[tuple[int, float]]] = {}
        """By operation: pairs of work and seconds."""
        self._unforeseen: set[_Place] = set()
        """The operations that needed memory besides their results, or other memory for the results than expected."""

    def add(self, calls: Sequence[Call], position: int, specs: Sequence[TensorSpec], cost: OpCost) -> None:
        """Adds the measured cost of the call at a position of a trace, which has these calls and specs of tensors."""
        place, call = _place(calls, position, specs), calls[position]
        points, work = self._measured.setdefault(place, []), _work(call, specs)
        if all(known != work for known, _ in points):
            bisect.insort(points, (work, cost.seconds))
        if cost.temporary_nbytes or cost.storages != _results(call, specs):
            self._unforeseen.add(place)

    def seconds(self, calls: Sequence[Call], position: int, specs: Sequence[TensorSpec]) -> float | None:
        """Returns the time of a call, see `add`; None if too few sizes have been measured."""
        points = self._measured.get(_place(calls, position, specs), [])
        if len(points) < _ENOUGH:
            return None
        work = _work(calls[position], specs)
        right = min(max(1, bisect.bisect_left(points, (work, 0.0))), len(points) - 1)
        (less, shorter), (more, longer) = points[right - 1], points[right]
        found = shorter + (longer - shorter) * (work - less) / (more - less)
        return max(found, min(seconds for _, seconds in points) / 2)

    def cost(self, calls: Sequence[Call], position: int, specs: Sequence[TensorSpec]) -> OpCost | None:
        """Returns the whole cost of a call, if its memory is known too; None if it has to be measured.

        Pointwise operations of torch allocate memory besides their results only to convert operands of other dtypes,
        so one that needed none at the measured sizes needs none at any size.
        """
        call = calls[position]
        if torch.Tag.pointwise not in getattr(call.op, "tags", ()) or call.op.namespace != "aten":
            return None
        seconds = None if _place(calls, position, specs) in self._unforeseen else self.seconds(calls, position, specs)
        return None if seconds is None else OpCost(seconds, flops_of(call, specs), 0, _results(call, specs))


def _place(calls: Sequence[Call], position: int, specs: Sequence[TensorSpec]) -> _Place:
    call = calls[position]
    arguments = [_described(value, specs) for value in (*call.args, *call.kwargs.values())]
    results = [None if t is None else specs[t].dtype for t in call.outputs]
    return len(calls), position, str(call.op), f"{arguments} {results}"


def _described(value: Any, specs: Sequence[TensorSpec]) -> Any:
    """Describes an argument of a call without sizes, strides and other numbers."""
    if isinstance(value, Ref):
        spec = specs[value.tensor]
        return spec.dtype, spec.device, spec.conj, spec.neg
    if isinstance(value, (list, tuple)):
        return [_described(part, specs) for part in value]
    return type(value) if isinstance(value, (int, float, complex, torch.Generator)) else value


def _work(call: Call, specs: Sequence[TensorSpec]) -> int:
    """Returns a number that grows with the sizes of an operation: the bytes of its tensors, and its FLOPs."""
    tensors = {ref.tensor for ref in refs((call.args, call.kwargs))} | {t for t in call.outputs if t is not None}
    return sum(prod(specs[t].shape) * specs[t].dtype.itemsize for t in tensors) + flops_of(call, specs)


def _results(call: Call, specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Returns the bytes of the results if each has a storage of its own."""
    return tuple([0 if t is None else prod(specs[t].shape) * specs[t].dtype.itemsize for t in call.outputs])
