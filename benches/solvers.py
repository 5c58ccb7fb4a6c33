"""The arena: planners against planners, on the same graphs, judged by the same simulation.

    python -m benches.solvers --frozen frozen --seconds 30 --json benches/results/solvers-cpu.json
    python -m benches.solvers --graphs unet resnet50 --solvers auto greedy dtr xla --budgets 0.6 0.3     # a minute
    python -m benches.solvers --graphs unet --files moccasin/data/*train_nx.json --check

For every graph, solver and budget: what the plan takes in addition, its simulated peak, whether there is a plan at all
and else the least budget for which the solver has one, and how long it looked. The graphs are those of `graphs.py`, and
files: graphs of fckpt, or those of the Checkmate paper (`checkmate_graphs.py`). A budget is a fraction of the peak of
the step as autograd runs it. A solver runs in a process of its own, and is stopped after `--seconds`; then it is not
asked about the budgets that remain. The bound is what `fckpt.solve.certificate` proves about all plans; a gap is the
distance of a plan to it, in percent of the step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from benches import checkmate_graphs
from benches.contest import LEAST, Cell, answers, solved
from benches.graphs import GRAPHS, checksum, frozen, read
from benches.script import opening, report_parser, steps, table_of
from benches.timing import write_json
from benches.torch_knapsack import TORCHS
from fckpt import solve
from fckpt.errors import FckptError
from fckpt.graph import Graph
from fckpt.simulate import simulate
from fckpt.solve.bounds import least_peak
from fckpt.solve.certificate import tighter
from fckpt.solve.save_all import save_all
from fckpt.units import format_bytes, format_seconds

BUDGETS = (0.8, 0.6, 0.4, 0.3, 0.2, 0.15)
BOUND = "bound"
"""Stands for it among the names of solvers."""
NO_CONTEST = ("brute", "policy", "recompute_all", "save_all")
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


# ---- one graph -------------------------------------------------------------------------------------


def contestants() -> dict[str, solve.Solver]:
    """Returns the solvers that take part: those of fckpt that look for a plan, and torch's knapsacks."""
    registered = {name: solve.get(name) for name in solve.names() if name not in NO_CONTEST}
    return {"auto": registered.pop("auto"), **registered, **TORCHS}


def contest(
    name: str,
    graph: Graph,
    solvers: dict[str, solve.Solver],
    budgets: Sequence[float],
    seconds: float,
    advance: Callable[[str], object],
    known: Round | None = None,
) -> Round:
    """Runs all solvers on a graph, but those of which cells are `known`."""
    plain = simulate(graph.plain, save_all(graph)).peak_nbytes
    found = Round(name, checksum(graph), len(graph.nodes), plain, graph.seconds, least_peak(graph))
    asked = {budget: int(budget * plain) for budget in (*budgets, LEAST)}
    if known is not None and known.checksum == found.checksum and {c.budget for c in known.cells} <= {*asked}:
        found.cells.extend(known.cells)
        found.bounds.update(known.bounds)
    if [*found.bounds] != [*budgets]:
        found.bounds.clear()
        for budget, bound in answers(_proven, graph, {b: asked[b] for b in budgets}, seconds):
            found.bounds[budget] = bound
            advance(f"{name}: bound")
    for title, solver in solvers.items():
        if title not in found.solvers:
            for cell in _cells(title, solver, graph, asked, seconds):
                found.cells.append(cell)
                advance(f"{name}: {title}")
    return found


def _cells(title: str, solver: solve.Solver, graph: Graph, asked: dict[float, int], seconds: float) -> Iterator[Cell]:
    """Yields what a solver makes of each budget, until one takes too long."""
    start = time.perf_counter()
    left = [*asked]
    for budget, cell in answers(partial(solved, title, solver), graph, asked, seconds):
        took = time.perf_counter() - start
        if cell is None and took < seconds:
            cell = Cell(title, budget, "failed", took, note="its process ended")
        elif cell is None or cell.solve_seconds > seconds:
            cell = Cell(title, budget, "time", seconds)
        yield cell
        left.remove(budget)
        if cell.outcome == "time":
            yield from (Cell(title, other, "skipped") for other in left)
            return
        start = time.perf_counter()


def _proven(budget: float, graph: Graph, nbytes: int) -> float:
    return tighter(graph, nbytes).seconds


def load(path: Path) -> Graph:
    """Reads a graph of fckpt, or one of the Checkmate paper."""
    try:
        return read(path)
    except FckptError:
        return checkmate_graphs.load(path)


# ---- what is said of it ----------------------------------------------------------------------------


