"""Draws the results of `benches.solvers`: for each graph, the extra time of all solvers over the budget.

    python -m benches solvers --frozen frozen --seconds 60 --json benches/results/solvers-cpu.json.gz
    python -m benches solvers_picture --results benches/results/solvers-cpu.json.gz --folder docs/pictures

Nothing is run, and equal JSON files give byte-equal pictures. solvers.svg has a plot for each graph: budgets on the
x-axis, extra time on the y-axis, `auto` as a staircase, the other solvers as points. The shaded region contains no
plan, which is proven; the hatched region is below the proven least peak. Plans with more than three times the largest
extra time of `auto` are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from benches.common.command import parse_picture
from benches.common.drawing import (
    OURS,
    STYLE,
    axes_in,
    draw_proofs,
    markers,
    memory_in_percent,
    save,
    scale_time,
    sheet,
)
from benches.common.solver_results import GraphResults, read_results
from benches.common.solver_runs import LEAST

ACROSS, WIDTH, HEIGHT = 4, 122, 96
"""Plots in a row, and the size of each in points."""
BETWEEN, BESIDE = 48, 34
"""Points between plots, vertically and horizontally."""
SUBTITLE = "extra time (square root scale) over the budget, relative to the plain step; in brackets: operations"
MOST = 3.0
"""The largest extra time that is drawn, relative to the largest of `auto`."""


@style.context(["default", STYLE])
def picture(results: Sequence[GraphResults]) -> Figure:
    """Draws all graphs."""
    rows = math.ceil(len(results) / ACROSS)
    solvers = list(dict.fromkeys(name for found in results for name in found.solvers if name != "auto"))
    looks = dict(zip(solvers, markers(), strict=False))
    legend = 16 * math.ceil((len(solvers) + 3) / 6)
    height = 40 + rows * (HEIGHT + BETWEEN) + legend
    title = f"auto and {len(solvers)} other solvers on {len(results)} graphs"
    figure = sheet(16 + ACROSS * (WIDTH + BESIDE), height, title, SUBTITLE)
    handles: dict[str, Artist] = {}
    for i, found in enumerate(results):
        row, column = divmod(i, ACROSS)
        bottom = height - 62 - HEIGHT - row * (HEIGHT + BETWEEN)
        axes = axes_in(figure, BESIDE + column * (WIDTH + BESIDE), bottom, WIDTH, HEIGHT)
        axes.set_title(f"{found.graph} ({found.nodes:,})", loc="left")
        handles |= _draw_plans(axes, found, looks) | _draw_proofs(axes, found)
        scale_time(axes, apart=0.12)
        memory_in_percent(axes)
        axes.set_xlim(0.0, 1.0)
    order = ["auto", *solvers, "bound", "wall"]
    figure.legend(handles=[handles[name] for name in order if name in handles], loc="lower center", ncols=6)
    return figure


def _draw_plans(axes: Axes, found: GraphResults, looks: dict[str, dict[str, str]]) -> dict[str, Artist]:
    asked = [c.overhead for c in found.cells if c.solver == "auto" and c.budget != LEAST and c.overhead is not None]
    most = MOST * max(asked, default=math.inf)
    ours = _plans(found, "auto", most)
    look = {"color": OURS, "linewidth": 1.3, "drawstyle": "steps-post", "marker": ".", "markersize": 5, "zorder": 4}
    look |= {"label": "auto", "gid": f"auto-{found.graph}"}
    handles: dict[str, Artist] = {"auto": axes.plot(*_across(ours), **look)[0]}
    for name, look in looks.items():
        plans = _plans(found, name, most)
        look = {**look, "linestyle": "none", "markersize": 4, "markeredgewidth": 0.7, "zorder": 3}
        handles[name] = axes.plot(*_across(plans), **look, label=name, gid=f"{name}-{found.graph}")[0]
    return handles


def _plans(found: GraphResults, solver: str, most: float) -> list[tuple[float, float]]:
    """Returns the budgets for which a solver has a plan, including its least peak, and the overheads."""
    plans = [
        ((cell.peak_bytes or 0) / found.plain_peak_bytes if cell.budget == LEAST else cell.budget, cell.overhead)
        for cell in found.cells
        if cell.solver == solver and cell.overhead is not None and cell.overhead <= most
    ]
    return sorted(plans)


def _across(plans: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [budget for budget, _ in plans], [overhead for _, overhead in plans]


def _draw_proofs(axes: Axes, found: GraphResults) -> dict[str, Artist]:
    bounds = [(b, bound / found.seconds - 1) for b, bound in found.bounds.items() if bound and bound < math.inf]
    return draw_proofs(
        axes, found.least_peak_bytes / found.plain_peak_bytes, sorted(bounds), "proven: no plan in so little memory"
    )


def _read(path: Path) -> list[GraphResults]:
    found = read_results(path)
    if not found:
        raise ValueError("it has no graphs")
    return found


def main(arguments: list[str]) -> int:
    """Draws the picture."""
    parsed = parse_picture("solvers_picture", __doc__, "solvers-cpu.json.gz", _read, arguments)
    save(picture(parsed.found), parsed.folder / "solvers.svg")
    Console().print(f"The picture is in {parsed.folder}.", highlight=False)
    return 0
