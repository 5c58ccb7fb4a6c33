"""A tighter lower bound on the seconds within a budget: several moments in one integer program (`moments`).

What such a program proves holds for every schedule that it is about, in any order if none is given: its rows demand no
more than what every schedule does. If the plan that it leads to overflows nowhere, the bound is the optimum.

Complexity: that of the programs, whose rows are bounded. Graphs for which two moments are too much get the bound of
one. Left out: what `moments` leaves out.
"""

from __future__ import annotations

from typing import NamedTuple

from fckpt.graph import Graph
from fckpt.solve.base import Order
from fckpt.solve.bounds import Bound, Problem, single
from fckpt.solve.moments import GAP, generated, usual_rows

__all__ = ["Certificate", "certified", "quick", "tighter"]

ROWS = 11_000
"""The most rows of all programs together: some seconds."""
QUICK = 3_000
"""The same for every plan: a second."""


class Certificate(NamedTuple):
    """What is proven, and the plans that came up on the way."""

    bound: Bound
    plans: list[Order]
    """Good to start from, but they need not be within the budget."""


def tighter(graph: Graph, budget: int, order: Order | None = None, rows: int = ROWS) -> Bound:
    """Returns what `certified` proves."""
    return certified(graph, budget, order, rows).bound


def quick(graph: Graph) -> int:
    """Returns the rows for a bound that takes a second."""
    return min(QUICK, usual_rows(graph))


def certified(graph: Graph, budget: int, order: Order | None = None, rows: int = ROWS) -> Certificate:
    """Returns a proven lower bound on the seconds of every schedule whose peak is at most `budget`.

    Args:
        graph: one training step.
        budget: bytes.
        order: restricts the claim to schedules whose first runs come in this order, as in `lower_bound`.
        rows: the effort: the most rows of all integer programs together.

    Returns:
        The bound of several moments, or that of `lower_bound`, where they prove no more.
    """
    problem = Problem(graph, order)
    bound, look = single(problem, budget)
    if look is None or 3 * look.moment.columns > rows:  # a second moment has about twice as many again
        return Certificate(bound, [])
    rounds = [*generated(problem, look.moment, budget, rows)]
    repeated = max(found.seconds for found in rounds)
    if repeated > (1 + GAP) * (bound.seconds - problem.least):
        bound = Bound(float(problem.least + repeated), bound.order, "several moments")
    return Certificate(bound, [found.plan for found in rounds if found.plan is not None])
