"""Benches of whole steps, of calls with derivatives inside, of changing sizes and of kernels, in their tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rich")

from benches import calls, kernels, sizes, steps
from benches.common.results import read_json

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WAYS = ("plain", "blocks", "hooks", "step, free", "step", "step, least")


def test_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "steps.json"
    arguments = [
        "--tiny",
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--networks",
        "mlp",
        "--optimizers",
        "momentum",
        "--check",
    ]
    assert steps.main([*arguments, "--json", str(target)]) == 0
    (report,) = read_json(target)["networks"]
    assert [(row["way"], row["accumulate"]) for row in report["rows"]] == [
        (way, count) for count in (1, 4) for way in WAYS
    ]
    for row in report["rows"]:
        assert row["unequal"] == row["complaints"] == []
        if row["way"].startswith("step"):
            assert row["peak_bytes"] == row["predicted_bytes"] <= (row["budget_bytes"] or row["peak_bytes"])
    assert "0 complaints about 1 networks." in capsys.readouterr().out


def test_calls(tmp_path: Path) -> None:
    target = tmp_path / "calls.json"
    names = ["step", "Hessian-vector product"]
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--calls", *names]
    assert calls.main([*arguments, "--json", str(target)]) == 0
    rows = read_json(target)["rows"]
    assert [(row["call"], row["budget"]) for row in rows] == [(n, b) for n in names for b in ("half", "least")]
    for row in rows:
        assert not [text for text in row["complaints"] if "feasible" not in text]
        assert row["peak_bytes"] is None or row["peak_bytes"] == row["predicted_bytes"]


def test_sizes(tmp_path: Path) -> None:
    target = tmp_path / "sizes.json"
    arguments = ["--tiny", "--device", "cpu", "--no-compile", "--networks", "messages", "bert", "--check"]
    assert sizes.main([*arguments, "--json", str(target)]) == 0
    for row in read_json(target)["rows"]:
        assert row["kept"] == row["equal"] == row["steps"] - row["refused"] > 0
        assert row["complaints"] == [] and row["planned"] > 0


@pytest.mark.slow
def test_kernels(tmp_path: Path) -> None:
    target = tmp_path / "kernels.json"
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--networks", "ReLU perceptron"]
    assert kernels.main([*arguments, "--json", str(target)]) == 0
    rows = {row["method"]: row for row in read_json(target)["rows"]}
    assert list(rows) == ["plain", "torch.compile", "fckpt aten", "fckpt exact", "fckpt fused"]
    for method in ("fckpt aten", "fckpt exact"):
        assert rows[method]["difference"] == 0
    for method in ("fckpt aten", "fckpt exact", "fckpt fused"):
        assert rows[method]["peak_bytes"] <= rows["plain"]["peak_bytes"] / 2
