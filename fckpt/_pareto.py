"""`pareto`: the trade-off between memory and time, as a curve of plans."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fckpt._inspect import Looked, Outputs
from fckpt._planned.families import SMALL
from fckpt._planned.plan import Plan
from fckpt._planned.tiling import Tile, check_tile
from fckpt._units import format_bytes, parse_bytes
from fckpt.cost.calls import CostSource
from fckpt.errors import ArgumentTypeError, ArgumentValueError, BudgetError
from fckpt.policies.decisions import PolicyLike
from fckpt.report.curve import curve_svg, curve_table
from fckpt.solve._known_orders import remembering

__all__ = ["Pareto", "ParetoPoint", "pareto"]


class ParetoPoint(NamedTuple):
    """One trade-off between memory and time."""

    peak_bytes: int
    overhead: float
    plan: Plan


class Pareto(list[ParetoPoint]):
    """Plans of one call for several budgets, with ascending peak and descending overhead.

    `print(curve)` shows a table, and a notebook shows a picture.
    """

    def best(
        self, *, overhead: float | None = None, seconds: float | None = None, peak_bytes: int | str | None = None
    ) -> ParetoPoint:
        """Returns the point with the smallest peak among those that are fast enough, or the fastest that fits.

        Args:
            overhead: the largest overhead, as a fraction of the plain function's time.
            seconds: the longest time of forward and backward, as the operations' times predict it.
            peak_bytes: the largest peak, in bytes or as text. Of the points within it, the fastest is returned.

        Raises:
            ArgumentTypeError: a condition has another type.
            ArgumentValueError: not exactly one condition is given, or no point meets it.

        Example:
            >>> import torch, fckpt
            >>> def loss(w, x):
            ...     for _ in range(20):
            ...         x = torch.tanh(x @ w)
            ...     return x.sum()
            >>> curve = fckpt.pareto(loss, torch.randn(16, 16, requires_grad=True), torch.randn(1024, 16), points=4)
            >>> curve.best(overhead=0.0) == curve[-1], curve.best(peak_bytes="1GiB") == curve[-1]
            (True, True)
        """
        given = {
            name: value
            for name, value in (("overhead", overhead), ("seconds", seconds), ("peak_bytes", peak_bytes))
            if value is not None
        }
        if len(given) != 1:
            raise ArgumentValueError(f"best takes one of overhead, seconds and peak_bytes, not {len(given)} of them.")
        for name in given.keys() & {"overhead", "seconds"}:
            if isinstance(given[name], bool) or not isinstance(given[name], (int, float)):
                raise ArgumentTypeError(f"{name} is a number, not {type(given[name]).__name__}: {given[name]!r}.")
        if peak_bytes is not None:
            limit = parse_bytes(peak_bytes)
            found = [point for point in self if point.peak_bytes <= limit][-1:]
            nearest = f"the smallest peak is {format_bytes(self[0].peak_bytes)}" if self else "there are no points"
        else:
            if seconds is not None:
                fast = [point for point in self if point.plan.timeline.seconds <= seconds]
            else:
                fast = [point for point in self if point.overhead <= (overhead or 0.0)]
            found = fast[:1]
            last = self[-1] if self else None
            nearest = "there are no points"
            if last is not None:
                nearest = f"the fastest takes {last.plan.timeline.seconds:.3g} s, an overhead of {last.overhead:.1%}"
        if not found:
            raise ArgumentValueError(f"no point has {next(iter(given))} up to {next(iter(given.values()))}: {nearest}.")
        return found[0]

    def __str__(self) -> str:
        """Returns a table of peaks and overheads; and what is differentiated, if that is a part of the result."""
        if not self:
            return "no points"
        return "\n".join([curve_table(self._pairs(), self._baseline()), *self[0].plan.loss_lines])

    def svg(self) -> str:
        """Returns a picture of the overheads over the peaks, as an `<svg>` element."""
        return curve_svg(self._pairs(), self._baseline())

    def _repr_html_(self) -> str:
        """Returns the picture and the table, which notebooks show."""
        return f"{self.svg()}<pre>{html.escape(str(self))}</pre>"

    def _pairs(self) -> list[tuple[int, float]]:
        return [(point.peak_bytes, point.overhead) for point in self]

    def _baseline(self) -> int:
        return self[0].plan.baseline_peak_bytes


def pareto(
    fn: Callable[..., Any],
    *args: Any,
    points: int = 12,
    policy: PolicyLike | None = None,
    solver: str | None = None,
    tile: Tile = False,
    costs: CostSource | str | None = None,
    device: torch.device | str | None = None,
    outputs: Outputs | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Pareto:
    """Plans a call for several budgets, from the least feasible one to the plain peak.

    Args:
        fn: see `plan`.
        args: see `plan`.
        points: the number of budgets, at least 2. They form a geometric sequence.
        policy: see `plan`.
        solver: see `plan`. By default, plans are found quickly, as for a first call; for graphs of up to 40 operations,
            by `auto`. The solver `auto` finds plans that are faster by up to two percent of a step, and takes about
            five times as long.
        tile: see `remat`.
        costs: see `plan`.
        device: see `plan`.
        outputs: see `plan`.
        donate_argnums: see `remat`.
        donate_argnames: see `remat`.
        kwargs: as in the call.

    Returns:
        Points with ascending peak and descending overhead. Budgets that do not reduce the overhead are left out. The
        list prints as a table and draws itself in notebooks, and its method `best` chooses a point.

    Example:
        >>> import torch, fckpt
        >>> def loss(w, x):
        ...     for _ in range(20):
        ...         x = torch.tanh(x @ w)
        ...     return x.sum()
        >>> curve = fckpt.pareto(loss, torch.randn(16, 16, requires_grad=True), torch.randn(1024, 16), points=4)
        >>> curve[0].peak_bytes < curve[-1].peak_bytes, curve[-1].overhead
        (True, 0.0)
    """
    if type(points) is not int or points < 2:
        raise ArgumentValueError(f"pareto needs at least 2 points, not {points!r}.")
    tile = check_tile(tile, 1.0)
    looked = Looked(fn, args, kwargs, costs, outputs, (donate_argnums, donate_argnames), device)
    found: list[ParetoPoint] = []
    with remembering():
        whole = looked.plan(policy, 1.0, solver or "auto")
        most = whole.baseline_peak_bytes
        quickly = solver is None and len(whole.graph.nodes) > SMALL
        solver = solver or ("greedy" if quickly else "auto")
        try:
            looked.plan(policy, 1, solver, None, tile, hint=False)
            least = 1
        except BudgetError as error:
            least = error.least_bytes
        for i in range(points):
            budget = round(least * (most / least) ** (i / (points - 1))) if least < most else most
            made = looked.plan(policy, max(budget, least), solver, None, tile, quickly=quickly)
            found.append(ParetoPoint(made.peak_bytes, made.overhead, made))
    found.sort(key=lambda point: (point.peak_bytes, point.overhead))
    best = Pareto()
    for point in found:
        if point.overhead < (best[-1].overhead if best else math.inf):
            best.append(point)
    return best
