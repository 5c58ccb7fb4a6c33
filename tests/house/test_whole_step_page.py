"""The tables of calls and of whole steps on the pages are what their benches wrote."""

from __future__ import annotations

from typing import Any

import pytest
from pages import ROOT

from benches.common.results import read_json
from benches.steps import NETWORKS

RESULTS = ROOT / "benches" / "results"


def _spread(value: dict[str, Any]) -> str:
    return f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


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


STEPS = read_json(RESULTS / "steps-cpu.json")["networks"]
PAGE = (ROOT / "docs" / "whole-step.md").read_text()
CASES = [(optimizer, count) for optimizer in ("momentum", "adamw") for count in (1, 4)]
WAYS = ("plain", "blocks", "hooks", "step, free", "step", "step, least")


def ways(report: dict[str, Any], optimizer: str, count: int) -> dict[str, dict[str, Any]]:
    """The rows of a network, by way."""
    return {row["way"]: row for row in report["rows"] if (row["optimizer"], row["accumulate"]) == (optimizer, count)}


def line(report: dict[str, Any], optimizer: str, count: int) -> str:
    """A network's line in the table of an optimizer and a number of microbatches."""
    rows = ways(report, optimizer, count)
    plain = rows["plain"]["peak_bytes"]
    time = lambda way, key="time_ratio": f"{rows[way][key]['median']:.2f}"
    peak = lambda way: f"{rows[way]['peak_bytes'] / plain:.2f}"
    cells = [report["name"], f"{plain / 2**20:.1f}", f"{report['today_bytes'] / plain:.2f}"]
    cells += [cell for way in ("blocks", "hooks") for cell in (peak(way), time(way))]
    cells += [time("step"), time("step", "time_to_hooks"), peak("step, least"), time("step, least")]
    return f"| {' | '.join([*cells, time('step, free')])} |"


def said() -> str:
    """Which networks the tables have, in words of the page."""
    return f"The tables have {len(STEPS)} of its {len(NETWORKS)} networks."


def targets() -> list[str]:
    """How many networks and cases reach each target, in words of the page."""
    cases = [(report, ways(report, *case)) for report in STEPS for case in CASES]
    half = {
        count: sum(
            2 * max(ways(r, o, count)["step, least"]["peak_bytes"] for o in ("momentum", "adamw")) <= r["today_bytes"]
            for r in STEPS
        )
        for count in (1, 4)
    }
    faster = sum(rows["step"]["time_to_hooks"]["median"] < 1 for _, rows in cases)
    slower = sum(rows["step, free"]["slower"] for _, rows in cases)
    return [
        f"at most half of today's least on {half[1]} of {len(STEPS)} networks; with 4 microbatches, on {half[4]}",
        f"less time than hooks in {faster} of {len(cases)} cases",
        f"slower than plain PyTorch beyond noise in {slower} of {len(cases)} cases",
    ]


@pytest.mark.parametrize(("optimizer", "count"), CASES)
def test_the_tables_of_steps(optimizer: str, count: int) -> None:
    for report in STEPS:
        assert line(report, optimizer, count) in PAGE


def test_what_the_page_says_of_steps() -> None:
    assert all(words in " ".join(PAGE.split()) for words in (said(), *targets()))


def test_steps_leave_the_same_bits_in_the_predicted_bytes() -> None:
    for report in STEPS:
        assert report["complaints"] == []
        for case in CASES:
            rows = ways(report, *case)
            assert tuple(rows) == WAYS
            for way in WAYS[3:]:
                row = rows[way]
                assert row["unequal"] == row["complaints"] == []
                assert row["peak_bytes"] == row["predicted_bytes"] <= (row["budget_bytes"] or row["peak_bytes"])


if __name__ == "__main__":
    for case in CASES:
        print(*case, *(line(report, *case) for report in STEPS), "", sep="\n")
    print(said(), *targets(), sep="\n")
