"""The table of tiles in docs/guide.md is what the bench wrote, and what it shows is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from benches.common.results import read_json

FOUND: list[dict[str, Any]] = read_json(ROOT / "benches" / "results" / "tiles-cpu.json")["rows"]


def lines() -> list[str]:
    found, plain = [], 0
    for row in FOUND:
        plain = row["peak_bytes"] if row["tile"] == "plain" else plain
        name = {"plain": "plain", "False": "no tiles", "exact": '`tile="exact"`', "True": "`tile=True`"}[row["tile"]]
        budget = {"": "", "least": ", least budget", "half": ", half the peak"}[row["budget"]]
        share = f"{row['peak_bytes'] / 2**20:.1f} ({row['peak_bytes'] / plain:.3f})"
        time = f"{row['time_ratio']['median']:.2f}"
        difference = f"{row['difference']:.1e}" if row["difference"] else "0"
        found.append(f"| {' | '.join((row['step'], name + budget, share, time, difference))} |")
    return found


def test_the_table_is_what_the_bench_wrote() -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    for line in lines():
        assert line in text


def test_predicted_peaks_are_the_measured_ones_and_exact_tiles_differ_nowhere() -> None:
    for row in FOUND:
        if row["tile"] != "plain":
            assert row["predicted_bytes"] == row["peak_bytes"]
        assert row["tile"] == "True" or row["difference"] == 0


def test_the_bench_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from benches import tiles

    assert tiles.main(["--tiny", "--rounds", "1", "--device", "cpu", "--json", str(tmp_path / "tiles.json")]) == 0
    assert {row["tile"] for row in read_json(tmp_path / "tiles.json")["rows"]} == {"plain", "False", "exact", "True"}
    assert "attention" in capsys.readouterr().out
