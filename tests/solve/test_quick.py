"""Plans that are found quickly: within the budget, about as fast as those of `auto`, or none."""

from __future__ import annotations

import pytest
from graphs import graphs, network, plain_nbytes
from hypothesis import HealthCheck, given, settings

from fckpt.graph import Graph, simulate
from fckpt.solve import _quick
from fckpt.solve._auto import auto
from fckpt.solve._quick import quick

POINTS = 5e-3
"""A quick plan may be slower than the solver's by this fraction of the step."""


@pytest.mark.parametrize("tenths", [4, 6, 8])
@pytest.mark.parametrize("count", [10, 30])
def test_a_quick_plan_is_about_as_fast_as_the_solvers(count: int, tenths: int) -> None:
    graph = network(count)
    budget = plain_nbytes(graph) * tenths // 10
    found = quick(graph, budget)
    assert found is not None
    timeline = simulate(graph, found)
    assert timeline.peak_nbytes <= budget
    assert timeline.seconds <= simulate(graph, auto(graph, budget)).seconds + POINTS * graph.seconds


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_every_quick_plan_is_within_the_budget(graph: Graph) -> None:
    for tenths in (3, 6, 9, 10):
        budget = plain_nbytes(graph) * tenths // 10
        found = quick(graph, budget)
        assert found is None or simulate(graph, found).peak_nbytes <= budget
    assert found is not None  # the plan that saves everything


@pytest.mark.parametrize("skipped", [0, 1, 2, 3])
def test_later_kinds_of_starts_are_tried_if_earlier_ones_do_not_fit(
    skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network(20)
    budget = plain_nbytes(graph) * 6 // 10
    tried: list[int] = []
    starts = _quick._starts

    def counted(*args: object) -> object:
        for number, make in enumerate(starts(*args)):  # type: ignore[arg-type]
            tried.append(number)
            yield make if number >= skipped else list

    monkeypatch.setattr(_quick, "_starts", counted)
    found = quick(graph, budget)
    assert tried == [0, 1, 2][: skipped + 1]
    assert (found is None) == (skipped == 3)
    assert found is None or simulate(graph, found).peak_nbytes <= budget


def test_nothing_is_found_below_what_any_plan_needs() -> None:
    assert quick(network(10), 1) is None
