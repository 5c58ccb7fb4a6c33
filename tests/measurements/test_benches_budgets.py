"""Benches that plan: every network trains in its tiny size, and the scripts run from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rich")

import torch

from benches import budgets
from benches.common.results import read_json
from benches.common.training import buffers_of, outcome_of, size_of, unequal
from benches.models.budget_networks import NETWORKS
from benches.models.wrapping import TorchCheckpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_trains_and_has_blocks_to_wrap(name: str) -> None:
    task = NETWORKS[name].task("tiny", CPU)
    buffers = buffers_of(task.loss)
    plain = outcome_of(task.loss, task, buffers)
    assert all(result is not None and result.isfinite().all() for result in plain.values())
    assert not unequal(plain, outcome_of(task.loss, task, buffers))
    wrapped = outcome_of(task.in_blocks(TorchCheckpoint), task, buffers)
    # PyTorch's checkpoint updates statistics a second time.
    assert not [what for what in unequal(plain, wrapped) if not what.startswith("buffer")]


def test_networks_have_the_same_sizes() -> None:
    assert {tuple(network.sizes) for network in NETWORKS.values()} == {("cuda", "cpu", "quick", "tiny")}
    assert [size_of(CPU), size_of(CPU, quick=True), size_of(CPU, tiny=True)] == ["cpu", "quick", "tiny"]
    assert size_of(torch.device("cuda")) == "cuda"


def test_differences_are_named() -> None:
    task = NETWORKS["resnet50"].task("tiny", CPU)
    buffers = buffers_of(task.loss)
    one = outcome_of(task.loss, task, buffers)
    with torch.no_grad():
        buffers[0].add_(1)
        next(task.loss.parameters())[0].fill_(0.5)
    found = unequal(one, outcome_of(task.loss, task, buffers))
    assert "loss" in found
    assert "gradient model.features.0.0.weight" in found
    assert "buffer model.features.0.1.running_mean" in found
    assert "generator" not in found


def test_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "budgets.json"
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--networks", "vit", "--budgets", "0.6", "0.01"]
    assert budgets.main([*arguments, "--json", str(target)]) == 0
    document = read_json(target)
    assert document["command"].startswith("python -m benches budgets --tiny")
    (report,) = document["networks"]
    fits, refused, least = report["rows"]
    for row in (fits, least):
        assert row["predicted_bytes"] <= row["budget_bytes"]
        assert abs(row["predicted_bytes"] - row["peak_bytes"]) <= 0.02 * row["peak_bytes"]
        assert row["unequal"] == row["complaints"] == []
    assert refused["peak_bytes"] is None
    assert refused["least_bytes"] == least["budget_bytes"]
    assert "0 complaints about 1 networks." in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        budgets.parse(["--help"])
    assert "--networks" in capsys.readouterr().out


def test_a_budget_is_a_fraction() -> None:
    with pytest.raises(SystemExit):
        budgets.parse(["--budgets", "2"])
