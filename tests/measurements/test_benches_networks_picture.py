"""The pictures of the networks: places, labels, and the script from end to end."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import matplotlib

from benches import networks_picture as pictures
from benches.common import drawing
from benches.common.network_plans import Point, Report, Target
from benches.common.timing import Spread
from fckpt import solve

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"


def planned(solver: str, budget: str, mib: int, overhead: float, **more: Any) -> Point:
    return Point(solver, budget, predicted_bytes=mib * MIB, predicted_overhead=overhead, **more)


def ours(mib: int, overhead: float, bound: float, budget: str = "") -> Point:
    """Takes ten less than it may."""
    return planned("auto", budget, mib - 10, overhead, budget_bytes=mib * MIB, lower_bound=bound)


def report(**changes: Any) -> Report:
    points = [
        planned("plain", "", 1000, 0.0),
        planned("torch", "per block", 600, 0.25),
        planned("ogc", "", 500, 0.36),
        Point("rotor", "same memory", budget_bytes=500 * MIB, least_bytes=700 * MIB),
        planned("knapsack", "same memory", 490, 0.09),
        ours(500, 0.04, 0.01, "same memory"),
        Point("auto", "half of it", budget_bytes=250 * MIB, least_bytes=300 * MIB),
        ours(310, 0.16, 0.09, "same time"),
    ]
    curve = [ours(310, 0.16, 0.09), ours(700, 0.01, 0.0025), ours(1000, 0.0, -1e-16)]
    targets = {"overhead": Target(0.11, 1 / 36, 0.03), "memory": Target(0.6, 0.5, 0.2)}
    published = {"plain_megabytes": 100, "cut": 0.4, "overhead": 0.3}
    more = {"points": points, "curve": curve, "targets": targets, "floor_bytes": 200 * MIB, "least_bytes": 300 * MIB}
    names = {"network": "net", "title": "Net-18", "what": "batch 2", "published": published}
    return Report(**{**names, **more, **changes})


def run(points: Sequence[Point]) -> list[Point]:
    """The points as if they had been run: each takes twice the extra time that was predicted."""

    def timed(point: Point) -> Point:
        if point.predicted_overhead is None:
            return point
        middle = 1 + 2 * point.predicted_overhead
        return replace(point, time_ratio=Spread(middle, middle - 0.1, middle + 0.2, middle - 0.2, 5))

    return [timed(point) for point in points]


def written(path: Path, reports: Sequence[Report], **options: Any) -> Path:
    machine = {"cpu": "A processor", "device": "cpu"}
    networks = [asdict(report) for report in reports]
    path.write_text(json.dumps({"machine": machine, "options": {"solver": "auto", **options}, "networks": networks}))
    return path


class Picture:
    """What an SVG says, in places and in words."""

    def __init__(self, path: Path) -> None:
        self.root = ElementTree.parse(path).getroot()
        self.texts = ["".join(text.itertext()) for text in self.root.iter(f"{SVG}text")]

    def group(self, name: str) -> ElementTree.Element:
        (found,) = (element for element in self.root.iter() if element.get("id") == name)
        return found

    def marks(self, name: str) -> list[tuple[float, float]]:
        """Where the markers of an artist are."""
        return [(float(use.get("x", "")), float(use.get("y", ""))) for use in self.group(name).iter(f"{SVG}use")]

    def corners(self, name: str) -> list[tuple[float, float]]:
        """The vertices of a line or of a region, without those that repeat the last one."""
        path = next(self.group(name).iter(f"{SVG}path"))
        numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path.get("d", ""))]
        right, down = (0.0, 0.0) if path.get("clip-path") else self.marks(name)[0]  # a region is a mark
        corners = zip(numbers[::2], numbers[1::2], strict=True)
        return [(x + right, y + down) for (x, y), _ in itertools.groupby(corners)]

    def figures(self, places: Sequence[tuple[float, float]], ogc: float = 0.36) -> list[tuple[float, float]]:
        """Returns peaks and overheads, by where plain is, and ogc: at half of the peak, with this overhead."""
        ((right, base),), ((left, high),) = self.marks("point-plain"), self.marks("point-ogc")
        roots = [math.sqrt(ogc) * (base - y) / (base - high) for _, y in places]
        peaks = [1 - 0.5 * (right - x) / (right - left) for x, _ in places]
        return [(round(peak, 4), round(root * abs(root), 4)) for peak, root in zip(peaks, roots, strict=True)]


def drawn(path: Path, report: Report, source: str = "predicted for H100") -> Picture:
    drawing.save(pictures.network_picture(report, "auto", source), path)
    return Picture(path)


# ---- one network ---------------------------------------------------------------------------------


def test_points_lie_where_they_belong(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "net.svg", report())
    names = ("torch-per-block", "knapsack-same-memory", "auto-same-memory", "auto-same-time")
    places = [place for name in names for place in picture.marks(f"point-{name}")]
    assert picture.figures(places) == [(0.6, 0.25), (0.49, 0.09), (0.49, 0.04), (0.3, 0.16)]


def test_who_has_a_plan_is_named_with_its_figures(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "net.svg", report())
    assert [text for text in picture.texts if re.fullmatch(r".*: [\d.]+%, [+-][\d.]+%", text)] == [
        "plain: 100.0%, +0.0%",
        "torch, per block: 60.0%, +25.0%",
        "ogc: 50.0%, +36.0%",
        "knapsack, same memory: 49.0%, +9.0%",
        "auto, same memory: 49.0%, +4.0%",
        "auto, same time: 30.0%, +16.0%",
    ]
    assert {"Net-18", "batch 2; times predicted for H100", "predicted: peak, extra time"} <= {*picture.texts}
    assert not any("rotor" in text for text in picture.texts)


def test_the_curve_and_what_is_proven_are_staircases(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "net.svg", report())
    assert picture.figures(picture.marks("curve")) == [(0.3, 0.16), (0.49, 0.04), (0.69, 0.01), (0.99, 0.0)]
    stairs = [
        (0.3, 0.16),
        (0.49, 0.16),
        (0.49, 0.04),
        (0.69, 0.04),
        (0.69, 0.01),
        (0.99, 0.01),
        (0.99, 0.0),
        (1.0, 0.0),
    ]
    assert picture.figures(picture.corners("curve")) == stairs
    # From the wall to each budget no plan is below what is proven of that budget.
    roof = [(0.2, 0.09), (0.31, 0.09), (0.31, 0.01), (0.5, 0.01), (0.5, 0.0025), (0.7, 0.0025), (0.7, 0.0)]
    region = picture.figures(picture.corners("bound"))
    assert [corner for corner, _ in itertools.groupby(region)][1:8] == roof
    assert {overhead for peak, overhead in region[9:]} == {0.0}


def test_a_bound_of_more_memory_holds_for_less() -> None:
    points = [ours(300, 0.5, 0.02), ours(400, 0.5, 0.2), ours(500, 0.5, 0.1)]
    assert pictures._proven(report(points=points, curve=[])) == [(300 * MIB, 0.2), (400 * MIB, 0.2), (500 * MIB, 0.1)]


def test_the_wall_and_our_least(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "net.svg", report())
    assert max(peak for peak, _ in picture.figures(picture.corners("wall"))) == 0.2
    assert [peak for peak, _ in picture.figures(picture.corners("least"))] == [0.3, 0.3]
    assert "proven: no plan below 20.0%" in picture.texts
    assert "auto, the least it needs: 30.0%" in picture.texts


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    picture = drawn(
        tmp_path / "net.svg", report(curve=[], floor_bytes=None, least_bytes=None, points=report().points[:4])
    )
    identities = {element.get("id") for element in picture.root.iter()}
    assert {"point-plain", "point-torch-per-block", "point-ogc"} <= identities
    assert not {"curve", "bound", "wall", "least", "complaints"} & identities


def test_a_network_that_was_run(tmp_path: Path) -> None:
    points = run(report().points)
    points[2].complaints.append("peaks 1 bytes above its budget")
    picture = drawn(
        tmp_path / "net.svg", report(points=points, complaints=["ValueError: of the curve"]), "measured on it"
    )
    assert "measured: peak, extra time" in picture.texts
    assert "ogc: 50.0%, +72.0% (!)" in picture.texts
    assert "(!) ValueError: of the curve; ogc: peaks 1 bytes above its budget" in picture.texts
    (ogc,), (low, high) = picture.marks("point-ogc"), picture.corners("spread-ogc")
    assert low[0] == high[0] == ogc[0]
    assert high[1] < ogc[1] < low[1]
    # The curve is as it was predicted.
    assert picture.figures(picture.marks("curve"), 0.72) == [(0.3, 0.16), (0.49, 0.04), (0.69, 0.01), (0.99, 0.0)]


def test_the_explanations_fit(tmp_path: Path) -> None:
    """Beside the axes, one below the other, with every solver that there is."""
    points = [planned(name, "same memory", 500 + i, 0.1 * i) for i, name in enumerate(solve.names())]
    figure = pictures.network_picture(report(points=[*report().points, *run(points)]), "auto", "predicted for H100")
    figure.draw_without_rendering()
    (axes,), (width, _) = figure.axes, figure.get_size_inches() * figure.dpi
    contenders, others = (legend.get_window_extent() for legend in figure.legends)
    assert axes.get_window_extent().x1 < contenders.x0 < contenders.x1 < width
    assert others.x1 < width
    assert others.y1 <= contenders.y0
    points = [line for line in axes.lines if str(line.get_gid()).startswith("point")]
    looks = [(line.get_marker(), line.get_color(), line.get_fillstyle()) for line in points]
    assert len({*looks}) == len(looks) - 1  # auto is there twice in the same memory


# ---- all networks --------------------------------------------------------------------------------


def overview(path: Path, reports: Sequence[Report]) -> Picture:
    drawing.save(pictures.overview(reports, "auto", "predicted for H100"), path)
    return Picture(path)


def test_the_overview(tmp_path: Path) -> None:
    better = report(title="Other")
    picture = overview(tmp_path / "overview.svg", [report(), Report("broken", "Broken", "", {}), better])
    assert [text for text in picture.texts if text in ("Net-18", "Broken", "Other")] == ["Net-18", "Other"]
    for half, expected in ("time", (0.3, 0.36, 0.04, 0.01)), ("memory", (0.6, 0.5, 0.3, 0.25)):
        kinds = ("published", "reference", "ours", "proven")
        first, second = ([picture.marks(f"{half}-{kind}")[row] for kind in kinds] for row in (0, 1))
        assert len({y for _, y in first}) == len({y for _, y in second}) == 1
        assert first[0][1] < second[0][1]
        xs = [x for x, _ in first]
        scale = (xs[1] - xs[2]) / (expected[1] - expected[2])
        assert [xs[2] + scale * (value - expected[2]) for value in expected] == pytest.approx(xs, abs=1e-3)
    assert picture.texts.count("\N{MINUS SIGN}89%") == 2
    assert picture.texts.count("\N{MINUS SIGN}40%") == 2


def test_the_overview_of_what_was_run(tmp_path: Path) -> None:
    picture = overview(tmp_path / "overview.svg", [report(points=run(report().points))])
    ((ogc, _),), ((auto, _),), ((proven, _),) = (
        picture.marks(f"time-{kind}") for kind in ("reference", "ours", "proven")
    )
    assert (ogc - auto) / (ogc - proven) == pytest.approx((0.72 - 0.08) / (0.72 - 0.01), abs=1e-5)
    assert "proven of predicted times" in picture.texts


def test_a_network_that_has_no_plan_of_ours(tmp_path: Path) -> None:
    bare = report(points=report().points[:4], targets={}, published={})
    picture = overview(tmp_path / "overview.svg", [bare])
    assert picture.texts.count("no plan") == 2
    assert len(picture.marks("time-reference")) == len(picture.marks("memory-reference")) == 1
    for kind in ("published", "ours", "proven"):
        assert not picture.marks(f"time-{kind}") and not picture.marks(f"memory-{kind}")


def test_who_is_no_better_says_so(tmp_path: Path) -> None:
    points = report().points
    points[5], points[7] = ours(510, 0.36, 0.01, "same memory"), ours(560, 0.3, 0.01, "same time")
    picture = overview(tmp_path / "overview.svg", [report(points=points)])
    assert {"0%", "+10%"} <= {*picture.texts}


# ---- files ---------------------------------------------------------------------------------------


def test_the_same_figures_make_the_same_file(tmp_path: Path) -> None:
    """Whatever has been set for other pictures, and that stays as it is."""
    drawn(tmp_path / "one.svg", report())
    with matplotlib.rc_context({"lines.linewidth": 7, "font.size": 20, "svg.fonttype": "path", "svg.hashsalt": None}):
        before = dict(matplotlib.rcParams)
        drawn(tmp_path / "two.svg", report())
        assert dict(matplotlib.rcParams) == before
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "two.svg").read_bytes()
    assert b"<dc:date>" not in one
    assert len(one) < 50_000


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Report("broken", "Broken", "", {}, complaints=["RuntimeError: out of [memory]"])
    measured = report(network="other", points=run(report().points))
    source = written(tmp_path / "networks.json", [report(), broken, measured], rounds=5)
    assert pictures.main(["--results", str(source), "--folder", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["net.svg", "other.svg", "overview.svg"]
    said = " ".join(capsys.readouterr().out.split())
    assert "there are no figures of Broken: RuntimeError: out of [memory]" in said
    other = Picture(tmp_path / "out" / "other.svg")
    assert "batch 2; times measured on A processor" in other.texts
    assert len(other.corners("spread-auto-same-time")) == 2


def test_what_networks_says_is_understood(tmp_path: Path) -> None:
    reports = [report(points=run(report().points)), Report("broken", "Broken", "", {})]
    results = pictures.load(written(tmp_path / "networks.json", reports, profile="A100"))
    assert results == pictures.Results("auto", "predicted for A100", reports)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"machine": {}, "networks": []}', "KeyError: 'options'"),
        (
            '{"machine": {"cpu": "", "device": "cpu"}, "options": {"solver": "x"}, "networks": []}',
            "figures of no network",
        ),
        ('{"machine": {"cpu": "", "device": "cpu"}, "options": {}, "networks": [{"name": ""}]}', "KeyError"),
    ],
)
def test_another_file_is_refused(
    text: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        pictures.main(["--results", str(path), "--folder", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert re.search(f"other.json is not a result of benches.networks: .*{re.escape(reason)}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
