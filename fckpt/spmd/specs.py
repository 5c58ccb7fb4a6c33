"""Specs: which axes of a mesh divide which dimensions of a tensor. Converts between global tensors and parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.spmd.collectives import all_gather, axis_index
from fckpt.spmd.mesh import Mesh, current_mesh, transport_of, use_mesh
from fckpt.spmd.packing import filled_up

__all__ = [
    "P",
    "check_even",
    "extent",
    "in_order",
    "local",
    "part_mask",
    "placements",
    "shard",
    "specs_for",
    "specs_of",
    "unshard",
    "whole_shape",
]


class P:
    """The spec of a tensor on a mesh: for each dimension, the axes that divide it.

    Args:
        dims: for each dimension an axis, a tuple of several, or None. Further dimensions are not divided; a tensor
            with the spec `P()` is replicated on all ranks.
        shape: the shape of the whole tensor, needed if a dimension cannot be divided evenly. The parts are as from
            `torch.chunk`, padded with zeros to equal shapes. `unshard`, `save` and `load` remove the padding.

    Example:
        >>> import fckpt
        >>> fckpt.P("data", None, ("model", "pipe"))
        P('data', None, ('model', 'pipe'))
        >>> import torch
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.shard(torch.ones(3), fckpt.P("data", shape=(3,))))
        [tensor([1., 1.]), tensor([1., 0.])]
    """

    __slots__ = ("dims", "shape")

    def __init__(self, *dims: str | Sequence[str] | None, shape: Sequence[int] | None = None):
        self.dims: tuple[tuple[str, ...], ...] = tuple(_names(dim) for dim in dims)
        self.shape: tuple[int, ...] | None = None if shape is None else _sizes(shape, len(self._bare))

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that divide a dimension."""
        return tuple(name for dim in self.dims for name in dim)

    def over(self, shape: Sequence[int]) -> list[tuple[int, tuple[str, ...]]]:
        """Returns the length of each dimension of a tensor, and the axes that divide it."""
        return [*zip(shape, [*self.dims, *[()] * len(shape)], strict=False)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and (self._bare, self.shape) == (other._bare, other.shape)

    def __hash__(self) -> int:
        return hash((self._bare, self.shape))

    @property
    def _bare(self) -> tuple[tuple[str, ...], ...]:
        count = max((i + 1 for i, dim in enumerate(self.dims) if dim), default=0)
        return self.dims[:count]

    def __repr__(self) -> str:
        said = [repr(dim if len(dim) > 1 else dim[0] if dim else None) for dim in self.dims]
        return f"P({', '.join([*said, *([f'shape={self.shape}'] if self.shape is not None else [])])})"


def _names(dim: Any) -> tuple[str, ...]:
    names = () if dim is None else (dim,) if isinstance(dim, str) else dim
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(f"P: each dimension takes an axis, a tuple of axes, or None, not {dim!r}.")
    return tuple(names)


def _sizes(shape: Any, dims: int) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, shape))
    except TypeError:
        raise ArgumentTypeError(f"P: shape must have an int for each dimension, unlike {shape!r}.") from None
    if len(found) < dims or min(found, default=0) < 0:
        raise ArgumentValueError(f"P: {found} is not the shape of a tensor whose first {dims} dimensions have specs.")
    return found


