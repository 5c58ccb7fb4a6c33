"""What goes wrong on one rank of several processes is an error on all, that names the rank, in bounded time."""

from __future__ import annotations

import re
import time
from pathlib import Path

import fault_programs
import pytest

import fckpt
from fckpt.errors import RankFailure

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
    "kill in a recompute": r"rank 0 gives no sign of life, in step 2: its process was killed or is frozen",
    "freeze in backward": r"rank 1 gives no sign of life, in step 2: its process was killed or is frozen",
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
    with pytest.raises(RankFailure, match=r"rank 1 waits at .*step\(float32\[3\]\), where most others do not come"):
        fckpt.launch(fault_programs.uneven, 3, str(tmp_path), TIMEOUT, timeout_seconds=TIMEOUT)
    assert time.monotonic() - start < 60
    for rank in range(3):
        seconds, blamed, said = (tmp_path / str(rank)).read_text().split(" ", 2)
        assert blamed == "1" and "step(float32[4])" in said and float(seconds) < TIMEOUT + 5
