"""How a process comes to be a rank of a mesh."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fckpt.errors import ArgumentValueError
from fckpt.spmd.links import NVLINK, Link
from fckpt.spmd.mesh import Along, Mesh, carry, check_shape, dismiss, put_in_use, simulated

__all__ = ["fake_mesh", "init_mesh"]


def init_mesh(
    shape: Mapping[str, int],
    *,
    timeout_seconds: float = 60.0,
    backend: str | None = None,
    links: Mapping[str, Link] | None = None,
) -> Mesh:
    """Returns the mesh of all ranks, makes this process one of them, and puts the mesh in use.

    Under `torchrun`, or any launcher that sets its variables, ranks are processes. In a program that `fckpt.sim` runs,
    ranks are its threads. In both, collectives may name the axes from here on, outside of mapped functions, too.
    Without a launcher there is one rank, and `with fckpt.use_mesh(mesh):` puts its mesh in use.

    Args:
        shape: the size of each axis by name, the slowest first. One may be -1: what is left.
        timeout_seconds: after which a collective that not all ranks have come to is an error.
        backend: of torch.distributed; default: "nccl" where every process has a GPU of its own, else "gloo".
        links: by axis, what messages cost a plan; default: roughly what they do within a machine.

    Raises:
        ArgumentTypeError, ArgumentValueError: `shape` is not a mesh; there are not so many ranks.

    Example:
        >>> import fckpt
        >>> fckpt.init_mesh({"data": -1})
        Mesh({'data': 1})
    """
    check_shape("init_mesh", shape)
    inside = simulated()
    if inside is not None:
        found = Mesh(_filled(shape, inside.size))
        if found != inside:
            raise ArgumentValueError(f"init_mesh: the simulated mesh is {inside}, not {found}.")
        return inside
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        chosen = backend or _backend()
        if "RANK" in os.environ:
            dist.init_process_group(chosen, timeout=timeout)
        else:
            dist.init_process_group(chosen, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    from fckpt.spmd.c10d import Processes  # where torch has no distributed part, meshes can still be simulated

    mesh = Mesh(_filled(shape, dist.get_world_size()))
    wanted = (timeout_seconds, dict(links or {}))
    if _made.get(mesh) != wanted:
        carry(mesh, Processes(mesh, timeout_seconds, links or {}))
        _made[mesh] = wanted
    if "RANK" in os.environ:
        put_in_use(mesh)
    return mesh


_made: dict[Mesh, Any] = {}
"""The meshes of this process, and how they were made: groups of processes are made once."""


def _leave() -> None:
    """Ends the groups that `init_mesh` began: a thread of gloo's aborts a process whose Python has ended before it.

    It lets go of the last message's tensor a little after the message has come (seen with torch 2.13). After an error
    nobody waits for messages that may be under way.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        for mesh in _made:
            dismiss(mesh)
        _made.clear()
        dist.destroy_process_group()


def _backend() -> str:
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= count else "gloo"


def _filled(shape: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Returns the shape with a number for -1."""
    sizes = dict(shape)
    open_ = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if not sizes or len(open_) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ArgumentValueError(
            f"init_mesh: a mesh has axes of one rank or more, one of them -1 at most, not {sizes}."
        )
    if open_ and known and ranks % known == 0:
        sizes[open_[0]] = ranks // known
    if math.prod(sizes.values()) != ranks:
        raise ArgumentValueError(
            f"init_mesh: {dict(shape)} does not come to the {ranks} ranks that there are. Start another number of "
            "processes (torchrun --nproc-per-node=N), or let one axis be -1."
        )
    return sizes


class _Nobody:
    """The transport of a mesh that is thought of only."""

    def __init__(self, rank: int, links: Mapping[str, Link]):
        self.rank, self.links = rank, links

    def link(self, axis: str) -> Link:
        return self.links.get(axis, NVLINK)

    def adds(self, dtype: Any, along: Along) -> bool:
        return False

    def exchange(self, about: str, mine: str) -> list[str]:
        return [mine]

    def share(self, about: str, mine: str, make: Callable[[Sequence[str]], str]) -> str:
        return make([mine])

    def watch(self, foreseen: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def agree(self, about: str, calls: list[str]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise ArgumentValueError(
            f"a fake mesh carries no messages ({name}): plan for it, and run on that of fckpt.init_mesh."
        )


def fake_mesh(shape: Mapping[str, int], *, rank: int = 0, links: Mapping[str, Link] | None = None) -> Mesh:
    """Returns a mesh to plan for, of any size, without devices. What would send anything is an error.

    Args:
        shape: the size of each axis by name.
        rank: which one this process stands for.
        links: by axis, what messages cost; default: roughly what they do between GPUs of a machine.

    Raises:
        ArgumentTypeError, ArgumentValueError: there is no such mesh, or no such rank of it.

    Example:
        >>> import fckpt
        >>> fckpt.fake_mesh({"data": 64, "model": 8}).size
        512
    """
    check_shape("fake_mesh", shape)
    sizes: Sequence[int] = [*shape.values()]
    if not sizes or min(sizes) < 1 or not 0 <= rank < math.prod(sizes):
        raise ArgumentValueError(f"fake_mesh: {dict(shape)} is no mesh with a rank {rank}.")
    mesh = Mesh(shape)
    nobody: Any = _Nobody(rank, links or {})
    carry(mesh, nobody)
    return mesh
