"""The leaves of a tree of parts: which part of a whole tensor is on which rank.

Specs are the same on all ranks, so each rank knows the parts of all ranks, and the ranks need no communication to
decide which rank writes which part.
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
    """The position of a part in the whole tensor: its offset and size in each dimension."""

    offsets: torch.Size
    sizes: torch.Size

    def common(self, other: Box) -> Box | None:
        """Returns the intersection with another box; None if it is empty."""
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(torch.Size(starts), torch.Size(end - start for start, end in zip(starts, ends, strict=True)))

    def within(self, other: Box) -> torch.Size:
        """Returns the offsets of this box relative to the start of another."""
        return torch.Size(a - b for a, b in zip(self.offsets, other.offsets, strict=True))


class Leaf(NamedTuple):
    """A leaf of a tree: its path, this rank's part, and how the tensor is divided.

    If a dimension is divided unevenly, `value` may be padded, or shorter on some ranks. Only the data in `box` is
    saved and loaded.
    """

    where: str
    value: Any
    spec: P
    shape: torch.Size
    """The shape of the whole tensor."""

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)

    def box(self, mesh: Mesh, rank: int) -> Box:
        """Returns the position of a rank's part."""
        dims = self.spec.over(self.shape)
        extents = [extent(length, mesh.count(axes), _numbers(mesh, axes)[rank]) for length, axes in dims]
        return Box(torch.Size(start for start, _ in extents), torch.Size(length for _, length in extents))

    def part(self, mesh: Mesh, rank: int) -> torch.Tensor:
        """Returns the data of this rank's part, without padding."""
        found = self.value.detach()
        for dim, length in enumerate(self.box(mesh, rank).sizes):
            found = found.narrow(dim, 0, length)
        return found

    def owners(self, mesh: Mesh, rank: int) -> list[int]:
        """Returns the ranks that have the same part as `rank`."""
        axes = self.spec.axes if self.is_tensor else ()
        numbers = _numbers(mesh, axes)
        return [other for other, number in enumerate(numbers) if number == numbers[rank]]

    def empty(self) -> Leaf:
        """Returns a leaf with a new tensor to load into."""
        if not self.is_tensor:
            return self
        device = torch.get_default_device() if self.value.is_meta else self.value.device
        make = torch.empty_like if self.spec.shape is None else torch.zeros_like
        new = make(self.value, device=device)
        return self._replace(value=new.requires_grad_(self.value.requires_grad))

    def copied(self) -> Leaf:
        """Returns a leaf with a copy of the tensor in CPU memory."""
        return self._replace(value=self.value.detach().to("cpu", copy=True)) if self.is_tensor else self

    @property
    def said(self) -> str:
        """Describes the properties that must be the same on all ranks."""
        if self.is_tensor:
            return f"{self.where} of {described(self.shape, self.value.dtype)} with {self.spec}"
        plain = isinstance(self.value, (bool, int, float, complex, str))
        return f"{self.where} = {self.value!r}" if plain else f"{self.where}, {type(self.value).__name__}"

    def digest(self, mesh: Mesh, rank: int) -> int:
        """Returns a checksum of the data of a replicated tensor; 0 for other leaves."""
        if not self.is_tensor or mesh.count(self.spec.axes) == mesh.size:
            return 0
        data: Any = self.part(mesh, rank).cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(data.numpy())


@functools.lru_cache(1024)
def _numbers(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the index of each rank along `axes`."""
    return tuple(mesh.index(rank, axes) for rank in range(mesh.size))


def described(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Describes a tensor briefly."""
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


def leaves_of(function: str, tree: Any, specs: Any, mesh: Mesh) -> dict[str, Leaf]:
    """Returns the leaves of a tree, by name.

    Raises:
        ArgumentTypeError, ArgumentValueError: a leaf cannot be saved, or two leaves have the same name. The error names
            `function`.
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
                f"{function}: {leaf.where} and {found[name].where} would both be {name!r} in the file. Rename one key."
            )
        found[name] = leaf
    if "" in found:
        found["tree"] = found.pop("")
    return found
