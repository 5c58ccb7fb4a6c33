"""Solving in the background: a worker process solves one graph after the other, the latest request first.

The worker starts when there is a request, and ends when it has answered, or when this process ends: its standard input
is a pipe that nothing is written to, and that closes with this process. The worker has the lowest priority, and uses
one thread. Requests and answers are JSON files in a temporary folder. There is no thread in this process: callers ask
for the answer between their steps.

The environment variable FCKPT_BACKGROUND=0 switches the worker off.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
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

__all__ = ["PENDING", "Request", "serve"]


class _Pending(Enum):
    PENDING = 0


PENDING: Final = _Pending.PENDING
"""The answer to a request that has not been solved yet."""


class Request:
    """A plan whose graph is to be solved again, by `auto` and within the same budget.

    A request that nothing refers to any more is not solved.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._answer: Plan | Literal[_Pending.PENDING] | None = PENDING
        if os.environ.get("FCKPT_BACKGROUND") == "0":
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
        with contextlib.suppress(ValueError, FckptError):  # for example, if the worker ran out of memory
            if text is not None:
                plan, schedule = self._plan, Schedule.from_json(json.loads(text))
                found = Plan(plan.graph, schedule, plan.solver, plan.budget_bytes, plan.torch_version)
                assert plan.budget_bytes is not None
                self._answer = found if found.peak_bytes <= plan.budget_bytes else None


class _Worker:
    """The worker process, and the requests that wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._owner = os.getpid()
        self._waiting: list[weakref.ref[Request]] = []
        self._request: Request | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, request: Request) -> None:
        """Adds a request, and starts the worker if it is idle."""
        with self._lock:
            if self._owner != os.getpid():  # a forked process: the worker belongs to its parent
                self._forget()
            self._waiting.append(weakref.ref(request))
            self._start()

    def look(self) -> None:
        """Hands over the answer, if the worker has finished, and starts the next request."""
        with self._lock:
            if self._owner != os.getpid() or self._process is None or self._process.poll() is None:
                return
            assert self._request is not None
            done, path = self._request, self._path("answer")
            done.finish(path.read_text() if self._process.returncode == 0 and path.exists() else None)
            self._end()
            self._start()

    def _start(self) -> None:
        while self._process is None and self._waiting:
            request = self._waiting.pop()()
            if request is None:
                continue
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="fckpt-")
                self._path("request").write_text(request.to_json())
                self._process = _run(self._folder.name)
                self._request = request
            except OSError:  # no more processes, or no space
                request.finish(None)
                self._end()

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{name}.json"

    def _end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._process, self._folder, self._request = None, None, None

    def stop(self) -> None:
        """Ends the worker, at the end of this process."""
        if self._owner == os.getpid() and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._end()


def _run(folder: str) -> subprocess.Popen[bytes]:
    code = f"from {__name__} import serve; serve({folder!r})"
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FCKPT_BACKGROUND": "0"}
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, env=settings
    )


_worker = _Worker()
atexit.register(_worker.stop)


def serve(folder: str) -> None:
    """Solves the request in a folder; the program of the worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(19)
    asked = json.loads((Path(folder) / "request.json").read_text())
    plan = make_plan(Graph.from_json(asked["graph"]), asked["nbytes"], "auto", "")
    (Path(folder) / "answer.json").write_text(json.dumps(plan.schedule.to_json()))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
