"""A tighter lower bound on the seconds within a budget: several moments in one integer program (`moment_program`).

The bound holds for every schedule that the program covers: all schedules, or all with a given order of first runs.
Every row of the program holds for all of them. If the plan made from the program's solution exceeds the budget nowhere,
the bound is the optimum.

Complexity: the time of the programs, whose rows are bounded. Graphs on which a second moment exceeds the limit get the
bound of a single moment. Left out: the same as in `moments`.
"""

from __future__ import annotations

from typing import NamedTuple

from fckpt.graph.graph import Graph
from fckpt.solve._moments import ProgramEffort, program_rounds, usual_effort
from fckpt.solve.core.rules import Order
from fckpt.solve.proofs.bounds import Bound, Problem, single_moments

__all__ = ["PROOF", "Certificate", "certified", "quick", "tighter"]

ROUNDING = 1e-6
"""A bound must exceed another by this fraction of the recomputation time to replace it."""
PROOF = ProgramEffort(rows=25_000, branches=20, searches=25, gap=5e-4, careful=True)
"""The effort of `tighter`: up to half a minute."""
QUICK = ProgramEffort(rows=3_000, searches=25, careful=True)
"""The effort spent on every plan: about a second."""


class Certificate(NamedTuple):
    """A proven bound, and the plans that were found on the way."""

    bound: Bound
    plans: list[Order]
    """Useful as starts; they need not be within the budget."""


def tighter(graph: Graph, budget: int, order: Order | None = None, effort: ProgramEffort = PROOF) -> Bound:
    """Returns the bound of `certified`."""
    return certified(graph, budget, order, effort).bound


def quick(graph: Graph) -> ProgramEffort:
    """Returns the effort for a bound that takes about a second."""
    return QUICK._replace(rows=min(QUICK.rows, usual_effort(graph).rows))


def certified(graph: Graph, budget: int, order: Order | None = None, effort: ProgramEffort = PROOF) -> Certificate:
    """Returns a proven lower bound on the seconds of every schedule whose peak is at most `budget`.

    Args:
        graph: one training step.
        budget: bytes.
        order: restricts the claim to schedules whose first runs are in this order, as in `lower_bound`.
        effort: the limits of the programs.

    Returns:
        The bound of several moments, or the bound of `lower_bound` if several moments do not prove more.
    """
    problem = Problem(graph, order)
    bound, strongest = single_moments(problem, budget)
    if strongest is None or 3 * strongest.moment.columns > effort.rows:  # a second moment adds twice as many
        return Certificate(bound, [])
    rounds = [*program_rounds(problem, strongest.moment, budget, effort)]
    repeated = max(found.seconds for found in rounds)
    if repeated > (1 + ROUNDING) * (bound.seconds - problem.least):
        bound = Bound(float(problem.least + repeated), bound.scope, "several moments")
    return Certificate(bound, [found.plan for found in rounds if found.plan is not None])
