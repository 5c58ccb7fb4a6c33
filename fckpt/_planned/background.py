"""Solving in the background: a worker process solves one graph after the other, the latest request first.

The worker starts when there is a request, and ends when it has answered. It also ends when this process ends, because
its standard input is a pipe that closes with this process; nothing is written to it. The worker has the lowest
priority, and solves in one thread. Requests and answers are JSON files in a temporary folder. There is no thread in
this process: callers ask for the answer between their steps. Nothing here raises an error: if the worker fails, callers
keep their plans.

A forked process does not use its parent's worker, and may start another.

The environment variable FCKPT_BACKGROUND=0 switches the worker off.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from enum import Enum
from pathlib import Path
from typing import Final, Literal

from fckpt._planned.making import make_plan
from fckpt._planned.plan import Plan
from fckpt.errors import FckptError
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule

__all__ = ["PENDING", "Request", "is_available", "serve"]


NICENESS = 19
"""The worker runs when nothing else does, as far as the system allows."""


class _Pending(Enum):
    PENDING = 0


PENDING: Final = _Pending.PENDING
"""The answer to a request that has not been solved yet."""


def is_available() -> bool:
    """Whether graphs can be solved in the background, as far as is known before a process is started."""
    return os.environ.get("FCKPT_BACKGROUND") != "0" and _interpreter() is not None


class Request:
    """A plan whose graph is to be solved again, by `auto` and within the same budget.

    A request that nothing refers to any more is not solved.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._answer: Plan | Literal[_Pending.PENDING] | None = PENDING
        if not is_available():
            self._answer = None
        else:
            _worker.add(self)

    def answer(self) -> Plan | Literal[_Pending.PENDING] | None:
        """Returns the plan, `PENDING` as long as it is not solved, or None if it cannot be solved in the background."""
        if self._answer is PENDING:
            _worker.look()
        return self._answer

    def to_json(self) -> str:
        """Returns the graph and the budget as text."""
        return json.dumps({"graph": self._plan.graph.to_json(), "nbytes": self._plan.budget_bytes})

    def finish(self, text: str | None) -> None:
        """Takes the answer of the worker; None if it failed."""
        self._answer = None
        with contextlib.suppress(ValueError, FckptError):  # for example, the file was cut off because the disk is full
            if text is not None:
                plan, schedule = self._plan, Schedule.from_json(json.loads(text))
                found = Plan(plan.graph, schedule, plan.solver, plan.budget_bytes, plan.torch_version)
                assert plan.budget_bytes is not None
                self._answer = found if found.peak_bytes <= plan.budget_bytes else None


class _Worker:
    """The worker process, and the requests that wait for it."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._waiting: list[weakref.ref[Request]] = []
        self._request: Request | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def forked(self) -> None:
        """Leaves the worker to the parent, in a process that was forked."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # or the worker would not end before this process
            self._process.returncode = 0  # not this process's child: no warning that it still runs
        self._forget()  # the lock as well: another thread of the parent may have held it

    def add(self, request: Request) -> None:
        """Adds a request, and starts the worker if it is idle."""
        with self._lock:
            self._waiting.append(weakref.ref(request))
            self._collect()

    def look(self) -> None:
        """Hands over the answer, if the worker has finished, and starts the next request."""
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            done, text = self._request, None
            if self._process.returncode == 0:
                with contextlib.suppress(OSError):  # someone has emptied the temporary folder
                    text = self._path("answer").read_text()
            self._end()
            if done is not None:
                done.finish(text)
        self._start()

    def _start(self) -> None:
        while self._process is None and self._waiting:
            request = self._waiting.pop()()
            if request is None:
                continue
            program = _interpreter()
            try:
                if program is not None:
                    self._folder = tempfile.mkdtemp(prefix="fckpt-")
                    self._path("request").write_text(request.to_json())
                    self._process = _run(program, self._folder)
                    self._request = request
            except (OSError, ValueError, RuntimeError):  # no more processes, no space, or the interpreter is ending
                pass
            if self._process is None:
                request.finish(None)
                self._end()

    def _path(self, name: str) -> Path:
        return Path(self._folder) / f"{name}.json"

    def _end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._process, self._folder, self._request = None, "", None

    def stop(self) -> None:
        """Ends the worker, at the end of this process."""
        if self._owner == os.getpid() and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._end()


def _interpreter() -> str | None:
    """Returns the path of Python; None if another program contains Python, which would be started a second time."""
    name = os.path.basename(sys.executable or "").lower()
    return sys.executable if name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False) else None


def _run(program: str, folder: str) -> subprocess.Popen[bytes]:
    nice = f"import os; hasattr(os, 'nice') and os.nice({NICENESS})"  # before the imports, which take a second
    code = f"{nice}; from {__name__} import serve; serve({folder!r})"
    path = os.pathsep.join(part or os.getcwd() for part in sys.path if isinstance(part, str))
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FCKPT_BACKGROUND": "0"}
    nothing = subprocess.DEVNULL
    names = ("IDLE_PRIORITY_CLASS", "CREATE_NO_WINDOW")  # on Windows
    return subprocess.Popen(
        [program, "-P", "-c", code],  # -P: modules in the current folder hide no others unless they do here
        stdin=subprocess.PIPE,
        stdout=nothing,
        stderr=nothing,
        env=settings,
        creationflags=sum(getattr(subprocess, name, 0) for name in names),
    )


_worker = _Worker()
atexit.register(_worker.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_worker.forked)


def serve(folder: str) -> None:
    """Solves the request in a folder; the program of the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which interrupts a step or a notebook's cell, not the worker
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    asked = json.loads((Path(folder) / "request.json").read_text())
    plan = make_plan(Graph.from_json(asked["graph"]), asked["nbytes"], "auto", "")
    (Path(folder) / "answer.json").write_text(json.dumps(plan.schedule.to_json()))


def _end_with_parent(folder: str) -> None:
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
