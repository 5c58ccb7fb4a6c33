"""Never a hang, and no wrong numbers without an error: what every rank tells the others about itself.

A rank that fails, or ends, says so in the store that all processes share, before it goes; while it lives it counts up a
number there, and says on which line of the program it is. A collective that fails, or is not over in time, makes a rank
look: who has failed, whose number stands still, who called something else, and who is elsewhere.

Ranks that call collectives of equal shapes in another order would exchange wrong numbers without any error. So before
a mapped function runs for the first time, they compare what it will call and of what that is made (`agree`), and at the
end of every call what they have called, and where in the program, before anyone sees a result (`watch`). That is one
small message per call. Where it cannot be known what a function will call, they compare each collective before they
call it. Everything else happens once, after a failure, or in a thread that sleeps.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import json
import math
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fckpt.errors import RankFailure
from fckpt.spmd.mesh import first_difference

__all__ = ["Guard", "place_of"]

T = TypeVar("T")
Compare = Callable[[torch.Tensor], torch.Tensor]

BEAT_SECONDS = 0.5
"""How often a rank shows that it lives."""
PATIENCE_SECONDS = 4.0
"""For how long a rank that has seen a failure waits to hear whose it was."""


class Guard:
    """Watches over this rank's collectives."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.timeout_seconds = rank, size, 60.0
        self.step, self.foreseen = 0, False
        self.counts: dict[tuple[str, str], int] = {}
        self.calls: list[str] = []
        """What this rank called in this step."""
        self.waiting = False
        """Whether it is in a collective."""
        self.store = self._connect() if size > 1 and "MASTER_PORT" in os.environ else None
        self.ended = threading.Event()
        if self.store is not None:
            beating = threading.Thread(target=self._beat, daemon=True, name="fckpt heartbeat")
            beating.start()
            atexit.register(self._end, beating)

    def _connect(self) -> dist.Store:
        # a connection of its own: one is blocked while the process waits for another rank
        host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ["MASTER_PORT"])
        timeout = datetime.timedelta(seconds=PATIENCE_SECONDS)
        return dist.PrefixStore("fckpt", dist.TCPStore(host, port, is_master=False, timeout=timeout))

    def _beat(self) -> None:
        store = self._connect()
        while not self.ended.is_set():
            try:
                store.set(f"where/{self.rank}", json.dumps([place_of(_main_frame()), self.waiting]))
                store.add(f"beat/{self.rank}", 1)
            except RuntimeError:
                return  # the store has gone, and with it the job
            self.ended.wait(BEAT_SECONDS)
        with contextlib.suppress(RuntimeError):
            store.set(f"ended/{self.rank}", "")

    def _end(self, beating: threading.Thread) -> None:
        """Python takes its end for that of all threads, and one that comes back from C++ then aborts the process."""
        self.ended.set()
        beating.join(PATIENCE_SECONDS)

    # ---- while all is well -------------------------------------------------------------------------

    def call(self, what: str, run: Callable[[], T], compare: Compare | None = None) -> T:
        """Runs one collective.

        Args:
            what: it is.
            run: calls it.
            compare: returns the tensors of the ranks that call it, stacked. It is used where they have not compared
                their calls before: one that brings another dtype would kill a process of gloo's that receives it.

        Raises:
            RankFailure: it failed, was not over in time, or another rank calls something else.
        """
        self.calls.append(what)
        self.waiting = True
        try:
            if compare is None or self.foreseen or self.size == 1 or _alike(compare, [what]):
                return run()
        except RuntimeError as error:
            raise self._failure(error) from error
        finally:
            self.waiting = False
        raise self._failure(None)

    @contextlib.contextmanager
    def watch(self, compare: Compare, foreseen: bool) -> Iterator[None]:
        """One step: what is raised in it is told to the other ranks, and in the end all compare what they called.

        Args:
            compare: returns the tensors of all ranks, stacked.
            foreseen: whether they have compared, or will with `agree`, what they are going to call.
        """
        before, self.foreseen = self.foreseen, foreseen
        self.step += 1
        self.calls = []
        try:
            yield
        except Exception as error:
            self.publish(error)
            raise
        finally:
            self.foreseen = before
        if self.size > 1 and not _alike(compare, self.calls):
            raise self._failure(None)

    def agree(self, about: str, calls: list[str]) -> None:
        """Waits until all ranks have come here, and compares what they will call.

        Args:
            about: what is called, and with what.
            calls: one line for each collective.

        Raises:
            RankFailure: one of them will call something else, has failed, or does not come.
        """
        if self.store is None:
            return
        key = self._say("agree", about, json.dumps(calls))
        known = {rank: json.loads(said) for rank, said in enumerate(self._all(key, about))}
        odd = first_difference(known)
        if odd is not None:
            rank, number, mine, usual = odd
            raise RankFailure(
                f"rank {rank} will call {mine} as collective number {number}, where others call {usual}. {_SAME}", rank
            )

    def exchange(self, about: str, mine: str) -> list[str]:
        """Waits until all ranks have come here, and returns what each of them says.

        Raises:
            RankFailure: one of them has failed, or does not come.
        """
        return [mine] if self.store is None else self._all(self._say("exchange", about, mine), about)

    def later(self, about: str) -> Callable[[str], list[str]]:
        """Returns an exchange for later, in any thread.

        Others may need long for what they have to say, such as a file that they write, while they live.

        Raises:
            RankFailure: one of them has ended, or gives no sign of life.
        """
        if self.store is None:
            return lambda mine: [mine]
        store, key = self.store, self._reserved("later", about)

        def exchange(mine: str) -> list[str]:
            store.set(f"{key}/{self.rank}", mine)
            return [self._outlived(store, f"{key}/{rank}", rank, about) for rank in range(self.size)]

        return exchange

    def _outlived(self, store: dist.Store, key: str, rank: int, about: str) -> str:
        """Waits for what a rank has to say, as long as it lives."""
        before, looked = self._beats(), time.monotonic()
        while not store.check([key]):
            if store.check([f"ended/{rank}"]) and not store.check([key]):
                raise RankFailure(f"rank {rank} has ended its program, while others wait at {about}.", rank)
            if time.monotonic() - looked > self.timeout_seconds:
                if rank in self._silent(before):
                    raise RankFailure(f"rank {rank} gives no sign of life while others wait at {about}.", rank)
                before, looked = self._beats(), time.monotonic()
            time.sleep(0.005)
        return store.get(key).decode()

    def share(self, about: str, mine: str, make: Callable[[Sequence[str]], str]) -> str:
        """Returns what rank 0 makes of what all ranks say about something, however long it takes.

        Raises:
            RankFailure: one of them has failed, or does not come.
        """
        if self.store is None:
            return make([mine])
        key = self._say("share", about, mine)
        if self.rank == 0:
            answer = make(self._all(key, about))
            self.store.set(f"{key}/answer", answer)
            return answer
        self._waited(f"{key}/0", 0, about, time.monotonic() + self.timeout_seconds)  # it comes in time, or is named
        return self._waited(f"{key}/answer", 0, about, math.inf)

    def _say(self, kind: str, about: str, what: str) -> str:
        """Leaves what this rank has to say about something, and returns where ranks do."""
        assert self.store is not None
        key = self._reserved(kind, about)
        self.store.set(f"{key}/{self.rank}", what)
        self.store.set(f"about/{self.rank}", about)
        return key

    def _reserved(self, kind: str, about: str) -> str:
        """Returns where ranks leave what they have to say about something, this time."""
        self.counts[kind, about] = number = self.counts.get((kind, about), 0) + 1
        return f"{kind}/{hashlib.sha256(about.encode()).hexdigest()[:16]}/{number}"

    def _all(self, key: str, about: str) -> list[str]:
        """Waits for what all ranks have to say."""
        deadline = time.monotonic() + self.timeout_seconds
        return [self._waited(f"{key}/{rank}", rank, about, deadline) for rank in range(self.size)]

    def _waited(self, key: str, rank: int, about: str, deadline: float) -> str:
        """Waits for what a rank has to say."""
        assert self.store is not None
        # Who plans may be busy for long, and its heartbeat wait for Python's lock.
        before, looked = self._beats(), time.monotonic()
        while not self.store.check([key]):
            failure = self._told(self.step)
            if failure is None and time.monotonic() - looked > self.timeout_seconds:
                if rank in self._silent(before):
                    failure = RankFailure(f"rank {rank} gives no sign of life while others wait at {about}.", rank)
                before, looked = self._beats(), time.monotonic()
            if failure is None and self.store.check([f"ended/{rank}"]) and not self.store.check([key]):
                failure = RankFailure(f"rank {rank} has ended its program, while others wait at {about}.", rank)
            if failure is None and time.monotonic() > deadline:
                failure = self._told(0) or self._absent(key.rpartition("/")[0], rank, about)
            if failure is not None:
                raise failure
            time.sleep(0.005)
        return self.store.get(key).decode()

    def _absent(self, key: str, rank: int, about: str) -> RankFailure:
        """Says that a rank does not come, or, where most do not, that of those who wait for them."""
        assert self.store is not None
        known = self.store.check([f"about/{rank}"])
        there = self.store.get(f"about/{rank}").decode() if known else "nowhere yet"
        place, _ = self._place(rank)
        there = f"{there} ({place})" if place else there
        came = [r for r in range(self.size) if self.store.check([f"{key}/{r}"])]
        if 2 * len(came) < self.size:
            text = f"rank {came[0]} waits at {about}, where most others do not come. Rank {rank} is at {there}."
            return RankFailure(text, came[0])
        return RankFailure(
            f"rank {rank} does not come, while rank {self.rank} waits at {about}. It is at {there}.", rank
        )

    def publish(self, error: BaseException) -> None:
        """Tells the other ranks what happened to this one."""
        if self.store is None:
            return
        if isinstance(error, RankFailure):
            rank, said = error.rank, str(error)
        else:
            rank, said = self.rank, f"rank {self.rank} raised in step {self.step}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self.store.set(f"failed/{self.rank}", json.dumps({"step": self.step, "rank": rank, "said": said}))

    # ---- when it is not ----------------------------------------------------------------------------

    def _failure(self, error: Exception | None) -> RankFailure:
        """Finds out whose fault it is."""
        try:
            found = self._diagnosed()
        except RuntimeError:
            found = RankFailure(
                f"in step {self.step} the store that all ranks share has gone: {_first_line(error)}", -1
            )
        if found is None:
            where = self.calls[-1] if self.calls else "a call"
            found = RankFailure(
                f"in step {self.step} rank {self.rank} waited in vain in {where}, and no other rank says why: "
                f"{_first_line(error)}",
                -1,
            )
        self.publish(found)
        return found

    def _diagnosed(self) -> RankFailure | None:
        if self.store is None:
            return None
        self.store.set(f"calls/{self.step}/{self.rank}", json.dumps(self.calls))
        before = self._beats()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            late = time.monotonic() > deadline
            found = self._told(self.step) or self._compared(2 if late else self.size)
            if found is not None or late:
                return found or self._told(0) or self._elsewhere()
            if time.monotonic() > deadline - PATIENCE_SECONDS + 4 * BEAT_SECONDS and (silent := self._silent(before)):
                if self.store.check([f"ended/{silent[0]}"]):
                    return RankFailure(
                        f"rank {silent[0]} has ended its program, while others wait for it in step {self.step}.",
                        silent[0],
                    )
                rest = f", {silent[1:]} neither" if len(silent) > 1 else ""
                return RankFailure(
                    f"rank {silent[0]} gives no sign of life{rest}, in step {self.step}: its process was killed or is "
                    "frozen.",
                    silent[0],
                )
            time.sleep(BEAT_SECONDS / 5)

    def _elsewhere(self) -> RankFailure | None:
        """Names a rank that lives and is in no collective, and where it is."""
        assert self.store is not None
        for rank in range(self.size):
            if rank != self.rank and not self.store.check([f"calls/{self.step}/{rank}"]):
                place, waiting = self._place(rank)
                if place and not waiting:
                    called = self.calls[-1] if self.calls else "a call"
                    return RankFailure(
                        f"rank {rank} does not come to {called}, where rank {self.rank} waits in step {self.step}. It "
                        f"lives, and is at {place}.",
                        rank,
                    )
        return None

    def _place(self, rank: int) -> tuple[str, bool]:
        """On which line of the program a rank was when it last said so, and whether in a collective."""
        assert self.store is not None
        if not self.store.check([f"where/{rank}"]):
            return "", False
        place, waiting = json.loads(self.store.get(f"where/{rank}"))
        return place, waiting

    def _told(self, since: int) -> RankFailure | None:
        """What another rank said of its own failure, or of whose failure it has seen, in this step or a later one.

        Errors of steps before may have been caught, as that of a checkpoint which is not there, on all ranks alike.
        """
        assert self.store is not None
        for rank in range(self.size):
            if rank != self.rank and self.store.check([f"failed/{rank}"]):
                told = json.loads(self.store.get(f"failed/{rank}"))
                if told["step"] >= since:
                    return RankFailure(told["said"], told["rank"])
        return None

    def _compared(self, least: int) -> RankFailure | None:
        """Who called something else than most, if the calls of so many ranks are known.

        Those of all may never be: ranks along another axis do not see what goes wrong along this one.
        """
        assert self.store is not None
        calls = {self.rank: self.calls}
        for rank in range(self.size):
            key = f"calls/{self.step}/{rank}"
            if rank != self.rank and self.store.check([key]):
                calls[rank] = json.loads(self.store.get(key))
        odd = first_difference(calls) if len(calls) >= least else None
        if odd is None:
            return None
        rank, number, mine, usual = odd
        what = f"{mine} as collective number {number}, where others call {usual}"
        return RankFailure(f"in step {self.step} rank {rank} calls {what}. {_SAME}", rank)

    def _beats(self) -> list[int]:
        assert self.store is not None
        return [self.store.add(f"beat/{rank}", 0) for rank in range(self.size)]

    def _silent(self, before: list[int]) -> list[int]:
        return [rank for rank, (a, b) in enumerate(zip(before, self._beats(), strict=True)) if a == b]


def _main_frame() -> types.FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def place_of(frame: types.FrameType | None) -> str:
    """The user's line that a frame is on, or was called from: `train.py:12`; empty outside of a user's code."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_SAME = "All ranks must call the same collectives in the same order."


def _alike(compare: Compare, lines: list[str]) -> bool:
    """Whether those ranks have the same lines, of which each calls this at the same time."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return len(set(compare(torch.tensor(int.from_bytes(digest[:7], "big"))).tolist())) == 1


def _first_line(error: Any) -> str:
    return str(error).partition("\n")[0][:300]
