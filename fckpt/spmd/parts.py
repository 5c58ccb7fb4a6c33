"""Leaves of a tree, in parts: which part of a whole tensor is on which rank.

Specs are the same on all ranks, so that each knows what all hold, and who writes what is not planned together.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.spmd.mesh import Mesh
from fckpt.spmd.specs import P, extent, local, specs_of, whole_shape

__all__ = ["Box", "Leaf", "described", "leaves_of"]


class Box(NamedTuple):
    """A part of a tensor: by dimension, where it begins in the whole, and how long it is."""

    offsets: torch.Size
    sizes: torch.Size

    def common(self, other: Box) -> Box | None:
        """Returns what lies in both, if anything does."""
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(torch.Size(starts), torch.Size(end - start for start, end in zip(starts, ends, strict=True)))

    def within(self, other: Box) -> torch.Size:
        """Returns where it begins, counted from the beginning of another."""
        return torch.Size(a - b for a, b in zip(self.offsets, other.offsets, strict=True))


class Leaf(NamedTuple):
    """A leaf of a tree: what it is to the user, this rank's part of it, and how the parts lie.

    Where parts are uneven, `value` may be filled up, or be shorter on some ranks; only what is in `box` counts.
    """

    where: str
    value: Any
    spec: P
    shape: torch.Size
    """That of the whole tensor."""

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)

    def box(self, mesh: Mesh, rank: int) -> Box:
        """Returns the part that a rank has."""
        dims = self.spec.over(self.shape)
        extents = [extent(length, mesh.count(axes), _numbers(mesh, axes)[rank]) for length, axes in dims]
        return Box(torch.Size(start for start, _ in extents), torch.Size(length for _, length in extents))

    def part(self, mesh: Mesh, rank: int) -> torch.Tensor:
        """Returns the data that this rank has, without what fills it up."""
        found = self.value.detach()
        for dim, length in enumerate(self.box(mesh, rank).sizes):
            found = found.narrow(dim, 0, length)
        return found

    def owners(self, mesh: Mesh, rank: int) -> list[int]:
        """Returns the ranks that have what `rank` has."""
        axes = self.spec.axes if self.is_tensor else ()
        numbers = _numbers(mesh, axes)
        return [other for other, number in enumerate(numbers) if number == numbers[rank]]

    def empty(self) -> Leaf:
        """Returns one like it, to be read into."""
        if not self.is_tensor:
            return self
        device = torch.get_default_device() if self.value.is_meta else self.value.device
        make = torch.empty_like if self.spec.shape is None else torch.zeros_like
        new = make(self.value, device=device)
        return self._replace(value=new.requires_grad_(self.value.requires_grad))

    def copied(self) -> Leaf:
        """Returns one whose tensor nobody else has, in the memory of the CPU."""
        return self._replace(value=self.value.detach().to("cpu", copy=True)) if self.is_tensor else self

    @property
    def said(self) -> str:
        """Describes what must be the same on all ranks."""
        if self.is_tensor:
            return f"{self.where} of {described(self.shape, self.value.dtype)} by {self.spec}"
        plain = isinstance(self.value, (bool, int, float, complex, str))
        return f"{self.where} = {self.value!r}" if plain else f"{self.where}, {type(self.value).__name__}"

    def digest(self, mesh: Mesh, rank: int) -> int:
        """Returns a number for the data of a tensor that other ranks have, too; else 0."""
        if not self.is_tensor or mesh.count(self.spec.axes) == mesh.size:
            return 0
        data: Any = self.part(mesh, rank).cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(data.numpy())


@functools.lru_cache(1024)
def _numbers(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the number of each rank along `axes`."""
    return tuple(mesh.index(rank, axes) for rank in range(mesh.size))


def described(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns a short description of a tensor."""
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


def leaves_of(function: str, tree: Any, specs: Any, mesh: Mesh) -> dict[str, Leaf]:
    """Returns the leaves of a tree by name.

    Raises:
        ArgumentTypeError, ArgumentValueError: one cannot be in a file, or two have one name. `function` is who asks.
    """
    specs = specs_of(function, "tree", P() if specs is None else specs, tree, mesh)
    given, spec = trees.flatten(tree)
    values = trees.leaves(local(function, tree, specs, mesh, "tree"))
    found: dict[str, Leaf] = {}
    for name, path, whole, value, p in zip(spec.names(), spec.paths(), given, values, specs, strict=True):
        shape = whole_shape(whole, p, mesh) if isinstance(whole, torch.Tensor) else torch.Size()
        leaf = Leaf(f"tree{path}", value, p, shape)
        if hasattr(value, "state_dict"):
            raise ArgumentTypeError(
                f"{function}: {leaf.where} is {type(value).__name__}: pass its state_dict(), a tree of tensors."
            )
        if leaf.is_tensor and value.layout != torch.strided:
            raise ArgumentTypeError(f"{function}: {leaf.where} is sparse ({value.layout}): pass its to_dense().")
        if name in found:
            raise ArgumentValueError(
                f"{function}: {leaf.where} and {found[name].where} would both be {name!r} in the file. Rename a key."
            )
        found[name] = leaf
    if "" in found:
        found["tree"] = found.pop("")
    return found
