"""The transport of a simulation: ranks are threads of one process that meet in each collective.

Sums are added in rank order, so they are equal on all ranks. Programs that would hang or compute wrong numbers on real
devices raise errors here: ranks that call different collectives, or that end while other ranks wait.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fckpt._call import ambient
from fckpt._call.rng import RandomState, unshared
from fckpt.errors import RankFailure
from fckpt.spmd.guard import place_of
from fckpt.spmd.isolated import Isolated
from fckpt.spmd.links import GLOO, Link
from fckpt.spmd.mesh import Along, Mesh, odd_one, simulated

__all__ = ["Meeting", "Thread", "Turns"]


class Turns:
    """Lets one rank run at a time, with its own random generators and Python state. When it waits, another rank runs.

    So random numbers are those of processes that start with the same seed, and no thread sees state that another
    thread has changed temporarily.
    """

    def __init__(self, isolated: Isolated, ranks: int):
        self.lock, self.counting = threading.Lock(), threading.Lock()
        self.isolated = isolated
        self.states = [_generators()] * ranks
        self.settings = [ambient.capture()] * ranks
        self.wanted = 0
        """The number of ranks that run or wait for their turn."""
        self.seconds = [0.0] * ranks
        """By rank: the seconds that it has run in past turns."""
        self.threads: dict[int, int] = {}
        """By rank: the id of its thread."""
        self.running: tuple[int, float] | None = None
        """The rank whose turn it is, and the start of its turn."""

    @contextlib.contextmanager
    def taken(self, rank: int) -> Iterator[None]:
        """Runs the body when it is this rank's turn."""
        self.take(rank)
        try:
            with unshared():
                yield
        finally:
            self.give(rank)

    @contextlib.contextmanager
    def given(self, rank: int) -> Iterator[None]:
        """Lets other ranks run while the body waits."""
        self.give(rank)
        try:
            yield
        finally:
            self.take(rank)

    def take(self, rank: int) -> None:
        with self.counting:
            self.wanted += 1
        self.lock.acquire()
        self.running, self.threads[rank] = (rank, time.monotonic()), threading.get_ident()
        self.states[rank].rewind()
        ambient.put_back(self.settings[rank])
        self.isolated.enter(rank)

    def give(self, rank: int) -> None:
        self.isolated.leave(rank)
        self.states[rank], self.settings[rank] = _generators(), ambient.capture()
        self.seconds[rank] = self.ran(rank)
        self.running = None
        with self.counting:
            self.wanted -= 1
        self.lock.release()

    def ran(self, rank: int) -> float:
        """Returns the seconds that a rank has run, without the time in which it waited for its turn."""
        running = self.running
        now = time.monotonic() - running[1] if running is not None and running[0] == rank else 0.0
        return self.seconds[rank] + now


def _generators() -> RandomState:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return RandomState.capture([torch.device("cuda", i) for i in range(count)])


