"""Solving in the background: quick and adapted plans are replaced by faster ones, and the worker that finds them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from helpers import assert_equal
from planned import Squared
from test_sizes import graphs, peak
from torch import nn

import fckpt
from fckpt._planned.background import Request
from fckpt._planned.families import Families
from fckpt._planned.plan import Plan
from fckpt._planned.planner import Planner, traced_without_running
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule


def deep() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())])
    return net, fckpt.remat(lambda x: net(x).square().sum(), budget=0.6)


def slower(graph: Graph, budget: int, known: Any) -> Schedule:
    """Returns a schedule for a smaller budget, which the solver surpasses."""
    return fckpt.solve.greedy(graph, budget * 5 // 6)


def test_a_plan_that_is_solved_in_the_background_replaces_the_adapted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FCKPT_BACKGROUND", raising=False)
    monkeypatch.setattr("fckpt._planned.background.NICENESS", 0)  # other tests keep all cores busy
    monkeypatch.setattr("fckpt._planned.families.adapt", slower)
    net, planned = deep()
    for rows in (240, 400):
        planned(torch.randn(rows, 32)).backward()
    x, limit = torch.randn(400, 32), time.monotonic() + 300
    held = planned(x)  # its backward pass runs by the plan of its forward pass
    while not fckpt.stats(planned).improved and time.monotonic() < limit:
        time.sleep(0.2)
        net.zero_grad()
        planned(x).backward()
    assert (fckpt.stats(planned).adapted, fckpt.stats(planned).improved) == (1, 1)
    improved = [p.grad for p in net.parameters()]
    for loss in (held, net(x).square().sum()):
        net.zero_grad(set_to_none=True)
        loss.backward()
        assert_equal([p.grad for p in net.parameters()], improved)


def test_a_first_call_runs_by_a_quick_plan_which_the_solver_improves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FCKPT_BACKGROUND", raising=False)
    monkeypatch.setattr("fckpt._planned.background.NICENESS", 0)
    monkeypatch.setattr("fckpt._planned.families.quick", lambda graph, budget: slower(graph, budget, ()))
    monkeypatch.setattr("fckpt._planned.families.SMALL", 0)
    monkeypatch.setattr("fckpt._planned.planner.make_plan", lambda *_: pytest.fail("solved while the call waits"))
    net, planned = deep()
    x, limit = torch.randn(400, 32), time.monotonic() + 300
    planned(x).backward()
    first = [p.grad for p in net.parameters()]
    assert (fckpt.stats(planned).quick, fckpt.stats(planned).improved) == (1, 0)
    while not fckpt.stats(planned).improved and time.monotonic() < limit:
        time.sleep(0.2)
        net.zero_grad()
        planned(x).backward()
    stats = fckpt.stats(planned)
    assert (stats.plans, stats.quick, stats.adapted, stats.improved) == (1, 1, 0, 1)
    assert_equal([p.grad for p in net.parameters()], first)
    net.zero_grad(set_to_none=True)
    net(x).square().sum().backward()
    assert_equal([p.grad for p in net.parameters()], first)


@pytest.mark.parametrize("why", ["switched off", "small", "named solver", "does not fit"])
def test_a_first_call_is_solved_if(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Graph] = []
    monkeypatch.setenv("FCKPT_BACKGROUND", "0" if why == "switched off" else "1")
    monkeypatch.setattr("fckpt._planned.families.SMALL", 10_000 if why == "small" else 0)
    monkeypatch.setattr("fckpt._planned.families.quick", lambda graph, budget: asked.append(graph))
    net, _ = deep()
    solver = "greedy" if why == "named solver" else "auto"
    planned = fckpt.remat(lambda x: net(x).square().sum(), budget=0.6, solver=solver)
    planned(torch.randn(400, 32)).backward()
    assert (fckpt.stats(planned).plans, fckpt.stats(planned).quick) == (1, 0)
    assert len(asked) == (why == "does not fit")


WORKER = """
import os, torch, fckpt
from torch import nn
from fckpt._planned import background
net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
plan = fckpt.plan(lambda x: net(x).sum(), torch.randn(50, 8), budget=0.9)
background.NICENESS = 0
request = background.Request(plan)
print(background._worker._process.pid, background._worker._folder, flush=True)
if {killed}:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_the_worker_ends_with_the_program(killed: bool) -> None:
    settings = {k: v for k, v in os.environ.items() if k != "FCKPT_BACKGROUND"}
    code = WORKER.format(killed=killed)
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings)
    assert made.returncode == (-9 if killed else 0), made.stderr
    pid, folder = made.stdout.split()
    limit = time.monotonic() + 300
    while _runs(int(pid)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not _runs(int(pid))
    assert not os.path.exists(folder)


FORKED = """
import multiprocessing, os, pathlib, sys, torch, fckpt
from torch import nn
from fckpt._planned import background
net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
plan = fckpt.plan(lambda x: net(x).sum(), torch.randn(50, 8), budget=0.9)
sys.path.append(pathlib.Path("."))  # which imports ignore
background.NICENESS = 0
request, worker = background.Request(plan), background._worker
mine = worker._process.pid
def work():
    assert request.answer() is background.PENDING
    other = background.Request(plan)
    assert worker._process.pid != mine
    worker.stop()
# A child of os.fork() may hang in torch's profiler as it exits, if the parent has used the profiler.
child = multiprocessing.get_context("fork").Process(target=work)
with worker._lock:
    child.start()
child.join()
assert child.exitcode == 0
assert os.path.exists(worker._folder)
assert worker._process.wait(300) == 0
assert request.answer() is not background.PENDING
assert worker._process is None
"""


def test_a_forked_process_leaves_the_worker_to_its_parent() -> None:
    settings = {k: v for k, v in os.environ.items() if k != "FCKPT_BACKGROUND"}
    made = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", FORKED],
        capture_output=True, text=True, env=settings, timeout=120,
    )  # fmt: skip
    assert made.returncode == 0 and "ResourceWarning" not in made.stderr, made.stderr


