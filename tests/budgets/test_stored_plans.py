"""Plans on disk: another process runs by them without solving, and whatever lies on disk, budgets and bits hold."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import functools
import json
import marshal
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal
from planned import Squared, measured
from torch import Tensor, nn

import fckpt
from fckpt._planned import making, stored
from fckpt._planned.background import Request
from fckpt._planned.optimizers import Updates
from fckpt._planned.plan import Plan
from fckpt._planned.planner import Planner, traced_without_running
from fckpt._planned.stored import StoredPlans
from fckpt._trace.operations import Trace
from fckpt.cost import OpCost
from fckpt.cost.store import Store
from fckpt.graph.schedule import Compute, Schedule, schedule_of
from fckpt.graph.simulation import simulate


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for plans, and the costs of the session."""
    for costs in Path(os.environ["FCKPT_CACHE"]).glob("costs-*"):
        shutil.copy(costs, tmp_path)
    monkeypatch.setenv("FCKPT_CACHE", str(tmp_path))
    monkeypatch.delenv("FCKPT_PLANS", raising=False)
    return tmp_path


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Squared(nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(16, 16), nn.GELU())]))


@functools.cache
def trace(rows: int) -> Trace:
    return traced_without_running(deep(), (torch.randn(rows, 16),), {})[0]


def plan(rows: int = 100, budget: Any = 0.7, **options: Any) -> tuple[Plan, Any]:
    """Returns the plan that a new planner makes, as in another process, and its statistics."""
    planner = Planner(budget=budget, **options)
    return planner.plan(trace(rows)), planner.ledger.stats


def counted(rows: int = 100, budget: Any = 0.7, **options: Any) -> tuple[int, int, int]:
    stats = plan(rows, budget, **options)[1]
    return stats.plans, stats.read, stats.adapted


