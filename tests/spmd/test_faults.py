"""What goes wrong on one rank of several processes is an error on all, that names the rank, in bounded time."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_programs
import pytest
import torch
import torch.distributed as dist

import fckpt
from fckpt import P
from fckpt.errors import RankFailure
from fckpt.spmd.guard import Guard
from fckpt.spmd.mesh import current_mesh, transport_of
from fckpt.spmd.threads import Thread

TIMEOUT = 4.0
"""After which a rank that waits gives up. It has some seconds more to find out whose fault it is."""

DIFFERENCES = {
    "unmapped": r"rank 1 calls all_reduce sum over a of \(3,\) float64 at .* where others call .* \(3,\) float32 at",
    "dtype": r"rank 1 calls all_reduce sum over a of \(3,\) float64 at .* where others call .* \(3,\) float32 at",
    "shape": r"rank 1 calls all_reduce sum over a of \(3, 1\) float32 at .* where others call .* of \(3,\) float32 at",
    "longer": r"rank 1 calls all_gather over a of \(6,\) .* where others call .* over a of \(3,\)",
    "operation": r"rank 1 calls all_reduce max over a .* where others call all_reduce sum over a",
    "pullback": r"rank 1 calls all_reduce sum over a of \(3,\) float64 at .* where others call .* \(3,\) float32 at",
    "graph": r"rank 1 plans another function than the other ranks: its operations or sizes differ",
    "graph, checked": r"rank 1 will call all_reduce .* computed by operations with hash \w+ as collective number 2",
}
FAULTS = {
    "raise in a recompute": r"rank 1 raised in step 2: ValueError: user bug",
    "kill in a recompute": r"rank 0 gives no sign of life in step 2: its process was killed or is frozen",
    "freeze in backward": r"rank 1 gives no sign of life in step 2: its process was killed or is frozen",
}


def test_what_differs_is_found_before_anything_is_sent():
    ranks = fckpt.launch(fault_programs.differs, 3, 20.0)
    for seen in ranks:
        assert seen.pop("then") == "[3.0, 3.0, 3.0]"
        assert set(seen) == set(DIFFERENCES)
        for name, said in seen.items():
            assert said.startswith("1 ") and re.search(DIFFERENCES[name], said), said


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_within_backward_ends_all(name: str, tmp_path: Path):
    start = time.monotonic()
    with pytest.raises(ValueError if "raise" in name else RankFailure) as caught:
        fckpt.launch(fault_programs.faulty, 2, name, str(tmp_path), TIMEOUT, timeout_seconds=TIMEOUT)
    assert time.monotonic() - start < 60
    (written,) = tmp_path.iterdir()
    culprit = fault_programs.FAULTS[name][0]
    seconds, blamed, said = written.read_text().split(" ", 2)
    assert written.name == str(1 - culprit) and blamed == str(culprit) and re.search(FAULTS[name], said), said
    assert float(seconds) < TIMEOUT + 5
    if "raise" in name:
        assert str(caught.value) == "user bug"


def test_a_batch_of_another_size_on_one_rank_is_named(tmp_path: Path):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 waits at .*step\(float32\[3\]\), but most ranks do not arrive"):
        fckpt.launch(fault_programs.uneven, 3, str(tmp_path), TIMEOUT, timeout_seconds=TIMEOUT)
    assert time.monotonic() - start < 60
    for rank in range(3):
        seconds, blamed, said = (tmp_path / str(rank)).read_text().split(" ", 2)
        assert blamed == "1" and "step(float32[4])" in said and float(seconds) < TIMEOUT + 5


def waiting(monkeypatch: pytest.MonkeyPatch) -> Guard:
    """Rank 1 of two, of which the other one lives and says nothing."""
    guard = Guard(1, 2)
    guard.store, guard.timeout_seconds = dist.HashStore(), 0.2
    monkeypatch.setattr(guard, "_silent", lambda before: [])
    return guard


def test_who_waits_for_what_rank_0_makes_does_not_wait_for_a_rank_0_that_is_elsewhere(monkeypatch: pytest.MonkeyPatch):
    guard = waiting(monkeypatch)
    guard.store.set("where/0", '["train.py:12", false]')  # type: ignore[union-attr]
    text = r"rank 0 does not arrive at a plan, where rank 1 waits\. Rank 0 is at train.py:12\."
    with pytest.raises(RankFailure, match=text):
        guard.share("a plan", "mine", lambda said: "")


def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    guard = waiting(monkeypatch)
    guard.timeout_seconds = 60.0
    guard.store.set("ended/0", "")  # type: ignore[union-attr]
    for wait in (lambda: guard.share("a plan", "mine", lambda said: ""), lambda: guard.agree("step", [])):
        with pytest.raises(RankFailure, match=r"rank 0 has ended its program, while others wait at (a plan|step)"):
            wait()


def stall(others_run: threading.Event) -> None:
    """Rank 1 sleeps, and does so when another rank has run until it waits."""
    if int(fckpt.axis_index("data")) != 1:
        others_run.set()
        return
    rank = transport_of(current_mesh("stall").key)
    assert isinstance(rank, Thread)
    with rank.idle():
        others_run.wait()
    time.sleep(1.0)


def stuck(others_run: threading.Event) -> Any:
    stall(others_run)
    return fckpt.psum(torch.ones(1), "data")


def stuck_before_a_mapped_function(others_run: threading.Event) -> Any:
    mapped = fckpt.shard_map(
        lambda x: fckpt.psum(x, "data"), fckpt.init_mesh({"data": 3}), in_specs=P("data"), out_specs=P()
    )
    stall(others_run)
    return mapped(torch.ones(1))


@pytest.mark.parametrize("program", [stuck, stuck_before_a_mapped_function])
def test_a_simulated_rank_that_lives_and_does_not_come_is_named(
    program: Callable[[threading.Event], Any],
):
    with pytest.raises(
        RankFailure, match=r"rank 1 did not arrive within 0.2 s, .* Rank 1 is at test_faults.py:\d+"
    ) as caught:
        fckpt.sim({"data": 3}, timeout_seconds=0.2).run(program, threading.Event())
    assert caught.value.rank == 1


def test_simulated_ranks_that_wait_for_their_turn_are_not_late():
    def program() -> torch.Tensor:
        time.sleep(0.2)  # six of them, one after another
        return fckpt.psum(torch.ones(1), "data")

    assert fckpt.sim({"data": 6}, timeout_seconds=0.6).run(program)[0] == 6


def test_simulated_ranks_that_wait_for_one_another_are_told():
    def program() -> torch.Tensor:
        axis = "data" if int(fckpt.axis_index(("data", "model"))) in (0, 3) else "model"
        return fckpt.psum(torch.ones(1), axis)

    with pytest.raises(RankFailure, match=r"did not arrive within 0\.3 s"):
        fckpt.sim({"data": 2, "model": 2}, timeout_seconds=0.3).run(program)
