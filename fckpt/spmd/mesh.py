"""Meshes, which name the dimensions of a grid of ranks, and transports, which carry messages between ranks.

A mesh is the same on all ranks, but each rank has its own `Transport`: one per process or, in a simulation, one per
thread. An operation in a graph has the key of its mesh, which is the same on every rank, and looks up the transport
here.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from fckpt.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "Along",
    "Axes",
    "Mesh",
    "Transport",
    "carried",
    "carry",
    "check_shape",
    "current_mesh",
    "dismiss",
    "first_difference",
    "mesh_in_use",
    "odd_one",
    "put_in_use",
    "simulated",
    "transport_of",
    "use_mesh",
]

Axes = str | Sequence[str]
"""One axis of a mesh, or several. Several axes are treated as one axis, in which the first axis varies slowest."""


class Along(NamedTuple):
    """The ranks that a collective reaches: all ranks along some axes, or groups of these ranks.

    In a graph it is a str, with the axes separated by commas and the groups after a colon: "data", "data:0 2|1 3".
    """

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    """Indices along the axes, each in exactly one group. Empty if all ranks are one group."""

    def __str__(self) -> str:
        groups = "|".join(" ".join(map(str, group)) for group in self.groups)
        return ",".join(self.axes) + (f":{groups}" if groups else "")

    @staticmethod
    def of(text: str) -> Along:
        """Parses the result of `str`."""
        axes, _, groups = text.partition(":")
        numbers = [tuple(map(int, group.split())) for group in groups.split("|")] if groups else ()
        return Along(tuple(axes.split(",")), tuple(numbers))

    @property
    def uneven(self) -> bool:
        """Whether groups have different sizes."""
        return len({*map(len, self.groups)}) > 1

    @property
    def said(self) -> str:
        """The axes and groups as text for error messages."""
        groups = f" in groups {[[*group] for group in self.groups]}" if self.groups else ""
        return ", ".join(self.axes) + groups


class Transport(Protocol):
    """Carries messages between the ranks of a mesh. All ranks call the same method in the same order."""

    @property
    def rank(self) -> int:
        """The number of this rank in the mesh, in which the last axis varies fastest."""
        ...

    def all_reduce(self, x: torch.Tensor, reduction: str, along: Along) -> torch.Tensor:
        """Returns the "sum", "max" or "min" over the ranks `along`."""
        ...

    def all_gather(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns the tensors of all ranks `along`, stacked along a new first dimension, in rank order."""
        ...

    def reduce_scatter(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns the sum of x[i] over the ranks `along`, where i is the index of this rank."""
        ...

    def all_to_all(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns y, where y[i] is x[j] of rank i, and j is the index of this rank."""
        ...

    def permute(self, x: torch.Tensor, sources: Sequence[int], along: Along) -> torch.Tensor:
        """Returns x of the rank whose index is `sources[i]`, where i is the index of this rank; zeros if it is -1."""
        ...

    def link(self, axis: str) -> Any:
        """Returns the `Link` between neighbouring ranks along an axis."""
        ...

    def adds(self, dtype: torch.dtype, along: Along) -> bool:
        """Whether this rank receives the tensors of all ranks `along` to compute a sum, which takes memory."""
        ...

    def exchange(self, about: str, mine: str) -> list[str]:
        """Waits for the texts of all ranks of the mesh, and returns them in rank order."""
        ...

    def share(self, about: str, mine: str, make: Callable[[Sequence[str]], str]) -> str:
        """Returns `make(texts of all ranks)`, computed by rank 0."""
        ...

    def later(self, about: str) -> Callable[[str], list[str]]:
        """Returns an `exchange` that can be called later, in any thread, and waits for all ranks that are alive."""
        ...

    def watch(self, foreseen: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager for one step: a failure inside it is reported to the other ranks.

        `foreseen`: whether all ranks agree on the collectives of the step (`agree`) before the first of them.
        """
        ...

    def agree(self, about: str, calls: list[str]) -> None:
        """Checks that all ranks will call the same collectives."""
        ...


class Mesh:
    """A grid of ranks with named axes.

    Made by `fckpt.init_mesh`, `fckpt.sim` and `fckpt.fake_mesh`. Rank 0 is at the origin, and the last axis varies
    fastest. Meshes with the same axes are equal.
    """

    def __init__(self, shape: Mapping[str, int]):
        for name in shape:
            if not isinstance(name, str) or not name or set(name) & set(",:="):
                raise ArgumentValueError(
                    f"the name of a mesh axis must be a str without commas, colons or '=', not {name!r}."
                )
        self.shape: dict[str, int] = dict(shape)
        """The number of ranks along each axis, by name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, of which the first varies slowest."""
        return tuple(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape.values())

    @property
    def key(self) -> str:
        """The text that identifies the mesh in a graph."""
        return ",".join(f"{name}={size}" for name, size in self.shape.items())

    @staticmethod
    def of_key(key: str) -> Mesh:
        """Returns the mesh with this key."""
        return Mesh({name: int(size) for name, _, size in (part.partition("=") for part in key.split(","))})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Mesh({self.shape})"

    def axes(self, function: str, axes: Axes) -> tuple[str, ...]:
        """Returns `axes` as a tuple of names.

        Raises:
            ArgumentTypeError, ArgumentValueError: an axis is not in this mesh, or occurs twice. The error names
                `function`.
        """
        names = (axes,) if isinstance(axes, str) else axes
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError(f"{function}: an axis must be a str or a tuple of strs, not {axes!r}.")
        known = ", ".join(repr(name) for name in self.names)
        for name in names:
            if name not in self.shape:
                raise ArgumentValueError(f"{function}: the mesh has no axis {name!r}. It has {known}.")
        if not names or len(set(names)) < len(names):
            raise ArgumentValueError(
                f"{function}: axes {tuple(names)!r} must be one or more of {known}, each at most once."
            )
        return tuple(names)

    def count(self, axes: Sequence[str]) -> int:
        """Returns the number of ranks along `axes`."""
        return math.prod(self.shape[name] for name in axes)

    def place(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank: its index along each axis."""
        found: dict[str, int] = {}
        for name in reversed(self.names):
            rank, found[name] = divmod(rank, self.shape[name])
        return {name: found[name] for name in self.names}

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Returns the index of a rank along `axes`."""
        place, number = self.place(rank), 0
        for name in axes:
            number = number * self.shape[name] + place[name]
        return number

    def reach(self, along: Along) -> int:
        """Returns the number of ranks that a collective reaches; with groups, the size of the largest group."""
        return max(map(len, along.groups)) if along.groups else self.count(along.axes)

    @functools.cache  # noqa: B019  # called for every message, and a process has few meshes
    def peers(self, rank: int, along: Along) -> tuple[int, ...]:
        """Returns the ranks that a collective of `rank` reaches, in the order of the axes or of its group.

        Along all other axes, these ranks have the coordinates of `rank`.
        """
        place = self.place(rank)
        rest = [name for name in self.names if name not in along.axes]
        same = [r for r in range(self.size) if all(self.place(r)[name] == place[name] for name in rest)]
        row = sorted(same, key=lambda r: self.index(r, along.axes))
        mine = next((group for group in along.groups if row.index(rank) in group), range(len(row)))
        return tuple(row[number] for number in mine)


def check_shape(function: str, shape: Any) -> None:
    """Checks that a shape is a dict from the name to the size of each axis.

    Raises:
        ArgumentTypeError: it is not. The error names `function`.
    """
    sizes = [*shape.values()] if isinstance(shape, Mapping) else [None]
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise ArgumentTypeError(
            f'{function}: shape must be a dict with the size of each axis, such as {{"data": 2}}, not {shape!r}.'
        )


T = TypeVar("T", bound=Hashable)


def odd_one(said: Mapping[int, T]) -> tuple[int, T] | None:
    """Returns the first rank whose entry differs from the most common one, and the latter; None if all are equal."""
    known = [*said.values()]
    usual = max(known, key=known.count)
    return next(((rank, usual) for rank, mine in sorted(said.items()) if mine != usual), None)


def first_difference(said: Mapping[int, Sequence[str]]) -> tuple[int, int, str, str] | None:
    """Returns a rank that differs from most, the number of the first differing line, its line, and the usual line."""
    odd = odd_one({rank: tuple(lines) for rank, lines in said.items()})
    if odd is None:
        return None
    rank, usual = odd
    mine = said[rank]
    shorter = min(len(mine), len(usual))
    at = next((i for i, (a, b) in enumerate(zip(mine, usual, strict=False)) if a != b), shorter)
    one, other = (lines[at] if at < len(lines) else "nothing more" for lines in (mine, usual))
    return rank, at + 1, one, other


# ---- transports and the mesh in use ----------------------------------------------------------------

_carriers: dict[str, Transport] = {}
_local = threading.local()
_current: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def carry(mesh: Mesh, transport: Transport) -> None:
    """Registers the transport of this process for `mesh`."""
    _carriers[mesh.key] = transport


def dismiss(mesh: Mesh) -> None:
    """Removes the transport of this process for `mesh`."""
    _carriers.pop(mesh.key, None)


@contextlib.contextmanager
def carried(mesh: Mesh, transport: Transport) -> Iterator[None]:
    """Context manager: this thread is a rank of the simulated `mesh`, with this transport."""
    _local.mesh, _local.transport = mesh, transport
    try:
        yield
    finally:
        del _local.mesh, _local.transport


def simulated() -> Mesh | None:
    """Returns the simulated mesh of which this thread is a rank, or None."""
    return getattr(_local, "mesh", None)


def transport_of(key: str) -> Transport:
    """Returns the transport for the mesh with this key.

    Raises:
        ArgumentValueError: there is none.
    """
    mesh = simulated()
    found = _local.transport if mesh is not None and mesh.key == key else _carriers.get(key)
    if found is None:
        raise ArgumentValueError(
            f"this process does not belong to the mesh ({key}). Call fckpt.init_mesh, or simulate it with fckpt.sim."
        )
    return found


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Puts `mesh` in use in the body: collectives in the body name its axes.

    Example:
        >>> import torch, fckpt
        >>> with fckpt.use_mesh(fckpt.fake_mesh({"data": 512})):
        ...     fckpt.axis_size("data")
        512
    """
    token = _current.set(mesh)
    try:
        yield mesh
    finally:
        _current.reset(token)


def put_in_use(mesh: Mesh) -> None:
    """Puts `mesh` in use from here on: collectives name its axes."""
    _current.set(mesh)


def mesh_in_use() -> Mesh | None:
    """Returns the mesh in use, or None."""
    return _current.get()


def current_mesh(function: str) -> Mesh:
    """Returns the mesh in use.

    Raises:
        ArgumentValueError: there is none. The error names `function`.
    """
    mesh = mesh_in_use()
    if mesh is None:
        raise ArgumentValueError(
            f"{function}: no mesh is in use. Call it in a function that fckpt.shard_map or fckpt.pmap maps, or inside "
            "`with fckpt.use_mesh(mesh):`."
        )
    return mesh
