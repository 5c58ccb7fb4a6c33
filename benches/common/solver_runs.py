"""Runs solvers in separate processes, which are ended if they take too long."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from fckpt import solve
from fckpt.errors import BudgetError, FckptError
from fckpt.graph import Graph, simulate

LEAST = 0.0
"""Stands for the least budget for which a solver has a plan."""
GRACE = 30.0
"""Seconds for a process to start and to read the graph."""


@dataclass(frozen=True)
class Cell:
    """The result of one solver for one budget."""

    solver: str
    budget: float
    """A fraction of the plain peak, or `LEAST`."""
    outcome: str
    """fits; over: the solver has no plan; time: it was stopped; skipped: not run, because it was stopped for an earlier
    budget of the graph; refused: it does not take such a graph; failed."""
    solve_seconds: float = 0.0
    overhead: float | None = None
    peak_bytes: int | None = None
    least_bytes: int | None = None
    """If there is no plan: the least budget, according to the solver."""
    note: str = ""


def solved(name: str, solver: solve.Solver, budget: float, graph: Graph, nbytes: int) -> Cell:
    """Runs a solver for a budget of `nbytes`, or for its least budget, and simulates the plan."""
    start = time.perf_counter()

    def cell(outcome: str, note: str = "", least: int | None = None) -> Cell:
        return Cell(name, budget, outcome, time.perf_counter() - start, least_bytes=least, note=note)

    try:
        schedule = solver(graph, nbytes)
    except BudgetError as error:
        if budget == LEAST and nbytes < error.least_bytes:
            return solved(name, solver, budget, graph, error.least_bytes)
        return cell("over", least=error.least_bytes)
    except FckptError:
        return cell("refused")
    except Exception as error:  # any error of a solver is a result
        return cell("failed", repr(error))
    took = time.perf_counter() - start
    timeline = simulate(graph, schedule)
    return Cell(name, budget, "fits", took, timeline.overhead, timeline.peak_nbytes)


def allowed(budget: float, seconds: float) -> float:
    """Returns the time limit for a budget. The least peak takes two runs: for the least budget, and for its plan."""
    return 2 * seconds if budget == LEAST else seconds


Answer = TypeVar("Answer")
Ask = Callable[[float, Graph, int], Answer]


def answers(
    ask: Ask[Answer], graph: Graph, budgets: Mapping[float, int], seconds: float
) -> Iterator[tuple[float, Answer | None]]:
    """Calls `ask` for one budget after the other, each in a process that is ended if the call takes too long.

    Args:
        ask: a picklable function of a budget, the graph, and the bytes of the budget.
        graph: one training step.
        budgets: the bytes of each.
        seconds: the limit for one budget; see `allowed`.

    Yields:
        A budget and the answer: None if the call took too long or the process died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for budget, nbytes in budgets.items():
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, ask, budget, graph, nbytes), daemon=True)
        process.start()
        there.close()
        answer: Answer | None = None
        with contextlib.suppress(EOFError):  # the process died: out of memory, for example
            if here.poll(GRACE) and here.recv() and here.poll(allowed(budget, seconds)):
                answer = here.recv()
        process.kill()  # before the caller continues
        process.join()
        yield budget, answer


def _work(pipe: Connection, ask: Ask[Answer], budget: float, graph: Graph, nbytes: int) -> None:
    pipe.send("started")
    pipe.send(ask(budget, graph, nbytes))
