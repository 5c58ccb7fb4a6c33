"""`sim`: a program for many ranks, run in one process, a thread for each rank.

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
    """Returns a mesh of simulated ranks, which runs programs.

    Args:
        shape: the size of each axis, by name.
        timeout_seconds: after which a rank that does not come to a collective is a `RankFailure`.
        links: by axis, what messages cost a plan.

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
        raise ArgumentValueError(f"sim: a mesh has axes of one rank or more, not {dict(shape)!r}.")
    return Simulation(Mesh(shape), timeout_seconds, links or {})


class Simulation:
    """Ranks that are threads of this process. Sums are added in the order of ranks: results are exact and repeatable.

    One runs at a time, until it waits for others. Each has random number generators of its own, which begin where those
    of the caller are, as processes do that begin with one seed; and what the program closes over or is passed is each
    rank's own, too, as far as it can be copied (see `isolated.py`). Rank 0 works on what the caller has.
    """

    def __init__(self, mesh: Mesh, timeout_seconds: float, links: Mapping[str, Link]):
        self.mesh, self.timeout_seconds, self.links = mesh, timeout_seconds, links

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Returns what `program(*args, **kwargs)` returns on each rank. The mesh is in use; `init_mesh` returns it.

        Raises:
            Exception: what the first rank to fail raised. If ranks wait for one another in vain, that is a
                `RankFailure` that names the rank.
        """
        isolated = Isolated(program, args, kwargs, self.mesh.size)
        turns = Turns(isolated, self.mesh.size)
        meeting = Meeting(self.mesh, self.timeout_seconds, self.links, turns)
        results: list[Any] = [None] * self.mesh.size
        failures: list[tuple[int, BaseException]] = []

        def rank(number: int) -> None:
            try:
                # autograd's own threads know nothing of ranks
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
    """Has all threads share one level of forward mode: torch counts levels by process, and the first to end ends all.

    Nested `jvp`s share the outermost one's level anyway.
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
