"""The demo: all ways give the same bits, a budget is kept, and what fails is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torchvision_shim  # noqa: F401  before transformers

from benches.common.results import read_json

SMALL = ["--layers", "2", "--hidden", "64", "--batch", "2", "--tokens", "64", "--repeats", "1", "--device", "cpu"]


@pytest.fixture
def demo() -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("rich")
    from benches import demo

    return demo


@pytest.mark.parametrize(("model", "budget"), [("bert", 1.0), ("vit", 0.9)])
def test_every_way_gives_the_same_bits(demo: Any, model: str, budget: float, tmp_path: Path, capsys: Any) -> None:
    report = tmp_path / "demo.json"
    assert demo.main([*SMALL, "--models", model, "--budgets", str(budget), "--json", str(report)]) == 0
    (result,) = read_json(report)["results"]
    ways = result["ways"]
    assert [way["name"] for way in ways] == [
        "plain", "checkpoint per block", "fckpt.remat_blocks", f"fckpt.remat, budget={budget:g}",
    ]  # fmt: skip
    assert not any(way["unequal"] for way in ways) and not result["complaints"]
    plain, *_, within = ways
    assert within["peak_bytes"] <= budget * plain["peak_bytes"] * 1.001
    printed = capsys.readouterr().out
    assert printed.count("equal |") == 3 and f"| `fckpt.remat, budget={budget:g}` | " in printed


def test_a_way_that_fails_is_said(demo: Any, capsys: Any) -> None:
    assert demo.main([*SMALL, "--models", "vit", "--budgets", "0.01"]) == 1
    assert "fckpt.remat, budget=0.01 failed: BudgetError" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--hidden", "65"], ["--budgets", "2"], ["--tokens", "600"], ["--repeats", "0"]])
def test_wrong_options(demo: Any, wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        demo.parse(wrong)
