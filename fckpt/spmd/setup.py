"""`init_mesh` makes a process a rank of a mesh; `fake_mesh` makes a mesh for planning only."""

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
    """Makes this process a rank of a mesh of all processes, puts the mesh in use, and returns it.

    Under `torchrun`, or another launcher that sets the same environment variables, the ranks are processes. In a
    program that `fckpt.sim` runs, the ranks are threads. In both cases collectives may name the axes from here on, also
    outside of mapped functions. Without a launcher there is one rank, and `with fckpt.use_mesh(mesh):` puts its mesh in
    use.

    Args:
        shape: the size of each axis, by name; the first axis varies slowest. One size may be -1: it is computed from
            the number of ranks.
        timeout_seconds: a collective that some ranks do not reach within this time is an error.
        backend: the backend of torch.distributed. Default: "nccl" if there is a GPU for every process, else "gloo".
        links: the cost of messages along each axis, for plans. Default: roughly the cost within one machine.

    Raises:
        ArgumentTypeError, ArgumentValueError: `shape` is not a mesh, or does not fit the number of ranks.

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
    from fckpt.spmd.c10d import Processes  # a torch without distributed support can still simulate meshes

    mesh = Mesh(_filled(shape, dist.get_world_size()))
    wanted = (timeout_seconds, dict(links or {}))
    if _made.get(mesh) != wanted:
        carry(mesh, Processes(mesh, timeout_seconds, links or {}))
        _made[mesh] = wanted
    if "RANK" in os.environ:
        put_in_use(mesh)
    return mesh


_made: dict[Mesh, Any] = {}
"""The meshes of this process with their arguments: the process groups of a mesh are made once."""


def _leave() -> None:
    """Destroys our process groups at exit: a gloo thread that outlives Python aborts the process.

    The gloo thread releases the tensor of the last message shortly after the message has arrived (seen with torch
    2.13). After an error the groups are not destroyed, because that would wait for pending messages.
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
    """Replaces -1 in the shape by the size that gives `ranks` ranks."""
    sizes = dict(shape)
    open_ = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if not sizes or len(open_) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ArgumentValueError(
            f"init_mesh: shape must have one axis or more, of sizes of 1 or more, of which one may be -1, not {sizes}."
        )
    if open_ and known and ranks % known == 0:
        sizes[open_[0]] = ranks // known
    if math.prod(sizes.values()) != ranks:
        raise ArgumentValueError(
            f"init_mesh: {dict(shape)} does not fit the number of ranks, {ranks}. Start another number of processes "
            "(torchrun --nproc-per-node=N), or set the size of one axis to -1."
        )
    return sizes


class _NoTransport:
    """The transport of a fake mesh, which cannot send messages."""

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
            f"a fake mesh carries no messages ({name}): use it for planning only, and run on a mesh of fckpt.init_mesh."
        )


def fake_mesh(shape: Mapping[str, int], *, rank: int = 0, links: Mapping[str, Link] | None = None) -> Mesh:
    """Returns a mesh of any size for planning, without devices. Sending a message over it is an error.

    Args:
        shape: the size of each axis, by name.
        rank: the rank that this process represents.
        links: the cost of messages along each axis. Default: roughly the cost between the GPUs of one machine.

    Raises:
        ArgumentTypeError, ArgumentValueError: `shape` is not a mesh, or does not have this rank.

    Example:
        >>> import fckpt
        >>> fckpt.fake_mesh({"data": 64, "model": 8}).size
        512
    """
    check_shape("fake_mesh", shape)
    sizes: Sequence[int] = [*shape.values()]
    if not sizes or min(sizes) < 1 or not 0 <= rank < math.prod(sizes):
        raise ArgumentValueError(f"fake_mesh: {dict(shape)} is not the shape of a mesh that has a rank {rank}.")
    mesh = Mesh(shape)
    transport: Any = _NoTransport(rank, links or {})
    carry(mesh, transport)
    return mesh
