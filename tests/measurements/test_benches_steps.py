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
def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHARES", {"0.5": 0.5})  # each budget compiles for some seconds
    monkeypatch.setattr(kernels, "OWN", (0.5,))
    target = tmp_path / "kernels.json"
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--check", "--networks", "ReLU perceptron"]
    assert kernels.main([*arguments, "--json", str(target)]) == 0
    rows = {(row["method"], row["budget"]): row for row in read_json(target)["rows"]}
    ours = [(method, "0.5") for method in ("aten", "exact", "fused", "around")]
    assert list(rows) == [("plain", ""), ("compile", ""), ("compile", "0.5"), *ours, ("backend", "0.5")]
    for method in ("aten", "exact"):
        assert rows[method, "0.5"]["difference"] == 0
    for key, row in rows.items():
        assert not row["refused"] and row["peak_bytes"] <= (row["budget_bytes"] or row["peak_bytes"]), key


def test_kernels_above_a_budget_and_with_other_bits_are_complaints() -> None:
    plain = kernels.Method("net", "plain", peak_bytes=1000)
    rows = [kernels.Method("net", kind, "0.5", peak_bytes=600, difference=1e-7) for kind in ("exact", "fused")]
    kernels._judge([plain, *rows], least=300)
    assert [len(row.complaints) for row in (plain, *rows)] == [0, 2, 1]


def test_the_kernel_bench_has_twelve_networks() -> None:
    assert len(kernels.cases(tiny=True)) == 12
    for make in kernels.cases(tiny=True).values():
        fn, leaves = make()
        assert fn().ndim == 0 and all(leaf.requires_grad for leaf in leaves)
