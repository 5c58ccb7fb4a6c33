"""The picture of the arena: for each graph, what all solvers make of each budget.

    python -m benches.solvers --frozen frozen --seconds 60 --json benches/results/solvers-cpu.json
    python -m benches.arena_picture --arena benches/results/solvers-cpu.json --folder docs/pictures

Nothing is run: all that is drawn stands in the JSON of `solvers.py`, and the same JSON makes the same file, byte for
byte. arena.svg has a plot for each graph: budgets from left to right, extra time upwards, our solver as a staircase,
the others as points, and what is proven as the region where no plan whatsoever lies, and the wall of the least peak.
Plans that take more than three times the extra time of our slowest within a budget are left out, for the scale.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from benches.contest import LEAST
from benches.paper import OURS, STYLE, axes_in, draw_proofs, markers, memory_in_percent, save, scale_time, sheet
from benches.script import described, picture_parser
from benches.standings import Round, read_rounds

__all__ = ["arena", "main"]

ACROSS, WIDTH, HEIGHT = 4, 122, 96
"""Plots in a row; the points of each."""
BETWEEN, BESIDE = 48, 34
"""Points from plot to plot, up and across: for what is written there."""
BENEATH = (
    "extra time (scale of square roots) within a budget, of the plain step's time and peak; in brackets: operations"
)
MOST = 3.0
"""What is drawn, of the extra time that our solver takes at most within a budget that was asked."""


@style.context(["default", STYLE])
def arena(rounds: Sequence[Round]) -> Figure:
    """Draws all graphs."""
    rows = math.ceil(len(rounds) / ACROSS)
    solvers = list(dict.fromkeys(name for found in rounds for name in found.solvers if name != "auto"))
    looks = dict(zip(solvers, markers(), strict=False))
    legend = 16 * math.ceil((len(solvers) + 3) / 6)
    height = 40 + rows * (HEIGHT + BETWEEN) + legend
    title = f"auto and {len(solvers)} other solvers on {len(rounds)} graphs"
    figure = sheet(16 + ACROSS * (WIDTH + BESIDE), height, title, BENEATH)
    handles: dict[str, Artist] = {}
    for i, found in enumerate(rounds):
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


def _draw_plans(axes: Axes, found: Round, looks: dict[str, dict[str, str]]) -> dict[str, Artist]:
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


def _plans(found: Round, solver: str, most: float) -> list[tuple[float, float]]:
    """Returns the budgets for which a solver has a plan, its least peak among them, and what that takes in addition."""
    plans = [
        (cell.peak_bytes / found.plain_peak_bytes if cell.budget == LEAST else cell.budget, cell.overhead)
        for cell in found.cells
        if cell.solver == solver and cell.overhead is not None and cell.peak_bytes is not None and cell.overhead <= most
    ]
    return sorted(plans)


def _across(plans: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [budget for budget, _ in plans], [overhead for _, overhead in plans]


def _draw_proofs(axes: Axes, found: Round) -> dict[str, Artist]:
    bounds = [(b, bound / found.seconds - 1) for b, bound in found.bounds.items() if bound and bound < math.inf]
    return draw_proofs(
        axes, found.least_peak_bytes / found.plain_peak_bytes, sorted(bounds), "proven: no plan so small"
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = picture_parser("arena_picture", __doc__, "--arena", "solvers-cpu.json")
    parsed = parser.parse_args(arguments)
    try:
        parsed.rounds = read_rounds(parsed.arena)
        if not parsed.rounds:
            raise ValueError("there are no figures of any graph")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        parser.error(f"{parsed.arena} is no report of benches.solvers: {described(error)}")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Draws the picture."""
    parsed = _parse(arguments)
    save(arena(parsed.rounds), parsed.folder / "arena.svg")
    Console().print(f"The picture is in {parsed.folder}.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
