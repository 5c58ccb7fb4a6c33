"""The tables of compiled kernels on the page are what their bench wrote, and plans kept their budgets and bits."""

from __future__ import annotations

from pages import ROOT

from benches.common.results import read_json
from benches.kernels_page import BUDGETS, KERNELS, OWN, PAGE, networks_of, slower

FOUND = read_json(ROOT / "benches" / "results" / "kernels-cpu.json")
NETWORKS = networks_of(FOUND)


def test_the_tables_of_kernels() -> None:
    page = (ROOT / "docs" / "compiled.md").read_text()
    assert PAGE.rewritten(page, FOUND) == page, "run `python -m benches kernels_page`"


def test_plans_with_kernels_keep_their_budgets_and_bits() -> None:
    assert len(NETWORKS) == 12
    for network in NETWORKS.values():
        for key in ((kernels, budget) for kernels in (*KERNELS, "around") for budget in BUDGETS):
            row = network[key]
            if not row["refused"]:
                assert row["complaints"] == [] and row["peak_bytes"] <= row["budget_bytes"]
                assert key[0] == "fused" or row["difference"] == 0.0
        for own in OWN:
            row = network["backend", own]
            assert bool(row["complaints"]) == (row["peak_bytes"] > row["budget_bytes"])


def test_slower_means_that_the_quartiles_do_not_overlap() -> None:
    row = lambda low, high: {"time_ratio": {"low": low, "high": high}}
    assert slower([(row(1.2, 1.3), row(1.0, 1.1)), (row(1.0, 1.2), row(1.1, 1.3))]) == 1
