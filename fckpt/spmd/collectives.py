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
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "replicated_argument",
    "replicated_output",
    "sums_watched",
]

Summing = Callable[[torch.Tensor, tuple[str, ...]], None]
_summings: ContextVar[tuple[Summing, ...]] = ContextVar("summings", default=())


@contextlib.contextmanager
def sums_watched(summing: Summing) -> Iterator[None]:
    """Calls `summing(x, axes)` for every tensor that a psum or pmean in the body sums, except in backward passes."""
    token = _summings.set((*_summings.get(), summing))
    try:
        yield
    finally:
        _summings.reset(token)


Groups = Sequence[Sequence[int]] | None


def psum(tree: Any, axis: Axes, *, out: str = "replicated", axis_index_groups: Groups = None) -> Any:
    """Returns, on every rank, the sum over the ranks along an axis.

    Args:
        tree: a pytree of tensors. Numbers must be equal on all ranks. Booleans are summed as integers (int64).
        axis: an axis of the mesh, or a tuple of several.
        out: how the result is differentiated. "replicated": each rank may use the result differently, and the
            gradient is a psum of the cotangents of all ranks. "invariant": all ranks compute the same from the result,
            so their cotangents are equal, and the cotangent is passed on unchanged.
        axis_index_groups: groups of indices along the axis; every index is in exactly one group. The sum is taken
            within each group: `[[0, 1], [2, 3]]` sums over the first two of four ranks, and over the last two. Groups
            may have different sizes here, and in `pmean`, `pmax` and `pmin`. Default: all ranks are one group.

    Raises:
        ArgumentTypeError, ArgumentValueError: the axis does not exist, or no mesh is in use; a leaf is not a tensor,
            or torch cannot add its dtype; the groups do not contain every index once, or have unsuitable sizes.

    Leaves of the same dtype are sent in one message.

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
        raise ArgumentValueError(f"{function}: out must be 'replicated' or 'invariant', not {out!r}.")
    linear = Linear("psum" if out == "replicated" else "psum_invariant", along, mesh)

    def multiplied(number: Any) -> Any:
        if along.uneven:
            raise ArgumentTypeError(
                f"{function}: with groups of different sizes, leaves must be tensors, not the number {number!r}. Pass "
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
    """Converts booleans to integers, as `torch.sum` does; returns other tensors unchanged.

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
"""Dtypes that torch can store, but not add."""


