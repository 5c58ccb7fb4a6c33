"""Picture of the memory over the steps of a plan: an SVG for notebooks and web pages, in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fckpt._units import format_bytes
from fckpt.graph.simulation import Timeline
from fckpt.report import svg
from fckpt.report.svg import AFTER, BEFORE, BOTTOM, BUDGET, HEIGHT, LEFT, RIGHT, TOP, WIDTH

__all__ = ["POINTS", "memory_svg"]

POINTS = 1000
"""The most points of a curve. With more steps, each point is the maximum of several consecutive steps."""


class _Axes(NamedTuple):
    """The mapping from steps and bytes to coordinates of the picture."""

    steps: int
    nbytes: float

    def x(self, step: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps:.2f}"

    def y(self, nbytes: float) -> str:
        return f"{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nbytes / self.nbytes:.2f}"


def memory_svg(
    before: Timeline,
    after: Timeline,
    budget: int | None = None,
    *,
    forward_steps: tuple[int, int] | None = None,
) -> str:
    """Draws the live bytes of two schedules over their steps.

    Args:
        before: the timeline of the plain function.
        after: the timeline of the plan.
        budget: the budget in bytes, drawn as a dashed line; None if there was none.
        forward_steps: the number of steps of each forward pass. If given, the starts of the backward passes are marked.

    A strip below the axis marks the steps in which the plan recomputes.

    Returns:
        An `<svg>` element, for a page or a file. Peaks are exact for any number of steps.

    Example:
        >>> plain = Timeline((4, 8, 6, 2), 8, 1, 8, 1.0, 0.0, 0)
        >>> plan = Timeline((4, 5, 3, 5, 2), 5, 1, 3, 1.2, 0.2, 1)
        >>> memory_svg(plain, plan, 6, forward_steps=(2, 2)).startswith("<svg ")
        True
    """
    steps = max(len(before.live_nbytes), len(after.live_nbytes))
    limit = max(before.peak_nbytes, after.peak_nbytes, budget or 0, 1)
    unit, factor = svg.unit(limit)
    tick = max(svg.round_up(limit / factor / 6) * factor, 1)
    axes = _Axes(steps, math.ceil(limit / tick) * tick)
    parts = [*_y_axis(axes, tick, unit, factor), *_x_axis(axes)]
    if forward_steps is not None:
        parts += _boundaries(axes, forward_steps)
    parts += [_curve(axes, before.live_nbytes, BEFORE), _curve(axes, after.live_nbytes, AFTER)]
    parts += _recomputed(axes, after.recomputed_steps)
    if budget is not None:
        parts.append(svg.line(LEFT, axes.y(budget), WIDTH - RIGHT, axes.y(budget), BUDGET, 'stroke-dasharray="6 4"'))
    parts += _legend(before, after, budget)
    return svg.document(parts, "Memory during one training step", _description(before, after, budget))


def _description(before: Timeline, after: Timeline, budget: int | None) -> str:
    allowed = "" if budget is None else f" The budget is {format_bytes(budget)}."
    return (
        f"Live bytes over the steps of the forward and the backward pass. The plain function peaks at "
        f"{format_bytes(before.peak_nbytes)} in {len(before.live_nbytes)} steps, the plan at "
        f"{format_bytes(after.peak_nbytes)} in {len(after.live_nbytes)} steps.{allowed}"
    )


def _curve(axes: _Axes, live: Sequence[int], colour: str) -> str:
    points = _thinned(live)
    path = f"M{axes.x(0)} {axes.y(points[0][1])}"
    path += "".join(f"H{axes.x(step)}V{axes.y(nbytes)}" for step, nbytes in points[1:])
    return f'<path d="{path}H{axes.x(len(live))}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _thinned(live: Sequence[int]) -> list[tuple[int, int]]:
    """Returns at most `POINTS` pairs of a step and the maximum of bytes up to the step of the next pair."""
    stride = math.ceil(len(live) / POINTS)
    return [(i, max(live[i : i + stride])) for i in range(0, len(live), stride)]


def _recomputed(axes: _Axes, steps: Sequence[int]) -> list[str]:
    """Returns a strip below the axis, filled where the plan recomputes; neighbouring steps share a rectangle."""
    gap = axes.steps / POINTS
    runs: list[list[int]] = []
    for step in steps:
        if runs and step - runs[-1][1] <= gap:
            runs[-1][1] = step + 1
        else:
            runs.append([step, step + 1])
    y = HEIGHT - BOTTOM + 2
    path = "".join(f"M{axes.x(start)} {y}H{axes.x(end)}v7H{axes.x(start)}z" for start, end in runs)
    return [f'<path d="{path}" fill="{AFTER}"/>'] if path else []


def _y_axis(axes: _Axes, tick: float, unit: str, factor: int) -> list[str]:
    parts = []
    for i in range(round(axes.nbytes / tick) + 1):
        y = axes.y(i * tick)
        parts.append(svg.line(LEFT, y, WIDTH - RIGHT, y, "currentColor", f'stroke-opacity="{0.15 if i else 0.6}"'))
        parts.append(svg.text(LEFT - 8, float(y) + 4, f"{i * tick / factor:g} {unit}" if i else "0", "end"))
    return parts


def _x_axis(axes: _Axes) -> list[str]:
    tick = max(round(svg.round_up(axes.steps / 8)), 1)
    y = HEIGHT - BOTTOM + 22
    parts = [svg.text(axes.x(step), y, str(step), "middle") for step in range(0, axes.steps + 1, tick)]
    return [*parts, svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "steps", "middle")]


def _boundaries(axes: _Axes, forward_steps: tuple[int, int]) -> list[str]:
    parts = []
    for step, colour in zip(forward_steps, (BEFORE, AFTER), strict=True):
        x = axes.x(step)
        parts.append(svg.line(x, TOP, x, HEIGHT - BOTTOM, colour, 'stroke-dasharray="2 3"'))
    x = float(axes.x(forward_steps[1]))
    return [*parts, svg.text(x - 6, TOP - 4, "forward", "end"), svg.text(x + 6, TOP - 4, "backward", "start")]


def _legend(before: Timeline, after: Timeline, budget: int | None) -> list[str]:
    entries = [
        (BEFORE, f"plain: peak {format_bytes(before.peak_nbytes)}"),
        (AFTER, f"plan: peak {format_bytes(after.peak_nbytes)}"),
    ]
    if budget is not None:
        entries.append((BUDGET, f"budget: {format_bytes(budget)}"))
    if after.recomputed_steps:
        entries.append((AFTER, "recomputed: strip below"))
    parts = []
    for i, (colour, label) in enumerate(entries):
        x = LEFT - 40 + 170 * i
        parts += [svg.line(x, 16, x + 18, 16, colour, 'stroke-width="3"'), svg.text(x + 24, 20, label, "start")]
    return parts
