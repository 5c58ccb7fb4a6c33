"""Meshes: names for the dimensions of a grid of ranks, and who carries messages between them.

A mesh is the same on all ranks; what differs is the `Transport`. It belongs to the process, or, in a simulation, to the
thread: an operation in a graph knows its mesh by a key that is the same on every rank, and finds the transport here.
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
"""One axis of a mesh or several; several count as one, the first of them varying slowest."""


class Along(NamedTuple):
    """The ranks that a collective reaches: all along some axes, or groups of them.

    As a str, in a graph, the axes with commas between them and the groups after a colon: "data", "data:0 2|1 3".
    """

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    """Numbers along the axes, each of them in one group; empty where all ranks are one group."""

    def __str__(self) -> str:
        groups = "|".join(" ".join(map(str, group)) for group in self.groups)
        return ",".join(self.axes) + (f":{groups}" if groups else "")

    @staticmethod
    def of(text: str) -> Along:
        """Returns what `str` has written."""
        axes, _, groups = text.partition(":")
        numbers = [tuple(map(int, group.split())) for group in groups.split("|")] if groups else ()
        return Along(tuple(axes.split(",")), tuple(numbers))

    @property
    def uneven(self) -> bool:
        """Whether groups have different sizes."""
        return len({*map(len, self.groups)}) > 1

    @property
    def said(self) -> str:
        """For messages."""
        groups = f" in groups {[[*group] for group in self.groups]}" if self.groups else ""
        return ", ".join(self.axes) + groups


class Transport(Protocol):
    """Carries messages between the ranks of a mesh. All ranks call the same method in the same order."""

    @property
    def rank(self) -> int:
        """This rank: the number of its place in the mesh, the last axis varying fastest."""
        ...

    def all_reduce(self, x: torch.Tensor, reduction: str, along: Along) -> torch.Tensor:
        """Returns the "sum", "max" or "min" over the ranks `along`."""
        ...

    def all_gather(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns those of all ranks `along`, stacked in front, in their order."""
        ...

    def reduce_scatter(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns the sum over the ranks of their x[i], i being the number of this rank among them."""
        ...

    def all_to_all(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns y, where y[i] is x[j] of rank i, j being the number of this rank among them."""
        ...

    def permute(self, x: torch.Tensor, sources: Sequence[int], along: Along) -> torch.Tensor:
        """Returns x of the rank that is named for this one in `sources`; zeros where that is -1."""
        ...

    def link(self, axis: str) -> Any:
        """Returns the `Link` between neighbours along an axis."""
        ...

    def adds(self, dtype: torch.dtype, along: Along) -> bool:
        """Whether a sum over the ranks `along` holds what all have brought, to add it up."""
        ...

    def exchange(self, about: str, mine: str) -> list[str]:
        """Waits for all ranks of the mesh, and returns what each of them says, in the order of ranks."""
        ...

    def share(self, about: str, mine: str, make: Callable[[Sequence[str]], str]) -> str:
        """Returns what rank 0 makes of what all ranks have to say about something."""
        ...

    def later(self, about: str) -> Callable[[str], list[str]]:
        """Returns an `exchange` for later, in any thread, that waits for others as long as they live."""
        ...

    def watch(self, foreseen: bool) -> contextlib.AbstractContextManager[None]:
        """What to run a step in, so that a failure on one rank is told to the others.

        `foreseen`: its collectives are those that all ranks agree upon before it calls the first of them.
        """
        ...

    def agree(self, about: str, calls: list[str]) -> None:
        """Makes sure that all ranks will call the same collectives."""
        ...


class Mesh:
    """A grid of ranks with named axes.

    Made by `fckpt.init_mesh`, `fckpt.sim` and `fckpt.fake_mesh`. Rank 0 is at the origin, and the last axis varies
    fastest. Meshes with the same axes are equal.
    """

    def __init__(self, shape: Mapping[str, int]):
        for name in shape:
            if not isinstance(name, str) or not name or set(name) & set(",:="):
                raise ArgumentValueError(f"a mesh has axes with names, without commas, colons or '=', not {name!r}.")
        self.shape: dict[str, int] = dict(shape)
        """By name: how many ranks there are along an axis."""

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, the slowest first."""
        return tuple(self.shape)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape.values())

    @property
    def key(self) -> str:
        """What names the mesh in a graph."""
        return ",".join(f"{name}={size}" for name, size in self.shape.items())

    @staticmethod
    def of_key(key: str) -> Mesh:
        """Returns the mesh that `key` names."""
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
            ArgumentTypeError, ArgumentValueError: they are none of this mesh, or one is there twice; `function` is
                who was asked.
        """
        names = (axes,) if isinstance(axes, str) else axes
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError(f"{function}: an axis is a str, or a tuple of them, not {axes!r}.")
        known = ", ".join(repr(name) for name in self.names)
        for name in names:
            if name not in self.shape:
                raise ArgumentValueError(f"{function}: the mesh has no axis {name!r}. It has {known}.")
        if not names or len(set(names)) < len(names):
            raise ArgumentValueError(
                f"{function}: axes {tuple(names)!r} must be one or more different ones of {known}."
            )
        return tuple(names)

    def count(self, axes: Sequence[str]) -> int:
        """Returns how many ranks there are along `axes`."""
        return math.prod(self.shape[name] for name in axes)

    def place(self, rank: int) -> dict[str, int]:
        """Returns where a rank is: by axis, its number."""
        found: dict[str, int] = {}
        for name in reversed(self.names):
            rank, found[name] = divmod(rank, self.shape[name])
        return {name: found[name] for name in self.names}

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Returns the number of a rank along `axes`."""
        place, number = self.place(rank), 0
        for name in axes:
            number = number * self.shape[name] + place[name]
        return number

    def reach(self, along: Along) -> int:
        """Returns how many ranks a collective reaches: the most of a group."""
        return max(map(len, along.groups)) if along.groups else self.count(along.axes)

    @functools.cache  # noqa: B019  # every message asks, and a process has few meshes, which are equal by key
    def peers(self, rank: int, along: Along) -> tuple[int, ...]:
        """Returns the ranks that a collective of `rank` reaches, by their numbers along its axes, or as in its group.

        They differ from `rank` along these axes at most.
        """
        place = self.place(rank)
        rest = [name for name in self.names if name not in along.axes]
        same = [r for r in range(self.size) if all(self.place(r)[name] == place[name] for name in rest)]
        row = sorted(same, key=lambda r: self.index(r, along.axes))
        mine = next((group for group in along.groups if row.index(rank) in group), range(len(row)))
        return tuple(row[number] for number in mine)


def check_shape(function: str, shape: Any) -> None:
    """Makes sure that a shape gives the size of each axis by name.

    Raises:
        ArgumentTypeError: it does not. `function` is who asks.
    """
    sizes = [*shape.values()] if isinstance(shape, Mapping) else [None]
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise ArgumentTypeError(f'{function}: shape gives the size of each axis by name, {{"data": 2}}, not {shape!r}.')


T = TypeVar("T", bound=Hashable)


def odd_one(said: Mapping[int, T]) -> tuple[int, T] | None:
    """Returns the first rank that says something else than most, and what they say; None if all say the same."""
    known = [*said.values()]
    usual = max(known, key=known.count)
    return next(((rank, usual) for rank, mine in sorted(said.items()) if mine != usual), None)


def first_difference(said: Mapping[int, Sequence[str]]) -> tuple[int, int, str, str] | None:
    """Returns a rank that differs from most, the number of the line where it does, its line, and theirs."""
    odd = odd_one({rank: tuple(lines) for rank, lines in said.items()})
    if odd is None:
        return None
    rank, usual = odd
    mine = said[rank]
    shorter = min(len(mine), len(usual))
    at = next((i for i, (a, b) in enumerate(zip(mine, usual, strict=False)) if a != b), shorter)
    one, other = (lines[at] if at < len(lines) else "nothing more" for lines in (mine, usual))
    return rank, at + 1, one, other


# ---- who carries the messages ----------------------------------------------------------------------

_carriers: dict[str, Transport] = {}
_local = threading.local()
_current: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def carry(mesh: Mesh, transport: Transport) -> None:
    """Makes `transport` carry what is sent over `mesh`, for this process."""
    _carriers[mesh.key] = transport


def dismiss(mesh: Mesh) -> None:
    """Lets go of what carries messages over `mesh` for this process."""
    _carriers.pop(mesh.key, None)


@contextlib.contextmanager
def carried(mesh: Mesh, transport: Transport) -> Iterator[None]:
    """Makes `transport` carry what is sent over `mesh` in this thread, which is a rank of it, in the body."""
    _local.mesh, _local.transport = mesh, transport
    try:
        yield
    finally:
        del _local.mesh, _local.transport


def simulated() -> Mesh | None:
    """Returns the mesh of which this thread is a rank, if it is one."""
    return getattr(_local, "mesh", None)


def transport_of(key: str) -> Transport:
    """Returns who carries what is sent over the mesh with this key.

    Raises:
        ArgumentValueError: nobody does.
    """
    mesh = simulated()
    found = _local.transport if mesh is not None and mesh.key == key else _carriers.get(key)
    if found is None:
        raise ArgumentValueError(
            f"this process belongs to no mesh ({key}). Make it with fckpt.init_mesh, or simulate it with fckpt.sim."
        )
    return found


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Makes `mesh` the one whose axes collectives name, in the body.

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
    """Makes `mesh` the one whose axes collectives name from here on."""
    _current.set(mesh)


def mesh_in_use() -> Mesh | None:
    """Returns the mesh in use, if there is one."""
    return _current.get()


def current_mesh(function: str) -> Mesh:
    """Returns the mesh in use.

    Raises:
        ArgumentValueError: there is none; `function` is who asks.
    """
    mesh = mesh_in_use()
    if mesh is None:
        raise ArgumentValueError(
            f"{function}: there is no mesh here. Call it in a function that fckpt.shard_map or fckpt.pmap maps, or "
            "`with fckpt.use_mesh(mesh):`."
        )
    return mesh