def show(found: Round, console: Console) -> None:
    """Prints a row per solver: overhead and seconds to find the plan, or the least budget in percent."""
    what = f"{found.nodes:,} operations, {format_bytes(found.plain_peak_bytes)}, {format_seconds(found.seconds)}"
    console.print(f"[bold]{escape(found.graph)}[/]: {what}, {found.checksum}", highlight=False)
    table = table_of("", *(f"{100 * budget:.4g}%" for budget in found.bounds), "least", left=[""])
    for solver in found.solvers:
        cells = [found.cell(solver, budget) for budget in (*found.bounds, LEAST)]
        table.add_row(solver, *(_text(found, cell) for cell in cells))
    bounds = [_bound_text(found, bound) for bound in found.bounds.values()]
    table.add_row("bound", *bounds, f"{found.least_peak_bytes / found.plain_peak_bytes:.1%}", style="dim")
    gaps = [found.gap(cell) if (cell := found.cell("auto", budget)) else None for budget in found.bounds]
    table.add_row("gap of auto", *("" if gap is None else f"{gap:.2%}" for gap in gaps), style="dim")
    console.print(table)


def _text(found: Round, cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.outcome == "time":
        return f"> {cell.solve_seconds:.0f} s"
    if cell.outcome == "over":
        return f"[dim]from {(cell.least_bytes or 0) / found.plain_peak_bytes:.1%}[/]"
    if cell.overhead is None or cell.seconds is None or cell.peak_bytes is None:
        return f"[dim]{cell.outcome}[/]"
    share = f"{cell.peak_bytes / found.plain_peak_bytes:.1%}, " if cell.budget == LEAST else ""
    text = f"{share}+{cell.overhead:.2%} {cell.solve_seconds:.1f} s"
    best = cell.budget != LEAST and cell.seconds <= found.best(cell.budget) + TOLERANCE * found.seconds
    return f"[green]{text}[/]" if best else text


def _bound_text(found: Round, bound: float | None) -> str:
    if bound is None:
        return "?"
    return "none" if math.isinf(bound) else f"+{bound / found.seconds - 1:.2%}"


@dataclass(frozen=True)
class Standing:
    """One solver against `auto`, over all graphs and budgets at which it was asked and takes such graphs."""

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
    """Median."""


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
        statistics.median([c.solve_seconds for _, c in taken]) if taken else 0.0,
    )


def _loss(found: Round, cell: Cell) -> str | None:
    """Says by how much `cell` beats auto, if it does."""
    auto = found.cell("auto", cell.budget)
    if auto is None or cell.seconds is None or cell.overhead is None or cell.budget == LEAST:
        return None
    where = f"{found.graph} at {cell.budget:.1%}: {cell.solver} +{cell.overhead:.3%}"
    if auto.seconds is None or auto.overhead is None:
        return f"{where}, auto has no plan ({auto.outcome})"
    if auto.seconds - cell.seconds > TOLERANCE * found.seconds:
        return f"{where}, auto +{auto.overhead:.3%}"
    return None


def losses(rounds: Sequence[Round]) -> list[str]:
    """Returns where auto is worse than another solver."""
    found = [loss for f in rounds for c in f.cells if (loss := _loss(f, c)) is not None]
    for f in rounds:
        least = {c.solver: c for c in f.cells if c.budget == LEAST and c.peak_bytes is not None}
        auto = least.get("auto")
        for c in least.values():
            if auto and c.peak_bytes and auto.peak_bytes and c.peak_bytes < auto.peak_bytes:
                shares = (c.peak_bytes / f.plain_peak_bytes, auto.peak_bytes / f.plain_peak_bytes)
                found.append(f"{f.graph}: {c.solver} goes down to {shares[0]:.2%}, auto to {shares[1]:.2%}")
    return found


def missed(rounds: Sequence[Round]) -> list[str]:
    """Returns the targets that are missed, besides losses."""
    found: list[str] = []
    for f in rounds:
        for c in f.cells:
            name = f"{f.graph} at {c.budget:.1%}"
            if c.outcome == "failed":
                found.append(f"{name}: {c.solver} fails: {c.note}")
            gap = f.gap(c)
            if gap is not None and gap < -TOLERANCE:
                found.append(f"{name}: {c.solver} is {-gap:.2%} below what is proven")
            if c.solver != "auto" or c.budget == LEAST:
                continue
            most = 0.001 if c.budget >= 0.3 else 0.03 if c.budget >= 0.15 else math.inf
            if gap is not None and gap > most:
                found.append(f"{name}: gap of {gap:.2%}, {most:.1%} at most")
            limit = 10.0 if f.nodes <= 2000 else 60.0
            if c.solve_seconds > limit:
                found.append(f"{name}: {c.solve_seconds:.1f} s for {f.nodes:,} operations, {limit:.0f} s at most")
            target = CHECKMATE.get(c.budget) if is_checkmates(f.graph, f.nodes) else None
            if target is not None and not (c.overhead is not None and c.overhead < target + 5e-6):
                reached = c.outcome if c.overhead is None else f"+{c.overhead:.3%}"
                found.append(f"{name}: {reached}, +{target:.3%} at most")
    return found