@pytest.fixture
def never_solved(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a plan was solved")

    return lambda: monkeypatch.setattr("fckpt._planned.planner.make_plan", never)


def only(folder: Path) -> Path:
    (path,) = folder.glob("plans-*")
    assert path.suffix == ".json"
    return path


def test_a_second_function_runs_by_the_plan_of_the_first(never_solved: Callable[[], None]) -> None:
    net, x = deep(), torch.randn(100, 16)
    net(x).backward()
    plain = [p.grad for p in net.parameters()]
    for read in (0, 1):
        net.zero_grad(set_to_none=True)
        planned = fckpt.remat(net, budget=0.7)
        planned(x).backward()
        assert (fckpt.stats(planned).plans, fckpt.stats(planned).read) == (1, read)
        assert_equal([p.grad for p in net.parameters()], plain)
        never_solved()
    net.zero_grad(set_to_none=True)
    assert measured(planned, x) <= (plan()[0].budget_bytes or 0)


PROGRAM = """
import torch, fckpt
from fckpt._planned import planner
from fckpt.cost import Measured
from torch import nn
torch.set_num_threads(1)
net = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(16, 16), nn.Tanh())])
loss = fckpt.remat(lambda x: net(x).square().sum(), budget=0.7)
if {again}:
    planner.make_plan = Measured._measure = None
loss(torch.randn(100, 16)).backward()
print(fckpt.stats(loss).plans, fckpt.stats(loss).read)
"""


def test_a_second_process_neither_measures_nor_solves(folder: Path) -> None:
    exec(PROGRAM.format(again=False), {})
    assert only(folder)
    made = subprocess.run([sys.executable, "-c", PROGRAM.format(again=True)], capture_output=True, text=True)
    assert made.stdout.split() == ["1", "1"], made.stderr


def test_another_size_is_adapted_from_what_is_on_disk(never_solved: Callable[[], None]) -> None:
    assert counted(100) == (1, 0, 0)
    never_solved()
    assert counted(140) == (1, 0, 1)
    assert counted(140) == (1, 0, 1)  # it is not on disk before it is solved
    assert counted(100) == (1, 1, 0)


@pytest.mark.parametrize("is_faster", [False, True])
def test_what_was_solved_in_the_background_is_read(is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(100)
    planner = Planner(budget=0.7)
    adapted = planner.plan(trace(140))
    answer = dataclasses.replace(adapted, schedule=fckpt.solve.auto(adapted.graph, adapted.budget_bytes))
    if is_faster:
        faster = dataclasses.replace(answer.timeline, seconds=0.9999 * adapted.timeline.seconds)
        monkeypatch.setitem(vars(answer), "timeline", faster)
    monkeypatch.setattr(Request, "answer", lambda _: answer)
    expected = answer if planner.families.improved(adapted) else adapted
    read, stats = plan(140)
    assert stats.read == 1
    assert read.schedule == expected.schedule


def test_steps(never_solved: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for again in (False, True):
        net = deep()
        optimizer = torch.optim.AdamW(net.parameters())
        step = fckpt.step(net, optimizer, lambda net, x: net(x), budget=0.8)
        torch.manual_seed(1)
        losses = [step(torch.randn(100, 16)) for _ in range(3)]
        assert step._planner.ledger.stats.read == again * step._planner.ledger.stats.plans
        found.append((losses, list(net.parameters())))
        never_solved()
        monkeypatch.setattr(Updates, "_measured", None)  # what updates cost is on disk as well
    assert_equal(*found)


@pytest.mark.parametrize("options", [{"solver": "greedy"}, {"tile": True, "budget": 0.4}])
def test_named_solvers_and_tiles(options: dict[str, Any], never_solved: Callable[[], None]) -> None:
    first, _ = plan(**options)
    never_solved()
    again, stats = plan(**options)
    assert (stats.read, again.schedule, again.tiles) == (1, first.schedule, first.tiles)
    assert again.peak_bytes <= (again.budget_bytes or 0)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "budget": lambda patch: {"budget": 0.72},
    "policy": lambda patch: {"policy": fckpt.policies.dots_saveable},
    "solver": lambda patch: {"solver": "greedy"},
    "costs": lambda patch: {"costs": fckpt.cost.Measured(cache=False)},
    "version": lambda patch: patch.setattr(fckpt, "__version__", "0.0.1"),
    "version of torch": lambda patch: patch.setattr(torch, "__version__", "2.0.1"),
    "device": lambda patch: patch.setattr(stored, "environment", lambda device: "another device"),
    "switch": lambda patch: patch.setenv("FCKPT_PLANS", "0"),
    "temporaries": lambda patch: patch.setattr(
        "fckpt._planned.planner.priced", lambda *args, **kwargs: _larger(*args, **kwargs)
    ),
}


def _larger(*args: Any, **kwargs: Any) -> Any:
    graph = making.priced(*args, **kwargs)
    nodes = (dataclasses.replace(graph.nodes[0], temporary_nbytes=8), *graph.nodes[1:])
    return dataclasses.replace(graph, nodes=nodes)


@pytest.mark.filterwarnings("ignore:the policy dots_saveable")
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plan_depends_on(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan()
    assert plan()[1].read == 1
    assert plan(**(CHANGES[change](monkeypatch) or {}))[1].read == 0


def test_a_plan_is_not_taken_as_solved_if_costs_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = plan()
    graph = first.graph
    recomputed = {s.node for s in first.schedule.backward if isinstance(s, Compute) and s.node < graph.boundary}
    assert recomputed
    plans = StoredPlans("auto", stored_where())
    assert plans.plan(graph, first.budget_bytes or 0) is not None
    for nodes in (recomputed, set(range(len(graph.nodes)))):
        slow = [dataclasses.replace(n, seconds=3 * n.seconds) if n.id in nodes else n for n in graph.nodes]
        assert plans.plan(dataclasses.replace(graph, nodes=tuple(slow)), first.budget_bytes or 0) is None


def stored_where() -> str:
    return stored.environment(torch.device("cpu"))


def test_solvers_of_users_are_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fckpt.solve._SOLVERS, "mine", lambda graph, budget=None: fckpt.solve.greedy(graph, budget))
    plan(solver="mine")
    assert not list(folder.glob("plans-*"))


def _edited(edit: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps(edit(json.loads(text))).encode()


def _with(**fields: Any) -> Callable[[bytes], bytes]:
    return _edited(lambda data: {"entries": [{**data["entries"][0], **fields}]})


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "cut off": lambda text: text[: len(text) // 2],
    "zeros": lambda text: bytes(len(text)),
    "not text": lambda text: b"\xff\xfe" + text,
    "another list": lambda text: b"[1, 2]",
    "nested": lambda text: b"[" * 100_000,
    "no entries": lambda text: b"{}",
    "entries of another kind": lambda text: b'{"entries": 5}',
    "an entry of another kind": lambda text: b'{"entries": [7]}',
    "a missing field": lambda text: text.replace(b'"overhead"', b'"other"'),
    "a flag for a time": _with(seconds=True),
    "not a number": lambda text: text.replace(b'"overhead": ', b'"overhead": NaN, "x": ').replace(b"x", b"y"),
    "steps of another kind": _with(schedule={"forward": ["import os"], "backward": []}),
    "no steps": _with(schedule={"forward": [], "backward": []}),
    "unknown nodes": _with(schedule={"forward": [10**9], "backward": [-(10**9)]}),
    "a pass that is left out": _edited(
        lambda data: {"entries": [{**e, "schedule": {**e["schedule"], "backward": []}} for e in data["entries"]]}
    ),
    "another order": _edited(
        lambda data: {
            "entries": [
                {**e, "schedule": {k: v[::-1] for k, v in e["schedule"].items()}} for e in data["entries"]
            ]
        }
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage: str, folder: Path) -> None:
    first, _ = plan()
    path = only(folder)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    again, stats = plan()
    assert stats.read == 0
    assert again.peak_bytes <= (again.budget_bytes or 0)
    assert again.schedule == first.schedule
    assert plan()[1].read == 1  # the damaged file was replaced


def test_a_plan_that_exceeds_the_budget_is_not_used(folder: Path) -> None:
    first, _ = plan()
    graph = first.graph
    whole = schedule_of(graph, range(graph.boundary), range(graph.boundary, len(graph.nodes)))
    assert simulate(graph, whole).peak_nbytes > (first.budget_bytes or 0)
    path = only(folder)
    path.write_bytes(_with(schedule=whole.to_json())(path.read_bytes()))
    again, stats = plan()
    assert stats.read == 0
    assert again.peak_bytes <= (again.budget_bytes or 0)


def test_a_slow_plan_is_no_more_than_slow(folder: Path) -> None:
    """Someone has replaced the plan by another that fits: bits and budget hold."""
    first, _ = plan(budget=0.9)
    slow = fckpt.solve.recompute_all(first.graph, None)
    assert simulate(first.graph, slow).peak_nbytes <= (first.budget_bytes or 0)
    path = only(folder)
    path.write_bytes(_with(schedule=slow.to_json(), overhead=1.0)(path.read_bytes()))
    net, x = deep(), torch.randn(100, 16)
    planned = fckpt.remat(net, budget=0.9)
    planned(x).backward()
    assert fckpt.stats(planned).read == 1
    found = [p.grad for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    net(x).backward()
    assert_equal([p.grad for p in net.parameters()], found)


def _folder_is_a_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    patch.setenv("FCKPT_CACHE", str(folder / "file"))


def _refusing(number: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


def _full(folder: Path, patch: pytest.MonkeyPatch) -> None:
    make = stored.tempfile.NamedTemporaryFile

    def limited(*args: Any, **kwargs: Any) -> Any:
        file = make(*args, **kwargs)
        patch.setattr(file, "write", _refusing(errno.ENOSPC), raising=False)
        return file

    patch.setattr(stored.tempfile, "NamedTemporaryFile", limited)


OBSTACLES: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "a file in the place of the folder": _folder_is_a_file,
    "read-only": lambda folder, patch: patch.setattr(
        stored.tempfile, "NamedTemporaryFile", _refusing(errno.EROFS)
    ),
    "full": _full,
    "unreadable": lambda folder, patch: patch.setattr(Path, "read_bytes", _refusing(errno.EACCES)),
}  # fmt: skip


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_without_a_usable_folder_nothing_is_stored(
    obstacle: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OBSTACLES[obstacle](folder, monkeypatch)
    for _ in range(2):
        found, stats = plan()
        assert (stats.plans, stats.read) == (1, 0)
        assert found.peak_bytes <= (found.budget_bytes or 0)
    assert not list(folder.glob("plans-*.tmp"))


def test_many_writers_at_once(folder: Path) -> None:
    first, _ = plan()
    graph, nbytes = first.graph, first.budget_bytes or 0
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            plans = StoredPlans("auto", stored_where())
            for i in range(20):
                plans.add(dataclasses.replace(first, budget_bytes=nbytes + 100 * i + number))
                assert plans.schedules(graph)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    entries = json.loads(only(folder).read_bytes())["entries"]
    assert len(entries) == len({e["key"] for e in entries}) == stored.MOST_ENTRIES


ADDER = """
import dataclasses, sys
import fckpt
from fckpt._planned import stored
stored.MOST_FILES = 3
plan = fckpt.Plan.load(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for i in range(60):
    plans = stored.StoredPlans("auto", f"device {i % 5}")
    plans.add(dataclasses.replace(plan, budget_bytes=plan.budget_bytes + int(sys.argv[2]) + i))
    for schedule in plans.schedules(plan.graph):
        assert schedule == plan.schedule
"""


def test_two_processes_add_plans_while_the_oldest_are_removed(folder: Path, tmp_path_factory: Any) -> None:
    first, _ = plan()
    file = tmp_path_factory.mktemp("plan") / "first.plan.json"
    first.save(file)
    command = [sys.executable, "-c", ADDER, str(file)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    adders = [subprocess.Popen([*command, number], text=True, **pipes) for number in ("0", "1000")]
    assert [adder.stdout.readline() for adder in adders if adder.stdout] == ["ready\n"] * 2
    for adder in adders:  # both are ready
        assert adder.stdin is not None
        adder.stdin.write("\n")
        adder.stdin.flush()
    assert [(adder.communicate(timeout=60)[1], adder.returncode) for adder in adders] == [("", 0)] * 2
    files = [*folder.glob("plans-*")]
    assert 1 <= len(files) <= 3
    for path in files:
        entries = json.loads(path.read_bytes())["entries"]
        assert 1 <= len(entries) <= stored.MOST_ENTRIES
        assert all(Schedule.from_json(entry["schedule"]) == first.schedule for entry in entries)


EXECUTING = [
    (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (marshal, "loads"), (torch, "load"),
    (builtins, "exec"), (builtins, "eval"), (builtins, "compile"),
]  # fmt: skip


def test_what_is_read_from_disk_is_never_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = plan()
    plans, costs = StoredPlans("auto", stored_where()), Store()
    costs.put("here", "an operation", OpCost(1.0, 2, 3))
    monkeypatch.setattr("fckpt.cost.store._READ", {})
    with monkeypatch.context() as patch:
        for module, name in EXECUTING:
            patch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
        found, known = plans.plan(first.graph, first.budget_bytes or 0), plans.schedules(first.graph)
        cost = Store().get("here", "an operation")
    assert plans.read and found is not None and found.schedule == first.schedule
    assert known == (first.schedule,) and cost == OpCost(1.0, 2, 3)


def test_the_folder_has_a_largest_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = plan()
    (folder / "plans-left.tmp").write_text("")
    os.utime(folder / "plans-left.tmp", (0, 0))
    plans = {name: StoredPlans("auto", name) for name in "abcdef"}
    monkeypatch.setattr(stored, "MOST_FILES", 4)
    for i, name in enumerate("abcde"):
        plans[name].add(first)
        os.utime(plans[name]._path(first.graph), (i + 1, i + 1))
    assert not (folder / "plans-left.tmp").exists()
    assert plans["c"].schedules(first.graph)  # and so it was used last
    plans["f"].add(first)
    kept = {name for name in plans if plans[name]._path(first.graph).exists()}
    assert kept == {"c", "e", "f"}  # and the first plan's
    assert len(list(folder.glob("plans-*"))) == 4
    monkeypatch.setattr(stored, "MOST_BYTES", 1.5 * plans["f"]._path(first.graph).stat().st_size)
    plans["f"].add(first)
    assert only(folder) == plans["f"]._path(first.graph)


def test_a_plan_of_nothing() -> None:
    loss = fckpt.remat(lambda x: x, budget=1.0)
    x = torch.ones(2, requires_grad=True)
    loss(x).sum().backward()
    assert x.grad is not None


def test_a_schedule_is_a_list_of_numbers(folder: Path) -> None:
    first, _ = plan()
    (entry,) = json.loads(only(folder).read_bytes())["entries"]
    assert entry["schedule"] == first.schedule.to_json()
    assert Schedule.from_json(entry["schedule"]) == first.schedule
    assert set(entry) == {"key", "seconds", "overhead", "schedule"}


def test_functions_of_equal_structure_share_a_file(folder: Path) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh().square().sum()

    w = torch.ones(16, 16, requires_grad=True)
    for rows in (30, 60):
        fckpt.remat(loss, budget=1.0)(torch.ones(rows, 16), w).backward()
    assert len(json.loads(only(folder).read_bytes())["entries"]) == 1  # the second recomputes nothing: it is not solved
