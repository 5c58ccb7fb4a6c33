"""Views of tiles: where the rows of a tensor are in a view of it, and the same view of a tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fckpt._tile.ways import SUM
from fckpt._trace.operations import Call, Ref, Trace, tensors_of

__all__ = ["Views", "view_arguments"]

aten = torch.ops.aten

Shape = Sequence[int]


class Views:
    """The views of a trace."""

    def __init__(self, trace: Trace):
        self.specs = trace.tensors
        self.producers = trace.producers()
        self.chains: dict[int, list[Call]] = {}

    def chain(self, tensor: int) -> list[Call]:
        """Returns the calls that make a view from the tensor that owns the memory, in order; none for other tensors."""
        if tensor not in self.chains:
            call = self.producers.get(tensor)
            sent = tensors_of(call) if call is not None and call.node is None else []
            one = call is not None and len(sent) == 1 and isinstance(call.args[0], Ref)
            self.chains[tensor] = [*self.chain(sent[0]), call] if one and call is not None else []
        return self.chains[tensor]

    def base(self, tensor: int) -> int:
        """Returns the tensor that `tensor` is a view of."""
        chain = self.chain(tensor)
        return chain[0].args[0].tensor if chain else tensor

    def rows_in(self, tensor: int, rows: Mapping[int, int]) -> int | None:
        """Returns the dimension of a tensor whose slices are the views of slices of its base; None if there is none.

        Args:
            tensor: the tensor.
            rows: by base, the dimension that is cut, or `SUM`.
        """
        chain = self.chain(tensor)
        dim = rows.get(self.base(tensor))
        dim = None if dim == SUM else dim
        for step, then in itertools.zip_longest(chain, chain[1:]):
            rule = _RULES.get(step.op)
            if dim is None or rule is None:
                return None
            made = tensor if then is None else then.args[0].tensor
            dim = rule(step.args[1:], self.specs[step.args[0].tensor].shape, self.specs[made].shape, dim)
        return dim


def view_arguments(call: Call, dim: int, rows: int) -> tuple[Any, ...]:
    """Returns the arguments after the first one with which `call` makes the view of a tile.

    Args:
        call: the call that makes the view of the whole tensor.
        dim: the dimension of the view that is cut.
        rows: the size of this dimension for the tile.
    """
    if call.op not in _SIZED:
        return call.args[1:]
    sizes = list(call.args[1])
    sizes[dim] = rows
    return (sizes, *call.args[2:])


def _same(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    return dim


def _transposed(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    first, second = (a % len(shape) for a in (args or (0, len(shape) - 1)))
    return {first: second, second: first}.get(dim, dim)


def _permuted(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    return [d % len(shape) for d in args[0]].index(dim)


def _unsqueezed(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    return dim + (dim >= args[0] % len(result))


def _squeezed(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    gone = {d for d in (g % len(shape) for g in given) if shape[d] == 1}
    return None if dim in gone else dim - sum(d < dim for d in gone)


def _expanded(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    at = dim + len(result) - len(shape)
    return at if result[at] == shape[dim] else None


def _parts(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    """The rule for slices and splits: a part of a dimension other than the rows."""
    return dim if shape[dim] == result[dim] else None


def _selected(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    along = (args[0] if args else 0) % len(shape)
    return None if dim == along else dim - (dim > along)


def _reshaped(args: Sequence[Any], shape: Shape, result: Shape, dim: int) -> int | None:
    """Finds the dimension that begins at the same element, and spans the same number of elements, as the rows."""
    before, span = math.prod(shape[:dim]), math.prod(shape[dim:])
    for at, size in enumerate(result):
        if size > 1 and math.prod(result[:at]) == before and math.prod(result[at:]) == span:
            return at if size % shape[dim] == 0 or shape[dim] % size == 0 else None
    return None


_SIZED = {aten.view.default, aten._unsafe_view.default, aten.expand.default}
_RULES: dict[Any, Callable[[Sequence[Any], Shape, Shape, int], int | None]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.t.default: _transposed,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.expand.default: _expanded,
    aten.slice.Tensor: _parts,
    aten.split.Tensor: _parts,
    aten.split_with_sizes.default: _parts,
    aten.select.int: _selected,
    aten.unbind.int: _selected,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
}
