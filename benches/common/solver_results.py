"""Results of all solvers: how they are stored, a summary per solver, and where `auto` is worse or misses a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.common.results import read_json, rounded
from benches.common.solver_runs import LEAST, Cell

__all__ = [
    "CHECKMATE",
    "DIGITS",
    "TOLERANCE",
    "GraphResults",
    "Summary",
    "auto_is_worse",
    "gap_allowed",
    "is_checkmates",
    "missed",
    "read_results",
    "summaries",
    "to_json",
]

CHECKMATE = {0.549: 0.01223, 0.323: 0.031, 0.187: 0.0766}
"""Budgets of the Checkmate paper for ResNet-50, and the overheads to reach."""
TOLERANCE = 1e-6
"""A fraction of the time of a step. Smaller differences are rounding."""
DIGITS = 8
"""Significant digits in a file: errors of overheads and bounds must be far below `TOLERANCE`."""


@dataclass(frozen=True)
class GraphResults:
    """The results of all solvers on one graph."""

    graph: str
    checksum: str
    nodes: int
    plain_peak_bytes: int
    seconds: float
    """Of the step without recomputation."""
    least_peak_bytes: int
    """A lower bound on the peak of any plan."""
    bounds: dict[float, float | None] = field(default_factory=dict)
    """By budget, a lower bound on the seconds of any plan: infinite if there is no plan, None if it took too long."""
    cells: list[Cell] = field(default_factory=list)

    @property
    def solvers(self) -> list[str]:
        """The solvers that were run."""
        return list(dict.fromkeys(cell.solver for cell in self.cells))

    def cell(self, solver: str, budget: float) -> Cell | None:
        """Returns the result of `solver` for `budget`, if it was run."""
        return next((c for c in self.cells if (c.solver, c.budget) == (solver, budget)), None)

    def best(self, budget: float) -> float:
        """Returns the overhead of the fastest plan for `budget`; infinite if there is none."""
        return min((c.overhead for c in self.cells if c.budget == budget and c.overhead is not None), default=math.inf)

    def gap(self, cell: Cell) -> float | None:
        """Returns how far the overhead of a plan is above the bound; None if there is no bound."""
        bound = self.bounds.get(cell.budget)
        return None if bound is None or cell.overhead is None else cell.overhead - (bound / self.seconds - 1)


# ---- files ---------------------------------------------------------------------------------------


def to_json(found: GraphResults) -> dict[str, Any]:
    """Returns the results of a graph for a file: for each solver, a row per budget.

    A row is the outcome, then what of the following is known: seconds to solve, overhead, peak or least bytes, note.
    The peak is stored for the least budget only.
    """
    budgets = list(dict.fromkeys(cell.budget for cell in found.cells))
    rows = {name: [_row(found.cell(name, budget)) for budget in budgets] for name in found.solvers}
    return {**vars(found), "budgets": budgets, "cells": rows}


def _row(cell: Cell | None) -> list[Any] | None:
    if cell is None:
        return None
    nbytes = cell.peak_bytes if cell.budget == LEAST and cell.outcome == "fits" else cell.least_bytes
    row = [cell.outcome, rounded(cell.solve_seconds), cell.overhead, nbytes, cell.note]
    while not row[-1]:
        row.pop()
    return row


def _cell(solver: str, budget: float, row: list[Any]) -> Cell:
    outcome, seconds, overhead, nbytes, note = [*row, *[None] * (5 - len(row))]
    peak, least = (nbytes, None) if outcome == "fits" else (None, nbytes)
    return Cell(solver, budget, outcome, seconds or 0.0, overhead, peak, least, note or "")


def read_results(path: Path | None) -> list[GraphResults]:
    """Returns the results in a file, or none if there is no file."""
    if path is None or not path.exists():
        return []
    return [_from_json(**graph) for graph in read_json(path)["graphs"]]


def _from_json(bounds: dict[str, Any], budgets: list[float], cells: dict[str, Any], **more: Any) -> GraphResults:
    known = {float(budget): bound for budget, bound in bounds.items()}
    found = [
        _cell(name, budget, row)
        for name, rows in cells.items()
        for budget, row in zip(budgets, rows, strict=True)
        if row is not None
    ]
    return GraphResults(**more, bounds=known, cells=found)


# ---- what they mean ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """One solver compared with `auto`, over all budgets of the graphs that it takes."""

    solver: str
    asked: int
    """Budgets for which it was run."""
    feasible: float
    """The fraction of budgets for which it has a plan, of those for which any solver has one."""
    slower: float | None
    """The time of its steps relative to auto's, where both have a plan: geometric mean, minus one."""
    points: float | None
    """The median of the differences of overheads, as a fraction of the step."""
    faster: int
    """The number of budgets at which it beats auto."""
    solve_seconds: float
    """Median of the budgets for which it was run."""


def summaries(results: Sequence[GraphResults]) -> list[Summary]:
    """Returns a summary of each solver, in the order of the results."""
    names = dict.fromkeys(name for found in results for name in found.solvers)
    return [_summary(name, results) for name in names]


