"""Failure detection: a rank that dies, stalls or diverges becomes an error on every rank.

All processes share a key-value store. In it, every rank increments a heartbeat counter and records the line of the
program on which it is; a rank that fails or ends records that too. When a collective fails or times out, a rank reads
the store to find the cause: a rank that failed, a heartbeat that has stopped, a rank that called another collective, or
a rank that is elsewhere in the program.

If ranks called collectives of equal shapes in different orders, they would exchange wrong numbers without an error.
Therefore, before the first call of a mapped function, the ranks compare the collectives that it will call and how their
inputs are computed (`agree`). At the end of every call, before any rank returns a result, they compare the collectives
that were called and the lines that called them (`watch`), which is one small message per call. If the collectives of a
function are not known beforehand, the ranks compare every collective before they call it. All other work is done after
a failure, or in a thread that mostly sleeps.
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
"""Interval of the heartbeat."""
PATIENCE_SECONDS = 4.0
"""How long a rank that sees a failure waits for the ranks to report its cause."""


class Guard:
    """Runs the collectives of this rank, and turns their failures into `RankFailure`s."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.timeout_seconds = rank, size, 60.0
        self.step, self.foreseen = 0, False
        self.counts: dict[tuple[str, str], int] = {}
        self.calls: list[str] = []
        """The collectives that this rank has called in this step."""
        self.waiting = False
        """Whether this rank is in a collective."""
        self.store = self._connect() if size > 1 and "MASTER_PORT" in os.environ else None
        self.ended = threading.Event()
        if self.store is not None:
            beating = threading.Thread(target=self._beat, daemon=True, name="fckpt heartbeat")
            beating.start()
            atexit.register(self._end, beating)

    def _connect(self) -> dist.Store:
        # a separate connection for this guard: torch's is blocked while the process waits for another rank
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
                return  # the store is gone, so the job has ended
            self.ended.wait(BEAT_SECONDS)
        with contextlib.suppress(RuntimeError):
            store.set(f"ended/{self.rank}", "")

    def _end(self, beating: threading.Thread) -> None:
        """Joins the heartbeat thread. A thread that returns from C++ after the interpreter exits aborts the process."""
        self.ended.set()
        beating.join(PATIENCE_SECONDS)

    # ---- without a failure -------------------------------------------------------------------------

    def call(self, what: str, run: Callable[[], T], compare: Compare | None = None) -> T:
        """Runs one collective.

        Args:
            what: describes the collective.
            run: calls the collective.
            compare: gathers a tensor from the ranks that call the collective, stacked. Used if the ranks have not
                compared their collectives beforehand: gloo aborts a process that receives a tensor of another dtype.

        Raises:
            RankFailure: the collective failed or timed out, or another rank calls a different one.
        """
        self.calls.append(what)
        self.waiting = True
        try:
            if compare is None or self.foreseen or self.size == 1 or _equal_on_all(compare, [what]):
                return run()
        except RuntimeError as error:
            raise self._failure(error) from error
        finally:
            self.waiting = False
        raise self._failure(None)

    @contextlib.contextmanager
    def watch(self, compare: Compare, foreseen: bool) -> Iterator[None]:
        """Context manager for one step: reports an error to the other ranks, and finally compares the calls.

        Args:
            compare: gathers a tensor from all ranks, stacked.
            foreseen: whether the ranks compare their collectives beforehand, with `agree`.
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
        if self.size > 1 and not _equal_on_all(compare, self.calls):
            raise self._failure(None)

    def agree(self, about: str, calls: list[str]) -> None:
        """Waits for all ranks, and compares the collectives that they will call.

        Args:
            about: names the mapped function and its arguments.
            calls: one line for each collective.

        Raises:
            RankFailure: a rank will call different collectives, has failed, or does not arrive.
        """
        if self.store is None:
            return
        key = self._say("agree", about, json.dumps(calls))
        known = {rank: json.loads(said) for rank, said in enumerate(self._all(key, about))}
        odd = first_difference(known)
        if odd is not None:
            rank, number, mine, usual = odd
            raise RankFailure(
                f"rank {rank} will call {mine} as collective number {number}, where others call {usual}. {_SAME}",
                rank,
            )

    def exchange(self, about: str, mine: str) -> list[str]:
        """Waits for the texts of all ranks, and returns them in the order of the ranks.

        Raises:
            RankFailure: a rank has failed, or does not arrive.
        """
        return [mine] if self.store is None else self._all(self._say("exchange", about, mine), about)

    def later(self, about: str) -> Callable[[str], list[str]]:
        """Returns an exchange that can be called later, in any thread.

        The exchange waits without a time limit for ranks that are alive, for example while they write a file.

        Raises:
            RankFailure: a rank has ended, or its heartbeat has stopped.
        """
        if self.store is None:
            return lambda mine: [mine]
        store, key = self.store, self._reserved("later", about)

        def exchange(mine: str) -> list[str]:
            store.set(f"{key}/{self.rank}", mine)
            return [self._outlived(store, f"{key}/{rank}", rank, about) for rank in range(self.size)]

        return exchange

    def _outlived(self, store: dist.Store, key: str, rank: int, about: str) -> str:
        """Waits for the text of a rank for as long as that rank is alive."""
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
        """Returns `make(texts of all ranks)`, which rank 0 computes. There is no time limit for `make`.

        Raises:
            RankFailure: a rank has failed, or does not arrive.
        """
        if self.store is None:
            return make([mine])
        key = self._say("share", about, mine)
        if self.rank == 0:
            answer = make(self._all(key, about))
            self.store.set(f"{key}/answer", answer)
            return answer
        self._waited(f"{key}/0", 0, about, time.monotonic() + self.timeout_seconds)  # rank 0 must arrive in time
        return self._waited(f"{key}/answer", 0, about, math.inf)

    def _say(self, kind: str, about: str, what: str) -> str:
        """Stores the text of this rank, and returns the key under which all ranks store theirs."""
        assert self.store is not None
        key = self._reserved(kind, about)
        self.store.set(f"{key}/{self.rank}", what)
        self.store.set(f"about/{self.rank}", about)
        return key

    def _reserved(self, kind: str, about: str) -> str:
        """Returns the key under which ranks store their texts for this exchange."""
        self.counts[kind, about] = number = self.counts.get((kind, about), 0) + 1
        return f"{kind}/{hashlib.sha256(about.encode()).hexdigest()[:16]}/{number}"

    def _all(self, key: str, about: str) -> list[str]:
        """Waits for the texts of all ranks."""
        deadline = time.monotonic() + self.timeout_seconds
        return [self._waited(f"{key}/{rank}", rank, about, deadline) for rank in range(self.size)]

    def _waited(self, key: str, rank: int, about: str, deadline: float) -> str:
        """Waits for the text of one rank."""
        assert self.store is not None
        # A planning rank may hold the GIL long enough to delay its heartbeat.
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
        """Reports the missing rank or, if most ranks are missing, the rank that waits alone."""
        assert self.store is not None
        known = self.store.check([f"about/{rank}"])
        there = self.store.get(f"about/{rank}").decode() if known else ""
        place, _ = self._place(rank)
        there = f"{there} ({place})" if there and place else there or place or "an unknown line"
        came = [r for r in range(self.size) if self.store.check([f"{key}/{r}"])]
        if 2 * len(came) < self.size:
            text = f"rank {came[0]} waits at {about}, but most ranks do not arrive there. Rank {rank} is at {there}."
            return RankFailure(text, came[0])
        return RankFailure(
            f"rank {rank} does not arrive at {about}, where rank {self.rank} waits. Rank {rank} is at {there}.", rank
        )

    def publish(self, error: BaseException) -> None:
        """Reports an error of this rank to the other ranks."""
        if self.store is None:
            return
        if isinstance(error, RankFailure):
            rank, said = error.rank, str(error)
        else:
            rank, said = self.rank, f"rank {self.rank} raised in step {self.step}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self.store.set(f"failed/{self.rank}", json.dumps({"step": self.step, "rank": rank, "said": said}))

    # ---- after a failure ---------------------------------------------------------------------------

    def _failure(self, error: Exception | None) -> RankFailure:
        """Returns the error to raise, which names the rank at fault, and reports it to the other ranks."""
        try:
            found = self._diagnosed()
        except RuntimeError:
            found = RankFailure(
                f"in step {self.step} the store that all ranks share is not reachable: {_first_line(error)}", -1
            )
        if found is None:
            where = self.calls[-1] if self.calls else "a call"
            found = RankFailure(
                f"in step {self.step} rank {self.rank} timed out or failed in {where}, and no other rank reports a "
                f"cause: {_first_line(error)}",
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
                rest = f" (nor do ranks {silent[1:]})" if len(silent) > 1 else ""
                return RankFailure(
                    f"rank {silent[0]} gives no sign of life{rest} in step {self.step}: its process was killed or is "
                    "frozen.",
                    silent[0],
                )
            time.sleep(BEAT_SECONDS / 5)

    def _elsewhere(self) -> RankFailure | None:
        """Reports a rank that is alive but not in a collective, and the line of the program that it runs."""
        assert self.store is not None
        for rank in range(self.size):
            if rank != self.rank and not self.store.check([f"calls/{self.step}/{rank}"]):
                place, waiting = self._place(rank)
                if place and not waiting:
                    called = self.calls[-1] if self.calls else "a call"
                    return RankFailure(
                        f"rank {rank} does not arrive at {called}, where rank {self.rank} waits in step {self.step}. "
                        f"Rank {rank} is alive, at {place}.",
                        rank,
                    )
        return None

    def _place(self, rank: int) -> tuple[str, bool]:
        """Returns the line of the program that a rank last recorded, and whether the rank was in a collective."""
        assert self.store is not None
        if not self.store.check([f"where/{rank}"]):
            return "", False
        place, waiting = json.loads(self.store.get(f"where/{rank}"))
        return place, waiting

    def _told(self, since: int) -> RankFailure | None:
        """Returns a failure that another rank has reported, its own or one that it saw, in step `since` or later.

        Errors of earlier steps may have been caught on all ranks, for example that a checkpoint does not exist.
        """
        assert self.store is not None
        for rank in range(self.size):
            if rank != self.rank and self.store.check([f"failed/{rank}"]):
                told = json.loads(self.store.get(f"failed/{rank}"))
                if told["step"] >= since:
                    return RankFailure(told["said"], told["rank"])
        return None

    def _compared(self, least: int) -> RankFailure | None:
        """Reports a rank whose calls differ from most ranks' calls, if the calls of `least` ranks are known.

        The calls of all ranks may never be known: ranks along another axis do not notice a failure along this axis.
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
    """Returns the innermost line of user code in a frame's stack, such as `train.py:12`; "" if there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_SAME = "All ranks must call the same collectives in the same order."


def _equal_on_all(compare: Compare, lines: list[str]) -> bool:
    """Whether the lines are equal on all ranks that `compare` reaches. All of these ranks call this together."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return len(set(compare(torch.tensor(int.from_bytes(digest[:7], "big"))).tolist())) == 1


def _first_line(error: Any) -> str:
    return str(error).partition("\n")[0][:300]
