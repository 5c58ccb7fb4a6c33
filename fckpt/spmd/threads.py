"""The transport of a simulation: ranks are threads of one process, and meet where they call the same collective.

Exact: sums are added in the order of ranks, so that they are the same on all of them. What would hang or give wrong
numbers on real devices is an error here: ranks that call different collectives, or stop calling them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fckpt._call.rng import RandomState, unshared
from fckpt.errors import RankFailure
from fckpt.spmd.isolated import Isolated
from fckpt.spmd.links import GLOO, Link
from fckpt.spmd.mesh import Along, Mesh, odd_one, simulated

__all__ = ["Meeting", "Thread", "Turns"]


class Turns:
    """Has one rank at a time run, on random generators and a state of its own: another's turn comes where it waits.

    So ranks draw as processes do that begin with the same seed, and no thread finds what another is about to put back.
    """

    def __init__(self, isolated: Isolated, ranks: int):
        self.lock = threading.Lock()
        self.isolated = isolated
        self.states = [_generators()] * ranks

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
        self.lock.acquire()
        self.states[rank].rewind()
        self.isolated.enter(rank)

    def give(self, rank: int) -> None:
        self.isolated.leave(rank)
        self.states[rank] = _generators()
        self.lock.release()


def _generators() -> RandomState:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return RandomState.capture([torch.device("cuda", i) for i in range(count)])


class Meeting:
    """Where the threads of a simulated mesh exchange what they bring."""

    def __init__(self, mesh: Mesh, timeout_seconds: float, links: Mapping[str, Link], turns: Turns):
        self.mesh, self.timeout, self.links, self.turns = mesh, timeout_seconds, links, turns
        self.said: dict[str, dict[int, str]] = {}
        self.lock = threading.Condition()
        self.rounds: dict[tuple[tuple[int, ...], int], dict[int, tuple[str, torch.Tensor]]] = {}
        self.taken: dict[tuple[tuple[int, ...], int], int] = {}
        self.gone: dict[int, str] = {}
        """Ranks that have ended, and how."""

    def say(
        self, about: str, rank: int, what: str | None, *, alone: bool = False, timeout: float | None = None
    ) -> list[str]:
        """Returns what all ranks say about something, or, where others say None, what rank 0 says of it.

        Raises:
            RankFailure: one of them has ended, or has not come after `timeout` seconds.
        """
        with self.lock:
            said = self.said.setdefault(about, {})
            if what is not None:
                said[rank] = what
                self.lock.notify_all()
        ranks = [0] if alone or what is None else [*range(self.mesh.size)]
        lost = lambda: [r for r in ranks if r not in said and r in self.gone]
        missing = lambda: [r for r in ranks if r not in said]
        came = self._until(rank, lambda: bool(lost()) or not missing(), timeout)
        with self.lock:
            if not came:
                raise RankFailure(
                    f"rank {missing()[0]} did not come to {about} within {timeout:g} s, where rank {rank} waits.",
                    rank=missing()[0],
                )
            if lost():
                gone = f"rank {lost()[0]} {self.gone[lost()[0]]}"
                raise RankFailure(f"{gone}, while rank {rank} waits for {about}.", lost()[0])
            return [said[r] for r in ranks]

    def _until(self, rank: int, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Lets other ranks run until something is so; returns whether it is. Threads that are no ranks wait, too."""
        with self.lock:
            if ready():
                return True
        with self.turns.given(rank) if simulated() else contextlib.nullcontext(), self.lock:
            return self.lock.wait_for(ready, timeout)

    def leave(self, rank: int, how: str) -> None:
        """Notes that a rank calls no more collectives."""
        with self.lock:
            self.gone[rank] = how
            self.lock.notify_all()

    def exchange(
        self, ranks: tuple[int, ...], number: int, rank: int, what: str, x: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns what each of `ranks` brought to their meeting number `number`.

        Raises:
            RankFailure: one of them has ended, or called something else, or does not come.
        """
        key = (ranks, number)
        with self.lock:
            brought = self.rounds.setdefault(key, {})
            brought[rank] = (what, x)
            self.lock.notify_all()
        missing = lambda: [r for r in ranks if r not in brought]
        lost = lambda: [r for r in missing() if r in self.gone]
        came = self._until(rank, lambda: not missing() or bool(lost()), self.timeout)
        with self.lock:
            if lost():
                first = lost()[0]
                raise RankFailure(f"rank {first} {self.gone[first]}, while rank {rank} waits in {what}.", rank=first)
            if not came:
                raise RankFailure(
                    f"rank {missing()[0]} did not come to {what} within {self.timeout:g} s, where rank {rank} waits.",
                    rank=missing()[0],
                )
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
        """Lets other ranks run while the body waits for something else than them."""
        return self.meeting.turns.given(self.rank)

    def link(self, axis: str) -> Link:
        return self.meeting.links.get(axis, GLOO)

    def adds(self, dtype: torch.dtype, along: Along) -> bool:
        return False  # ranks look at what others hold anyway

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
        return contextlib.nullcontext()  # the meetings see everything

    def agree(self, about: str, calls: list[str]) -> None:
        pass

    def _meet(self, what: str, x: torch.Tensor, along: Along) -> tuple[int, list[torch.Tensor]]:
        """Returns the number of this rank among those `along`, and what they brought."""
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
