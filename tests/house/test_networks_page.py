"""The tables of docs/networks.md are what the bench wrote, and what the page says of them holds."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from pages import ROOT

from benches.common.network_plans import TARGETS, Target
from benches.common.results import read_json
from benches.models.published_networks import NETWORKS

RESULTS = ROOT / "benches" / "results"
PAGE = ROOT / "docs" / "networks.md"
README = ROOT / "README.md"
MEASURED, PLANNED = "networks-cpu.json", "networks-planned.json"


def reports(name: str) -> list[dict[str, Any]]:
    return read_json(RESULTS / name)["networks"]


def point(report: dict[str, Any], solver: str, budget: str = "") -> dict[str, Any] | None:
    found = [p for p in report["points"] if (p["solver"], p["budget"]) == (solver, budget)]
    return found[0] if found and found[0]["predicted_bytes"] is not None else None


def extra(found: dict[str, Any] | None) -> str:
    """The time in addition, in percent: the median of what was measured, if it was."""
    if found is None:
        return ""
    overhead = found["time_ratio"]["median"] - 1 if found["time_ratio"] else found["predicted_overhead"]
    return f"{100 * overhead:.1f}"


def row(report: dict[str, Any]) -> str:
    plain, ogc = point(report, "plain"), point(report, "ogc")
    assert plain is not None
    assert ogc is not None
    memory, time = Target(**report["targets"]["memory"]), Target(**report["targets"]["overhead"])
    nbytes = plain["peak_bytes"] or plain["predicted_bytes"]
    cells = [
        report["title"].partition(" (")[0],
        f"{nbytes / 2**20:,.0f}",
        f"{ogc['predicted_bytes'] / nbytes:.2f}",
        extra(ogc),
        extra(point(report, "rotor", "same memory")),
        extra(point(report, "torch_dp", "same memory")),
        extra(point(report, "auto", "same memory")),
        "" if time.proven is None else f"{100 * time.proven * ogc['predicted_overhead']:.1f}",
        "" if memory.value is None else f"{memory.value:.2f}",
        "" if memory.proven is None else f"{memory.proven:.2f}",
        f"{report['published']['ogc_megabytes'] / report['published']['plain_megabytes']:.2f}",
        f"{100 * report['published']['overhead']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def more(report: dict[str, Any]) -> list[str]:
    """The cells of what else was compared: torch's checkpoint per block, and `auto` in half of ogc's memory."""
    plain, torch, half = (
        point(report, "plain"),
        point(report, "torch", "per block"),
        point(report, "auto", "half of it"),
    )
    assert plain is not None
    assert torch is not None
    part = (torch["peak_bytes"] or torch["predicted_bytes"]) / (plain["peak_bytes"] or plain["predicted_bytes"])
    cells = [f"{part:.2f}", extra(torch)]
    if half is not None:
        return [*cells, extra(half), f"{100 * half['lower_bound']:.1f}"]
    asked = next(p["budget_bytes"] for p in report["points"] if p["budget"] == "half of it")
    return [*cells, "" if report["floor_bytes"] > asked else "*none*", ""]


def also(name: str) -> str:
    """A network's line in the table of what else was compared, measured and planned."""
    both = [next(r for r in reports(kind) if r["network"] == name) for kind in (MEASURED, PLANNED)]
    return f"| {' | '.join([both[0]['title'].partition(' (')[0], *more(both[0]), *more(both[1])])} |"


def summary(name: str, target: str) -> str:
    """What part of ogc's extra time, or memory, `auto` takes: the least, the median and the most of all networks."""
    parts = [Target(**report["targets"][target]).value for report in reports(name)]
    found = sorted(part for part in parts if part is not None)
    assert len(found) == len(NETWORKS)
    least = round(found[0], 2) + 0.0  # without the sign of -0.0
    return f"{median(found):.2f} ({least:.2f} to {found[-1]:.2f})"


def missed() -> list[str]:
    """A line for each target that is missed."""
    return [
        f"* {report['title'].partition(' (')[0]}, {kind}: {found.value:.3f} of the {word}; "
        f"the proven bound is {found.proven:.3f}, which the plan exceeds by {100 * found.gap:.1f} % of {unit}"
        for kind, name in (("measured", MEASURED), ("planned", PLANNED))
        for report in reports(name)
        for target, word, unit in (("memory", "memory", "that memory"), ("overhead", "extra time", "a step"))
        if not (found := Target(**report["targets"][target])).is_met(TARGETS[target]) and found.gap is not None
    ]


@pytest.mark.parametrize("name", [MEASURED, PLANNED])
def test_the_tables_are_what_the_bench_wrote(name: str):
    found = reports(name)
    assert [report["network"] for report in found] == list(NETWORKS)
    text = PAGE.read_text()
    for report in found:
        assert row(report) in text


def test_the_table_of_what_else_was_compared_is_what_the_bench_wrote():
    text = PAGE.read_text()
    for name in NETWORKS:
        assert also(name) in text


def test_what_is_missed_is_said_and_nothing_else():
    assert not any(report["complaints"] for report in reports(MEASURED) + reports(PLANNED))
    section = PAGE.read_text().partition("## Missed")[2]
    assert [line for line in section.splitlines() if line.startswith("* ")] == missed()


def test_what_was_run_is_what_was_planned_and_the_same_bit_for_bit():
    for report in reports(MEASURED):
        for found in report["points"]:
            assert not found["unequal"]
            assert not found["complaints"]
            if found["budget_bytes"] is not None and found["measured_step_bytes"] is not None:
                assert found["measured_step_bytes"] == found["predicted_step_bytes"]


def test_the_page_has_the_medians():
    text = " ".join(PAGE.read_text().split())
    for name in (MEASURED, PLANNED):
        for target in TARGETS:
            assert summary(name, target) in text
    found = [
        (target, Target(**r["targets"][target])) for r in reports(MEASURED) + reports(PLANNED) for target in TARGETS
    ]
    assert (sum(not values.is_met(TARGETS[target]) for target, values in found), len(found)) == (len(missed()), 72)
    assert len(missed()) == 5
    assert "all but five of these 72" in text


def test_the_readme_has_what_was_measured():
    text = " ".join(README.read_text().split())
    assert f"needs {summary(MEASURED, 'overhead')} of their extra time" in text


def test_there_is_a_picture_of_each_network():
    for name in (*NETWORKS, "overview"):
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").exists()


if __name__ == "__main__":
    for name in (MEASURED, PLANNED):
        print(name, *map(row, reports(name)), *(summary(name, target) for target in TARGETS), sep="\n")
    print(*map(also, NETWORKS), *missed(), sep="\n")
