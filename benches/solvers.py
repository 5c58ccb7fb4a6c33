"""Compares all solvers on the same graphs: extra time, simulated peak, and seconds to find the plan.

    python -m benches solvers --frozen frozen --seconds 60 --json benches/results/solvers-cpu.json.gz
    python -m benches solvers --graphs unet resnet50 --solvers auto greedy dtr xla --budgets 0.6 0.3     # a minute
    git clone https://github.com/haoming-codes/moccasin
    python -m benches solvers --graphs unet --files moccasin/data/*train_nx.json --check

For each graph, solver and budget: the overhead of the plan, its simulated peak and the seconds to find it; if there is
no plan, the least budget for which the solver has one. The graphs are those of `common/graphs.py`, and files: graphs of
fckpt, or of the Checkmate and Moccasin papers (`common/checkmate.py`), which are not part of fckpt. With
`--frozen FOLDER`, a graph in the folder is read; any other is traced and written there.

A budget is a fraction of the peak of the step as autograd runs it. A solver runs in a separate process, and is stopped
after `--seconds`, or twice that for its least budget; then it is not run for the remaining budgets. The bound is the
lower bound that `fckpt.solve.certificate` proves, within `--seconds` if possible, otherwise in about one second. A gap
is the distance of a plan to the bound, in percent of the step.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from benches.common import checkmate
from benches.common.command import opening, report_parser, steps, table_of
from benches.common.graphs import GRAPHS, LARGER, checksum, frozen, read
from benches.common.results import write_json
from benches.common.solver_results import (
    CHECKMATE,
    DIGITS,
    TOLERANCE,
    GraphResults,
    auto_is_worse,
    is_checkmates,
    missed,
    read_results,
    summaries,
    to_json,
)
from benches.common.solver_runs import LEAST, Cell, allowed, answers, solved
from benches.common.torch_knapsack import TORCHS
from fckpt import solve
from fckpt._units import format_bytes, format_seconds
from fckpt.errors import FckptError
from fckpt.graph import Graph, simulate
from fckpt.solve._save_all import save_all
from fckpt.solve.proofs.bounds import least_peak
from fckpt.solve.proofs.certificate import quick, tighter

BUDGETS = (0.8, 0.6, 0.4, 0.3, 0.2, 0.15)
BOUND = "bound"
"""Stands for the lower bound among the names of solvers."""
EXCLUDED = ("brute", "policy", "recompute_all", "save_all")


# ---- one graph -------------------------------------------------------------------------------------


def compared() -> dict[str, solve.Solver]:
    """Returns the solvers: those of fckpt that look for a plan within a budget, and torch's knapsacks."""
    registered = {name: solve.get(name) for name in solve.names() if name not in EXCLUDED}
    return {"auto": registered.pop("auto"), **registered, **TORCHS}


def run_all(
    name: str,
    graph: Graph,
    solvers: dict[str, solve.Solver],
    budgets: Sequence[float],
    seconds: float,
    advance: Callable[[str], object],
    known: GraphResults | None = None,
) -> GraphResults:
    """Runs all solvers on a graph, except those whose results are `known`."""
    plain = simulate(graph.plain, save_all(graph)).peak_nbytes
    found = GraphResults(name, checksum(graph), len(graph.nodes), plain, graph.seconds, least_peak(graph))
    asked = {budget: int(budget * plain) for budget in (*budgets, LEAST)}
    if known is not None and known.checksum == found.checksum and {c.budget for c in known.cells} <= {*asked}:
        found.cells.extend(known.cells)
        found.bounds.update(known.bounds)
    if [*found.bounds] != [*budgets]:
        found.bounds.clear()
        for budget, bound in _bounds(graph, {b: asked[b] for b in budgets}, seconds):
            found.bounds[budget] = bound
            advance(f"{name}: bound")
    for title, solver in solvers.items():
        if title not in found.solvers:
            for cell in _cells(title, solver, graph, asked, seconds):
                found.cells.append(cell)
                advance(f"{name}: {title}")
    return found


def _cells(title: str, solver: solve.Solver, graph: Graph, asked: dict[float, int], seconds: float) -> Iterator[Cell]:
    """Yields the result of a solver for each budget. After a timeout the others are skipped."""
    start = time.perf_counter()
    left = [*asked]
    for budget, cell in answers(partial(solved, title, solver), graph, asked, seconds):
        took = time.perf_counter() - start
        most = allowed(budget, seconds)
        if cell is None and took < most:
            cell = Cell(title, budget, "failed", took, note="its process ended")
        elif cell is None or cell.solve_seconds > most:
            cell = Cell(title, budget, "time", most)
        yield cell
        left.remove(budget)
        if cell.outcome == "time":
            yield from (Cell(title, other, "skipped") for other in left)
            return
        start = time.perf_counter()


def _bounds(graph: Graph, asked: dict[float, int], seconds: float) -> Iterator[tuple[float, float | None]]:
    """Yields a lower bound for each budget, in descending order: a bound also holds for smaller budgets."""
    best = -math.inf
    for budget, bound in answers(_proven, graph, asked, seconds):
        if bound is None:
            bound = dict(answers(_quickly_proven, graph, {budget: asked[budget]}, seconds))[budget]
        best = best if bound is None else max(best, bound)
        yield budget, None if best == -math.inf else best


def _proven(budget: float, graph: Graph, nbytes: int) -> float:
    return tighter(graph, nbytes).seconds


def _quickly_proven(budget: float, graph: Graph, nbytes: int) -> float:
    return tighter(graph, nbytes, effort=quick(graph)).seconds


