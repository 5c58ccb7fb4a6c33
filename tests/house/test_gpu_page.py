"""The table of a GPU in docs/concepts.md is what the bench wrote there."""

from __future__ import annotations

from typing import Any

from pages import ROOT

from benches.common.results import read_json
from benches.common.timing import Spread

RESULTS = ROOT / "benches" / "results" / "budgets-nvidia-h100-80gb-hbm3.json"


def networks() -> list[dict[str, Any]]:
    return read_json(RESULTS)["networks"]


def rows() -> list[str]:
    lines = []
    for network in networks():
        for row in network["rows"]:
            mib = [f"{row[k] / 2**20:,.1f}" for k in ("predicted_bytes", "peak_bytes")]
            times = f"{row['predicted_overhead']:.3f}", str(Spread(**row["time_ratio"]))
            cells = (network["name"], row["budget"], *mib, *times)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_table_is_what_the_bench_wrote() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    assert len(rows()) == 8
    for line in rows():
        assert line in text


def test_every_peak_was_predicted_and_every_result_equal() -> None:
    for network in networks():
        assert not network["unrepeated"]
        for row in network["rows"]:
            assert row["peak_bytes"] <= row["budget_bytes"]
            assert row["peak_bytes"] == row["predicted_bytes"]
            assert not row["unequal"]
