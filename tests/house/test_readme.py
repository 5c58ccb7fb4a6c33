"""The README: its code runs and prints what it shows, and its figures are what the benches wrote."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torchvision_shim  # noqa: F401  before transformers
from pages import ROOT, blocks, run_page

import fckpt
from benches.common.results import read_json

README = ROOT / "README.md"


def test_code_prints_what_the_readme_shows() -> None:
    code = [block for block in blocks(README) if block.language == "python"]
    assert code[0].shown is not None and "parameters equal: True" in code[0].shown
    assert all(block.shown is not None for block in code)
    assert run_page(README) == len(code) == 2


def anchors(page: Path) -> set[str]:
    """The anchors that MkDocs gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", README.read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
        assert not anchor or anchor in anchors(ROOT / target), anchor


def test_the_readme_fits_three_screens() -> None:
    assert len(README.read_text().splitlines()) <= 164


def test_targets_exist() -> None:
    named = set(re.findall(r"^make (\w+)", README.read_text(), re.MULTILINE))
    assert named == {"demo", "test", "help"}
    makefile = (ROOT / "Makefile").read_text()
    for target in named:
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), f"make {target}"


def test_the_versions_are_those_of_the_package() -> None:
    text, project = README.read_text(), (ROOT / "pyproject.toml").read_text()
    assert "Python 3.11 or later" in text and 'requires-python = ">=3.11"' in project
    assert "torch 2.11 or later" in text and "torch>=2.11" in project
    assert fckpt.__version__ in text


def test_the_licence_is_the_one_named() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def test_make_help_lists_the_targets() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"setup", "demo", "test", "tiny", "lint", "type", "bench", "docs"} <= set(shown.split())


RESULTS = README.parent / "benches" / "results"


def cost_of_budgets() -> list[str]:
    """The rows of the table, from what the bench wrote."""
    rows = []
    for network in read_json(RESULTS / "budgets-cpu.json")["networks"]:
        found = {row["budget"]: row for row in network["rows"] if row["peak_bytes"] is not None}
        times = [
            f"{found[b]['time_ratio']['median']:.2f}" if b in found else "" for b in ("1.0", "0.8", "0.6", "0.4", "0.2")
        ]
        least = found["least"]
        share = f"{least['peak_bytes'] / network['plain_bytes']:.2f}"
        cells = [network["name"], f"{network['plain_bytes'] / 2**20:,.0f} MiB", *times, share]
        cells += [f"{least['time_ratio']['median']:.2f}", f"{network['blocks_bytes'] / network['plain_bytes']:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_the_table_of_budgets_is_what_the_bench_wrote() -> None:
    text = README.read_text()
    for row in cost_of_budgets():
        assert row in text
    for network in read_json(RESULTS / "budgets-cpu.json")["networks"]:
        for row in network["rows"]:
            if row["peak_bytes"] is not None:
                assert row["peak_bytes"] == row["predicted_bytes"] <= row["budget_bytes"]
                assert not row["unequal"]
