"""The picture of all solvers: what is drawn of each graph, and the script from end to end."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benches import solvers_picture
from benches.common.results import write_json
from benches.common.solver_results import GraphResults, to_json
from benches.common.solver_runs import LEAST, Cell

SVG = "{http://www.w3.org/2000/svg}"


def fits(solver: str, budget: float, overhead: float, peak: int = 500) -> Cell:
    return Cell(solver, budget, "fits", 1.0, overhead, peak)


def found(name: str = "net") -> GraphResults:
    cells = [
        fits("auto", 0.6, 0.05),
        fits("auto", 0.3, 0.2),
        fits("auto", LEAST, 0.4, 250),
        fits("dtr", 0.6, 0.1),
        fits("dtr", 0.3, 1.3),  # more than three times ours
        Cell("ogc", 0.6, "over", least_bytes=700),
    ]
    return GraphResults(name, "abc", 1200, 1000, 10.0, 200, {0.6: 10.4, 0.3: None}, cells)


def written(path: Path, *results: GraphResults) -> Path:
    write_json(path, {"graphs": [to_json(r) for r in results]})
    return path


def drawn(path: Path, gid: str) -> int:
    """How many markers a solver has."""
    group = next(g for g in ElementTree.parse(path).iter(f"{SVG}g") if g.get("id") == gid)
    return len([*group.iter(f"{SVG}use")])


def test_each_graph_has_its_plans(tmp_path: Path):
    source = written(tmp_path / "solvers.json", found("one"), found("two"))
    assert solvers_picture.main(["--results", str(source), "--folder", str(tmp_path)]) == 0
    path = tmp_path / "solvers.svg"
    text = path.read_text()
    assert "one (1,200)" in text and "two (1,200)" in text and "auto and 2 other solvers on 2 graphs" in text
    for name in ("one", "two"):
        assert [drawn(path, f"{solver}-{name}") for solver in ("auto", "dtr", "ogc")] == [3, 1, 0]
    before = path.read_bytes()
    solvers_picture.main(["--results", str(source), "--folder", str(tmp_path)])
    assert path.read_bytes() == before


def test_a_plan_is_where_its_budget_is_and_the_proven_region_left_of_its():
    axes = solvers_picture.picture([found()]).axes[0]
    lines = {line.get_gid(): line for line in axes.lines}
    assert lines["auto-net"].get_xydata().tolist() == [[0.25, 0.4], [0.3, 0.2], [0.6, 0.05]]
    assert lines["dtr-net"].get_xydata().tolist() == [[0.6, 0.1]]
    region = axes.collections[0].get_paths()[0].get_extents()
    assert (region.x0, region.x1, region.y0) == (0.2, 0.6, 0.0)
    assert region.y1 == pytest.approx(0.04)


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for text in ("", "{}", '{"graphs": []}', '{"graphs": [{"nodes": 1}]}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(SystemExit):
            solvers_picture.main(["--results", str(tmp_path / "x.json"), "--folder", str(tmp_path)])
        assert "not a result of benches.solvers" in capsys.readouterr().err
