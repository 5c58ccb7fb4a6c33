"""What the pictures share: colours and markers, figures, the scale of extra time, and SVG files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

__all__ = [
    "GREY",
    "INK",
    "OURS",
    "STYLE",
    "WRONG",
    "axes_in",
    "draw_proofs",
    "markers",
    "memory_in_percent",
    "save",
    "scale_time",
    "sheet",
]

INK, GREY, WRONG, PROVEN, EDGE, OURS = "#222222", "#767676", "#b00020", "#f8e4dc", "#c98a6c", "#0072b2"
OTHERS = (
    ("s", INK),
    ("X", GREY),
    ("D", "#d55e00"),
    ("^", "#00875f"),
    ("P", "#a8478a"),
    ("v", "#8c6d00"),
    ("h", "#3a8fc0"),
    (">", "#5b3f99"),
    ("p", "#7a4b2a"),
)
"""Markers and colours of the other solvers."""
STYLE = {
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlepad": 5,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "fckpt",
}
TICKS = [percent / 100 for percent in (0, 1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 700, 1000)]


def sheet(width: float, height: float, title: str, subtitle: str) -> Figure:
    """Returns a figure of this size in points, with a title."""
    figure = Figure((width / 72, height / 72))
    figure.text(12 / width, 1 - 22 / height, title, size=12, weight="bold")
    figure.text(12 / width, 1 - 37 / height, subtitle, color=GREY)
    return figure


def axes_in(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Adds axes in a box, given in points."""
    across, up = 72 * figure.get_figwidth(), 72 * figure.get_figheight()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))


@style.context(["default", STYLE])
def save(figure: Figure, path: Path) -> None:
    """Writes an SVG without date and versions, so that equal figures give equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def markers() -> Iterator[dict[str, str]]:
    """Yields markers for one solver after the other: hollow, then half filled, then from the beginning again."""
    looks = ((*other, fill) for fill in ("none", "bottom", "left") for other in OTHERS)
    return cycle({"marker": marker, "color": colour, "fillstyle": fill} for marker, colour, fill in looks)


def draw_proofs(axes: Axes, wall: float, stairs: Sequence[tuple[float, float]], below: str) -> dict[str, Artist]:
    """Draws the regions where it is proven that there is no plan.

    Args:
        axes: extra time over memory, both relative to the plain step.
        wall: a lower bound on the peak; 0 if there is none.
        stairs: budgets in ascending order, with a lower bound on the extra time for each.
        below: the label of the region below `wall`.

    Returns:
        The artists that were drawn: "bound" and "wall".
    """
    look = {"facecolor": PROVEN, "edgecolor": EDGE, "linewidth": 0.8}
    found: dict[str, Artist] = {}
    if stairs:
        budgets, bounds = zip(*stairs, strict=True)
        label = "proven: no plan in here"
        region = [wall, *budgets], [bounds[0], *bounds]
        found["bound"] = axes.fill_between(*region, step="pre", **look, zorder=1.5, label=label)
    if wall:
        found["wall"] = axes.axvspan(-1, wall, hatch="///", **look, zorder=1.6, label=below)
    return found


def memory_in_percent(axes: Axes) -> None:
    """Labels the x-axis, memory relative to the plain step, in percent."""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda part, _: f"{100 * part:.4g}%"))


def _root(values: Any) -> Any:
    return np.sign(values) * np.sqrt(np.abs(values))


def _square(values: Any) -> Any:
    return np.sign(values) * np.square(values)


def scale_time(axes: Axes, apart: float = 0.05) -> None:
    """Scales the y-axis, extra time, by square roots, so that 1% and 100% are both visible. Noise may be below zero.

    Args:
        axes: with all lines; those with the id "least" are not considered.
        apart: the least distance between ticks, as a fraction of the height.
    """
    heights = np.concatenate([line.get_ydata() for line in axes.lines if line.get_gid() != "least"])
    top, bottom = 1.06 * _root(max(heights.max(), 0.01)), _root(min(heights.min(), 0.0))
    bottom -= 0.04 * (top - bottom)
    axes.set_yscale("function", functions=(_root, _square))
    axes.set_ylim(_square(bottom), _square(top))
    shown = [0.0]
    for tick in TICKS:
        if tick <= _square(top) and _root(tick) - _root(shown[-1]) > apart * (top - bottom):
            shown.append(tick)
    below = [-tick for tick in shown[1:] if -tick >= _square(bottom)]
    axes.yaxis.set_major_locator(FixedLocator([*below, *shown]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
