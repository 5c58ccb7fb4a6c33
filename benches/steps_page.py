"""Writes the tables of docs/whole-step.md from the results of `benches.steps`.

    python -m benches steps --json benches/results/steps-cpu.json --check
    python -m benches steps_page --results benches/results/steps-cpu.json --page docs/whole-step.md

Nothing is run. What is between the two comments of the page is replaced, for any number of networks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benches.common.page import Page, table, wrapped
from benches.models.step_networks import NETWORKS

CASES = {
    ("momentum", 1): "SGD with momentum, the whole batch at once",
    ("momentum", 4): "SGD with momentum, 4 microbatches",
    ("adamw", 1): "AdamW, the whole batch at once",
    ("adamw", 4): "AdamW, 4 microbatches",
}
"""The title of each table, by optimizer and number of microbatches."""
COLUMNS = (
    "network", "plain MiB", "today", "blocks", "time", "hooks", "time", "step", "of hooks", "least", "time", "free",
)  # fmt: skip

Report = dict[str, Any]


def ways(report: Report, optimizer: str, count: int) -> dict[str, dict[str, Any]]:
    """Returns the rows of a network for an optimizer and a number of microbatches, by way."""
    return {row["way"]: row for row in report["rows"] if (row["optimizer"], row["accumulate"]) == (optimizer, count)}


def cells_of(report: Report, optimizer: str, count: int) -> list[str]:
    """Returns a network's cells in the table of an optimizer and a number of microbatches."""
    rows = ways(report, optimizer, count)
    plain = rows["plain"]["peak_bytes"]

    def time(way: str, key: str = "time_ratio") -> str:
        spread = rows[way][key]
        return "" if spread is None else f"{spread['median']:.2f}"

    def peak(way: str) -> str:
        nbytes = rows[way]["peak_bytes"]
        return "" if nbytes is None else f"{nbytes / plain:.2f}"

    cells = [report["name"], f"{plain / 2**20:.1f}", f"{report['today_bytes'] / plain:.2f}"]
    cells += [cell for way in ("blocks", "hooks") for cell in (peak(way), time(way))]
    cells += [time("step"), time("step", "time_to_hooks"), peak("step, least"), time("step, least")]
    return [*cells, time("step, free")]


def targets(reports: Sequence[Report]) -> str:
    """Returns a paragraph on how many networks and cases reach each target."""
    cases = [ways(report, *case) for report in reports for case in CASES]
    half = {case: sum(_halves(report, *case) for report in reports) for case in CASES}
    faster = sum(_median(rows["step"], "time_to_hooks") < 1 for rows in cases)
    slower = sum(rows["step, free"]["slower"] for rows in cases)
    planned = [row for rows in cases for way, row in rows.items() if way.startswith("step")]
    exact = sum(row["peak_bytes"] == row["predicted_bytes"] is not None for row in planned)
    same = sum(not row["unequal"] for row in planned)
    kept = f"{same} left the bits of the plain step (losses, parameters, buffers, state of the optimizer)"
    return (
        f"The least peak of a step is at most half of today's least on {half['momentum', 1]} of {len(reports)} "
        f"networks with momentum, and on {half['adamw', 1]} with AdamW, whose update makes temporary tensors. With 4 "
        f"microbatches, all gradients of the earlier microbatches are alive, and half is reached on "
        f"{half['momentum', 4]} networks with momentum, and on {half['adamw', 4]} with AdamW. *step* takes less time "
        f"than hooks in {faster} of {len(cases)} cases. *free* is slower than plain PyTorch beyond noise in {slower} "
        f"of {len(cases)} cases. Of {len(planned)} planned steps, {kept}, and {exact} have the predicted peak "
        "to the byte."
    )


def _halves(report: Report, optimizer: str, count: int) -> bool:
    """Whether the least peak of a network's step is at most half of today's."""
    row = ways(report, optimizer, count)["step, least"]
    return row["peak_bytes"] is not None and 2 * row["peak_bytes"] <= report["today_bytes"]


def _median(row: dict[str, Any], key: str) -> float:
    return math.inf if row[key] is None else row[key]["median"]


def text(found: dict[str, Any]) -> str:
    """Returns what stands between the two comments, for the document that `benches.steps` wrote."""
    reports = found["networks"]
    count = f"all {len(reports)}" if len(reports) == len(NETWORKS) else f"{len(reports)} of its {len(NETWORKS)}"
    rounds = found["options"]["rounds"]
    opening = (
        f"The tables have {count} networks. Memory is a part of the plain step's peak, and time is relative to the "
        f"plain step, as the median of {rounds} steps taken alternately. *of hooks* is the time of *step* relative to "
        "hooks in the same memory."
    )
    parts = [wrapped(opening)]
    for case, title in CASES.items():
        parts += [f"{title}:", table(COLUMNS, (cells_of(report, *case) for report in reports))]
    return "\n\n".join([*parts, wrapped(targets(reports))])


PAGE = Page("steps", "docs/whole-step.md", text)


def main(arguments: list[str]) -> int:
    """Rewrites the page."""
    return PAGE.write(__doc__, arguments)
