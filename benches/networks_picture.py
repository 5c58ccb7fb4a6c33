"""Draws the results of `benches.networks`: extra time over memory, for each network and for all.

    python -m benches networks --planned --json benches/results/networks-planned.json
    python -m benches networks_picture --results benches/results/networks-planned.json --folder docs/pictures

Nothing is run, and equal JSON files give byte-equal pictures, which are SVG files on white:

NAME.svg      for each network, a point per method that has a plan, the curve of our solver, the proven region without
              plans, and the proven least peak. Curve and region are staircases, because nothing is known between two
              budgets, except that more memory never makes the best plan slower. Extra time has a square root scale.
overview.svg  for each network, ogc and our solver in the same memory and in the same time, with the proven bounds, and
              the published figures of ogc.

If the steps were run, the points are measured. The curve and the bounds are by predicted times.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console

from benches.common.command import parse_picture, steps
from benches.common.drawing import (
    INK,
    OURS,
    STYLE,
    WRONG,
    axes_in,
    draw_proofs,
    markers,
    memory_in_percent,
    save,
    scale_time,
    sheet,
)
from benches.common.network_plans import REFERENCE, Point, Report, Target
from benches.common.results import read_json
from benches.common.timing import Spread

OUR_MARKERS = {"same memory": "o", "half of it": "v", "same time": "<"}
ROW = 17
"""The height of a network in the overview, in points."""
VISIBLE = 1e-4
"""Smaller bounds are not drawn."""


# ---- the results of the bench --------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The content of a file of results."""

    ours: str
    """The solver that is compared with the others."""
    source: str
    """The origin of the times, in words."""
    reports: list[Report]


def load(path: Path) -> Results:
    """Reads a file of `benches.networks`. Raises one of several errors if it is not one."""
    document = read_json(path)
    options, machine = document["options"], document["machine"]
    device = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    source = f"predicted for {options['profile']}" if "profile" in options else f"measured on {device}"
    results = Results(options["solver"], source, [_report(network) for network in document["networks"]])
    if not any(_is_known(report) for report in results.reports):
        raise ValueError("it has figures of no network")
    return results


def _report(network: dict[str, Any]) -> Report:
    points = {name: [_point(point) for point in network[name]] for name in ("points", "curve")}
    targets = {name: Target(**target) for name, target in network["targets"].items()}
    return Report(**{**network, **points, "targets": targets})


def _point(point: dict[str, Any]) -> Point:
    spreads = {name: Spread(**point[name]) for name in ("time_ratio", "step_seconds") if point[name]}
    return Point(**{**point, **spreads})


def _find(report: Report, solver: str, budget: str = "") -> Point:
    """Returns the point of a solver and budget, or an empty one."""
    found = (point for point in report.points if (point.solver, point.budget) == (solver, budget))
    return next(found, Point(solver, budget))


def _is_known(report: Report) -> bool:
    return _find(report, "plain").bytes is not None


def _staircase(report: Report, ours: str) -> list[tuple[int, float]]:
    """Returns memory and overhead of the plans of our solver that no other one beats, in ascending order."""
    best: list[tuple[int, float]] = []
    plans = [*report.curve, *(point for point in report.points if point.solver == ours)]
    for nbytes, overhead in sorted((p.predicted_bytes or 0, p.predicted_overhead or 0.0) for p in plans):
        if nbytes and (not best or overhead < best[-1][1]):
            best.append((nbytes, overhead))
    return best


def _proven(report: Report) -> list[tuple[int, float]]:
    """Returns ascending budgets with their best lower bounds. A bound for more memory also holds for less."""
    points = [*report.curve, *report.points]
    known = [(p.budget_bytes, p.lower_bound) for p in points if p.budget_bytes and p.lower_bound is not None]
    needed: list[tuple[int, float]] = []
    for nbytes, bound in sorted(known, reverse=True):
        if bound > VISIBLE:
            needed.append((nbytes, max(bound, needed[-1][1] if needed else 0.0)))
    return needed[::-1]


# ---- one network ---------------------------------------------------------------------------------


@style.context(["default", STYLE])
def network_picture(report: Report, ours: str, source: str) -> Figure:
    """Draws one network. Raises ValueError if it has no figures."""
    plain = _find(report, "plain").bytes
    if plain is None:
        raise ValueError(f"there are no figures of {report.title}")
    height = max(238, 14 * (len(report.points) + 7))  # of both legends
    figure = sheet(620, height + 138, report.title, f"{report.what}; times {source}")
    axes = axes_in(figure, 54, 54, 320, height)
    methods = _draw_points(axes, report, ours, plain)
    others = [*_draw_curve(axes, report, ours, plain), *_draw_proofs(axes, report, plain)]
    _scale_memory(axes, report, plain)
    scale_time(axes)
    axes.set_ylabel("extra time (square root scale)")
    known = "measured" if _was_run(report) else "predicted"
    look = {"bbox_to_anchor": (1.02, -0.02, 1, 1.04), "bbox_transform": axes.transAxes, "alignment": "left"}
    figure.legend(handles=methods, loc="upper left", title=f"{known}: peak, extra time", **look)
    figure.legend(handles=others, loc="lower left", title="by predicted times", **look)
    _complain(figure, report)
    return figure


