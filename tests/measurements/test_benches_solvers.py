"""The bench of all solvers: its graphs, its processes, and what it reports."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benches import solvers
from benches.common import solver_results, solver_runs
from benches.common.graphs import checksum, frozen, layered, read, traced, write
from benches.common.solver_results import GraphResults, read_results
from benches.common.solver_runs import LEAST, Cell
from benches.common.torch_knapsack import torch_dp, torch_greedy, torch_ilp
from fckpt import solve
from fckpt.errors import BudgetError
from fckpt.graph import Graph, simulate
from fckpt.solve.core.rules import Rules


def peak_of_all(graph: Graph) -> int:
    return simulate(graph, solve.get("save_all")(graph, None)).peak_nbytes


def test_random_graphs_are_the_same_each_time_and_layered():
    graph = layered(60)
    assert checksum(graph) == checksum(layered(60)) != checksum(layered(60, seed=1))
    assert graph.boundary == 60 and len(graph.gradients) >= 1
    assert all(graph.nodes[i].inputs or i == 0 for i in range(60))  # one source
    assert all(graph.consumers[v] for v in range(59)) and graph.outputs == (59,)  # one sink
    assert len(Rules(graph).backward) == len(graph.nodes) - 60


def test_networks_are_traced_without_memory_and_frozen(tmp_path: Path):
    graph = traced("unet")
    assert peak_of_all(graph.plain) > 2**31  # eight images of 256 x 256
    assert graph.seconds > 0 and all(n.seconds > 0 for n in graph.nodes)
    write(graph, tmp_path / "unet.json.gz")
    assert checksum(read(tmp_path / "unet.json.gz")) == checksum(graph)
    assert frozen("unet", tmp_path) == graph
    assert frozen("layered100", tmp_path) == frozen("layered100", tmp_path) == layered(100)


@pytest.mark.parametrize("knapsack", [torch_dp, torch_greedy, torch_ilp])
def test_torchs_knapsacks_fit_or_say_what_would(knapsack: solve.Solver):
    graph = layered(40)
    plain = peak_of_all(graph)
    with pytest.raises(BudgetError) as error:
        knapsack(graph, plain // 10)
    for budget in (error.value.least_bytes, (error.value.least_bytes + plain) // 2):
        assert simulate(graph, knapsack(graph, budget)).peak_nbytes <= budget
    assert simulate(graph, knapsack(graph, None)).recomputed_nodes == 0


def slow(budget: float, graph: Graph, nbytes: int) -> int:
    if budget == 0.5:
        time.sleep(60)
    return nbytes


def test_a_process_that_takes_too_long_is_ended_and_the_next_budget_asked():
    start = time.perf_counter()
    found = dict(solver_runs.answers(slow, layered(10), {0.9: 9, 0.5: 5, 0.1: 1}, 0.5))
    assert found == {0.9: 9, 0.5: None, 0.1: 1}
    assert time.perf_counter() - start < 50


def test_what_becomes_of_a_solver():
    graph = layered(30)
    plain = peak_of_all(graph)
    cell = solver_runs.solved("greedy", solve.get("greedy"), 0.9, graph, int(0.9 * plain))
    assert cell.outcome == "fits" and cell.peak_bytes is not None and cell.peak_bytes <= 0.9 * plain
    cell = solver_runs.solved("save_all", solve.get("save_all"), 0.9, graph, int(0.9 * plain))
    assert (cell.outcome, cell.least_bytes) == ("over", plain)
    cell = solver_runs.solved("save_all", solve.get("save_all"), LEAST, graph, 0)
    assert (cell.outcome, cell.peak_bytes, cell.overhead) == ("fits", plain, 0.0)
    assert solver_runs.solved("brute", solve.get("brute"), 0.9, graph, plain).outcome == "refused"
    assert solver_runs.solved("none", partial(divmod, 0), 0.9, graph, plain).outcome == "failed"  # type: ignore[arg-type]


def plan(solver: str, budget: float, overhead: float, seconds: float = 1.0, peak: int = 50) -> Cell:
    return Cell(solver, budget, "fits", seconds, overhead, peak)


def made_up(*cells: Cell, bound: float | None = 10.0, nodes: int = 100) -> GraphResults:
    budgets = dict.fromkeys((c.budget for c in cells if c.budget != LEAST), bound)
    return GraphResults("g", "abc", nodes, 100, 10.0, 20, budgets, list(cells))


def test_where_auto_is_worse_is_shown():
    over = Cell("auto", 0.3, "over", least_bytes=40)
    assert solver_results.auto_is_worse([made_up(plan("auto", 0.3, 0.1), plan("dtr", 0.3, 0.1))]) == []
    assert solver_results.auto_is_worse([made_up(plan("auto", 0.3, 0.1), plan("dtr", 0.3, 0.09))]) == [
        "g at 30.0%: dtr +9.000%, auto +10.000%"
    ]
    assert solver_results.auto_is_worse([made_up(over, plan("dtr", 0.3, 0.2))]) == [
        "g at 30.0%: dtr +20.000%, auto has no plan (over)"
    ]
    assert solver_results.auto_is_worse(
        [made_up(plan("auto", LEAST, 0.5, peak=40), plan("dtr", LEAST, 0.9, peak=30))]
    ) == ["g: dtr goes down to 30.00%, auto to 40.00%"]
    late = Cell("auto", LEAST, "time", 120.0)
    assert solver_results.auto_is_worse([made_up(late, plan("dtr", LEAST, 0.9, peak=30))]) == [
        "g: dtr goes down to 30.00%, auto has no plan (it was stopped)"
    ]
    three = made_up(
        plan("auto", LEAST, 0.5, peak=40), plan("xla", LEAST, 0.9, peak=35), plan("dtr", LEAST, 0.9, peak=30)
    )
    assert solver_results.auto_is_worse([three]) == ["g: dtr goes down to 30.00%, 1 more below auto, auto to 40.00%"]


def test_targets():
    assert (
        solver_results.missed([made_up(plan("auto", 0.3, 0.0009), plan("auto", 0.2, 0.029), plan("auto", 0.1, 9.0))])
        == []
    )
    assert solver_results.missed([made_up(plan("auto", 0.3, 0.0011))]) == ["g at 30.0%: gap of 0.11%, 0.1% at most"]
    assert solver_results.missed([made_up(plan("auto", 0.2, 0.031))]) == ["g at 20.0%: gap of 3.10%, 3.0% at most"]
    assert solver_results.missed([made_up(plan("auto", 0.3, 0.2), bound=None)]) == ["g at 30.0%: nothing is proven"]
    late = Cell("auto", 0.3, "time", 60.0), Cell("auto", LEAST, "skipped")
    assert solver_results.missed([made_up(*late)]) == ["g at 30.0%: stopped after 60 s"]
    late = [made_up(plan("auto", 0.8, 0.0, 11.0)), made_up(plan("auto", 0.8, 0.0, 11.0), nodes=2400)]
    assert solver_results.missed(late) == ["g at 80.0%: 11.0 s for 100 operations, 10 s at most"]
    large = [made_up(plan("auto", 0.8, 0.0, 36.0), nodes=count) for count in (11_000, 20_000)]
    assert solver_results.missed(large) == ["g at 80.0%: 36.0 s for 11,000 operations, 35 s at most"]
    assert solver_results.missed([made_up(plan("dtr", 0.8, 0.1), bound=11.5)]) == [
        "g at 80.0%: dtr is 5.00% below what is proven"
    ]
    checkmate = GraphResults("ResNet50", "abc", 353, 100, 10.0, 20, {0.549: 10.13}, [plan("auto", 0.549, 0.0130)])
    assert solver_results.missed([checkmate]) == ["ResNet50 at 54.9%: +1.300%, +1.223% at most"]


def test_summaries():
    results = [made_up(plan("auto", 0.3, 0.0), plan("dtr", 0.3, 0.2)), made_up(plan("auto", 0.3, 0.5))]
    results[1].cells.append(Cell("dtr", 0.3, "over", 3.0, least_bytes=70))
    auto, dtr = solver_results.summaries(results)
    assert (auto.asked, auto.feasible, auto.faster) == (2, 1.0, 0)
    assert (dtr.asked, dtr.feasible, dtr.faster) == (2, 0.5, 0)
    assert dtr.slower is not None and math.isclose(dtr.slower, 0.2)
    results[1].cells.append(Cell("dtr", LEAST, "skipped"))
    results[1].cells.append(Cell("dtr", 0.2, "skipped"))  # takes no time
    assert solver_results.summaries(results)[1].solve_seconds == dtr.solve_seconds == 2.0


def test_a_late_proof_gives_way_to_that_of_a_larger_budget_or_a_quick_one(monkeypatch: pytest.MonkeyPatch):
    slow = {0.8: 1.0, 0.6: None, 0.4: 3.0, 0.3: None}

    def answers(ask: object, graph: Graph, asked: dict[float, int], seconds: float) -> Iterator[tuple[float, Any]]:
        quick = ask is solvers._quickly_proven
        assert seconds == 10.0
        return iter([(b, {0.6: 2.0, 0.3: 2.5}[b] if quick else slow[b]) for b in asked])

    monkeypatch.setattr(solvers, "answers", answers)
    found = dict(solvers._bounds(layered(10), dict.fromkeys(slow, 1), 10.0))
    assert found == {0.8: 1.0, 0.6: 2.0, 0.4: 3.0, 0.3: 3.0}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(layered(16), tmp_path / "small.json.gz")
    out = tmp_path / "out.json"
    arguments = ["--graphs", "--files", str(tmp_path / "small.json.gz"), "--solvers", "save_all", "--json", str(out)]
    with pytest.raises(SystemExit):
        solvers.main(arguments)  # does not look for plans
    capsys.readouterr()
    arguments[4] = "knapsack"
    assert solvers.main([*arguments, "--budgets", "0.9", "0.7", "--seconds", "30"]) == 0
    (found,) = read_results(out)
    assert found.checksum == checksum(layered(16)) and set(found.bounds) == {0.9, 0.7}
    assert {(c.solver, c.budget) for c in found.cells} == {
        (solver, budget) for solver in ("auto", "knapsack") for budget in (0.9, 0.7, LEAST)
    }
    text = capsys.readouterr().out
    assert "small" in text and "gap of auto" in text and "auto is worse: " in text


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, size in (("one", 12), ("two", 14)):
        write(layered(size), tmp_path / f"{name}.json.gz")
    out = tmp_path / "out.json"
    rest = ["--solvers", "knapsack", "--budgets", "0.8", "0.1", "--seconds", "30", "--json", str(out), "--resume"]
    solvers.main(["--graphs", "--files", str(tmp_path / "one.json.gz"), *rest])
    (first,) = read_results(out)
    asked: list[tuple[str, int]] = []
    real = solvers._cells  # pyright: ignore[reportPrivateUsage]

    def cells(title: str, solver: solve.Solver, graph: Graph, *args: Any) -> Iterator[Cell]:
        asked.append((title, len(graph.nodes)))
        return real(title, solver, graph, *args)

    monkeypatch.setattr(solvers, "_cells", cells)
    both = ["--graphs", "--files", str(tmp_path / "one.json.gz"), str(tmp_path / "two.json.gz"), *rest]
    solvers.main(both)
    once = read_results(out)
    sizes = [found.nodes for found in once]
    assert {size for _, size in asked} == {sizes[1]} and once[0] == first and len(sizes) == 2
    asked.clear()
    solvers.main([*both, "--again", "auto"])
    assert asked == [("auto", size) for size in sizes]
    again = read_results(out)
    for before, after in zip(once, again, strict=True):
        others = [[c for c in found.cells if c.solver != "auto"] for found in (before, after)]
        assert others[0] == others[1] and len(before.cells) == len(after.cells)
    solvers.main(["--graphs", "--files", str(tmp_path / "one.json.gz"), *rest, "--again", "auto", "xla"])
    left = read_results(out)  # what is not run stays
    assert left[1] == again[1] and len(left[0].cells) == len(again[0].cells)


def test_a_solver_that_takes_too_long_is_not_asked_again(monkeypatch: pytest.MonkeyPatch):
    def answers(ask: object, graph: Graph, budgets: dict[float, int], seconds: float):
        yield 0.8, Cell("x", 0.8, "fits", 1.0)
        yield 0.6, Cell("x", 0.6, "fits", seconds + 1)
        raise AssertionError("asked again")

    monkeypatch.setattr(solvers, "answers", answers)
    cells = [*solvers._cells("x", solve.get("knapsack"), layered(12), {0.8: 8, 0.6: 6, 0.4: 4, LEAST: 0}, 5.0)]  # pyright: ignore[reportPrivateUsage]
    assert [(c.budget, c.outcome) for c in cells] == [
        (0.8, "fits"),
        (0.6, "time"),
        (0.4, "skipped"),
        (LEAST, "skipped"),
    ]