@pytest.mark.parametrize("found", [None, "", "/usr/bin/uwsgi", "/nowhere/python"])
def test_no_step_fails_if_no_worker_can_start(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FCKPT_BACKGROUND", raising=False)
    monkeypatch.setattr(sys, "executable", found)
    monkeypatch.setattr("fckpt._planned.families.adapt", slower)
    _, planned = deep()
    for rows in (240, 400, 400):
        planned(torch.randn(rows, 32)).backward()
    assert (fckpt.stats(planned).adapted, fckpt.stats(planned).improved) == (1, 0)


def test_a_plan_of_which_another_thread_took_the_answer_is_not_replaced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    families, graph = Families(), graphs(160)
    budget = peak(graph) * 6 // 10
    slow = Plan(graph, fckpt.solve.recompute_all(graph, None), "auto", budget, "")
    fast = Plan(graph, fckpt.solve.auto(graph, budget), "auto", budget, "")
    families.solve_later(slow)
    taken: list[Plan | None] = []

    def answer(_: Request) -> Plan:
        if not taken:  # another thread asks between this one's question and its answer
            taken.append(None)
            taken.append(families.improved(slow))
        return fast

    monkeypatch.setattr(Request, "answer", answer)
    assert families.improved(slow) is None
    assert taken[1:] == [fast]


def test_plans_of_the_latest_sizes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fckpt._planned.planner._MOST", 3)
    planner = Planner(budget=0.9)
    net = Squared(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()))
    plans = [planner.plan(traced_without_running(net, (torch.randn(rows, 8),), {})[0]) for rows in range(20, 25)]
    assert list(planner.plans.values()) == plans[-3:]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_no_worker_starts_if_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("started"))
    monkeypatch.setattr("fckpt._planned.families.adapt", slower)
    _, planned = deep()
    for rows in (240, 400, 400):
        planned(torch.randn(rows, 32)).backward()
    assert (fckpt.stats(planned).adapted, fckpt.stats(planned).improved) == (1, 0)
