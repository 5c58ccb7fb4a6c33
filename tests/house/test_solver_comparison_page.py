"""The tables of docs/solver-comparison.md are what the bench wrote, and what the page says of them holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from pages import ROOT

from benches.common import solver_results
from benches.common.graphs import GRAPHS
from benches.common.solver_results import CHECKMATE, GraphResults, Summary, auto_is_worse, gap_allowed, summaries
from benches.common.solver_runs import LEAST
from benches.solvers import BUDGETS

PAGE = ROOT / "docs" / "solver-comparison.md"
RESULTS = solver_results.read_results(ROOT / "benches" / "results" / "solvers-cpu.json.gz")
(LARGE,) = solver_results.read_results(ROOT / "benches" / "results" / "solvers-large.json")


def overhead(found: GraphResults, budget: float) -> str:
    """What `auto` made of a budget, in percent, and how far that is above the bound."""
    cell, bound = found.cell("auto", budget), found.bounds[budget]
    assert cell is not None
    if cell.overhead is None:
        return "" if bound == math.inf else "*none*" if cell.outcome == "over" else "*late*"
    gap = found.gap(cell)
    assert gap is not None
    text = f"{100 * cell.overhead:.2f}" + (f" ({100 * gap:.2f})" if gap >= 0.00005 else "")
    return f"**{text}**" if gap > gap_allowed(budget) else text


def row(found: GraphResults) -> str:
    """A graph's line in the table of `auto`."""
    least = found.cell("auto", LEAST)
    assert least is not None
    reached = f"{100 * least.peak_bytes / found.plain_peak_bytes:.2f}" if least.peak_bytes else "*late*"
    asked = [cell for b in BUDGETS if (cell := found.cell("auto", b)) is not None and cell.outcome != "skipped"]
    took = [cell.solve_seconds for cell in asked]
    cells = [
        f"Checkmate's {found.graph}" if found.graph not in GRAPHS else found.graph,
        f"{found.nodes:,}",
        *(overhead(found, budget) for budget in BUDGETS),
        f"{reached} ({100 * found.least_peak_bytes / found.plain_peak_bytes:.2f})",
        f"{median(took):.1f}, {max(took):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def checkmates() -> Iterator[str]:
    """The lines about the budgets of the Checkmate paper."""
    found = next(r for r in RESULTS if solver_results.is_checkmates(r.graph, r.nodes))
    for budget, target in CHECKMATE.items():
        cell, bound = found.cell("auto", budget), found.bounds[budget]
        assert cell is not None
        assert cell.overhead is not None
        assert bound is not None
        cells = [
            f"{100 * budget:.1f}",
            f"{100 * target:.3f}",
            f"{100 * cell.overhead:.3f}",
            f"{100 * (bound / found.seconds - 1):.3f}",
            f"{cell.solve_seconds:.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def summary(line: Summary) -> str:
    """A solver's line in the table of all."""
    name = f"`{line.solver}`"
    if line.slower is None:
        return f"| {name} | {line.asked} | {100 * line.feasible:.0f} % | | {line.faster} | {line.solve_seconds:.1f} |"
    longer = "" if line.solver == "auto" else f"{100 * line.slower:.2f} %"
    cells = (f"{line.asked}", f"{100 * line.feasible:.0f} %", longer, f"{line.faster}", f"{line.solve_seconds:.1f}")
    return f"| {' | '.join((name, *cells))} |"


def missed() -> list[str]:
    """Everything that falls short, but for the gaps: those are bold in the table."""
    return [
        f"* {line}" for line in (*auto_is_worse(RESULTS), *solver_results.missed(RESULTS)) if ": gap of " not in line
    ]


def large() -> Iterator[str]:
    """The lines about the graph of more than 20,000 operations, a solver each."""
    for solver in ("auto", "hierarchy", "greedy", "rotor"):
        cells = [f"`{solver}`"]
        for budget in BUDGETS:
            cell = LARGE.cell(solver, budget)
            assert cell is not None
            gap = LARGE.gap(cell)
            cells.append(
                "*late*" if gap is None or cell.overhead is None else f"{100 * cell.overhead:.2f} ({100 * gap:.2f})"
            )
        least = LARGE.cell(solver, LEAST)
        assert least is not None
        cells.append(f"{100 * least.peak_bytes / LARGE.plain_peak_bytes:.2f}" if least.peak_bytes else "*late*")
        asked = [cell for b in BUDGETS if (cell := LARGE.cell(solver, b)) is not None and cell.outcome != "skipped"]
        took = [cell.solve_seconds for cell in asked]
        cells.append(f"{median(took):.0f}, {max(took):.0f}")
        yield f"| {' | '.join(cells)} |"


def solve_seconds(solver: str, budget: float) -> float:
    cell = LARGE.cell(solver, budget)
    assert cell is not None
    return cell.solve_seconds


def test_the_table_of_the_large_graph_is_what_the_bench_wrote():
    text = PAGE.read_text()
    assert [line for line in large() if line not in text.splitlines()] == []
    assert f"gpt850 has {LARGE.nodes:,} operations" in text
    worse = ["gpt850 at 80.0%: greedy +0.506%, auto +0.524%", "gpt850 at 40.0%: greedy +5.392%, auto +5.403%"]
    assert auto_is_worse([LARGE]) == worse
    at80, at40 = (solve_seconds("greedy", budget) / solve_seconds("auto", budget) for budget in (0.8, 0.4))
    said = f"`greedy` is faster at 80 and 40 %, by 0.02 and 0.01 points, in {at80:.1f} and {at40:.1f} times the seconds"
    assert f"{said}; no other solver is faster at any budget" in " ".join(text.split())
    assert solver_results.missed([LARGE]) == []


def test_all_graphs_are_there():
    names = [found.graph for found in RESULTS]
    assert names[: len(GRAPHS)] == list(GRAPHS)
    assert len(names) == len(set(names)) > len(GRAPHS)


def test_the_tables_are_what_the_bench_wrote():
    lines = PAGE.read_text().splitlines()
    wanted = [*map(row, RESULTS), *checkmates(), *map(summary, summaries(RESULTS))]
    assert [line for line in wanted if line not in lines] == []


def test_the_readme_says_who_wins():
    said = " ".join((ROOT / "README.md").read_text().split())
    assert not auto_is_worse(RESULTS)
    assert "Up to 20,000 operations, no solver is anywhere better than the default `auto`" in said
    assert {line.partition(": ")[2].partition(" ")[0] for line in auto_is_worse([LARGE])} == {"greedy"}
    assert "on a graph of 40,000, `greedy` is better by at most 0.02 points" in said


def test_everything_that_is_missed_is_said_and_nothing_else():
    section = PAGE.read_text().partition("## Missed")[2]
    assert [line for line in section.splitlines() if line.startswith("* ")] == missed()
    assert ("nowhere worse than any other solver, at no budget and in no least peak: that aim is met" in section) == (
        not list(auto_is_worse(RESULTS))
    )


if __name__ == "__main__":
    print(
        *map(row, RESULTS),
        "",
        *checkmates(),
        "",
        *map(summary, summaries(RESULTS)),
        "",
        *missed(),
        "",
        *large(),
        sep="\n",
    )
