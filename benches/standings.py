"""What the arena found, and what is said of it: who is better, and which targets are missed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benches.contest import LEAST, Cell

__all__ = [
    "CHECKMATE",
    "TOLERANCE",
    "Round",
    "Standing",
    "gap_allowed",
    "is_checkmates",
    "losses",
    "missed",
    "read_rounds",
    "standings",
]

CHECKMATE = {0.549: 0.01223, 0.323: 0.031, 0.187: 0.0766}
"""Budgets for ResNet-50 as the Checkmate paper has it, and the overheads that are to be reached there."""
TOLERANCE = 1e-6
"""Of the time of a step: differences below are rounding."""


@dataclass(frozen=True)
class Round:
    """All solvers on one graph."""

    graph: str
    checksum: str
    nodes: int
    plain_peak_bytes: int
    seconds: float
    """Of the step that repeats nothing."""
    least_peak_bytes: int
    """Proven: no plan has a lower peak."""
    bounds: dict[float, float | None] = field(default_factory=dict)
    """By budget: the seconds that every plan takes at least; infinite if there is none, None if that took too long."""
    cells: list[Cell] = field(default_factory=list)

    @property
    def solvers(self) -> list[str]:
        """Those that were asked."""
        return list(dict.fromkeys(cell.solver for cell in self.cells))

    def cell(self, solver: str, budget: float) -> Cell | None:
        """Returns what `solver` made of `budget`, if it was asked."""
        return next((c for c in self.cells if (c.solver, c.budget) == (solver, budget)), None)

    def best(self, budget: float) -> float:
        """Returns the seconds of the fastest plan for `budget`."""
        return min((c.seconds for c in self.cells if c.budget == budget and c.seconds is not None), default=math.inf)

    def gap(self, cell: Cell) -> float | None:
        """Returns how far a plan is above the bound, as a fraction of the step; None where nothing is proven."""
        bound = self.bounds.get(cell.budget)
        return None if bound is None or cell.seconds is None else (cell.seconds - bound) / self.seconds


def read_rounds(path: Path | None) -> list[Round]:
    """Returns what a file says that was written before."""
    if path is None or not path.exists():
        return []
    graphs = json.loads(path.read_text())["graphs"]
    return [
        Round(
            **{
                **graph,
                "bounds": {float(budget): bound for budget, bound in graph["bounds"].items()},
                "cells": [Cell(**cell) for cell in graph["cells"]],
            }
        )
        for graph in graphs
    ]


@dataclass(frozen=True)
class Standing:
    """One solver against `auto`, over all budgets of the graphs that it takes."""

    solver: str
    asked: int
    feasible: float
    """The share of the budgets at which it has a plan, of those at which any solver has one."""
    slower: float | None
    """The time of its steps over that of auto's where both have a plan: geometric mean, less one."""
    points: float | None
    """The median of the differences of overheads, as a fraction of the step."""
    faster: int
    """How often it beats auto."""
    solve_seconds: float
    """Median of the budgets at which it was asked: not of those below one at which it was stopped."""


def standings(rounds: Sequence[Round]) -> list[Standing]:
    """Returns a line per solver, the order of the rounds kept."""
    names = dict.fromkeys(name for found in rounds for name in found.solvers)
    return [_standing(name, rounds) for name in names]


def _standing(name: str, rounds: Sequence[Round]) -> Standing:
    cells = [(f, c) for f in rounds for c in f.cells if c.solver == name and c.budget != LEAST]
    taken = [(f, c) for f, c in cells if c.outcome not in ("refused", "failed")]
    possible = [c for f, c in taken if f.best(c.budget) < math.inf]
    pairs = [
        (c.seconds / a.seconds, (c.seconds - a.seconds) / f.seconds)
        for f, c in taken
        if c.seconds is not None and (a := f.cell("auto", c.budget)) is not None and a.seconds is not None
    ]
    return Standing(
        name,
        len(taken),
        sum(c.outcome == "fits" for c in possible) / len(possible) if possible else 0.0,
        statistics.geometric_mean(ratio for ratio, _ in pairs) - 1 if pairs else None,
        statistics.median(points for _, points in pairs) if pairs else None,
        sum(loser is not None for loser in (_loss(f, c) for f, c in taken)),
        statistics.median([c.solve_seconds for _, c in taken if c.outcome != "skipped"]) if taken else 0.0,
    )


def _loss(found: Round, cell: Cell) -> str | None:
    """Says by how much `cell` beats auto, if it does."""
    auto = found.cell("auto", cell.budget)
    if auto is None or cell.seconds is None or cell.overhead is None or cell.budget == LEAST:
        return None
    where = f"{found.graph} at {cell.budget:.1%}: {cell.solver} +{cell.overhead:.3%}"
    if auto.seconds is None or auto.overhead is None:
        return f"{where}, auto has no plan ({_why(auto)})"
    if auto.seconds - cell.seconds > TOLERANCE * found.seconds:
        return f"{where}, auto +{auto.overhead:.3%}"
    return None


def _why(cell: Cell) -> str:
    return {"time": "it was stopped", "skipped": "it was not asked after a stop"}.get(cell.outcome, cell.outcome)


def losses(rounds: Sequence[Round]) -> list[str]:
    """Returns where auto is worse than another solver."""
    found = [loss for f in rounds for c in f.cells if (loss := _loss(f, c)) is not None]
    return found + [loss for f in rounds if (loss := _smaller(f)) is not None]


def _smaller(found: Round) -> str | None:
    """Says whose plan has a lower peak than auto's lowest, and how many others do."""
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


def missed(rounds: Sequence[Round]) -> list[str]:
    """Returns the targets that are missed, besides losses."""
    return [line for f in rounds for c in f.cells for line in (*_wrong(f, c), *_short(f, c))]


def _where(found: Round, cell: Cell) -> str:
    return f"{found.graph} at " + (f"{cell.budget:.1%}" if cell.budget != LEAST else "its least")


def _wrong(found: Round, cell: Cell) -> Iterator[str]:
    """Yields what no solver may do."""
    if cell.outcome == "failed":
        yield f"{_where(found, cell)}: {cell.solver} fails: {cell.note}"
    gap = found.gap(cell)
    if gap is not None and gap < -TOLERANCE:
        yield f"{_where(found, cell)}: {cell.solver} is {-gap:.2%} below what is proven"


def gap_allowed(budget: float) -> float:
    """Returns the largest gap that is no miss, as a part of the step."""
    return 0.001 if budget >= 0.3 else 0.03 if budget >= 0.15 else math.inf


def _short(found: Round, cell: Cell) -> Iterator[str]:
    """Yields where auto falls short."""
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
    if gap is None and cell.seconds is not None:
        yield f"{where}: nothing is proven"
    limit = 10.0 + 50.0 * max(0, found.nodes - 2000) / 18_000  # 2,000 operations in 10 seconds, 20,000 in 60
    if cell.outcome != "time" and cell.solve_seconds > limit:
        yield f"{where}: {cell.solve_seconds:.1f} s for {found.nodes:,} operations, {limit:.0f} s at most"
    target = CHECKMATE.get(cell.budget) if is_checkmates(found.graph, found.nodes) else None
    if target is not None and not (cell.overhead is not None and cell.overhead < target + 5e-6):
        reached = cell.outcome if cell.overhead is None else f"+{cell.overhead:.3%}"
        yield f"{where}: {reached}, +{target:.3%} at most"


def is_checkmates(name: str, nodes: int) -> bool:
    """Whether this is ResNet-50 as the Checkmate paper has it."""
    return "ResNet50" in name and nodes == 353
