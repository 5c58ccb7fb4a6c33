"""Picture and table of a curve of plans: memory against time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fckpt._units import format_bytes
from fckpt.report import svg
from fckpt.report.svg import AFTER, BEFORE, BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from fckpt.report.table import aligned

__all__ = ["curve_svg", "curve_table"]


class _Axes(NamedTuple):
    """The mapping from bytes and overheads, in percent, to coordinates of the picture."""

    nbytes: float
    overhead: float

    def x(self, nbytes: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * nbytes / self.nbytes, 2)

    def y(self, overhead: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * overhead / self.overhead, 2)


def curve_table(points: Sequence[tuple[int, float]], baseline: int) -> str:
    """Formats points of memory and time as a table, a line each.

    Args:
        points: pairs of a peak in bytes and an overhead.
        baseline: the peak of the plain function in bytes.

    Example:
        >>> print(curve_table([(2**20, 0.25), (2**21, 0.0)], 2**21))
        peak      of plain  extra time
        1.00 MiB     50.0%      +25.0%
        2.00 MiB    100.0%       +0.0%
    """
    rows = [[format_bytes(peak), f"{peak / max(baseline, 1):.1%}", f"{overhead:+.1%}"] for peak, overhead in points]
    return "\n".join(aligned([["peak", "of plain", "extra time"], *rows], right=(1, 2)))


def curve_svg(points: Sequence[tuple[int, float]], baseline: int) -> str:
    """Draws the overheads of plans over their peaks.

    Args:
        points: pairs of a peak in bytes and an overhead, by ascending peak.
        baseline: the peak of the plain function in bytes, marked on the axis.

    Returns:
        An `<svg>` element, for a page or a file.

    Example:
        >>> curve_svg([(2**20, 0.25), (2**21, 0.0)], 2**21).startswith("<svg ")
        True
    """
    points = [(peak, 100 * overhead) for peak, overhead in points]
    most = max(1.0, *(overhead for _, overhead in points))
    unit, factor = svg.unit(max(baseline, points[-1][0], 1))
    across = svg.round_up(max(baseline, points[-1][0], 1) / factor / 6) * factor
    up = svg.round_up(most / 5)
    axes = _Axes((max(baseline, points[-1][0]) // across + 1) * across, (most // up + 1) * up)
    parts = _grid(axes, across, unit, factor, up)
    x = axes.x(baseline)
    parts += [svg.line(x, TOP, x, HEIGHT - BOTTOM, BEFORE, 'stroke-dasharray="2 3"')]
    parts += [svg.text(x - 6, TOP - 6, f"plain: {format_bytes(baseline)}", "end")]
    path = " ".join(f"{axes.x(peak)},{axes.y(overhead)}" for peak, overhead in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{AFTER}" stroke-width="1.5"/>')
    for peak, overhead in points:
        title = f"<title>{format_bytes(peak)}, time {overhead:+.1f}%</title>"
        parts.append(f'<circle cx="{axes.x(peak)}" cy="{axes.y(overhead)}" r="3.5" fill="{AFTER}">{title}</circle>')
    least = points[0]
    described = f"from {format_bytes(least[0])} with {least[1]:+.1f}% time, to {format_bytes(points[-1][0])}"
    return svg.document(parts, "Memory against time", f"Extra time of plans over their peaks: {described}.")


def _grid(axes: _Axes, across: float, unit: str, factor: int, up: float) -> list[str]:
    parts = []
    for i in range(round(axes.overhead / up) + 1):
        y = axes.y(i * up)
        parts.append(svg.line(LEFT, y, WIDTH - RIGHT, y, "currentColor", f'stroke-opacity="{0.15 if i else 0.6}"'))
        parts.append(svg.text(LEFT - 8, y + 4, f"{i * up:+.3g}%".replace("+0%", "0"), "end"))
    ticks = [i * across for i in range(round(axes.nbytes / across) + 1)]
    parts += [svg.text(axes.x(at), HEIGHT - BOTTOM + 18, f"{at / factor:g}", "middle") for at in ticks]
    parts.append(svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, f"peak in {unit}", "middle"))
    parts.append(svg.text(LEFT - 40, TOP - 24, "extra time", "start"))
    return parts
