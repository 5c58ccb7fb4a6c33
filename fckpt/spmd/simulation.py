"""`sim`: runs a program for many ranks in one process, with one thread per rank.

Private in torch 2.11 and 2.13: `torch._functorch.eager_transforms.JVP_NESTING`, see `_one_level`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._functorch.eager_transforms as eager_transforms

from fckpt._call import ambient
from fckpt._call.levels import share_idle_level
from fckpt._trace.stand_ins import prepare_fake_tensors
from fckpt.errors import ArgumentValueError, RankFailure
from fckpt.spmd.isolated import Isolated
from fckpt.spmd.links import Link
from fckpt.spmd.mesh import Mesh, carried, check_shape, use_mesh
from fckpt.spmd.saving import finished
from fckpt.spmd.threads import Meeting, Thread, Turns

__all__ = ["Simulation", "sim"]


def sim(
    shape: Mapping[str, int], *, timeout_seconds: float = 60.0, links: Mapping[str, Link] | None = None
) -> Simulation:
    """Returns a mesh of simulated ranks that can run programs.

    Args:
        shape: the size of each axis, by name.
        timeout_seconds: a rank that does not reach a collective within this time is a `RankFailure`.
        links: the cost of messages along each axis, for plans.

    Raises:
        ArgumentTypeError, ArgumentValueError: `shape` is not a mesh.

    Example:
        >>> import torch, fckpt
        >>> def program(x):
        ...     return fckpt.psum(x * fckpt.axis_index("data"), "data")
        >>> fckpt.sim({"data": 4}).run(program, torch.tensor(10.0))
        [tensor(60.), tensor(60.), tensor(60.), tensor(60.)]
    """
    check_shape("sim", shape)
    if not shape or min(shape.values()) < 1:
        raise ArgumentValueError(f"sim: shape must have one axis or more, of sizes of 1 or more, not {dict(shape)!r}.")
    return Simulation(Mesh(shape), timeout_seconds, links or {})


class Simulation:
    """Simulated ranks: threads of this process. Sums are added in rank order, so results are reproducible.

    One rank runs at a time, until it waits for other ranks. Each rank has separate random number generators, which
    start in the state of the caller's generators, like processes that start with the same seed. Each rank has separate
    copies of what the program closes over and is passed, if it can be copied (see `isolated.py`). Rank 0 works on the
    originals.
    """

    def __init__(self, mesh: Mesh, timeout_seconds: float, links: Mapping[str, Link]):
        self.mesh, self.timeout_seconds, self.links = mesh, timeout_seconds, links

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Runs `program(*args, **kwargs)` on every rank, with the mesh in use, and returns the list of the results.

        In the program, `init_mesh` returns this mesh.

        Raises:
            Exception: the exception of the first rank that failed. If a rank waits for another rank that does not
                arrive, a `RankFailure` that names the missing rank.
        """
        prepare_fake_tensors()  # before there are threads
        isolated = Isolated(program, args, kwargs, self.mesh.size)
        turns = Turns(isolated, self.mesh.size)
        meeting = Meeting(self.mesh, self.timeout_seconds, self.links, turns)
        results: list[Any] = [None] * self.mesh.size
        failures: list[tuple[int, BaseException]] = []

        def rank(number: int) -> None:
            try:
                # autograd's threads do not belong to a rank
                alone = torch.autograd.set_multithreading_enabled(False)
                mine = carried(self.mesh, Thread(meeting, number))
                with mine, use_mesh(self.mesh), alone, turns.taken(number), finished():
                    results[number] = isolated.programs[number]()
                meeting.leave(number, "has returned")
            except BaseException as error:
                failures.append((number, error))
                meeting.leave(number, f"raised {type(error).__name__}: {error}")

        threads = [threading.Thread(target=rank, args=(i,), name=f"rank {i}") for i in range(self.mesh.size)]
        with _one_level():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        turns.states[0].rewind()
        ambient.put_back(turns.settings[0])
        isolated.collect()
        if failures:
            number, error = next((f for f in failures if not isinstance(f[1], RankFailure)), failures[0])
            error.add_note(f"on rank {number} of {self.mesh}")
            raise error
        return results


@contextlib.contextmanager
def _one_level() -> Iterator[None]:
    """Makes all threads share one level of forward mode.

    torch has one level per process, and the first thread that ended it would end it for all threads. Nested `jvp`s
    share the level of the outermost one anyway.
    """
    if eager_transforms.JVP_NESTING:
        yield
        return
    with share_idle_level():
        eager_transforms.JVP_NESTING = 1
        try:
            yield
        finally:
            eager_transforms.JVP_NESTING = 0
