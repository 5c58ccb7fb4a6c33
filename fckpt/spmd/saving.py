"""`Saving`: a checkpoint that is written in the background."""

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
    """A checkpoint that is being written in the background, returned by `fckpt.save(..., wait=False)`.

    The end of the program and the next save wait until the checkpoint is complete.
    """

    def __init__(self, path: str, write: Callable[[], None]):
        self.path = path
        """The folder of the checkpoint."""
        self._write = write
        self._error: BaseException | None = None
        self._told = False
        """Whether `wait` has returned or raised the result of this saving."""
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
        """Whether the saving has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete on all ranks.

        Raises:
            Exception: this rank could not write.
            RankFailure: another rank could not write, or has died.
        """
        with _others_running():
            self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error


class _Process:
    """Represents the rank of a process that is not simulated."""


_process = _Process()
_lock = threading.Lock()
_under_way: weakref.WeakKeyDictionary[Transport | _Process, Saving] = weakref.WeakKeyDictionary()
"""The last saving of each rank."""


def _rank() -> Transport | _Process:
    mesh = simulated()
    return _process if mesh is None else transport_of(mesh.key)


def _others_running() -> contextlib.AbstractContextManager[None]:
    """Context manager for waiting: in a simulation, lets the other ranks run, because ranks run one at a time."""
    rank: Any = _rank()
    return contextlib.nullcontext() if rank is _process else rank.idle()


def finish() -> None:
    """Waits for the last saving of this rank, if there is one.

    Raises:
        Exception: the saving failed, and its `wait` has not raised the error yet.
    """
    with _lock:
        saving = _under_way.pop(_rank(), None)
    if saving is not None and not (saving._told and saving.done()):
        saving.wait()


@contextlib.contextmanager
def finished() -> Iterator[None]:
    """Context manager for a program: waits at its end for its last saving."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the error of the body is more useful
            finish()
        raise
    finish()


@atexit.register
def _tell_at_the_end() -> None:
    """Raises the error of a saving that was not waited for; Python prints exceptions raised at exit."""
    finish()