def is_checkmates(name: str, nodes: int) -> bool:
    """Whether this is ResNet-50 as the Checkmate paper has it."""
    return "ResNet50" in name and nodes == 353


def conclude(rounds: Sequence[Round], console: Console) -> None:
    """Prints who stands where."""
    columns = ("budgets", "has a plan", "step longer by", "median", "beats auto", "looks for")
    table = table_of("", *columns, left=[""], title="against auto")
    for line in standings(rounds):
        longer = "" if line.slower is None else f"{line.slower:+.2%}"
        median = "" if line.points is None else f"{line.points:+.2%}"
        cells = (f"{line.asked}", f"{line.feasible:.0%}", longer, median, f"{line.faster}")
        table.add_row(line.solver, *cells, f"{line.solve_seconds:.1f} s")
    console.print(table)
    for title, lines in (("auto is worse", losses(rounds)), ("targets missed", missed(rounds))):
        console.print(f"{title}: {len(lines)}" + "".join(f"\n  {escape(line)}" for line in lines), highlight=False)


# ---- the command -----------------------------------------------------------------------------------


def _parser(solvers: Sequence[str]) -> argparse.ArgumentParser:
    parser = report_parser("solvers", __doc__)
    parser.add_argument("--graphs", nargs="*", choices=list(GRAPHS), metavar="NAME", help=", ".join(GRAPHS))
    parser.add_argument("--files", nargs="+", type=Path, default=[], metavar="FILE", help="graphs in files as well")
    parser.add_argument("--frozen", type=Path, metavar="FOLDER", help="where graphs are kept (benches.graphs)")
    parser.add_argument("--solvers", nargs="+", choices=solvers, metavar="NAME", help=", ".join(solvers))
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="X", help="of the plain peak")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="for one plan (default 120)")
    parser.add_argument("--resume", action="store_true", help="ask only what is not in the JSON file: it takes hours")
    anew = "with --resume: ask these solvers anew, on the graphs that are named, or prove the bound anew"
    parser.add_argument("--again", nargs="+", default=[], choices=[*solvers, BOUND], metavar="NAME", help=anew)
    parser.add_argument("--check", action="store_true", help="fail where auto is worse, or a target is missed")
    return parser


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


def _without(known: Round, again: Collection[str]) -> Round:
    """Returns what is known but of those that are to be asked anew."""
    cells = [cell for cell in known.cells if cell.solver not in again]
    return replace(known, cells=cells, bounds={} if BOUND in again else known.bounds)


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench."""
    solvers = contestants()
    parser = _parser(list(solvers))
    parsed = parser.parse_args(arguments)
    try:  # before the first hour, not after the last
        files = {path: load(path) for path in parsed.files}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    console, document = opening("solvers", arguments, torch.device("cpu"))
    chosen = {name: solvers[name] for name in dict.fromkeys(("auto", *(parsed.solvers or solvers)))}
    names = list(GRAPHS) if parsed.graphs is None and not parsed.files else parsed.graphs or []
    rounds = {known.graph: known for known in (read_rounds(parsed.json) if parsed.resume else [])}
    again = {*parsed.again} & {*chosen, BOUND}
    for source in (*names, *parsed.files):
        name = source if isinstance(source, str) else source.name.partition(".")[0]
        with steps(1, f"{name}: graph"):
            graph = frozen(source, parsed.frozen) if isinstance(source, str) else files[source]
        extra = CHECKMATE if is_checkmates(name, len(graph.nodes)) else ()
        budgets = sorted({*parsed.budgets, *extra}, reverse=True)
        with steps(len(budgets) + len(chosen) * (len(budgets) + 1), name) as advance:
            known = _without(rounds[name], again) if name in rounds else None
            rounds[name] = contest(name, graph, chosen, budgets, parsed.seconds, advance, known)
        show(rounds[name], console)
        if parsed.json:  # a run of hours may be cut short
            done = list(rounds.values())
            ends = {"standings": [asdict(s) for s in standings(done)], "auto_is_worse": losses(done)}
            found = {"graphs": [asdict(r) for r in done], **ends, "targets_missed": missed(done)}
            write_json(parsed.json, {**document, **found})
    done = list(rounds.values())
    conclude(done, console)
    return int(parsed.check and bool(losses(done) or missed(done)))


if __name__ == "__main__":
    sys.exit(main())
