"""The bench of eighteen networks: its count of memory, its searches, and the script from end to end."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytest.importorskip("rich")

import torch
from torch import nn

import fckpt
from benches import networks
from benches.common.network_plans import Point, Report, Target, accumulating, search
from benches.common.results import read_json
from benches.common.training import Task, TrainingLoss
from benches.models.published_networks import NETWORKS
from fckpt._memory import measure_peak
from fckpt.cost import Analytic, Measured, profiles
from fckpt.graph import simulate

CPU = torch.device("cpu")


def settings(**changes: object) -> argparse.Namespace:
    """Those of a quick run: costs are estimated, and one round is timed."""
    options = {"size": "tiny", "device": CPU, "costs": Analytic(profiles["cpu"]), "planned": False, "solver": "greedy"}
    return argparse.Namespace(**{**options, "solvers": ("knapsack",), "points": 0, "rounds": 1, **changes})


def nothing(what: str) -> None:
    """No progress is shown."""


def test_gradients_that_are_there_cost_nothing() -> None:
    """By the allocator: what the second of two steps takes that add up their gradients."""
    inner = nn.Sequential(nn.Linear(64, 512, bias=False), nn.ReLU(), nn.Linear(512, 10, bias=False))
    task = Task("mlp", "", TrainingLoss(inner), torch.randn(32, 64), torch.zeros(32, dtype=torch.int64))
    plain = fckpt.plan(task.loss, task.inputs, task.labels)

    def step() -> None:
        task.loss(task.inputs, task.labels).backward()

    step()
    counted = accumulating(plain.graph.plain)
    predicted = simulate(counted, plain.schedule).peak_nbytes
    assert predicted == measure_peak(step).peak_bytes
    assert predicted < plain.peak_bytes


def test_a_search_ends_between_what_fits_and_what_does_not() -> None:
    too_small, enough = search(lambda nbytes: nbytes >= 12_345, 100, 10**6)
    assert too_small < 12_345 <= enough <= 1.01 * too_small


def test_targets() -> None:
    assert Target(0.4, 0.1, 0.2).is_met(0.5)
    assert Target(0.6, 0.55, 0.04).is_met(0.5)
    assert not Target(0.6, 0.55, 0.06).is_met(0.5)
    assert not Target(0.6, 0.45, 0.01).is_met(0.5)
    assert not Target(None, 0.6, None).is_met(0.5)


def test_what_is_wrong_is_said() -> None:
    point = Point("auto", "same memory", complaints=["peaks 1 bytes above its budget"])
    report = Report("x", "X", "", {}, points=[point], targets={"memory": Target(0.9, 0.2, 0.5)})
    first, second = report.everything_wrong()
    assert first == "auto, same memory: peaks 1 bytes above its budget"
    assert second.startswith("memory: 0.90 of the reference's")


def test_a_network_is_run() -> None:
    report = networks.examine(settings(costs=Measured(cache=False)), "alexnet", nothing)
    assert [*report.complaints, *(text for point in report.points for text in point.complaints)] == []
    by_title = {point.title: point for point in report.points}
    plain, torchs, ours = by_title["plain"], by_title["torch, per block"], by_title["greedy, same memory"]
    assert "knapsack, same memory" in by_title
    assert plain.predicted_step_bytes == plain.measured_step_bytes
    assert ours.predicted_step_bytes == ours.measured_step_bytes
    assert torchs.peak_bytes is not None
    assert plain.peak_bytes is not None
    assert torchs.peak_bytes < plain.peak_bytes
    for point in report.points:
        if point.predicted_bytes is None:
            assert point.least_bytes is not None
            continue
        assert point.unequal == []
        assert point.time_ratio is not None
        assert point.budget_bytes is None or point.predicted_bytes <= point.budget_bytes
        if point.lower_bound is not None:
            assert point.predicted_overhead is not None
            assert point.lower_bound <= point.predicted_overhead + 1e-9


def test_a_difference_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "unequal", lambda one, other: ["gradient model.head.weight"])
    monkeypatch.setattr(networks, "plan_all", lambda planned, report, *_: [(Point("plain", predicted_bytes=1), None)])
    monkeypatch.setattr(networks, "targets_of", lambda *_: {})
    report = networks.examine(settings(), "alexnet", nothing)
    different, wrong = (complaint for point in report.points for complaint in sorted(point.complaints))
    assert different == "1 results not bitwise equal: gradient model.head.weight"
    assert wrong.startswith("predicted 1 bytes, measured ")


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "networks.json"
    arguments = ["--planned", "--tiny", "--networks", "vgg11", "--points", "3", "--solver", "greedy"]
    assert networks.main([*arguments, "--json", str(target)]) == 0
    document = read_json(target)
    assert document["command"].startswith("python -m benches networks --planned")
    (report,) = document["networks"]
    assert report["published"]["ogc_megabytes"] == NETWORKS["vgg11"].published.ogc_megabytes
    titles = [point["solver"] for point in report["points"]]
    assert titles[:3] == ["plain", "torch", "ogc"]
    assert set(report["targets"]) == {"overhead", "memory"}
    assert len(report["curve"]) == 3
    peaks = [point["predicted_bytes"] for point in report["curve"]]
    assert peaks == sorted(peaks)
    assert report["floor_bytes"] <= report["least_bytes"] <= peaks[0] == report["curve"][0]["budget_bytes"]
    assert all(point["time_ratio"] is None for point in report["points"])
    assert "VGG-11" in capsys.readouterr().out
    arguments[3:4] = ["vgg11", "alexnet"]
    assert networks.main([*arguments, "--resume", "--json", str(target)]) == 0
    first, second = read_json(target)["networks"]
    assert first == report and second["network"] == "alexnet"
    assert "VGG-11" not in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        networks.parse(["--help"])
    assert "--planned" in capsys.readouterr().out
