"""Which axes of a mesh divide which dimensions of a tensor, and global tensors in and out of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fckpt import tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.spmd.collectives import all_gather
from fckpt.spmd.mesh import Mesh, current_mesh, transport_of, use_mesh

__all__ = ["P", "check_even", "in_order", "local", "placements", "shard", "specs_of", "unshard"]


class P:
    """How a tensor lies on a mesh: for each dimension, the axes that divide it.

    Args:
        dims: by dimension an axis, several, or None for none. Dimensions that are not named are not divided; `P()` is
            the same on all ranks.

    Example:
        >>> import fckpt
        >>> fckpt.P("data", None, ("model", "pipe"))
        P('data', None, ('model', 'pipe'))
    """

    __slots__ = ("dims",)

    def __init__(self, *dims: str | Sequence[str] | None):
        self.dims: tuple[tuple[str, ...], ...] = tuple(_names(dim) for dim in dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that divide something."""
        return tuple(name for dim in self.dims for name in dim)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self._bare == other._bare

    def __hash__(self) -> int:
        return hash(self._bare)

    @property
    def _bare(self) -> tuple[tuple[str, ...], ...]:
        count = max((i + 1 for i, dim in enumerate(self.dims) if dim), default=0)
        return self.dims[:count]

    def __repr__(self) -> str:
        dims = (dim if len(dim) > 1 else dim[0] if dim else None for dim in self.dims)
        return f"P({', '.join(map(repr, dims))})"


def _names(dim: Any) -> tuple[str, ...]:
    names = () if dim is None else (dim,) if isinstance(dim, str) else dim
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(f"P: a dimension is divided by an axis, a tuple of them, or None, not {dim!r}.")
    return tuple(names)


def specs_of(function: str, what: str, specs: Any, tree: Any, mesh: Mesh) -> list[P]:
    """Returns the spec of every leaf of `tree`.

    Raises:
        ArgumentTypeError, ArgumentValueError: `specs` is no prefix of the tree, or one of them does not fit the mesh or
            the tensor. `what` says what the tree is.
    """
    try:
        found = trees.spread(specs, tree)
    except ValueError as error:
        raise ArgumentValueError(
            f"{function}: the specs must be a tree that ends where {what} goes on, or with it: {error}"
        ) from None
    leaves, spec = trees.flatten(tree)
    for path, leaf, p in zip(spec.paths(), leaves, found, strict=True):
        where = f"{what}{path}"
        if not isinstance(p, P):
            raise ArgumentTypeError(f"{function}: the spec of {where} is a P, P() for all ranks alike, not {p!r}.")
        for name in p.axes:
            if name not in mesh.shape:
                known = ", ".join(map(repr, mesh.names))
                raise ArgumentValueError(f"{function}: {p} of {where} names {name!r}; the axes are {known}.")
        if len(set(p.axes)) < len(p.axes):
            raise ArgumentValueError(f"{function}: {p} of {where} names an axis twice.")
        dims = leaf.dim() if isinstance(leaf, torch.Tensor) else 0
        if len(p._bare) > dims:
            raise ArgumentValueError(
                f"{function}: {p} is about {len(p._bare)} dimensions, but {where} is {trees.describe(leaf)}."
            )
    return found


def shard(tree: Any, specs: Any, mesh: Mesh | None = None) -> Any:
    """Returns this rank's part of global tensors.

    Args:
        tree: a pytree of tensors, the same on all ranks. Other leaves are passed on.
        specs: a `P` for each, or a tree that ends before.
        mesh: default: the one in use.

    Raises:
        ArgumentTypeError, ArgumentValueError: the specs do not fit, or a dimension cannot be divided evenly.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.shard(torch.arange(4), fckpt.P("data")))
        [tensor([0, 1]), tensor([2, 3])]
    """
    return _each("shard", tree, specs, mesh, _part)


def unshard(tree: Any, specs: Any, mesh: Mesh | None = None) -> Any:
    """Returns global tensors, on all ranks, of which every rank has a part. The inverse of `shard`; see there.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.unshard(torch.ones(1), fckpt.P("data")))[0]
        tensor([1., 1.])
    """
    return _each("unshard", tree, specs, mesh, _whole)


