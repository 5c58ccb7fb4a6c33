"""Plans on disk: schedules that a solver has found, so that another process runs by them without solving anew.

There is one JSON file for each structure of graphs (`graph.identity.structure`), solver, device with its settings,
version of torch and version of fckpt. It has the latest schedules, each under a hash of everything on which a plan
depends except times: sizes, temporaries, lifetimes and the budget. So it serves equal calls, and calls with other sizes
(`families`). The files lie in the folder of the measured costs (`cost.store`).

Nothing on disk is trusted. A schedule is simulated on the graph of the call and is used only if it fits the budget, so
a damaged file costs time at most. A plan is read as solved if it is about as fast by the present costs as it was when
it was solved; otherwise it is adapted like a plan of another size. Processes may share the folder: files are replaced
as a whole, and if two processes write at once, the entry of one of them may get lost. If the folder is not writable,
nothing is stored, and no error is raised. The oldest files are removed when there are too many.

The environment variable FCKPT_PLANS=0 switches all of this off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fckpt
from fckpt import solve
from fckpt._planned.plan import Plan
from fckpt._trace.operations import Trace
from fckpt.cost.store import cache_folder, environment, remove_oldest
from fckpt.errors import FckptError
from fckpt.graph.graph import Graph, checked
from fckpt.graph.identity import fingerprint, structure
from fckpt.graph.schedule import Schedule
from fckpt.graph.simulation import simulate

__all__ = ["StoredPlans", "stored_plans"]

FORMAT = 1
"""Part of the file names: to be increased when the contents change."""
MOST_ENTRIES = 16
"""Schedules per file: the latest ones."""
MOST_FILES = 256
MOST_BYTES = 64 * 2**20
"""The number of files that stay, and their size in bytes. The files that were used last stay."""
SLOWER = 5e-3
"""A stored plan counts as solved if its overhead has grown by at most this much, by the present costs."""
OTHER_TIMES = 2.0
"""It does not if the step's time differs by more than this factor: costs were registered, or measured elsewhere."""


class _Entry(NamedTuple):
    key: str
    seconds: float
    """The time of the step without recomputation, when the plan was solved."""
    overhead: float
    schedule: Schedule


class StoredPlans:
    """The plans on disk for the graphs of one trace: they are read, solved or added."""

    def __init__(self, solver: str, where: str | None):
        """Prepares to read.

        Args:
            solver: the name of the solver of the plans.
            where: the devices and settings; None to store nothing.
        """
        self._solver, self._where = solver, where
        self.read = False
        """Whether a plan was read."""
        self.solved = False
        """Whether a solver has run."""

    def plan(self, graph: Graph, nbytes: int) -> Plan | None:
        """Returns the stored plan of a priced graph for this budget, or None."""
        if self._where is None:
            return None
        key, path = _key(graph, nbytes), self._path(graph)
        if path in _keys and _keys[path][0] == _version(path) and key not in _keys[path][1]:
            return None
        for entry in self._entries(graph):
            if entry.key == key:
                plan = Plan(graph, entry.schedule, self._solver, nbytes, str(torch.__version__))
                with contextlib.suppress(FckptError, IndexError):  # a damaged schedule
                    slower = plan.peak_bytes > nbytes or plan.timeline.overhead > entry.overhead + SLOWER
                    known = sorted((graph.seconds, entry.seconds))
                    if not slower and known[1] <= OTHER_TIMES * known[0]:
                        self.read = True
                        return plan
        return None

    def schedules(self, graph: Graph) -> tuple[Schedule, ...]:
        """Returns the stored schedules of graphs with this structure that are valid, the latest first."""
        found = []
        for entry in self._entries(graph):
            with contextlib.suppress(FckptError, IndexError):  # a damaged schedule
                simulate(graph, entry.schedule)
                found.append(entry.schedule)
        return tuple(found)

    def made(self, graph: Graph, nbytes: int, make: Callable[[], Plan]) -> Plan:
        """Returns the stored plan; if there is none, solves the graph and stores the plan.

        Raises:
            BudgetError: the solver finds no plan that fits.
        """
        plan = self.plan(graph, nbytes)
        if plan is None:
            plan, self.solved = make(), True
            self.add(plan)
        return plan

    def add(self, plan: Plan) -> None:
        """Stores a solved plan."""
        if self._where is None or plan.budget_bytes is None or len(plan.graph.nodes) == 0:
            return
        key = _key(plan.graph, plan.budget_bytes)
        others = [entry for entry in self._entries(plan.graph) if entry.key != key]
        entries = [_Entry(key, plan.graph.seconds, plan.timeline.overhead, plan.schedule), *others][:MOST_ENTRIES]
        text = json.dumps({"entries": [{**e._asdict(), "schedule": e.schedule.to_json()} for e in entries]})
        with contextlib.suppress(OSError):
            _replace(self._path(plan.graph), text)
            remove_oldest("plans", MOST_FILES, MOST_BYTES)

    def _path(self, graph: Graph) -> Path:
        parts = (structure(graph), self._solver, self._where, torch.__version__, fckpt.__version__)
        name = hashlib.sha256(repr(tuple(map(str, parts))).encode()).hexdigest()
        return cache_folder() / f"plans-{FORMAT}-{name[:32]}.json"

    def _entries(self, graph: Graph) -> list[_Entry]:
        if self._where is None:
            return []
        path = self._path(graph)
        try:
            if path.stat().st_size > MOST_BYTES:
                return []
            data = json.loads(path.read_bytes())
            found = [_entry(item) for item in data["entries"]][:MOST_ENTRIES]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, FckptError):
            return []  # there is none, or it is damaged, and the next plan replaces it
        with contextlib.suppress(OSError):
            os.utime(path)
        for other in list(_keys)[:-MOST_FILES]:
            _keys.pop(other, None)
        _keys[path] = _version(path), frozenset(entry.key for entry in found)
        return found


_keys: dict[Path, tuple[Any, frozenset[str]]] = {}
"""By file that was read: its version then, and the keys of its entries. A file of other keys is not read again."""


def _version(path: Path) -> Any:
    """Returns a value that changes whenever the file is replaced; None if the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def stored_plans(solver: str, traced: Trace, *, own_costs: bool) -> StoredPlans:
    """Returns the plans on disk for a trace.

    Args:
        solver: the name of the solver. Plans of solvers that users have registered are not stored.
        traced: the trace.
        own_costs: whether costs are measured as usual. Plans by other costs are not stored.
    """
    ours = solve.get(solver).__module__.startswith(f"{solve.__name__}.")
    if not ours or not own_costs or os.environ.get("FCKPT_PLANS") == "0":
        return StoredPlans(solver, None)
    devices = {traced.tensors[t].device for t in traced.operands}
    return StoredPlans(solver, "; ".join(sorted({_named(device) for device in devices})))


def _named(device: torch.device) -> str:
    return "meta" if device.type == "meta" else environment(device)


def _key(graph: Graph, nbytes: int) -> str:
    """Returns a hash of the budget and of everything in a graph on which a plan depends, except times."""
    nodes = [(n.temporary_nbytes, n.replayed_nbytes, n.overwrites, n.accumulates) for n in graph.nodes]
    values = [(v.decision, v.held_to) for v in graph.values]
    parts = (fingerprint(graph), nbytes, nodes, values, graph.plain_order)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _entry(data: Any) -> _Entry:
    return _Entry(
        checked(data["key"], "key", str),
        checked(data["seconds"], "seconds", float),
        checked(data["overhead"], "overhead", float),
        Schedule.from_json(data["schedule"]),
    )


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="plans-", suffix=".tmp", delete=False) as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)
