"""The table of docs/devices.md is what the bench of several processes wrote."""

from __future__ import annotations

from typing import Any

from pages import ROOT

from benches.common.results import read_json
from benches.common.timing import Spread

RESULTS = ROOT / "benches" / "results"
PAGE = ROOT / "docs" / "devices.md"


def times(spread: dict[str, Any] | None) -> str:
    return "" if spread is None else str(Spread(**spread))


def rows() -> list[str]:
    found: list[dict[str, Any]] = read_json(RESULTS / "multi-gpu-cpu.json")["rows"]
    naive = found[0]
    lines = []
    for row in (row for row in found if row["other"] is None):
        against = next((fckpts["to_other"] for fckpts in found if fckpts["other"] == row["name"]), None)
        share = f"{100 * row['peak_bytes'] / naive['peak_bytes']:.1f}"
        cells = (row["name"], f"{row['peak_bytes'] / 2**20:.1f}", share, times(row["time_ratio"]), times(against))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def scaling() -> list[str]:
    found: list[dict[str, Any]] = read_json(RESULTS / "multi-gpu-scaling-cpu.json")["scaling"]
    lines = []
    for pace in found:
        relative = (pace[kind]["median"] / found[0][kind]["median"] for kind in ("naive_seconds", "planned_seconds"))
        lines.append(
            f"| {pace['ranks']} | {' | '.join(f'{x:.2f}' for x in relative)} | {times(pace['planned_to_naive'])} |"
        )
    return lines


def test_the_tables_are_what_the_bench_wrote() -> None:
    text = PAGE.read_text()
    for line in (*rows(), *scaling()):
        assert line in text


def test_the_readme_says_the_same() -> None:
    found = {row["name"]: row for row in read_json(RESULTS / "multi-gpu-cpu.json")["rows"]}
    ours, theirs = found["fckpt in 57%"], found["DDP + bottlenecks"]
    assert 100 * theirs["peak_bytes"] // found["naive DDP"]["peak_bytes"] == 60
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"takes {ours['time_ratio']['median']:.2f} of its time, where `torch.utils.checkpoint` takes" in text
    assert f"`torch.utils.checkpoint` takes {theirs['time_ratio']['median']:.2f} in 60 %" in text


def test_nothing_was_wrong_but_what_the_page_says() -> None:
    found = read_json(RESULTS / "multi-gpu-cpu.json")["rows"]
    for row in found:
        assert row["difference"] == 0.0
        for complaint in row["complaints"]:
            assert "of the time of" in complaint  # memory and numbers are as they should be
    ours = next(row for row in found if row["name"].startswith("fckpt in"))
    assert ours["peak_bytes"] <= 0.57 * found[0]["peak_bytes"]


if __name__ == "__main__":
    print(*rows(), "", *scaling(), sep="\n")