def pmean(tree: Any, axis: Axes, *, out: str = "replicated", axis_index_groups: Groups = None) -> Any:
    """Returns, on every rank, the mean over the ranks along an axis: `psum` divided by the number of ranks.

    Takes the arguments and raises the errors of `psum`. Integers become floats, as with `/`.

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
    """Returns, on every rank, the elementwise maximum over the ranks along an axis. Differentiating it is an error.

    Takes the arguments and raises the errors of `psum`.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 4}).run(lambda: fckpt.pmax(fckpt.axis_index("data"), "data"))[0]
        tensor(3)
    """
    return _extreme("pmax", "max", tree, axis, axis_index_groups)


def pmin(tree: Any, axis: Axes, *, axis_index_groups: Groups = None) -> Any:
    """Returns, on every rank, the elementwise minimum over the ranks along an axis. Differentiating it is an error.

    Takes the arguments and raises the errors of `psum`.

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
            raise ArgumentTypeError(f"{name}: complex numbers have no order. Pass x.abs() or x.real.")
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
    """Returns, on every rank, the tensors of all ranks along an axis. Its transpose is `psum_scatter`.

    Args:
        tree: a pytree of tensors, with the same shapes on all ranks.
        axis: an axis of the mesh, or a tuple of several.
        dim: the dimension of the result that runs over the ranks: a new dimension, or with `tiled` the dimension along
            which the tensors are concatenated.
        tiled: whether to concatenate the tensors instead of stacking them.
        size: with `tiled`, the length of `dim` in the result, if the parts are padded (see `P(shape=...)`): the padding
            is removed, and its gradient is zero. Default: the sum of all parts.
        axis_index_groups: see `psum`. All groups must have the same size. The result has the order of the group.

    Raises:
        ArgumentTypeError, ArgumentValueError: as in `psum`; `dim` does not exist; `size` does not fit the parts.

    Example:
        >>> import torch, fckpt
        >>> mine = lambda: torch.tensor([0, 1]) + 10 * fckpt.axis_index("data")
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.all_gather(mine(), "data", tiled=True))[0]
        tensor([ 0,  1, 10, 11])
    """
    mesh, along = _where("all_gather", axis, axis_index_groups, even=True)
    linear = Linear("all_gather", along, mesh)
    if size is not None and not tiled:
        raise ArgumentValueError("all_gather: size is the length of a dimension concatenated by tiled=True. Pass both.")

    def finish(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        whole = joined("all_gather", x, dim, len(shape) + (not tiled), tiled)
        return whole if size is None else without_padding("all_gather", whole, dim, size, mesh.reach(along))

    return packed("all_gather", tree, lambda x: apply(x, linear), 0, finish=finish)


def psum_scatter(
    tree: Any, axis: Axes, *, dim: int = 0, tiled: bool = False, pad: bool = False, axis_index_groups: Groups = None
) -> Any:
    """Returns this rank's part of the sum over the ranks along an axis. Its transpose is `all_gather`.

    Args:
        tree: a pytree of tensors.
        axis: an axis of the mesh, or a tuple of several.
        dim: the dimension to divide among the ranks.
        tiled: whether the result keeps `dim`, with its length divided by the number of ranks. If not, the length of
            `dim` must be the number of ranks, and the result does not have `dim`.
        pad: with `tiled`, whether to pad `dim` with zeros at its end if it cannot be divided evenly. All parts then
            have the same size, as with `P(shape=...)`. `all_gather(..., size=...)` removes the padding.
        axis_index_groups: see `psum`. All groups must have the same size. The parts go to the ranks in group order.

    Raises:
        ArgumentTypeError, ArgumentValueError: as in `psum`; the dimension cannot be divided among the ranks.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.psum_scatter(torch.arange(3), "data", tiled=True, pad=True))
        [tensor([0, 2]), tensor([4, 0])]
    """
    mesh, along = _where("psum_scatter", axis, axis_index_groups, even=True)
    linear, ranks = Linear("psum_scatter", along, mesh), mesh.reach(along)
    if pad and not tiled:
        raise ArgumentValueError("psum_scatter: pad applies to a dimension divided by tiled=True. Pass both.")

    def begin(x: torch.Tensor) -> torch.Tensor:
        x = _countable("psum_scatter", x)
        x = with_padding("psum_scatter", x, dim, ranks) if pad else x
        return divided("psum_scatter", x, dim, ranks, along, tiled)

    return packed("psum_scatter", tree, lambda x: apply(x, linear), 1, begin=begin)


def all_to_all(
    tree: Any, axis: Axes, *, split: int, concat: int, tiled: bool = False, axis_index_groups: Groups = None
) -> Any:
    """Divides each tensor among the ranks along an axis; returns the parts that all ranks send to this rank.

    Args:
        tree: a pytree of tensors, with the same shapes on all ranks.
        axis: an axis of the mesh, or a tuple of several.
        split: the dimension to divide.
        concat: the dimension of the result that runs over the received parts: a new dimension, or with `tiled` the
            dimension along which the parts are concatenated.
        tiled: whether to keep `split`, with its length divided by the number of ranks, and to concatenate the parts. If
            not, the length of `split` must be the number of ranks, and the parts do not have `split`.
        axis_index_groups: see `psum`. All groups must have the same size. The parts go to the ranks in group order.

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
    """Sends tensors from rank to rank along an axis. Its transpose is the inverse permutation.

    Args:
        tree: a pytree of tensors, with the same shapes on all ranks.
        axis: an axis of the mesh, or a tuple of several.
        pairs: (source, destination) indices along the axis; each source and each destination occurs at most once. A
            rank that is not a destination receives zeros.

    Raises:
        ArgumentTypeError, ArgumentValueError: as in `psum`; `pairs` is not a list of such pairs.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"stage": 3}).run(lambda: fckpt.ppermute(torch.ones(()), "stage", [(0, 1), (1, 2)]))
        [tensor(0.), tensor(1.), tensor(1.)]
    """
    mesh, along = _where("ppermute", axis)
    size = mesh.reach(along)
    sources = [-1] * size
    if not isinstance(pairs, (list, tuple)):
        raise ArgumentTypeError(f"ppermute: pairs must be a list, such as [(0, 1), (1, 0)], not {pairs!r}.")
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(n, int) for n in pair)):
            raise ArgumentTypeError(
                f"ppermute: each pair must be (source, destination), two indices along {along.said}, not {pair!r}. For "
                "example, [(0, 1), (1, 0)] swaps two ranks."
            )
        source, target = pair
        if not (0 <= source < size and 0 <= target < size):
            raise ArgumentValueError(
                f"ppermute: ({source}, {target}) must be two indices from 0 to {size - 1} along {along.said}."
            )
        if sources[target] >= 0 or source in sources:
            raise ArgumentValueError(f"ppermute: {list(pairs)} contains a source or a destination twice.")
        sources[target] = source
    linear = Linear("ppermute", along, mesh, tuple(sources))
    return packed("ppermute", tree, lambda x: apply(x, linear), 0)


def replicated_argument(x: torch.Tensor, axes: tuple[str, ...], mesh: Mesh) -> torch.Tensor:
    """Returns an argument that is replicated along `axes`. Backward: sums the cotangents over the ranks."""
    return apply(x, Linear("pvary", Along(axes), mesh))


def replicated_output(x: torch.Tensor, axes: tuple[str, ...], mesh: Mesh) -> torch.Tensor:
    """Returns an output that is replicated along `axes`. Backward: divides the cotangent among the ranks."""
    return apply(x, Linear("replicated", Along(axes), mesh))


def pvary(tree: Any, axis: Axes) -> Any:
    """Marks a replicated value as varying along an axis: identity forward, psum backward.

    With `pvary`, a replicated tensor such as a parameter gets its whole gradient, if the differentiated value is the
    same on all ranks (a `psum` with `out="invariant"`). Takes the arguments and raises the errors of `psum`.

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
    """Returns the number of ranks along an axis, or along several.

    Example:
        >>> import fckpt
        >>> fckpt.sim({"data": 2, "model": 3}).run(lambda: fckpt.axis_size(("data", "model")))[0]
        6
    """
    mesh, along = _where("axis_size", axis)
    return mesh.reach(along)