def _each(function: str, tree: Any, specs: Any, mesh: Mesh | None, fn: Callable[..., torch.Tensor]) -> Any:
    mesh = mesh or current_mesh(function)
    leaves, spec = trees.flatten(tree)
    found = specs_of(function, "tree", specs, tree, mesh)
    paths = spec.paths()
    results = [
        fn(x, p, mesh, f"tree{path}") if isinstance(x, torch.Tensor) else x
        for x, p, path in zip(leaves, found, paths, strict=True)
    ]
    return trees.unflatten(spec, results)


def _part(x: torch.Tensor, spec: P, mesh: Mesh, where: str) -> torch.Tensor:
    rank = transport_of(mesh.key).rank
    for dim, axes in enumerate(spec.dims):
        check_even("shard", where, x, dim, axes, mesh)
        length = x.shape[dim] // mesh.count(axes)
        x = x.narrow(dim, mesh.index(rank, axes) * length, length) if axes else x
    return x.contiguous()


def check_even(function: str, where: str, x: torch.Tensor, dim: int, axes: tuple[str, ...], mesh: Mesh) -> None:
    """Makes sure that a dimension can be divided among the ranks along `axes`.

    Raises:
        ArgumentValueError: it cannot. `where` says what `x` is.
    """
    size = mesh.count(axes)
    if x.shape[dim] % size:
        named = ", ".join(f"{name!r} ({mesh.shape[name]})" for name in axes)
        raise ArgumentValueError(
            f"{function}: dimension {dim} of {where}, {trees.describe(x)}, cannot be divided evenly by {named}. Pad it "
            f"to a multiple of {size}."
        )


def _whole(x: torch.Tensor, spec: P, mesh: Mesh, where: str) -> torch.Tensor:
    with use_mesh(mesh):
        for dim, axes in enumerate(spec.dims):
            x = all_gather(x, axes, dim=dim, tiled=True) if axes else x
    return x


def local(function: str, tree: Any, specs: Sequence[P], mesh: Mesh, what: str) -> Any:
    """Returns `tree` with the local part of every DTensor in its place.

    Raises:
        ArgumentValueError: one is placed otherwise than its spec says.
    """
    leaves, spec = trees.flatten(tree)
    if not any(_is_dtensor(leaf) for leaf in leaves):
        return tree
    found = [
        _local(function, leaf, p, mesh, f"{what}{path}") if _is_dtensor(leaf) else leaf
        for leaf, p, path in zip(leaves, specs, spec.paths(), strict=True)
    ]
    return trees.unflatten(spec, found)


def placements(spec: P, names: Sequence[str]) -> list[Any]:
    """Returns what `spec` means to a DTensor on a mesh with these axes."""
    from torch.distributed.tensor import Replicate, Shard

    by_axis = {name: dim for dim, axes in enumerate(spec.dims) for name in axes}
    return [Shard(by_axis[name]) if name in by_axis else Replicate() for name in names]


def in_order(axes: Sequence[str], names: Sequence[str]) -> bool:
    """Whether axes that divide one dimension come in the order of `names`, the only one that a DTensor has."""
    return [*axes] == [name for name in names if name in axes]


def _is_dtensor(leaf: Any) -> bool:
    return type(leaf).__module__.startswith("torch.distributed.tensor")


def _local(function: str, x: Any, spec: P, mesh: Mesh, where: str) -> torch.Tensor:
    names = x.device_mesh.mesh_dim_names or ()
    wanted = placements(spec, names)
    sizes = {name: x.device_mesh.size(i) for i, name in enumerate(names)}
    if sizes != {name: mesh.shape[name] for name in mesh.names if name in sizes} or set(spec.axes) - set(names):
        raise ArgumentValueError(
            f"{function}: {where} is a DTensor on {x.device_mesh}, whose axes are not those of {mesh} that {spec} "
            "needs."
        )
    turned = next((axes for axes in spec.dims if not in_order(axes, names)), None)
    if turned is not None:
        raise ArgumentValueError(
            f"{function}: {where} is a DTensor, whose parts lie in the order of its mesh, {names}, but {spec} has them "
            f"in that of {turned}. Name the axes in the order of the mesh."
        )
    if list(x.placements) != wanted:
        raise ArgumentValueError(
            f"{function}: {where} is a DTensor with placements {list(x.placements)}, but {spec} means {wanted}. Call "
            f"{where}.redistribute(placements={wanted}), or change its spec."
        )
    return x.to_local()
