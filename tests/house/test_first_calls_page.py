"""The table of first calls in docs/concepts.md is what the bench wrote, and what the page says about it is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from benches.common.results import read_json

STAGES = ("capture", "trace", "price", "solve", "lower")
FOUND: list[dict[str, Any]] = read_json(ROOT / "benches" / "results" / "first-calls-cpu.json")["rows"]
FRESH = [row for row in FOUND if row["folder"] == "new folder"]
STORED = {row["network"]: row for row in FOUND if row["folder"] == "plans on disk"}


def lines() -> list[str]:
    found = []
    for row in FRESH:
        stored = STORED[row["network"]]["call_seconds"]
        seconds = [*(row["stage_seconds"][stage] for stage in STAGES), row["call_seconds"], stored]
        slower = "" if row["solved_overhead"] is None else f"{100 * (row['overhead'] - row['solved_overhead']):+.2f}"
        cells = [row["network"], f"{row['operations']:,}", *(f"{s:.1f}" for s in seconds), slower]
        found.append(f"| {' | '.join(cells).rstrip()} |")
    return found


def test_the_table_is_what_the_bench_wrote() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    assert len(lines()) == 6
    for line in lines():
        assert line in text


def test_stored_plans_are_read_and_quick_plans_are_about_as_fast_as_the_solvers() -> None:
    for row in FRESH:
        stored = STORED[row["network"]]
        assert not row["complaints"] and not stored["complaints"]
        assert (row["plans"]["quick"], stored["plans"]["read"]) == (1, 1)
        assert row["overhead"] <= row["solved_overhead"] + 0.005
        assert stored["call_seconds"] < row["call_seconds"]


@pytest.mark.filterwarnings("ignore")
def test_the_bench_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from benches import first_calls

    path = tmp_path / "first.json"
    assert first_calls.main(["--tiny", "--networks", "T5-small", "--json", str(path)]) == 0
    fresh, stored = read_json(path)["rows"]
    assert not fresh["complaints"] and not stored["complaints"]
    assert (fresh["plans"], stored["plans"]) == ({"quick": 1, "read": 0}, {"quick": 0, "read": 1})
    assert sum(fresh["stage_seconds"].values()) <= fresh["call_seconds"]
    assert stored["stage_seconds"]["price"] < fresh["stage_seconds"]["price"]
    assert "0 complaints about 2 rows" in capsys.readouterr().out