def _summary(name: str, results: Sequence[GraphResults]) -> Summary:
    cells = [(f, c) for f in results for c in f.cells if c.solver == name and c.budget != LEAST]
    taken = [(f, c) for f, c in cells if c.outcome not in ("refused", "failed")]
    possible = [c for f, c in taken if f.best(c.budget) < math.inf]
    pairs = [
        ((1 + c.overhead) / (1 + a.overhead), c.overhead - a.overhead)
        for f, c in taken
        if c.overhead is not None and (a := f.cell("auto", c.budget)) is not None and a.overhead is not None
    ]
    return Summary(
        name,
        len(taken),
        sum(c.outcome == "fits" for c in possible) / len(possible) if possible else 0.0,
        statistics.geometric_mean(ratio for ratio, _ in pairs) - 1 if pairs else None,
        statistics.median(points for _, points in pairs) if pairs else None,
        sum(_better(f, c) is not None for f, c in taken),
        statistics.median([c.solve_seconds for _, c in taken if c.outcome != "skipped"]) if taken else 0.0,
    )


def _better(found: GraphResults, cell: Cell) -> str | None:
    """Returns a line if `cell` beats auto."""
    auto = found.cell("auto", cell.budget)
    if auto is None or cell.overhead is None or cell.budget == LEAST:
        return None
    where = f"{found.graph} at {cell.budget:.1%}: {cell.solver} +{cell.overhead:.3%}"
    if auto.overhead is None:
        return f"{where}, auto has no plan ({_why(auto)})"
    if auto.overhead - cell.overhead > TOLERANCE:
        return f"{where}, auto +{auto.overhead:.3%}"
    return None


def _why(cell: Cell) -> str:
    return {"time": "it was stopped", "skipped": "it was not asked after a stop"}.get(cell.outcome, cell.outcome)


def auto_is_worse(results: Sequence[GraphResults]) -> list[str]:
    """Returns a line for each budget, and each least peak, at which auto is worse than another solver."""
    found = [line for f in results for c in f.cells if (line := _better(f, c)) is not None]
    return found + [line for f in results if (line := _smaller(f)) is not None]


def _smaller(found: GraphResults) -> str | None:
    """Returns a line if solvers have a lower least peak than auto."""
    auto = found.cell("auto", LEAST)
    if auto is None:
        return None
    ends = {c.solver: c.peak_bytes / found.plain_peak_bytes for c in found.cells if c.budget == LEAST and c.peak_bytes}
    lower = sorted((share, name) for name, share in ends.items() if share < ends.get("auto", math.inf))
    if not lower:
        return None
    more = f", {len(lower) - 1} more below auto" if len(lower) > 1 else ""
    ours = f"auto to {ends['auto']:.2%}" if "auto" in ends else f"auto has no plan ({_why(auto)})"
    return f"{found.graph}: {lower[0][1]} goes down to {lower[0][0]:.2%}{more}, {ours}"


def missed(results: Sequence[GraphResults]) -> list[str]:
    """Returns a line for each target that is missed, apart from `auto_is_worse`."""
    return [line for f in results for c in f.cells for line in (*_wrong(f, c), *_short(f, c))]


def _where(found: GraphResults, cell: Cell) -> str:
    return f"{found.graph} at " + (f"{cell.budget:.1%}" if cell.budget != LEAST else "its least")


def _wrong(found: GraphResults, cell: Cell) -> Iterator[str]:
    """Yields errors of any solver."""
    if cell.outcome == "failed":
        yield f"{_where(found, cell)}: {cell.solver} fails: {cell.note}"
    gap = found.gap(cell)
    if gap is not None and gap < -TOLERANCE:
        yield f"{_where(found, cell)}: {cell.solver} is {-gap:.2%} below what is proven"


def gap_allowed(budget: float) -> float:
    """Returns the largest gap that meets the target, as a fraction of the step."""
    return 0.001 if budget >= 0.3 else 0.03 if budget >= 0.15 else math.inf


def _short(found: GraphResults, cell: Cell) -> Iterator[str]:
    """Yields the targets that auto misses."""
    where = _where(found, cell)
    if cell.solver != "auto" or cell.outcome == "skipped":
        return
    if cell.outcome == "time":
        yield f"{where}: stopped after {cell.solve_seconds:.0f} s"
    if cell.budget == LEAST:
        return
    gap = found.gap(cell)
    most = gap_allowed(cell.budget)
    if gap is not None and gap > most:
        yield f"{where}: gap of {gap:.2%}, {most:.1%} at most"
    if gap is None and cell.overhead is not None:
        yield f"{where}: nothing is proven"
    limit = 10.0 + 50.0 * max(0, found.nodes - 2000) / 18_000  # 10 s for 2,000 operations, 60 s for 20,000
    if cell.outcome != "time" and cell.solve_seconds > limit:
        yield f"{where}: {cell.solve_seconds:.1f} s for {found.nodes:,} operations, {limit:.0f} s at most"
    target = CHECKMATE.get(cell.budget) if is_checkmates(found.graph, found.nodes) else None
    if target is not None and not (cell.overhead is not None and cell.overhead < target + 5e-6):
        reached = cell.outcome if cell.overhead is None else f"+{cell.overhead:.3%}"
        yield f"{where}: {reached}, +{target:.3%} at most"


def is_checkmates(name: str, nodes: int) -> bool:
    """Whether this is the ResNet-50 of the Checkmate paper."""
    return "ResNet50" in name and nodes == 353