def load(path: Path) -> Graph:
    """Reads a graph of fckpt, or one of the Checkmate paper."""
    try:
        return read(path)
    except FckptError:
        return checkmate.load(path)


# ---- tables ----------------------------------------------------------------------------------------


def show(found: GraphResults, console: Console) -> None:
    """Prints a row per solver: the overhead and the seconds to find the plan, or the least budget in percent."""
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


def _text(found: GraphResults, cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.outcome == "time":
        return f"> {cell.solve_seconds:.0f} s"
    if cell.outcome == "over":
        return f"[dim]from {(cell.least_bytes or 0) / found.plain_peak_bytes:.1%}[/]"
    if cell.overhead is None:
        return f"[dim]{cell.outcome}[/]"
    share = f"{(cell.peak_bytes or 0) / found.plain_peak_bytes:.1%}, " if cell.budget == LEAST else ""
    text = f"{share}+{cell.overhead:.2%} {cell.solve_seconds:.1f} s"
    best = cell.budget != LEAST and cell.overhead <= found.best(cell.budget) + TOLERANCE
    return f"[green]{text}[/]" if best else text


def _bound_text(found: GraphResults, bound: float | None) -> str:
    if bound is None:
        return "?"
    return "none" if math.isinf(bound) else f"+{bound / found.seconds - 1:.2%}"


def conclude(results: Sequence[GraphResults], console: Console) -> None:
    """Prints the summary of each solver, where auto is worse, and missed targets."""
    columns = ("budgets", "has a plan", "extra time", "median", "beats auto", "seconds")
    table = table_of("", *columns, left=[""], title="compared with auto")
    for line in summaries(results):
        longer = "" if line.slower is None else f"{line.slower:+.2%}"
        median = "" if line.points is None else f"{line.points:+.2%}"
        cells = (f"{line.asked}", f"{line.feasible:.0%}", longer, median, f"{line.faster}")
        table.add_row(line.solver, *cells, f"{line.solve_seconds:.1f}")
    console.print(table)
    for title, lines in (("auto is worse", auto_is_worse(results)), ("targets missed", missed(results))):
        console.print(f"{title}: {len(lines)}" + "".join(f"\n  {escape(line)}" for line in lines), highlight=False)


# ---- the command -----------------------------------------------------------------------------------


def _parser(solvers: Sequence[str]) -> argparse.ArgumentParser:
    parser = report_parser("solvers", __doc__, device=False, check="auto is worse anywhere, or a target is missed")
    add = parser.add_argument
    graphs = f"{', '.join(GRAPHS)}; these are all but {', '.join(LARGER)}"
    add("--graphs", nargs="*", choices=[*GRAPHS, *LARGER], default=list(GRAPHS), metavar="NAME", help=graphs)
    files = "also graphs in files; only these with an empty --graphs"
    add("--files", nargs="+", type=Path, default=[], metavar="FILE", help=files)
    add("--frozen", type=Path, metavar="FOLDER", help="folder of traced graphs, filled if necessary")
    add("--solvers", nargs="+", choices=solvers, default=solvers, metavar="NAME", help=", ".join(solvers))
    add("--budgets", nargs="+", type=float, default=BUDGETS, metavar="X", help="fractions of the plain peak")
    add("--seconds", type=float, default=120.0, metavar="S", help="time limit for one plan (default 120)")
    add("--resume", action="store_true", help="run only what is not in the JSON file: all of it takes hours")
    again = f"with --resume: run these solvers again on the named graphs; {BOUND} for the lower bound"
    add("--again", nargs="+", default=[], choices=[*solvers, BOUND], metavar="NAME", help=again)
    return parser


def _without(known: GraphResults, again: Collection[str]) -> GraphResults:
    """Returns the known results, without those that are to be run again."""
    cells = [cell for cell in known.cells if cell.solver not in again]
    return replace(known, cells=cells, bounds={} if BOUND in again else known.bounds)


def main(arguments: list[str]) -> int:
    """Runs the bench."""
    solvers = compared()
    parser = _parser(list(solvers))
    parsed = parser.parse_args(arguments)
    try:
        files = {path: load(path) for path in parsed.files}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    console, document = opening("solvers", arguments, torch.device("cpu"))
    chosen = {name: solvers[name] for name in dict.fromkeys(("auto", *parsed.solvers))}
    results = {known.graph: known for known in (read_results(parsed.json) if parsed.resume else [])}
    again = {*parsed.again} & {*chosen, BOUND}
    for source in (*parsed.graphs, *parsed.files):
        name = source if isinstance(source, str) else source.name.partition(".")[0]
        with steps(1, f"{name}: graph"):
            graph = frozen(source, parsed.frozen) if isinstance(source, str) else files[source]
        extra = CHECKMATE if is_checkmates(name, len(graph.nodes)) else ()
        budgets = sorted({*parsed.budgets, *extra}, reverse=True)
        with steps(len(budgets) + len(chosen) * (len(budgets) + 1), name) as advance:
            known = _without(results[name], again) if name in results else None
            results[name] = run_all(name, graph, chosen, budgets, parsed.seconds, advance, known)
        show(results[name], console)
        if parsed.json:  # after each graph, because a run of hours may be interrupted
            write_json(parsed.json, {**document, "graphs": [to_json(found) for found in results.values()]}, DIGITS)
    done = list(results.values())
    conclude(done, console)
    return int(parsed.check and bool(auto_is_worse(done) or missed(done)))
