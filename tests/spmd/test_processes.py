"""Real processes over gloo: the same as a simulation, the same as one process, and never a hang."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import spmd_programs
import torch

import fckpt
from fckpt.errors import ArgumentTypeError, RankFailure

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
"""A mean over ranks adds in another order than a mean over a batch."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return fckpt.launch(spmd_programs.everything, 4)


def test_processes_do_what_a_simulation_does(found: list[dict[str, Any]]):
    simulated = fckpt.sim({"a": 2, "b": 2}).run(spmd_programs.collectives)
    for mine, theirs in zip(found, simulated, strict=True):
        for x, y in zip(mine["collectives"], theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)  # bit for bit; NaN equals NaN


@pytest.mark.parametrize("name", spmd_programs.PROGRAMS)
def test_gradients_are_those_of_one_process(name: str, found: list[dict[str, Any]]):
    expected = spmd_programs.reference()
    assert len(found) == 4
    for result in found:
        for key, gradient in expected.items():
            torch.testing.assert_close(result[name][key], gradient, **CLOSE)


@pytest.mark.parametrize("name", spmd_programs.PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_one_process_simulated(name: str, ranks: int):
    axes = {"grid": {"data": 2, "model": ranks // 2}, "tensor_parallel": {"model": ranks}}.get(name, {"data": ranks})
    expected = spmd_programs.reference()
    for result in fckpt.sim(axes).run(spmd_programs.PROGRAMS[name]):
        for key, gradient in expected.items():
            torch.testing.assert_close(result[key], gradient, **CLOSE)


FAULTS = {
    "raise": r"rank 1 raised in step 1: ValueError: user bug",
    "kill": r"rank 1 gives no sign of life in step 1: its process was killed or is frozen",
    "freeze": r"rank 1 gives no sign of life in step 1: its process was killed or is frozen",
    "shape": r"in step 1 rank 1 calls all_reduce sum over data of \(1,\) .* where others call all_reduce .* of \(3,\)",
    "sleep": r"rank 1 does not arrive at all_reduce .* Rank 1 is alive, at spmd_programs.py:\d+",
    "end": r"rank 1 has ended its program, while others wait for it in step 1",
    "skip": r"in step 1 rank 1 calls .* as collective number 2, where others call all_reduce",
    "swap": r"rank 1 will call .*, computed by operations with hash .* where others call all_reduce .*, computed by",
    "elsewhere": r"in step 1 rank 1 calls .* at spmd_programs.py:\d+ .* where others call .* at spmd_programs.py:\d+",
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", FAULTS)
def test_the_others_name_the_rank_and_never_hang(kind: str, tmp_path: Path):
    timeout, start = 4.0, time.monotonic()
    with pytest.raises(ValueError if kind == "raise" else RankFailure) as caught:
        fckpt.launch(spmd_programs.faulty, 3, kind, str(tmp_path), timeout, timeout_seconds=timeout)
    assert time.monotonic() - start < 60
    if kind == "raise":
        assert "on rank 1" in caught.value.__notes__[0] and "user bug" in str(caught.value)
    for rank in (0, 2):
        seconds, culprit, said = (tmp_path / str(rank)).read_text().split(" ", 2)
        assert culprit == "1" and re.search(FAULTS[kind], said), said
        assert float(seconds) < timeout + 5 + 10 * (kind == "swap")  # tracing is slow on a busy machine


def test_what_cannot_be_imported_cannot_be_launched():
    with pytest.raises(ArgumentTypeError, match=r"cannot import the function .* run it with fckpt.sim"):
        fckpt.launch(lambda: None, 2)