def specs_of(function: str, what: str, specs: Any, tree: Any, mesh: Mesh, *, whole: bool = False) -> list[P]:
    """Returns the spec of every leaf of `tree`.

    Args:
        function: the name of the public function, for errors.
        what: the name of the tree, for errors.
        specs: a `P`, or a tree of `P`s that is a tree prefix of `tree`.
        tree: a pytree of whole tensors (`whole`) or of this rank's parts.
        mesh: the mesh.
        whole: whether the tensors are whole.

    Raises:
        ArgumentTypeError, ArgumentValueError: `specs` is not a tree prefix of `tree`, or a spec does not fit the mesh
            or its tensor.
    """
    try:
        found = trees.spread(specs, tree)
    except ValueError as error:
        raise ArgumentValueError(f"{function}: the specs must be a tree prefix of {what}: {error}") from None
    leaves, spec = trees.flatten(tree)
    for path, leaf, p in zip(spec.paths(), leaves, found, strict=True):
        where = f"{what}{path}"
        if not isinstance(p, P):
            raise ArgumentTypeError(
                f"{function}: the spec of {where} must be a P (P() if it is replicated), not {p!r}."
            )
        for name in p.axes:
            if name not in mesh.shape:
                known = ", ".join(map(repr, mesh.names))
                raise ArgumentValueError(
                    f"{function}: {p} of {where} names {name!r}, but the axes of the mesh are {known}."
                )
        if len(set(p.axes)) < len(p.axes):
            raise ArgumentValueError(f"{function}: {p} of {where} names an axis twice.")
        dims = leaf.dim() if isinstance(leaf, torch.Tensor) else 0
        if len(p._bare) > dims:
            raise ArgumentValueError(
                f"{function}: {p} has {len(p._bare)} dimensions, but {where} is {trees.describe(leaf)}."
            )
        if p.shape is not None and isinstance(leaf, torch.Tensor):
            _check_shape(function, where, leaf, p, mesh, whole or _is_dtensor(leaf))
    return found


def _check_shape(function: str, where: str, leaf: torch.Tensor, p: P, mesh: Mesh, whole: bool) -> None:
    assert p.shape is not None
    part = [extent(length, mesh.count(axes), 0)[1] for length, axes in p.over(p.shape)]
    if [*leaf.shape] != [*(p.shape if whole else part)]:
        wanted = f"a tensor of shape {[*p.shape]}" + ("" if whole else f", of which a part has shape {part}")
        raise ArgumentValueError(f"{function}: {where} is {trees.describe(leaf)}, but {p} means {wanted}.")


