"""The bench of data parallel training: it runs from end to end on real processes, and its parts are right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

import torch

from benches import multi_gpu
from benches.common.data_parallel import NAIVE, Planned, Rank, join, plain_plan, planned_step
from benches.common.data_parallel_runs import PLANNED_AS, Result
from benches.common.results import read_json
from benches.common.timing import spread

METHODS = ("DDP + layers", "DDP + bottlenecks", "FSDP2 + layers", "FSDP2 + bottlenecks")


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "table.json"
    assert multi_gpu.main(["--tiny", "--device", "cpu", "--rounds", "1", "--json", str(target)]) == 0
    document = read_json(target)
    assert document["command"].startswith("python -m benches multi_gpu --tiny")
    assert document["machine"]["torch_threads"] >= 1
    rows = {row["name"]: row for row in document["rows"]}
    assert [*rows] == [NAIVE, *METHODS, "fckpt in 80%", *(PLANNED_AS + name for name in METHODS)]
    # Two ranks: a sum of two has one order only, and so all gradients are bitwise the same.
    assert all(row["difference"] == 0 for row in rows.values())
    assert all(rows[name]["step_seconds"]["rounds"] == 1 for name in METHODS)
    parameters = 4 * 2666
    assert rows[NAIVE]["held_bytes"] > 3 * parameters  # with their momentum, and the buckets of messages
    assert 0 < rows["FSDP2 + layers"]["held_bytes"] < 2 * parameters
    assert rows["DDP + bottlenecks"]["peak_bytes"] < rows[NAIVE]["peak_bytes"]
    planned = [row for name, row in rows.items() if name.startswith("fckpt")]
    for row in planned:
        assert row["step_bytes"] == row["predicted_bytes"] <= row["budget_bytes"]
        assert 2 * parameters < row["held_bytes"] < 3 * parameters
        assert row["statistics_equal"] and row["least_bytes"] is None
    assert rows["fckpt in 80%"]["peak_bytes"] <= 0.8 * rows[NAIVE]["peak_bytes"]
    printed = capsys.readouterr().out
    assert "fckpt as FSDP2 + layers" in printed and "complaints about 10 rows." in printed


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, which is this process: starting another takes seconds."""
    monkeypatch.setattr(multi_gpu, "run", lambda fn, ranks, *args: fn(*args))


ONE = ["--tiny", "--device", "cpu", "--threads", "1", "--processes", "1"]


@pytest.mark.usefixtures("here")
def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "scaling.json"
    assert multi_gpu.main([*ONE, "--rounds", "1", "--scaling", "1", "--json", str(target)]) == 0
    assert "Weak scaling, 4 images for each process of 1 threads" in capsys.readouterr().out
    rows = read_json(target)["scaling"]
    assert [row["ranks"] for row in rows] == [1]
    assert rows[0]["planned_to_naive"]["rounds"] == 1 and "plan" not in rows[0]


SETTING = multi_gpu.parse(["--tiny", "--device", "cpu", "--threads", "1", "--processes", "1"])


@pytest.fixture(scope="module")
def rank() -> Rank:
    """This process as the only rank."""
    return join(SETTING)


def test_a_step_is_sgd_on_the_loss(rank: Rank) -> None:
    planned = Planned(rank, planned_step(rank, plain_plan(rank)))
    model = copy.deepcopy(rank.task.loss)
    model(rank.task.inputs, rank.task.labels).backward()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4).step()
    planned.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(planned.params[name], parameter)
    for name, buffer in model.named_buffers():
        assert torch.equal(planned.buffers[name], buffer)


# ---- what is wrong -----------------------------------------------------------------------------------


def test_the_targets_are_checked() -> None:
    def row(name: str, mebibytes: int, ratio: float, **options: Any) -> Result:
        once = spread([ratio])
        return Result(name, peak_bytes=mebibytes << 20, step_seconds=once, time_ratio=once, **options)

    naive, ddp = row(NAIVE, 100, 1.0), row("DDP + layers", 40, 1.3)
    good = row("fckpt in 57%", 56, 1.09, predicted_bytes=56 << 20)
    even = row("fckpt as DDP + layers", 40, 1.2, predicted_bytes=40 << 20, other="DDP + layers", to_other=spread([0.9]))
    rows = [naive, ddp, good, even]
    multi_gpu.check(rows, ranks=2, fraction=0.57)
    assert not [text for found in rows for text in found.complaints]

    good.time_ratio, good.peak_bytes = spread([1.2]), 58 << 20
    even.to_other, even.difference, even.statistics_equal = spread([1.1]), 1e-7, False
    ddp.difference = 1e-7
    multi_gpu.check(rows, ranks=2, fraction=0.57)
    assert [text.split(" ")[0] for text in good.complaints] == ["holds", "takes"]
    assert [text.split(" ")[0] for text in even.complaints] == ["gradients", "statistics", "takes"]
    assert len(ddp.complaints) == 1
    ddp.complaints.clear()
    multi_gpu.check(rows, ranks=3, fraction=0.57)
    assert not ddp.complaints  # three summands have several orders


# ---- the command line --------------------------------------------------------------------------------


def test_arguments() -> None:
    parsed = multi_gpu.parse(["--device", "cpu"])
    assert (parsed.processes, parsed.batch_size, parsed.depth, parsed.growth) == (2, 32, 40, 12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch_size", "3"], "cannot be divided among 2 processes"),
        (["--depth", "41"], "4 layers and a multiple of 6, not 41"),
        (["--budget", "1.5"], "above 0 and at most 1"),
        (["--processes", "0"], "are 1 or more"),
    ],
)
def test_mistakes_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        multi_gpu.parse(["--device", "cpu", *arguments])
    assert said in capsys.readouterr().err
