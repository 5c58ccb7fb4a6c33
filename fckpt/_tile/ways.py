"""Ways to cut an operation into tiles: which operands are cut along which dimension, and what becomes of the results.

One table maps operations to rules. A rule lists the ways of a call; an operation that is not in the table and not
pointwise cannot be cut. The dimensions along which an operation is independent follow from its definition. Whether a
tile has the bits of the whole operation depends on the kernel, and is tested by `exact.py`.

The table follows `torch/_inductor/fx_passes/auto_chunker/propagator.py` (torch 2.9), which propagates the dimension of
the rows through a graph in the same manner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fckpt._trace.operations import Call, TensorSpec, is_random, tensors_of

__all__ = ["SUM", "Way", "is_pointwise", "ways"]

aten = torch.ops.aten

SUM = -1
"""In place of a dimension of a result: the tiles make parts of a sum."""


class Way(NamedTuple):
    """A way to cut a call."""

    reads: tuple[int | None, ...]
    """By tensor among the arguments, in their order: the dimension that is cut; None if every tile reads all of it."""
    makes: tuple[int, ...]
    """By result: the dimension that is cut, or `SUM`."""
    sizes: tuple[int, int] | None = None
    """The position of an argument that lists sizes, and the entry in it that becomes the size of the tile."""

    @property
    def sums(self) -> bool:
        """Whether the result is a sum, of which each tile makes a part."""
        return SUM in self.makes


def is_pointwise(op: Any) -> bool:
    """Whether each element of the results depends on the elements of the operands at the same position alone."""
    return op in _LIKE_POINTWISE or torch.Tag.pointwise in getattr(op, "tags", ())


def ways(call: Call, specs: Sequence[TensorSpec]) -> list[Way]:
    """Returns the ways to cut a call, by dimension; none if it cannot be cut.

    Args:
        call: a call of a node.
        specs: the specs of the tensors, by number.
    """
    op = call.op
    known = isinstance(op, torch._ops.OpOverload)
    if not known or op._schema.is_mutable or is_random(op) or call.replaced or None in call.outputs:
        return []
    rule = _RULES.get(op) or (_pointwise if is_pointwise(op) else None)
    given = _Given(call, specs)
    return [] if rule is None else [way for way in rule(given) if given.is_even(way)]


class _Given:
    """A call with the shapes of its tensors."""

    def __init__(self, call: Call, specs: Sequence[TensorSpec]):
        self.args = call.args
        self.shapes = [specs[t].shape for t in tensors_of(call)]
        self.results = [specs[t].shape for t in call.outputs if t is not None]

    def is_even(self, way: Way) -> bool:
        """Whether all tensors have the same number of rows. An index may have fewer rows than the tensor it reads."""
        read = {s[d] for s, d in zip(self.shapes, way.reads, strict=True) if d is not None}
        made = {s[d] for s, d in zip(self.results, way.makes, strict=True) if d != SUM}
        return len(read | made) == 1

    def dimension(self, position: int, default: int = 0) -> int:
        """Returns an argument that names a dimension of the first tensor, as a number from 0 on."""
        value = self.args[position] if position < len(self.args) else default
        return value % max(1, len(self.shapes[0]))


_Rule = Callable[[_Given], Iterator[Way]]


def _pointwise(given: _Given) -> Iterator[Way]:
    shape = given.results[0]
    if any(other != shape for other in given.results):
        return
    for dim, size in enumerate(shape):
        if size > 1:
            reads = [dim - len(shape) + len(other) for other in given.shapes]
            cut = [r if r >= 0 and s[r] == size else None for r, s in zip(reads, given.shapes, strict=True)]
            yield Way(tuple(cut), (dim,) * len(given.results))


def _mm(given: _Given) -> Iterator[Way]:
    yield Way((0, None), (0,))
    yield Way((None, 1), (1,))
    yield Way((1, 0), (SUM,))


def _bmm(given: _Given) -> Iterator[Way]:
    yield Way((0, 0), (0,))
    yield Way((1, None), (1,))
    yield Way((None, 2), (2,))
    yield Way((2, 1), (SUM,))


def _addmm(given: _Given) -> Iterator[Way]:
    bias, rows, columns = given.shapes[0], given.results[0][0], given.results[0][1]
    yield Way((0 if len(bias) == 2 and bias[0] == rows else None, 0, None), (0,))
    yield Way((len(bias) - 1 if bias and bias[-1] == columns else None, None, 1), (1,))


def _baddbmm(given: _Given) -> Iterator[Way]:
    bias, shape = given.shapes[0], given.results[0]
    if len(bias) == 3:
        yield Way((0 if bias[0] == shape[0] else None, 0, 0), (0,))
        yield Way((1 if bias[1] == shape[1] else None, 1, None), (1,))


def _outside_of(position: int, default: int = 0) -> _Rule:
    """Returns the rule of an operation along the dimension that argument `position` names: others are independent."""

    def rule(given: _Given) -> Iterator[Way]:
        along = given.dimension(position, default)
        for dim in range(len(given.shapes[0])):
            if dim != along:
                yield Way((dim,) * len(given.shapes), (dim,) * len(given.results))

    return rule


def _softmax(given: _Given) -> Iterator[Way]:
    """Cuts dimensions before the one of the sums: kernels vectorise over those behind it."""
    for dim in range(given.dimension(len(given.shapes))):
        yield Way((dim,) * len(given.shapes), (dim,))


def _layer_norm(given: _Given) -> Iterator[Way]:
    for dim in range(len(given.shapes[0]) - len(given.args[1])):
        yield Way((dim, *(None,) * (len(given.shapes) - 1)), (dim,) * len(given.results))


def _layer_norm_backward(given: _Given) -> Iterator[Way]:
    mask = given.args[7]
    for dim in range(len(given.shapes[0]) - len(given.args[2])):
        rest = (None,) * (len(given.shapes) - 4)
        made = [kind for kind, wanted in zip((dim, SUM, SUM), mask, strict=True) if wanted]
        if len(made) == len(given.results):
            yield Way((dim, dim, dim, dim, *rest), tuple(made))


def _nll_loss(given: _Given) -> Iterator[Way]:
    if len(given.shapes[0]) == 2 and given.args[3] == 0:  # a loss of each row
        yield Way((0, 0, *(None,) * (len(given.shapes) - 2)), (0, SUM))


def _nll_loss_backward(given: _Given) -> Iterator[Way]:
    if len(given.shapes[1]) == 2:
        rows = 0 if given.shapes[0] else None
        yield Way((rows, 0, 0, *(None,) * (len(given.shapes) - 3)), (0,))


def _reduction(*, sums: bool) -> _Rule:
    """Returns the rule of a reduction over dimensions that argument 1 lists; all if it lists none."""

    def rule(given: _Given) -> Iterator[Way]:
        rank = len(given.shapes[0])
        listed = given.args[1] if len(given.args) > 1 else None
        reduced = {d % rank for d in listed} if listed else set(range(rank))
        keeps = len(given.args) > 2 and given.args[2]
        for dim in range(rank):
            if dim not in reduced:
                before = 0 if keeps else sum(r < dim for r in reduced)
                yield Way((dim,), (dim - before,))
            elif sums:
                yield Way((dim,), (SUM,))

    return rule


def _embedding(given: _Given) -> Iterator[Way]:
    for dim in range(len(given.shapes[1])):
        yield Way((None, dim), (dim,))


def _embedding_backward(given: _Given) -> Iterator[Way]:
    for dim in range(len(given.shapes[1])):
        yield Way((dim, dim), (SUM,))


def _padded(given: _Given) -> Iterator[Way]:
    """The rule for the derivatives of slices and selections, which list the sizes of their results."""
    sizes = given.results[0]
    along, gone = given.args[2] % len(sizes), len(sizes) - len(given.shapes[0])
    for dim in range(len(sizes)):
        if dim != along:
            yield Way((dim - (gone and dim > along),), (dim,), (1, dim))


_LIKE_POINTWISE = {
    aten.clone.default, aten._to_copy.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self,
    aten.gelu_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default, aten.silu_backward.default,
    aten.threshold_backward.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip

_RULES: dict[Any, _Rule] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax,
    aten._log_softmax_backward_data.default: _softmax,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.gather.default: _outside_of(1),
    aten.scatter.value: _outside_of(1),
    aten.scatter.src: _outside_of(1),
    aten.scatter_add.default: _outside_of(1),
    aten.cumsum.default: _outside_of(1),
    aten.sum.default: _reduction(sums=True),
    aten.sum.dim_IntList: _reduction(sums=True),
    aten.mean.dim: _reduction(sums=False),
    aten.amax.default: _reduction(sums=False),
    aten.amin.default: _reduction(sums=False),
    aten.logsumexp.default: _reduction(sums=False),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.slice_backward.default: _padded,
    aten.select_backward.default: _padded,
}
