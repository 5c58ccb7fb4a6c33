"""The list of benches, which also runs them, and the small form of their results."""

from __future__ import annotations

import ast
import gzip
import re
from pathlib import Path

import pytest

pytest.importorskip("rich")

from pages import ROOT

from benches.__main__ import BENCHES, main
from benches.common.results import read_json, write_json

FOLDER = ROOT / "benches"
RESULTS = sorted((FOLDER / "results").glob("*.json*"))


def test_every_script_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "__main__"}
    assert scripts == set(BENCHES)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.endswith(f"python -m benches {name}") for line in lines) for name in BENCHES)
    assert main(["nothing"]) == 2


def test_a_bench_is_run_by_its_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    with pytest.raises(SystemExit):
        main(["solvers", "--help"])
    assert "Compares all solvers on the same graphs" in capsys.readouterr().out


def test_scripts_import_no_scripts() -> None:
    for path in FOLDER.rglob("*.py"):
        if path.name == "__main__.py":
            continue
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        named = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        assert not [name for name in named if name.startswith("benches.") and name.split(".")[1] in BENCHES], path


def test_results_are_small_and_in_the_form_that_is_written(tmp_path: Path) -> None:
    assert sum(path.stat().st_size for path in RESULTS) < 300_000
    for path in RESULTS:
        written = tmp_path / path.name
        write_json(written, read_json(path), digits=8)
        plain = gzip.decompress if path.suffix == ".gz" else bytes  # other versions of zlib compress to other bytes
        assert plain(written.read_bytes()) == plain(path.read_bytes()), path.name


def test_what_is_written_is_read(tmp_path: Path) -> None:
    spread = {"median": 1.5, "low": 0.1}
    rows = [{"name": "a", "time": spread, "found": []}, {"name": "b", "time": None, "found": [1, {"x": 2}]}]
    document = {
        "rows": rows,
        "one": rows[:1],
        "unlike": [{"a": 1}, {"b": 2}],
        "none": [{"a": None}] * 2,
        "pair": (1, 2),
    }
    for name in ("x.json", "x.json.gz"):
        write_json(tmp_path / name, document)
        assert read_json(tmp_path / name) == {**document, "pair": [1, 2]}
    write_json(tmp_path / "x.json", {"third": 1 / 3, "bytes": 123_456_789})
    assert read_json(tmp_path / "x.json") == {"third": 0.3333333, "bytes": 123_456_789}


def test_the_picture_of_a_step_says_what_the_command_finds(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert main(["step_picture", "--svg", str(tmp_path / "step.svg")]) == 0
    for path in (tmp_path / "step.svg", ROOT / "docs" / "pictures" / "step.svg"):
        assert {"plain: peak 373 MiB", "plan: peak 149 MiB"} <= {*re.findall(r">([^<>]+)</text>", path.read_text())}
