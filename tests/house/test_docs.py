"""The documentation: its code runs, all public names are in it, and the site loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torchvision_shim  # noqa: F401  before timm and transformers
from pages import ROOT, run_page

import fckpt

DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md") if page.name != "examples.md")  # tests/house/test_examples.py


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs_and_prints_what_the_page_shows(page: Path) -> None:
    run_page(page)


def test_pages_with_code_are_run() -> None:
    assert {page.stem for page in PAGES if "```python" in page.read_text()} >= {"index", "guide", "faq"}


def public_names() -> list[str]:
    found = vars(fckpt).items()
    return [name for name, value in found if name[0] != "_" and not isinstance(value, ModuleType)]


def test_every_public_name_has_an_entry() -> None:
    # `fckpt.sequential` is a function and a file; the entry is told apart by its full path.
    entries = re.findall(r"^::: fckpt\.(?:sequential\.)?(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(entries) == sorted(public_names())


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in public_names() if not (getattr(fckpt, name).__doc__ or "").strip()] == []


def test_every_file_of_the_package_is_in_the_walk() -> None:
    walk = (DOCS / "how-it-works.md").read_text()
    files = {path.name for path in (ROOT / "fckpt").glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(files) if name not in walk] == []


def test_every_example_is_shown() -> None:
    shown = re.findall(r"--8<-- \"docs/examples/(\w+)\.py\"", (DOCS / "examples.md").read_text())
    scripts = {path.stem for path in (DOCS / "examples").glob("*.py")} - {"repair_torchvision"}
    assert sorted(shown) == sorted(scripts)


def test_error_headings_name_errors() -> None:
    named = set(re.findall(r"^### (\w+Error):", (DOCS / "faq.md").read_text(), re.MULTILINE)) - {"RuntimeError"}
    assert named and all(issubclass(getattr(fckpt, name), fckpt.FckptError) for name in named)


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    html = list(tmp_path.rglob("*.html"))
    assert len(html) >= 8
    for page in html:
        loaded = re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
    assert (tmp_path / "api" / "index.html").read_text().count("doc-heading") >= len(public_names())