def slug(text: str) -> str:
    """Returns text as an id of SVG: `auto-same-memory`."""
    return "-".join(text.replace(",", " ").lower().split())


def _was_run(report: Report) -> bool:
    return any(point.time_ratio is not None for point in report.points)


def _draw_points(axes: Axes, report: Report, ours: str, plain: int) -> list[Line2D]:
    others = markers()
    handles = []
    for point in report.points:
        is_ours = point.solver == ours
        mine = {"marker": OUR_MARKERS.get(point.budget, "o"), "color": OURS, "fillstyle": "full"}
        look = mine if is_ours else next(others)
        if point.bytes is None or point.overhead is None:
            continue
        x, y = point.bytes / plain, point.overhead
        size = {"markersize": 6.5, "zorder": 5 - is_ours}
        label = f"{point.title}: {x:.1%}, {y:+.1%}" + " (!)" * bool(point.complaints)
        name = slug(point.title)
        handles += axes.plot(x, y, **look, **size, linestyle="none", label=label, gid=f"point-{name}")
        if point.time_ratio is not None:
            low, high = point.time_ratio.low - 1, point.time_ratio.high - 1
            axes.plot([x, x], [low, high], color=look["color"], linewidth=1, zorder=3, gid=f"spread-{name}")
    return handles


def _draw_curve(axes: Axes, report: Report, ours: str, plain: int) -> list[Artist]:
    handles: list[Artist] = []
    if stairs := _staircase(report, ours):
        nbytes, overhead = zip(*stairs, strict=True)
        peaks = np.array([*nbytes, max(plain, nbytes[-1])]) / plain
        look = {"color": OURS, "linewidth": 1.3, "drawstyle": "steps-post", "marker": ".", "markersize": 4}
        look |= {"markevery": range(len(stairs)), "label": f"{ours}, at any budget", "gid": "curve"}
        handles += axes.plot(peaks, [*overhead, overhead[-1]], **look)
    if report.least_bytes is not None:
        least = report.least_bytes / plain
        label = f"{ours}, the least it needs: {least:.1%}"
        handles.append(axes.axvline(least, color=OURS, linestyle=(0, (2, 2)), linewidth=1.1, label=label, gid="least"))
    return handles


def _draw_proofs(axes: Axes, report: Report, plain: int) -> list[Artist]:
    wall = (report.floor_bytes or 0) / plain
    stairs = [(nbytes / plain, bound) for nbytes, bound in _proven(report)]
    found = draw_proofs(axes, wall, stairs, f"proven: no plan below {wall:.1%}")
    for name, artist in found.items():
        artist.set_gid(name)
    return list(found.values())


def _scale_memory(axes: Axes, report: Report, plain: int) -> None:
    """Scales the x-axis, with some room left of the least peak."""
    peaks = [*(point.bytes for point in report.points), report.least_bytes, report.floor_bytes]
    known = [nbytes / plain for nbytes in peaks if nbytes is not None]
    least, most = min(known), max(known)
    axes.set_xlim(max(0.0, least - 0.12 * (most - least) - 0.005), most + 0.04 * (most - least) + 0.002)
    memory_in_percent(axes)
    axes.set_xlabel("peak memory, relative to the plain step")
    scales = partial(np.multiply, plain / 2**20), partial(np.multiply, 2**20 / plain)
    mib = axes.secondary_xaxis("top", functions=scales)
    mib.grid(False)
    mib.set_zorder(3)  # above the grid
    mib.xaxis.set_major_locator(MaxNLocator(6))
    mib.set_xlabel("MiB above weights and gradients", labelpad=5)


def _complain(figure: Figure, report: Report) -> None:
    complaints = [*report.complaints, *(f"{p.title}: {text}" for p in report.points for text in p.complaints)]
    if complaints:
        text = textwrap.shorten("(!) " + "; ".join(complaints), 110, placeholder=" ...")
        figure.text(1 / 6 / figure.get_figwidth(), 1 / 7 / figure.get_figheight(), text, color=WRONG, gid="complaints")


# ---- all networks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The values of one network in one half of the overview; NaN if unknown."""

    reference: float
    ours: float
    proven: float
    """A lower bound for any plan."""
    published: float


