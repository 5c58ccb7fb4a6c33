"""Collectives: functions of pytrees that can be differentiated, batched and traced.

Each collective reshapes the tensors of a pytree into messages and applies a linear map of `linear.py`, which has the
table of the maps and their transposes.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.spmd.linear import Linear, apply, extreme, rank_number
from fckpt.spmd.mesh import Along, Axes, Mesh, current_mesh
from fckpt.spmd.packing import divided, joined, packed, with_padding, without_padding

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "handed_on",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "received",
    "sums_watched",
]

# ---- functions of pytrees --------------------------------------------------------------------------

Summing = Callable[[torch.Tensor, tuple[str, ...]], None]
_summings: ContextVar[tuple[Summing, ...]] = ContextVar("summings", default=())


@contextlib.contextmanager
def sums_watched(summing: Summing) -> Iterator[None]:
    """Calls `summing(x, axes)` for every tensor that a psum or pmean in the body sums, pullbacks not among them."""
    token = _summings.set((*_summings.get(), summing))
    try:
        yield
    finally:
        _summings.reset(token)


Groups = Sequence[Sequence[int]] | None


def psum(tree: Any, axis: Axes, *, out: str = "replicated", axis_index_groups: Groups = None) -> Any:
    """Returns the sum over the ranks along an axis, on every one of them.

    Args:
        tree: a pytree of tensors; numbers count as the same on every rank. Booleans are summed as integers (int64).
        axis: an axis of the mesh, or several.
        out: what the result is to later differentiation. "replicated": every rank goes on with it on its own, and it
            pulls back to a psum of their cotangents. "invariant": all compute the same from it, so that their
            cotangents are alike, and are passed on as they are.
        axis_index_groups: numbers of ranks along the axis, by group, each of them in one: ranks exchange with those
            of their group alone. `[[0, 1], [2, 3]]` sums the first two of four ranks, and the last two. Groups may
            be of different sizes here, and in `pmean`, `pmax` and `pmin`. Default: one group of all.

    Raises:
        ArgumentTypeError, ArgumentValueError: there is no such axis, or no mesh; a leaf is no tensor, or of a dtype
            that torch does not add; the groups do not have each rank once, or sizes that do not suit.

    Leaves of one dtype travel in one message.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.psum({"x": torch.tensor([1, 2]), "count": 1}, "data"))[0]
        {'x': tensor([2, 4]), 'count': 2}

    References:
        `jax.lax.psum`, https://docs.jax.dev/en/latest/_autosummary/jax.lax.psum.html
    """
    return _summed("psum", tree, axis, out, axis_index_groups)


def _summed(function: str, tree: Any, axis: Axes, out: str, groups: Groups) -> Any:
    mesh, along = _where(function, axis, groups)
    if out not in ("replicated", "invariant"):
        raise ArgumentValueError(f"{function}: out is 'replicated' or 'invariant', not {out!r}.")
    linear = Linear("psum" if out == "replicated" else "psum_invariant", along, mesh)

    def multiplied(number: Any) -> Any:
        if along.uneven:
            raise ArgumentTypeError(
                f"{function} takes tensors where groups have different sizes, not the number {number!r}: pass "
                f"torch.tensor({number!r})."
            )
        return number * mesh.reach(along)

    for summing in _summings.get():
        for leaf in trees.leaves(tree):
            if isinstance(leaf, torch.Tensor):
                summing(leaf, along.axes)
    send = lambda x: apply(x, linear)
    return packed(function, tree, send, 0, begin=lambda x: _countable(function, x), scalar=multiplied)


def _countable(function: str, x: torch.Tensor) -> torch.Tensor:
    """What sums count: booleans as integers, as in `torch.sum`.

    Raises:
        ArgumentTypeError: torch cannot add or compare numbers of this dtype.
    """
    if x.dtype in _STORED:
        wider = "x.float()" if x.dtype.is_floating_point else "x.long()"
        raise ArgumentTypeError(f"{function}: torch cannot reduce numbers of {x.dtype}. Convert them: {wider}.")
    return x.to(torch.int64) if x.dtype == torch.bool else x


_STORED = {
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and name.startswith(("float8", "float4", "uint16", "uint32", "uint64"))
}
"""Dtypes in which torch stores numbers, and does not add them."""


def pmean(tree: Any, axis: Axes, *, out: str = "replicated", axis_index_groups: Groups = None) -> Any:
    """Returns the mean over the ranks along an axis: `psum` by their number. Arguments and errors are those of `psum`.

    Integers become floats, as with `/`.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 4}).run(lambda: fckpt.pmean(fckpt.axis_index("data"), "data"))[0]
        tensor(1.5000)
    """
    mesh, along = _where("pmean", axis, axis_index_groups)
    total = _summed("pmean", tree, axis, out, axis_index_groups)
    if not along.uneven:
        return trees.map_leaves(lambda x: x / mesh.reach(along), total)
    sizes = {number: len(group) for group in along.groups for number in group}

    def by_group(x: torch.Tensor) -> torch.Tensor:
        known = torch.tensor([sizes[number] for number in range(len(sizes))], device=x.device)
        return x / known.take(axis_index(axis, device=x.device))

    return trees.map_leaves(by_group, total)


def pmax(tree: Any, axis: Axes, *, axis_index_groups: Groups = None) -> Any:
    """Returns the largest of each element over the ranks along an axis. It has no derivative: an error says so.

    Arguments and errors are those of `psum`.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 4}).run(lambda: fckpt.pmax(fckpt.axis_index("data"), "data"))[0]
        tensor(3)
    """
    return _extreme("pmax", "max", tree, axis, axis_index_groups)


def pmin(tree: Any, axis: Axes, *, axis_index_groups: Groups = None) -> Any:
    """Returns the smallest of each element over the ranks along an axis. It has no derivative: an error says so.

    Arguments and errors are those of `psum`.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 4}).run(lambda: fckpt.pmin(fckpt.axis_index("data"), "data"))[0]
        tensor(0)
    """
    return _extreme("pmin", "min", tree, axis, axis_index_groups)


def _extreme(name: str, reduction: str, tree: Any, axis: Axes, groups: Groups) -> Any:
    mesh, along = _where(name, axis, groups)
    send = lambda x: extreme(x, reduction, str(along), mesh.key)

    def ordered(x: torch.Tensor) -> torch.Tensor:
        if x.is_complex():
            raise ArgumentTypeError(f"{name}: complex numbers have no order. Take it of x.abs(), or of x.real.")
        return x if x.dtype == torch.bool else _countable(name, x)

    return packed(name, tree, send, 0, begin=ordered, scalar=lambda number: number)


def all_gather(
    tree: Any,
    axis: Axes,
    *,
    dim: int = 0,
    tiled: bool = False,
    size: int | None = None,
    axis_index_groups: Groups = None,
) -> Any:
    """Returns what all ranks along an axis hold, on every one of them. It pulls back to `psum_scatter`.

    Args:
        tree: a pytree of tensors, of the same shapes on all ranks.
        axis: an axis of the mesh, or several.
        dim: where the ranks stand in the result: a new dimension, or with `tiled` the one along which they are
            concatenated.
        tiled: whether they are concatenated, and not stacked.
        size: how long the result is along `dim`, with `tiled`, where parts are filled up to one length (see
            `P(shape=...)`): what lies beyond is left out, and its gradient is zero. Default: all.
        axis_index_groups: see `psum`. All groups are of one size, and the order in a group is that of the result.

    Raises:
        ArgumentTypeError, ArgumentValueError: as in `psum`; there is no such dimension; it is not so long.

    Example:
        >>> import torch, fckpt
        >>> mine = lambda: torch.tensor([0, 1]) + 10 * fckpt.axis_index("data")
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.all_gather(mine(), "data", tiled=True))[0]
        tensor([ 0,  1, 10, 11])
    """
    mesh, along = _where("all_gather", axis, axis_index_groups, even=True)
    linear = Linear("all_gather", along, mesh)
    if size is not None and not tiled:
        raise ArgumentValueError("all_gather: size is about a dimension that tiled=True puts together. Pass both.")

    def finish(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        whole = joined("all_gather", x, dim, len(shape) + (not tiled), tiled)
        return whole if size is None else without_padding("all_gather", whole, dim, size, mesh.reach(along))

    return packed("all_gather", tree, lambda x: apply(x, linear), 0, finish=finish)


def psum_scatter(
    tree: Any, axis: Axes, *, dim: int = 0, tiled: bool = False, pad: bool = False, axis_index_groups: Groups = None
) -> Any:
    """Returns this rank's part of the sum over the ranks along an axis. It pulls back to `all_gather`.

    Args:
        tree: a pytree of tensors.
        axis: an axis of the mesh, or several.
        dim: the dimension that is divided among the ranks.
        tiled: whether it stays, divided by their number. If not, it must be their number, and goes.
        pad: whether, with `tiled`, zeros are put at its end where it cannot be divided evenly: all parts are of one
            size, as those of `P(shape=...)`. `all_gather(..., size=...)` leaves them out again.
        axis_index_groups: see `psum`. All groups are of one size, and the order in a group is that of the parts.

    Raises:
        ArgumentTypeError, ArgumentValueError: as in `psum`; the dimension cannot be divided so.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.psum_scatter(torch.arange(3), "data", tiled=True, pad=True))
        [tensor([0, 2]), tensor([4, 0])]
    """
    mesh, along = _where("psum_scatter", axis, axis_index_groups, even=True)
    linear, ranks = Linear("psum_scatter", along, mesh), mesh.reach(along)
    if pad and not tiled:
        raise ArgumentValueError("psum_scatter: pad is about a dimension that tiled=True divides. Pass both.")

    def begin(x: torch.Tensor) -> torch.Tensor:
        x = _countable("psum_scatter", x)
        x = with_padding("psum_scatter", x, dim, ranks) if pad else x
        return divided("psum_scatter", x, dim, ranks, along, tiled)

    return packed("psum_scatter", tree, lambda x: apply(x, linear), 1, begin=begin)


def all_to_all(
    tree: Any, axis: Axes, *, split: int, concat: int, tiled: bool = False, axis_index_groups: Groups = None
) -> Any:
    """Divides each tensor among the ranks along an axis; returns the parts that are meant for this one.

    Args:
        tree: a pytree of tensors, of the same shapes on all ranks.
        axis: an axis of the mesh, or several.
        split: the dimension that is divided.
        concat: where the parts stand in the result: a new dimension, or with `tiled` the one along which they are
            concatenated.
        tiled: whether `split` stays, divided by the number of ranks, and the parts are concatenated. If not, `split`
            must be that number, and goes.
        axis_index_groups: see `psum`. All groups are of one size, and the order in a group is that of the parts.

    Raises:
        ArgumentTypeError, ArgumentValueError: as in `psum_scatter`.

    Example:
        >>> import torch, fckpt
        >>> mine = lambda: torch.tensor([0, 1]) + 10 * fckpt.axis_index("data")
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.all_to_all(mine(), "data", split=0, concat=0, tiled=True))
        [tensor([ 0, 10]), tensor([ 1, 11])]
    """
    mesh, along = _where("all_to_all", axis, axis_index_groups, even=True)
    linear, ranks = Linear("all_to_all", along, mesh), mesh.reach(along)

    finish = lambda x, shape: joined("all_to_all", x, concat, len(shape) + (not tiled), tiled)
    begin = lambda x: divided("all_to_all", x, split, ranks, along, tiled)
    return packed("all_to_all", tree, lambda x: apply(x, linear), 1, begin=begin, finish=finish)


def ppermute(tree: Any, axis: Axes, pairs: Sequence[tuple[int, int]]) -> Any:
    """Sends from rank to rank along an axis. It pulls back to the inverse permutation.

    Args:
        tree: a pytree of tensors, of the same shapes on all ranks.
        axis: an axis of the mesh, or several.
        pairs: (source, destination) by their numbers along the axis, each source and each destination once. Who gets
            nothing gets zeros.

    Raises:
        ArgumentTypeError, ArgumentValueError: as in `psum`; `pairs` is no such thing.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"stage": 3}).run(lambda: fckpt.ppermute(torch.ones(()), "stage", [(0, 1), (1, 2)]))
        [tensor(0.), tensor(1.), tensor(1.)]
    """
    mesh, along = _where("ppermute", axis)
    size = mesh.reach(along)
    sources = [-1] * size
    if not isinstance(pairs, (list, tuple)):
        raise ArgumentTypeError(f"ppermute: pairs are a list, such as [(0, 1), (1, 0)], not {pairs!r}.")
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(n, int) for n in pair)):
            raise ArgumentTypeError(
                f"ppermute: pairs are (source, destination), two numbers along {along.said}, not {pair!r}: [(0, 1), "
                "(1, 0)] swaps two ranks."
            )
        source, target = pair
        if not (0 <= source < size and 0 <= target < size):
            raise ArgumentValueError(
                f"ppermute: ({source}, {target}) is no pair of numbers below {size}, along {along.said}."
            )
        if sources[target] >= 0 or source in sources:
            raise ArgumentValueError(f"ppermute: {list(pairs)} names a source or a destination twice.")
        sources[target] = source
    linear = Linear("ppermute", along, mesh, tuple(sources))
    return packed("ppermute", tree, lambda x: apply(x, linear), 0)


def received(x: torch.Tensor, axes: tuple[str, ...], mesh: Mesh) -> torch.Tensor:
    """Returns an argument that all ranks along `axes` have been given alike: its cotangents are summed over them."""
    return apply(x, Linear("pvary", Along(axes), mesh))


def handed_on(x: torch.Tensor, axes: tuple[str, ...], mesh: Mesh) -> torch.Tensor:
    """Returns a result that all ranks along `axes` have alike: each gets its part of the cotangent."""
    return apply(x, Linear("replicated", Along(axes), mesh))


def pvary(tree: Any, axis: Axes) -> Any:
    """Returns `tree`, as something with which every rank along an axis goes on in its own way.

    The identity, whose cotangents are summed over the ranks: what all ranks hold alike, such as a parameter, gets its
    whole gradient so, if what is differentiated is one value for all of them (a `psum` with `out="invariant"`).
    Arguments and errors are those of `psum`.

    Example:
        >>> import torch, fckpt
        >>> def loss(w):
        ...     mine = fckpt.pvary(w, "data") * (1.0 + fckpt.axis_index("data"))
        ...     return fckpt.psum(mine, "data", out="invariant")
        >>> fckpt.sim({"data": 2}).run(lambda: torch.func.grad(loss)(torch.tensor(1.0)))
        [tensor(3.), tensor(3.)]
    """
    mesh, along = _where("pvary", axis)
    linear = Linear("pvary", along, mesh)
    return packed("pvary", tree, lambda x: apply(x, linear), 0, scalar=lambda number: number)


def axis_size(axis: Axes) -> int:
    """Returns how many ranks there are along an axis, or several.

    Example:
        >>> import fckpt
        >>> fckpt.sim({"data": 2, "model": 3}).run(lambda: fckpt.axis_size(("data", "model")))[0]
        6
    """
    mesh, along = _where("axis_size", axis)
    return mesh.reach(along)


def axis_index(axis: Axes, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns the number of this rank along an axis, or several, as a tensor of no dimensions (int64).

    A tensor, so that a traced function is the same on every rank. `int()` makes a number of it where nothing is traced.

    Example:
        >>> import fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.axis_index("data"))
        [tensor(0), tensor(1)]
    """
    mesh, along = _where("axis_index", axis)
    return rank_number(str(along), torch.device(device or torch.get_default_device()), mesh.key)


# ---- the mesh in use --------------------------------------------------------------------------------


def _where(function: str, axis: Axes, groups: Groups = None, *, even: bool = False) -> tuple[Mesh, Along]:
    """Returns the mesh in use, and the ranks of it that are meant; `even` if groups must be of one size."""
    mesh = current_mesh(function)
    axes = mesh.axes(function, axis)
    if groups is None:
        return mesh, Along(axes)
    try:
        found = tuple(tuple(map(operator.index, group)) for group in groups)
    except TypeError:
        raise ArgumentTypeError(
            f"{function}: axis_index_groups has lists of numbers, such as [[0, 1], [2, 3]], not {groups!r}."
        ) from None
    count = mesh.count(axes)
    along = Along(axes, found) if found != (tuple(range(count)),) else Along(axes)
    if sorted(number for group in found for number in group) != [*range(count)] or () in found:
        raise ArgumentValueError(
            f"{function}: axis_index_groups must have each number below {count}, along {Along(axes).said}, once, "
            f"unlike {groups!r}."
        )
    if even and along.uneven:
        raise ArgumentValueError(
            f"{function}: all groups must be of one size, unlike {groups!r}. Only sums, means and extremes may be over "
            "groups of different sizes."
        )
    return mesh, along
