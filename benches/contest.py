"""Solvers in processes of their own, which are ended when they take too long."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from fckpt import solve
from fckpt.errors import BudgetError, FckptError
from fckpt.graph import Graph, simulate

__all__ = ["LEAST", "Cell", "allowed", "answers", "solved"]

LEAST = 0.0
"""Stands for the least budget for which a solver has a plan."""
GRACE = 30.0
"""Seconds that a process has besides, to start and to read the graph."""


@dataclass(frozen=True)
class Cell:
    """What one solver made of one budget."""

    solver: str
    budget: float
    """A fraction of the plain peak, or `LEAST`."""
    outcome: str
    """fits; over: there is no plan; time: it was stopped; skipped: not asked, since it was stopped on the same graph;
    refused: it does not take such a graph; failed."""
    solve_seconds: float = 0.0
    overhead: float | None = None
    seconds: float | None = None
    """Of the step that it planned."""
    peak_bytes: int | None = None
    least_bytes: int | None = None
    """Where there is no plan: what the solver says it needs."""
    note: str = ""


def solved(name: str, solver: solve.Solver, budget: float, graph: Graph, nbytes: int) -> Cell:
    """Asks a solver for a plan of so many bytes, or for its least one, and simulates that."""
    start = time.perf_counter()

    def cell(outcome: str, note: str = "", least: int | None = None) -> Cell:
        return Cell(name, budget, outcome, time.perf_counter() - start, least_bytes=least, note=note)

    try:
        schedule = solver(graph, nbytes)
    except BudgetError as error:
        if budget == LEAST and nbytes < error.least_bytes:
            return solved(name, solver, budget, graph, error.least_bytes)
        return cell("over", least=error.least_bytes)
    except FckptError as error:
        return cell("refused", str(error))
    except Exception as error:  # whatever a solver dies of belongs in the table
        return cell("failed", repr(error))
    took = time.perf_counter() - start
    timeline = simulate(graph, schedule)
    return Cell(name, budget, "fits", took, timeline.overhead, timeline.seconds, timeline.peak_nbytes)


def allowed(budget: float, seconds: float) -> float:
    """Returns the seconds for a budget: the least peak is two questions, for the budget and for a plan."""
    return 2 * seconds if budget == LEAST else seconds


Answer = TypeVar("Answer")
Ask = Callable[[float, Graph, int], Answer]


def answers(
    ask: Ask[Answer], graph: Graph, budgets: Mapping[float, int], seconds: float
) -> Iterator[tuple[float, Answer | None]]:
    """Asks about one budget after the other, in another process that is ended if it takes too long with one of them.

    Args:
        ask: a function that can be pickled, of a budget, the graph, and the bytes of the budget.
        graph: one training step.
        budgets: the bytes of each.
        seconds: for one budget; see `allowed`.

    Yields:
        A budget and the answer; none where that took too long, or the process came to grief.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    left = dict(budgets)
    while left:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, ask, graph, left), daemon=True)
        process.start()
        there.close()
        try:
            grace = GRACE
            for budget in [*left]:
                answer: Answer | None = here.recv() if here.poll(allowed(budget, seconds) + grace) else None
                grace = 0.0
                del left[budget]
                if answer is None:
                    process.kill()  # not only after what is done with this
                yield budget, answer
                if answer is None:
                    break
        except EOFError:  # it is gone: out of memory, say
            budget = next(iter(left))
            del left[budget]
            yield budget, None
        finally:
            process.kill()
            process.join()


def _work(pipe: Connection, ask: Ask[Answer], graph: Graph, budgets: Mapping[float, int]) -> None:
    for budget, nbytes in budgets.items():
        pipe.send(ask(budget, graph, nbytes))