def extent(length: int, ranks: int, number: int) -> tuple[int, int]:
    """Returns the start and the length of a rank's part of a dimension, divided as by `torch.chunk`."""
    part = -(-length // ranks)
    start = min(number * part, length)
    return start, min(part, length - start)


def whole_shape(x: torch.Tensor, spec: P, mesh: Mesh) -> torch.Size:
    """Returns the shape of the tensor of which `x` is a part."""
    if _is_dtensor(x) or spec.shape is not None:
        return torch.Size(x.shape if spec.shape is None else spec.shape)
    return torch.Size(length * mesh.count(axes) for length, axes in spec.over(x.shape))


def specs_for(tree: Any, specs: Any) -> Any:
    """Returns specs with the shapes of whole tensors, so that dimensions may be divided unevenly.

    Args:
        tree: a pytree of whole tensors, with or without data.
        specs: a `P`, or a tree of `P`s that is a tree prefix of `tree`.

    Raises:
        ArgumentValueError: the specs do not fit the tree.

    Example:
        >>> import torch, fckpt
        >>> specs = fckpt.specs_for({"w": torch.ones(3, 2)}, fckpt.P("data"))
        >>> specs
        {'w': P('data', shape=(3, 2))}
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.shard({"w": torch.ones(3, 2)}, specs)["w"].shape)
        [torch.Size([2, 2]), torch.Size([2, 2])]
    """
    try:
        found = trees.spread(specs, tree)
    except ValueError as error:
        raise ArgumentValueError(f"specs_for: the specs must be a tree prefix of the tree: {error}") from None
    leaves, spec = trees.flatten(tree)
    shaped = [
        P(*p.dims, shape=x.shape) if isinstance(x, torch.Tensor) and isinstance(p, P) else p
        for x, p in zip(leaves, found, strict=True)
    ]
    return trees.unflatten(spec, shaped)


def part_mask(spec: P, mesh: Mesh | None = None, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns a boolean mask of this rank's part: False where the part is padding.

    Use it where elements are counted, as in the mean over a batch that was divided unevenly. In a traced function the
    mask is computed by the same operations on every rank.

    Args:
        spec: a spec with the shape of the whole tensor.
        mesh: default: the mesh in use.
        device: default: torch's default device.

    Raises:
        ArgumentValueError: the spec has no shape, or no mesh is in use.

    Example:
        >>> import torch, fckpt
        >>> x = torch.tensor([1.0, 2.0, 6.0])
        >>> def mean():
        ...     spec = fckpt.P("data", shape=x.shape)
        ...     return fckpt.psum((fckpt.shard(x, spec) + 1).where(fckpt.part_mask(spec), 0).sum(), "data") / 3
        >>> fckpt.sim({"data": 2}).run(mean)[0], (x + 1).mean()
        (tensor(4.), tensor(4.))
    """
    mesh = mesh or current_mesh("part_mask")
    if spec.shape is None:
        raise ArgumentValueError(
            f"part_mask: {spec} has no shape, so its padding is not known. Pass P(..., shape=...)."
        )
    place = torch.device(device) if device is not None else torch.get_default_device()
    mask = torch.ones((), dtype=torch.bool, device=place)
    with use_mesh(mesh):
        for length, axes in spec.over(spec.shape):
            part = extent(length, mesh.count(axes), 0)[1]
            start = part * axis_index(axes, device=place) if axes else 0
            mask = mask.unsqueeze(-1) & (torch.arange(part, device=place) + start < length)
    return mask


def shard(tree: Any, specs: Any, mesh: Mesh | None = None) -> Any:
    """Returns this rank's parts of global tensors.

    Args:
        tree: a pytree of tensors, the same on all ranks. Other leaves are returned unchanged.
        specs: a `P`, or a tree of `P`s that is a tree prefix of `tree`. If a spec has a shape (`specs_for`), its
            dimensions may be divided unevenly.
        mesh: default: the mesh in use.

    Raises:
        ArgumentTypeError, ArgumentValueError: the specs do not fit, or a dimension cannot be divided evenly and its
            spec has no shape.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.shard(torch.arange(4), fckpt.P("data")))
        [tensor([0, 1]), tensor([2, 3])]
    """
    return _each("shard", tree, specs, mesh, _part)


def unshard(tree: Any, specs: Any, mesh: Mesh | None = None) -> Any:
    """Returns, on all ranks, the global tensors of which every rank passes its part. The inverse of `shard`.

    In a mapped function, gradients are reduced and scattered to the ranks of the parts, as FSDP does around a layer.

    Example:
        >>> import torch, fckpt
        >>> fckpt.sim({"data": 2}).run(lambda: fckpt.unshard(torch.ones(1), fckpt.P("data")))[0]
        tensor([1., 1.])
    """
    return _each("unshard", tree, specs, mesh, _whole)


def _each(function: str, tree: Any, specs: Any, mesh: Mesh | None, fn: Callable[..., torch.Tensor]) -> Any:
    mesh = mesh or current_mesh(function)
    leaves, spec = trees.flatten(tree)
    found = specs_of(function, "tree", specs, tree, mesh, whole=fn is _part)
    paths = spec.paths()
    results = [
        fn(x, p, mesh, f"tree{path}") if isinstance(x, torch.Tensor) else x
        for x, p, path in zip(leaves, found, paths, strict=True)
    ]
    return trees.unflatten(spec, results)


def _part(x: torch.Tensor, spec: P, mesh: Mesh, where: str) -> torch.Tensor:
    rank = transport_of(mesh.key).rank
    for dim, axes in enumerate(spec.dims):
        if not axes:
            continue
        if spec.shape is None:
            check_even("shard", where, x, dim, axes, mesh)
        ranks, length = mesh.count(axes), x.shape[dim]
        x = x.narrow(dim, *extent(length, ranks, mesh.index(rank, axes)))
        x = filled_up(x, dim, extent(length, ranks, 0)[1])
    return x.contiguous()


def check_even(function: str, where: str, x: torch.Tensor, dim: int, axes: tuple[str, ...], mesh: Mesh) -> None:
    """Checks that a dimension can be divided evenly among the ranks along `axes`.

    Raises:
        ArgumentValueError: it cannot. The error calls `x` by the name `where`.
    """
    size = mesh.count(axes)
    if x.shape[dim] % size:
        named = ", ".join(f"{name!r} ({mesh.shape[name]})" for name in axes)
        raise ArgumentValueError(
            f"{function}: dimension {dim} of {where}, {trees.describe(x)}, cannot be divided evenly by {named}. Pass "
            f"the shape of the whole tensor in its spec: P(..., shape={tuple(x.shape)}), or use fckpt.specs_for."
        )


def _whole(x: torch.Tensor, spec: P, mesh: Mesh, where: str) -> torch.Tensor:
    with use_mesh(mesh):
        for dim, axes in enumerate(spec.dims):
            if axes:
                size = None if spec.shape is None else spec.shape[dim]
                x = all_gather(x, axes, dim=dim, tiled=True, size=size)
    return x


def local(function: str, tree: Any, specs: Sequence[P], mesh: Mesh, what: str, *, fill_up: bool = False) -> Any:
    """Replaces every DTensor in `tree` by its local part.

    The parts of an unevenly divided DTensor have different sizes, whereas specs pad the parts to equal sizes.
    `fill_up`: pad the local parts too.

    Raises:
        ArgumentValueError: the placements of a DTensor differ from its spec.
    """
    leaves, spec = trees.flatten(tree)
    if not any(_is_dtensor(leaf) for leaf in leaves):
        return tree
    found = [
        _local(function, leaf, p, mesh, f"{what}{path}", fill_up) if _is_dtensor(leaf) else leaf
        for leaf, p, path in zip(leaves, specs, spec.paths(), strict=True)
    ]
    return trees.unflatten(spec, found)


def placements(spec: P, names: Sequence[str]) -> list[Any]:
    """Returns the DTensor placements for `spec` on a mesh with these axes."""
    from torch.distributed.tensor import Replicate, Shard

    by_axis = {name: dim for dim, axes in enumerate(spec.dims) for name in axes}
    return [Shard(by_axis[name]) if name in by_axis else Replicate() for name in names]


def in_order(axes: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the axes that divide a dimension are in the order of `names`, the only order possible for a DTensor."""
    return [*axes] == [name for name in names if name in axes]


def _is_dtensor(leaf: Any) -> bool:
    return type(leaf).__module__.startswith("torch.distributed.tensor")


def _local(function: str, x: Any, spec: P, mesh: Mesh, where: str, fill_up: bool) -> torch.Tensor:
    names = x.device_mesh.mesh_dim_names or ()
    wanted = placements(spec, names)
    sizes = {name: x.device_mesh.size(i) for i, name in enumerate(names)}
    if sizes != {name: mesh.shape[name] for name in mesh.names if name in sizes} or set(spec.axes) - set(names):
        raise ArgumentValueError(
            f"{function}: {where} is a DTensor on {x.device_mesh}, which does not have the axes of {mesh} that {spec} "
            "names. Make both meshes with the same axes."
        )
    turned = next((axes for axes in spec.dims if not in_order(axes, names)), None)
    if turned is not None:
        raise ArgumentValueError(
            f"{function}: {where} is a DTensor, whose parts are in the order of its mesh, {names}, but {spec} has the "
            f"order {turned}. Name the axes in the order of the mesh."
        )
    if list(x.placements) != wanted:
        raise ArgumentValueError(
            f"{function}: {where} is a DTensor with placements {list(x.placements)}, but {spec} means {wanted}. Call "
            f"{where}.redistribute(placements={wanted}), or change its spec."
        )
    uneven = [dim for dim, axes in enumerate(spec.dims) if axes and x.shape[dim] % mesh.count(axes)]
    for dim in uneven:
        if len([name for name in spec.dims[dim] if mesh.shape[name] > 1]) > 1:
            raise ArgumentValueError(
                f"{function}: {where} is a DTensor whose dimension {dim} of length {x.shape[dim]} is divided unevenly "
                f"by several axes, {spec.dims[dim]}. Its parts differ from the parts of a spec. Divide it by one axis."
            )
    part = x.to_local()
    if not uneven or not fill_up:
        return part
    for dim in uneven:
        if spec.shape is None:
            check_even(function, where, x, dim, spec.dims[dim], mesh)
        part = filled_up(part, dim, extent(x.shape[dim], mesh.count(spec.dims[dim]), 0)[1])
    return part
