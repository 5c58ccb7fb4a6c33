"""The constraint program against exhaustive search for its order and number of recomputations."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from fixed_order import least_peak, optimum, tight
from graphs import graphs, network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fckpt.errors import ArgumentValueError, BudgetError, FckptError
from fckpt.graph import Compute, Graph, Schedule, simulate
from fckpt.solve._moccasin import moccasin, moccasin3
from fckpt.solve._save_all import save_all
from fckpt.solve.core.rules import Rules, Solver

needs_ortools = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs fckpt[cpsat]")

CHOICES = [2, 6, 8, 12, 13, 15]
"""Random seeds of graphs on which recomputations lower the peak."""


def plain_peak(graph: Graph) -> int:
    return simulate(graph, save_all(graph)).peak_nbytes


def computed(schedule: Schedule) -> list[int]:
    return [s.node for s in (*schedule.forward, *schedule.backward) if isinstance(s, Compute)]


@needs_ortools
@pytest.mark.parametrize(("solver", "most"), [(moccasin, 1), (moccasin3, 2)])
@pytest.mark.parametrize("seed", CHOICES)
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_the_plan_is_optimal_for_its_order_and_recomputations(solver: Solver, most: int, seed: int, fraction: float):
    graph = tight(seed, 3)
    least = int(least_peak(graph, most=most))
    budget = int(least + fraction * (plain_peak(graph) - least))
    schedule = solver(graph, budget)
    nodes = computed(schedule)
    assert simulate(graph, schedule).peak_nbytes <= budget
    assert 1 < max(nodes.count(index) for index in nodes) <= most + 1
    taken = sum(Rules(graph).seconds[index] for index in nodes)
    assert taken == pytest.approx(optimum(graph, budget, most=most), abs=1e-6)


@needs_ortools
@pytest.mark.parametrize(("solver", "most"), [(moccasin, 1), (moccasin3, 2)])
@pytest.mark.parametrize("seed", CHOICES[:4])
def test_the_least_budget_is_the_least_peak_of_the_order(solver: Solver, most: int, seed: int):
    graph = tight(seed, 3)
    least = least_peak(graph, most=most)
    with pytest.raises(BudgetError, match=r"solver 'moccasin3?' finds") as error:
        solver(graph, int(least) - 1)
    assert error.value.least_bytes == least


@needs_ortools
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    graph=graphs(most=5, decisions=True), fraction=st.floats(0.2, 1.0), solver=st.sampled_from([moccasin, moccasin3])
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


@needs_ortools
def test_a_large_graph_is_refused():
    graph = network(70)
    with pytest.raises(ArgumentValueError) as error:
        moccasin(graph, plain_peak(graph) // 2)
    assert str(error.value) == (
        f"the solver 'moccasin' takes graphs of at most 400 nodes, not {len(graph.nodes)}. Take 'auto' or 'moments'."
    )
    assert moccasin(graph) == moccasin(graph, plain_peak(graph)) == save_all(graph)


def test_without_ortools_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(ImportError) as error:
        moccasin3(network(1), 0)
    assert isinstance(error.value, FckptError)
    assert (
        str(error.value) == "the solver 'moccasin3' needs OR-Tools, which is not installed: pip install 'fckpt[cpsat]'."
    )