def _compared(report: Report, ours: str) -> dict[str, Comparison]:
    """Returns the extra time in the reference's memory, and the memory in its time, relative to the plain step."""
    known = lambda value: math.nan if value is None else value
    reference, plain = _find(report, REFERENCE), known(_find(report, "plain").bytes)
    same_memory, same_time = (_find(report, ours, f"same {what}") for what in ("memory", "time"))
    targets = report.targets or dict.fromkeys(("overhead", "memory"), Target(None, None, None))
    least_time = known(targets["overhead"].proven) * known(reference.predicted_overhead)
    least_memory = known(targets["memory"].proven) * known(reference.predicted_bytes) / plain
    published = known(report.published.get("overhead")), 1 - known(report.published.get("cut"))
    memory = known(reference.bytes) / plain, known(same_time.bytes) / plain
    return {
        "time": Comparison(known(reference.overhead), known(same_memory.overhead), least_time, published[0]),
        "memory": Comparison(*memory, least_memory, published[1]),
    }


@style.context(["default", STYLE])
def overview(reports: Sequence[Report], ours: str, source: str) -> Figure:
    """Draws all networks that have figures."""
    shown = [report for report in reports if _is_known(report)]
    height = ROW * len(shown)
    title = f"{ours} against the checkpoints of Feng & Huang ({REFERENCE}), {len(shown)} networks"
    figure = sheet(600, height + 122, title, f"one training step each; times {source}")
    time, memory = axes_in(figure, 116, 56, 184, height), axes_in(figure, 366, 56, 184, height)
    proof = "proven of predicted times" if any(_was_run(report) for report in shown) else "proven: no plan has less"
    compared = [_compared(report, ours) for report in shown]
    handles = _draw_comparisons(time, "time", compared, ours, proof)
    _draw_comparisons(memory, "memory", compared, ours, proof)
    time.set_title(f"extra time in {REFERENCE}'s memory", loc="left")
    memory.set_title(f"memory in {REFERENCE}'s time", loc="left")
    time.set_yticks(range(len(shown)), [report.title for report in shown])
    memory.set_yticks([])
    figure.legend(handles=handles, loc="lower center", ncols=4)
    return figure


def _draw_comparisons(
    axes: Axes, name: str, networks: Sequence[dict[str, Comparison]], ours: str, proof: str
) -> list[Line2D]:
    compared = [network[name] for network in networks]
    rows = range(len(compared))
    looks = {
        "published": {"marker": "x", "markersize": 5, "color": "#a8a8a8", "label": f"{REFERENCE}, as published"},
        "reference": {"marker": "D", "markersize": 5.5, "color": "#d55e00", "mfc": "white", "label": REFERENCE},
        "ours": {"marker": "o", "markersize": 6.5, "color": OURS, "label": ours},
        "proven": {"marker": "|", "markersize": 11, "mew": 1.6, "color": INK, "label": proof},
    }
    axes.hlines(
        rows, [d.ours for d in compared], [d.reference for d in compared], color="#9cc4de", linewidth=2.5, zorder=1.5
    )
    handles = []
    for kind, look in looks.items():
        values = [getattr(one, kind) for one in compared]
        handles += axes.plot(values, rows, linestyle="none", gid=f"{name}-{kind}", **look)
    for row, text in enumerate([f"vs {REFERENCE}", *map(_change, compared)], -1):
        look: dict[str, Any] = {"color": OURS, "ha": "right", "va": "center_baseline"}
        axes.annotate(text, (1, row), (44, 0), ("axes fraction", "data"), "offset points", **look)
    axes.set_ylim(len(compared) - 0.4, -0.6)
    axes.set_xlim(1.2 * min((value for d in compared for value in (d.reference, d.ours) if value < 0), default=0.0))
    axes.set_xlabel("relative to the plain step")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return handles


def _change(one: Comparison) -> str:
    if math.isnan(one.ours):
        return "no plan"
    if not one.reference > 0:
        return ""
    change = round(100 * (one.ours / one.reference - 1))
    return f"{change:+d}%".replace("-", "\N{MINUS SIGN}") if change else "0%"


# ---- the script ----------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Draws all pictures."""
    parsed = parse_picture("networks_picture", __doc__, "networks-planned.json", load, arguments)
    results, console = parsed.found, Console()
    with steps(len(results.reports) + 1) as advance:
        for report in results.reports:
            advance(report.title)
            if not _is_known(report):
                text = f"there are no figures of {report.title}: {'; '.join(report.complaints)}"
                console.print(text, style="bold red", highlight=False, markup=False)
                continue
            save(network_picture(report, results.ours, results.source), parsed.folder / f"{report.network}.svg")
        advance("overview")
        save(overview(results.reports, results.ours, results.source), parsed.folder / "overview.svg")
    console.print(f"The pictures are in {parsed.folder}.", highlight=False)
    return 0