def axis_index(axis: Axes, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns the index of this rank along an axis, or along several, as a scalar tensor (int64).

    The index is a tensor so that a traced function is the same on every rank. Outside of tracing, `int()` converts it.

    Example:
        >>> import fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.axis_index("data"))
        [tensor(0), tensor(1)]
    """
    mesh, along = _where("axis_index", axis)
    return rank_number(str(along), torch.device(device or torch.get_default_device()), mesh.key)


# ---- the mesh in use --------------------------------------------------------------------------------


def _where(function: str, axis: Axes, groups: Groups = None, *, even: bool = False) -> tuple[Mesh, Along]:
    """Returns the mesh in use and the ranks that a collective reaches. `even`: all groups must have the same size."""
    mesh = current_mesh(function)
    axes = mesh.axes(function, axis)
    if groups is None:
        return mesh, Along(axes)
    try:
        found = tuple(tuple(map(operator.index, group)) for group in groups)
    except TypeError:
        raise ArgumentTypeError(
            f"{function}: axis_index_groups must be lists of indices, such as [[0, 1], [2, 3]], not {groups!r}."
        ) from None
    count = mesh.count(axes)
    along = Along(axes, found) if found != (tuple(range(count)),) else Along(axes)
    if sorted(number for group in found for number in group) != [*range(count)] or () in found:
        raise ArgumentValueError(
            f"{function}: axis_index_groups must contain every index from 0 to {count - 1} along {Along(axes).said} "
            f"exactly once, in groups that are not empty, unlike {groups!r}."
        )
    if even and along.uneven:
        raise ArgumentValueError(
            f"{function}: all groups must have the same size, unlike {groups!r}. Only psum, pmean, pmax and pmin take "
            "groups of different sizes."
        )
    return mesh, along
