"""Checkmate's integer program against exhaustive search for its order, and its rounded relaxation."""

from __future__ import annotations

import pytest
from fixed_order import least_peak, optimum, tight
from graphs import graphs, network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fckpt.errors import ArgumentValueError, BudgetError
from fckpt.graph import Compute, Graph, Schedule, simulate
from fckpt.solve._checkmate import checkmate, checkmate_lp
from fckpt.solve._save_all import save_all
from fckpt.solve.core.frontier import Frontier
from fckpt.solve.core.rules import Rules, Solver

CHOICES = [2, 4, 6, 8, 12, 13, 15, 17, 18, 19, 21, 22, 23, 26, 28, 29, 36, 38, 39]
"""Random seeds of graphs on which recomputations lower the peak."""


def plain_peak(graph: Graph) -> int:
    return simulate(graph, save_all(graph)).peak_nbytes


def seconds(graph: Graph, schedule: Schedule) -> float:
    weights = Rules(graph).seconds
    return sum(weights[s.node] for s in (*schedule.forward, *schedule.backward) if isinstance(s, Compute))


@pytest.mark.parametrize("seed", CHOICES)
@pytest.mark.parametrize("fraction", [0.0, 0.4, 0.8])
def test_the_plan_is_optimal_for_its_order(seed: int, fraction: float):
    graph = tight(seed, 3)
    least = int(least_peak(graph))
    budget = int(least + fraction * (plain_peak(graph) - least))
    schedule = checkmate(graph, budget)
    timeline = simulate(graph, schedule)
    assert timeline.peak_nbytes <= budget and timeline.recomputed_nodes
    assert seconds(graph, schedule) == pytest.approx(optimum(graph, budget), abs=1e-6)


@pytest.mark.parametrize("seed", CHOICES)
def test_the_least_budget_is_the_least_peak_of_the_order(seed: int):
    graph = tight(seed, 3)
    least = least_peak(graph)
    with pytest.raises(BudgetError, match="solver 'checkmate' finds") as error:
        checkmate(graph, int(least) - 1)
    assert error.value.least_bytes == least


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    graph=graphs(most=8, decisions=True),
    fraction=st.floats(0.2, 1.0),
    solver=st.sampled_from([checkmate, checkmate_lp]),
)
def test_a_plan_fits_or_the_least_budget_succeeds(graph: Graph, fraction: float, solver: Solver):
    budget = int(fraction * plain_peak(graph))
    try:
        schedule = solver(graph, budget)
    except BudgetError as error:
        assert error.least_bytes > budget
        budget = error.least_bytes
        schedule = solver(graph, budget)
    assert simulate(graph, schedule).peak_nbytes <= budget
    assert solver(graph, budget) == schedule


def test_rounding_stays_near_the_optimum():
    graph = network(2, parameters=False)
    budget = int(0.8 * plain_peak(graph))
    exact, rounded = (seconds(graph, solver(graph, budget)) for solver in (checkmate, checkmate_lp))
    assert graph.seconds < exact <= rounded <= 1.06 * exact  # the paper has 1.00 to 1.06


def test_nothing_is_recomputed_if_everything_fits_or_without_a_budget():
    graph = network(100)
    assert checkmate(graph) == checkmate(graph, plain_peak(graph)) == save_all(graph)


@pytest.mark.parametrize("solver", [checkmate, checkmate_lp])
def test_a_program_that_is_too_large_is_refused(solver: Solver):
    graph = network(40)
    size = Frontier(Rules(graph)).size()
    with pytest.raises(ArgumentValueError) as error:
        solver(graph, plain_peak(graph) // 2)
    assert str(error.value) == (
        f"the solver {solver.__name__!r} takes integer programs of at most about 100000 variables; this graph "
        f"of {len(graph.nodes)} nodes needs {size}. Take 'auto' or 'moments'."
    )


@pytest.mark.parametrize("seed", CHOICES[::3])
def test_held_values_determine_recomputations(seed: int):
    frontier = Frontier(Rules(tight(seed, 3)))
    stages = range(len(frontier.sequence))
    everything = [[v for v in frontier.choices if frontier.may_hold(v, t + 1)] for t in stages]
    for held, expected in ((everything, False), ([()] * len(stages), True)):
        order = frontier.holding(held)
        assert (len(order.forward) + len(order.backward) > len(stages)) is (expected or bool(frontier.rules.unsaved))