class Meeting:
    """Exchanges tensors and texts between the threads of a simulated mesh."""

    def __init__(self, mesh: Mesh, timeout_seconds: float, links: Mapping[str, Link], turns: Turns):
        self.mesh, self.timeout, self.links, self.turns = mesh, timeout_seconds, links, turns
        self.said: dict[str, dict[int, str]] = {}
        self.lock = threading.Condition()
        self.rounds: dict[tuple[tuple[int, ...], int], dict[int, tuple[str, torch.Tensor]]] = {}
        self.taken: dict[tuple[tuple[int, ...], int], int] = {}
        self.gone: dict[int, str] = {}
        """The ranks that have ended, each with a description of how."""

    def say(
        self, about: str, rank: int, what: str | None, *, alone: bool = False, timeout: float | None = None
    ) -> list[str]:
        """Returns the texts of all ranks; only the text of rank 0 if `alone`, or if this rank passes None.

        Raises:
            RankFailure: one of these ranks has ended, or has not arrived after `timeout` seconds.
        """
        with self.lock:
            said = self.said.setdefault(about, {})
            if what is not None:
                said[rank] = what
                self.lock.notify_all()
        ranks = [0] if alone or what is None else [*range(self.mesh.size)]
        self._wait(rank, ranks, said, f"for {about}", timeout)
        with self.lock:
            return [said[r] for r in ranks]

    def _wait(self, rank: int, ranks: Sequence[int], came: Mapping[int, Any], what: str, timeout: float | None) -> None:
        """Lets other ranks run until all of `ranks` have arrived. Also called by threads that are not ranks.

        Ranks run one at a time, so a rank is late only if it has run for `timeout` seconds, or if no rank runs or waits
        for its turn.

        Raises:
            RankFailure: one of `ranks` has ended, or is late.
        """
        missing = lambda: [r for r in ranks if r not in came]
        lost = lambda: [r for r in missing() if r in self.gone]
        ready = lambda: not missing() or bool(lost())
        with self.lock:
            waits = not ready()
        if waits:
            before = [*map(self.turns.ran, range(self.mesh.size))]
            with self.turns.given(rank) if simulated() else contextlib.nullcontext(), self.lock:
                left, idle = timeout, 0
                while not self.lock.wait_for(ready, left):
                    assert timeout is not None
                    used = {r: self.turns.ran(r) - before[r] for r in missing()}
                    late = next((r for r in used if used[r] >= timeout), None)
                    idle = 0 if self.turns.wanted else idle + 1  # a rank may be about to continue
                    if late is not None or idle > 2:
                        raise self._late(missing()[0] if late is None else late, rank, what, timeout)
                    left = 0.02 if idle else max(timeout - max(used.values()), 0.02)
        with self.lock:
            if lost():
                raise RankFailure(
                    f"rank {lost()[0]} {self.gone[lost()[0]]}, while rank {rank} waits {what}.", lost()[0]
                )

    def _late(self, late: int, rank: int, what: str, timeout: float) -> RankFailure:
        thread = self.turns.threads.get(late)
        place = place_of(sys._current_frames().get(thread)) if thread is not None else ""
        there = f" Rank {late} is at {place}." if place else ""
        return RankFailure(
            f"rank {late} did not arrive within {timeout:g} s, while rank {rank} waits {what}.{there}", late
        )

    def leave(self, rank: int, how: str) -> None:
        """Records that a rank has ended and calls no more collectives."""
        with self.lock:
            self.gone[rank] = how
            self.lock.notify_all()

    def exchange(
        self, ranks: tuple[int, ...], number: int, rank: int, what: str, x: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns the tensors of `ranks` in their collective number `number`.

        Raises:
            RankFailure: one of `ranks` has ended, called another collective, or does not arrive.
        """
        key = (ranks, number)
        with self.lock:
            brought = self.rounds.setdefault(key, {})
            brought[rank] = (what, x)
            self.lock.notify_all()
        self._wait(rank, ranks, brought, f"in {what}", self.timeout)
        with self.lock:
            self._compare(ranks, number, brought)
            found = [brought[r][1] for r in ranks]
            self.taken[key] = self.taken.get(key, 0) + 1
            if self.taken[key] == len(ranks):
                del self.rounds[key], self.taken[key]
            return found

    def _compare(self, ranks: tuple[int, ...], number: int, brought: dict[int, tuple[str, torch.Tensor]]) -> None:
        said = {
            r: f"{what} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for r, (what, x) in brought.items()
        }
        odd = odd_one(said)
        if odd is not None:
            rank, usual = odd
            raise RankFailure(
                f"rank {rank} calls {said[rank]} as collective number {number + 1} of ranks {list(ranks)}, where "
                f"others call {usual}. All ranks must call the same collectives in the same order.",
                rank=rank,
            )


class Thread:
    """One rank of a simulated mesh."""

    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank = meeting, rank
        self.count: dict[tuple[int, ...], int] = {}
        self.shares: dict[str, int] = {}

    def idle(self) -> contextlib.AbstractContextManager[None]:
        """Lets other ranks run while the body waits for something other than a collective."""
        return self.meeting.turns.given(self.rank)

    def link(self, axis: str) -> Link:
        return self.meeting.links.get(axis, GLOO)

    def adds(self, dtype: torch.dtype, along: Along) -> bool:
        return False  # threads read the tensors of other threads directly

    def exchange(self, about: str, mine: str) -> list[str]:
        self.shares[about] = number = self.shares.get(about, 0) + 1
        return self.meeting.say(f"{about} {number}", self.rank, mine, timeout=self.meeting.timeout)

    def later(self, about: str) -> Callable[[str], list[str]]:
        self.shares[about] = number = self.shares.get(about, 0) + 1
        return lambda mine: self.meeting.say(f"{about} {number}", self.rank, mine)

    def share(self, about: str, mine: str, make: Callable[[Sequence[str]], str]) -> str:
        self.shares[about] = number = self.shares.get(about, 0) + 1
        said = self.meeting.say(f"{about} {number}", self.rank, mine)
        if self.rank == 0:
            return self.meeting.say(f"{about} {number} answer", 0, make(said), alone=True)[0]
        return self.meeting.say(f"{about} {number} answer", self.rank, None)[0]

    def watch(self, foreseen: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # `Meeting` compares every collective

    def agree(self, about: str, calls: list[str]) -> None:
        pass

    def _meet(self, what: str, x: torch.Tensor, along: Along) -> tuple[int, list[torch.Tensor]]:
        """Returns the index of this rank among the ranks `along`, and the tensors of these ranks."""
        ranks = self.meeting.mesh.peers(self.rank, along)
        # a copy, because this rank may write over its tensor while others still read it
        number = self.count.get(ranks, 0)
        self.count[ranks] = number + 1
        brought = self.meeting.exchange(ranks, number, self.rank, f"{what} over {along.said}", x.detach().clone())
        return ranks.index(self.rank), brought

    def all_reduce(self, x: torch.Tensor, reduction: str, along: Along) -> torch.Tensor:
        combine: dict[str, Callable[[Any, Any], Any]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
        _, brought = self._meet(f"all_reduce {reduction}", x, along)
        result = brought[0].clone()
        for other in brought[1:]:
            result = combine[reduction](result, other)
        return result

    def all_gather(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        return torch.stack(self._meet("all_gather", x, along)[1])

    def reduce_scatter(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        mine, brought = self._meet("reduce_scatter", x, along)
        result = brought[0][mine].clone()
        for other in brought[1:]:
            result = result + other[mine]
        return result

    def all_to_all(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        mine, brought = self._meet("all_to_all", x, along)
        return torch.stack([other[mine] for other in brought])

    def permute(self, x: torch.Tensor, sources: Sequence[int], along: Along) -> torch.Tensor:
        mine, brought = self._meet(f"permute {tuple(sources)}", x, along)
        return brought[sources[mine]].clone() if sources[mine] >= 0 else torch.zeros_like(x)
