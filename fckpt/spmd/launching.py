"""`launch`: runs a program in several processes of this machine, for notebooks, tests and experiments."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from fckpt.errors import ArgumentTypeError, ArgumentValueError, RankFailure
from fckpt.spmd.saving import finished

__all__ = ["launch"]

GRACE_SECONDS = 5.0
"""After one rank has failed, how long the other ranks may take to end, in addition to their timeout."""


def launch(fn: Callable[..., Any], ranks: int, *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
    """Runs `fn(*args)` in new processes, one for each rank, and returns the list of their results.

    The same program also runs under `torchrun --nproc-per-node=RANKS script.py`, on any number of machines, because
    `launch` sets the same environment variables. The program calls `init_mesh` to make the mesh.

    Args:
        fn: a function defined in a module, because the processes import it by name. A function in a notebook cell
            cannot be imported: put it in a file, or run it with `fckpt.sim`.
        ranks: the number of processes.
        args: passed to `fn`; must be picklable.
        timeout_seconds: how long the other ranks may take to end after one has failed.

    Raises:
        Exception: the exception of the first rank that failed, with its traceback as a note.
        RankFailure: a process was killed.
        ArgumentTypeError, ArgumentValueError: `fn` cannot be imported by name, or `ranks` is not a positive int.

    Example:
        >>> import os, fckpt
        >>> fckpt.launch(os.getenv, 2, "RANK")
        ['0', '1']
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentValueError(f"launch: ranks must be an int of 1 or more, not {ranks!r}.")
    try:
        work = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentTypeError(
            f"launch: processes cannot import the function or an argument by name ({error}). Define it at the top "
            "level of a file, or run it with fckpt.sim."
        ) from error
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        environment = _environment(rank, ranks, store.port)
        processes.append(context.Process(target=_work, args=(there, environment, work), daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        return _collected(pipes, processes, timeout_seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    # the store is in this process, so that it outlives the ranks
    fixed = {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**{name: str(value) for name, value in found.items()}, **fixed}


def _work(pipe: Connection, environment: dict[str, str], work: bytes) -> None:
    os.environ.update(environment)
    try:
        fn, args = pickle.loads(work)
        buffer = io.BytesIO()
        with finished():
            torch.save(fn(*args), buffer)  # shared memory would be freed with the process
        pipe.send(("returned", buffer.getvalue(), ""))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(("raised", error, text))
    finally:
        if dist.is_initialized() and environment["WORLD_SIZE"] == "1":
            dist.destroy_process_group()
        pipe.close()


def _collected(pipes: list[Connection], processes: list[Any], timeout_seconds: float) -> list[Any]:
    """Returns the results. After the first failure, waits `timeout_seconds` and some more for the other ranks."""
    results: dict[int, Any] = {}
    failures: list[tuple[int, BaseException]] = []
    deadline: float | None = None
    while len(results) + len(failures) < len(pipes):
        done = {*results, *(rank for rank, _ in failures)}
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in done}
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([*left], patience)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            outcome = _outcome(pipe, left[pipe], processes[left[pipe]])
            if isinstance(outcome, BaseException):
                failures.append((left[pipe], outcome))
                deadline = deadline or time.monotonic() + timeout_seconds + GRACE_SECONDS
            else:
                results[left[pipe]] = outcome[0]
    if failures:
        errors = [error for _, error in failures]
        raise next((error for error in errors if not isinstance(error, RankFailure)), errors[0])
    return [results[rank] for rank in range(len(pipes))]


def _outcome(pipe: Connection, rank: int, process: Any) -> tuple[Any] | BaseException:
    try:
        how, what, text = pipe.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RankFailure(f"the process of rank {rank} {how}.", rank)
    if how == "returned":
        return (torch.load(io.BytesIO(what), weights_only=False),)
    what.add_note(f"on rank {rank}:\n{text}")
    return what
