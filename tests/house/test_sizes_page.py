"""The table of changing sizes in docs/concepts.md is what the bench wrote, and what the page says about it is true."""

from __future__ import annotations

from typing import Any

from pages import ROOT

from benches.common.results import read_json

FOUND: list[dict[str, Any]] = read_json(ROOT / "benches" / "results" / "sizes-cpu.json")["rows"]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f}"


def lines() -> list[str]:
    found = []
    for row in FOUND:
        ratios = [number(row[way]) for way in ("checkpointed", "compiled", "planned")]
        first = [row["network"], f"{row['plain_seconds']:.1f}", number(row["budget"]), str(row["above"])]
        times = [milliseconds(row[what]) for what in ("planning_seconds", "new_size_seconds")]
        last = [f"{row['kept']} of {row['steps']}", *times]
        found.append(f"| {' | '.join([*first, *ratios, *last])} |")
    return found


def test_the_table_is_what_the_bench_wrote() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    assert len(lines()) == 7
    for line in lines():
        assert line in text


def test_budgets_are_kept_and_results_are_equal() -> None:
    for row in FOUND:
        assert row["kept"] == row["equal"] == row["steps"] and not row["refused"]
