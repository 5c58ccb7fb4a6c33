"""A tighter lower bound on the seconds within a budget: several moments in one integer program (`moments`).

What such a program proves holds for every schedule that it is about, in any order if none is given: its rows demand no
more than what every schedule does. If the plan that it leads to overflows nowhere, the bound is the optimum.

Complexity: that of the programs, whose rows are bounded. Graphs for which two moments are too much get the bound of
one. Left out: what `moments` leaves out.
"""

from __future__ import annotations

from typing import NamedTuple

from fckpt.graph.graph import Graph
from fckpt.solve._moments import ProgramEffort, program_rounds, usual_effort
from fckpt.solve.core.rules import Order
from fckpt.solve.proofs.bounds import Bound, Problem, single_moments

__all__ = ["PROOF", "Certificate", "certified", "quick", "tighter"]

ROUNDING = 1e-6
"""A part of the repetitions' time: more than that has to be gained to be worth a name."""
PROOF = ProgramEffort(rows=25_000, branches=20, gap=5e-4, careful=True)
"""Half a minute now and then."""
QUICK = ProgramEffort(rows=3_000, careful=True)
"""The same for every plan: a second."""


class Certificate(NamedTuple):
    """What is proven, and the plans that came up on the way."""

    bound: Bound
    plans: list[Order]
    """Good to start from, but they need not be within the budget."""


def tighter(graph: Graph, budget: int, order: Order | None = None, effort: ProgramEffort = PROOF) -> Bound:
    """Returns what `certified` proves."""
    return certified(graph, budget, order, effort).bound


def quick(graph: Graph) -> ProgramEffort:
    """Returns the effort for a bound that takes a second."""
    return QUICK._replace(rows=min(QUICK.rows, usual_effort(graph).rows))


def certified(graph: Graph, budget: int, order: Order | None = None, effort: ProgramEffort = PROOF) -> Certificate:
    """Returns a proven lower bound on the seconds of every schedule whose peak is at most `budget`.

    Args:
        graph: one training step.
        budget: bytes.
        order: restricts the claim to schedules whose first runs come in this order, as in `lower_bound`.
        effort: what may be spent.

    Returns:
        The bound of several moments, or that of `lower_bound`, where they prove no more.
    """
    problem = Problem(graph, order)
    bound, strongest = single_moments(problem, budget)
    if strongest is None or 3 * strongest.moment.columns > effort.rows:  # a second moment has about twice as many again
        return Certificate(bound, [])
    rounds = [*program_rounds(problem, strongest.moment, budget, effort)]
    repeated = max(found.seconds for found in rounds)
    if repeated > (1 + ROUNDING) * (bound.seconds - problem.least):
        bound = Bound(float(problem.least + repeated), bound.scope, "several moments")
    return Certificate(bound, [found.plan for found in rounds if found.plan is not None])
