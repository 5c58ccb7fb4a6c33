"""The tables of calls and of whole steps on the pages are what their benches wrote."""

from __future__ import annotations

from typing import Any

from pages import ROOT

from benches.common.results import read_json
from benches.common.timing import Spread
from benches.steps_page import CASES, PAGE, ways

RESULTS = ROOT / "benches" / "results"


def _spread(value: dict[str, Any]) -> str:
    return str(Spread(**value))


def test_calls() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    rows = read_json(RESULTS / "calls-cpu.json")["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["complaints"] == [] and row["peak_bytes"] == row["predicted_bytes"] <= row["budget_bytes"]
        plain, peak = row["plain_bytes"], row["peak_bytes"]
        share, extra = f"{peak / plain:.2f}", f"{row['predicted_overhead']:.2f}"
        cells = [row["call"], f"{plain / 2**20:.1f} MiB", row["budget"], share, extra, _spread(row["time_ratio"])]
        assert f"| {' | '.join(cells)} |" in page
    assert all(row["time_ratio"]["median"] < 1 for row in rows if row["budget"] == "half")


FOUND = read_json(RESULTS / "steps-cpu.json")
WAYS = ("plain", "blocks", "hooks", "step, free", "step", "step, least")


def test_the_tables_of_steps() -> None:
    page = (ROOT / "docs" / "whole-step.md").read_text()
    assert PAGE.rewritten(page, FOUND) == page, "run `python -m benches steps_page`"


def test_steps_leave_the_same_bits_in_the_predicted_bytes() -> None:
    assert FOUND["networks"]
    for report in FOUND["networks"]:
        assert report["complaints"] == []
        for case in CASES:
            rows = ways(report, *case)
            assert tuple(rows) == WAYS
            for way in WAYS[3:]:
                row = rows[way]
                assert row["unequal"] == row["complaints"] == []
                assert row["peak_bytes"] == row["predicted_bytes"] <= (row["budget_bytes"] or row["peak_bytes"])
