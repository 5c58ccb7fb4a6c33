"""Savings: checkpoints that are written while the program goes on."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fckpt.spmd.mesh import Transport, simulated, transport_of

__all__ = ["Saving", "finish", "finished"]


class Saving:
    """A checkpoint that is being written, which `fckpt.save(..., wait=False)` returns.

    The program does not end before it is whole, and the next save waits for it.
    """

    def __init__(self, path: str, write: Callable[[], None]):
        self.path = path
        """Where it is written to."""
        self._write = write
        self._error: BaseException | None = None
        self._told = False
        """Whether somebody has waited for it, and knows how it ended."""
        self._thread = threading.Thread(target=self._run, name=f"fckpt save {path}")
        with _lock:
            _under_way[_rank()] = self
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Saving to {self.path}, {'done' if self.done() else 'under way'}>"

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is whole on all ranks.

        Raises:
            Exception: what kept this rank from writing.
            RankFailure: another rank could not write, or has died.
        """
        with _others_running():
            self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error


class _Process:
    """Stands for the one rank of a process."""


_process = _Process()
_lock = threading.Lock()
_under_way: weakref.WeakKeyDictionary[Transport | _Process, Saving] = weakref.WeakKeyDictionary()
"""By rank: what it began last."""


def _rank() -> Transport | _Process:
    mesh = simulated()
    return _process if mesh is None else transport_of(mesh.key)


def _others_running() -> contextlib.AbstractContextManager[None]:
    """What waits may need the other ranks of a simulation, which run one at a time."""
    rank: Any = _rank()
    return contextlib.nullcontext() if rank is _process else rank.idle()


def finish() -> None:
    """Waits for the saving that this rank has begun, if there is one.

    Raises:
        Exception: it failed, and nobody has been told.
    """
    with _lock:
        saving = _under_way.pop(_rank(), None)
    if saving is not None and not (saving._told and saving.done()):
        saving.wait()


@contextlib.contextmanager
def finished() -> Iterator[None]:
    """What to run a program in: it ends when its last saving does."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # what is under way tells more
            finish()
        raise
    finish()


@atexit.register
def _tell_at_the_end() -> None:
    """Tells of a failure that nobody has waited for: Python prints what is raised here."""
    finish()
