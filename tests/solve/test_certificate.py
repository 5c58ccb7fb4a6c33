"""Bounds from several moments: never above the optimum for any moments, and above the bound of one moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import pytest
from graphs import Builder, chain, network
from test_bounds import ROUNDING, first_runs, isclose, least_budget, seconds_in, small

from fckpt.graph import Graph, simulate
from fckpt.solve import brute, get
from fckpt.solve._moments import ProgramEffort
from fckpt.solve.core.rules import Order, Rules, peak_of, seconds_of
from fckpt.solve.core.starts import save_everything
from fckpt.solve.proofs.bounds import Bound, Problem, lower_bound, proven_seconds
from fckpt.solve.proofs.certificate import tighter
from fckpt.solve.proofs.moment_program import MomentProgram


def optima(graph: Graph, fractions: tuple[float, ...]) -> Iterator[tuple[int, Order, float]]:
    """Yields budgets, the order of first runs of an optimal schedule, and its seconds."""
    least, most = least_budget(graph), simulate(graph, get("save_all")(graph, None)).peak_nbytes
    for budget in sorted({int(least + f * (most - least)) for f in fractions}):
        best = brute(graph, budget)
        yield budget, first_runs(best), seconds_in(graph, best)


def by_moments(graph: Graph, budget: int, draw: Random, order: Order | None = None) -> float:
    """Returns the bound of two to four random moments, or of all moments if the order is given."""
    problem = Problem(graph, order)
    if not problem.least:
        return 0.0
    found: list[int] = []
    nodes = [i for i in (*problem.first_runs.forward, *problem.first_runs.backward) if problem.certain.required[i]]
    for index in nodes if order is not None else draw.sample(nodes, len(nodes)):
        before, after = problem.certain.before(index), problem.certain.after(index)
        if all(before[i] or after[i] for i in found) and (order is not None or len(found) < 4):
            found.append(index)
    found.sort(key=lambda i: problem.certain.before(i).sum())
    program = MomentProgram(problem, [problem.moment(i) for i in found], budget)
    repeated = (
        proven_seconds(problem, program.solve(branches=20, gap=5e-4, searches=25), program.columns)
        if program.columns
        else 0.0
    )
    return problem.least + repeated


def against_brute(seed: int, most: int, fractions: tuple[float, ...]) -> Iterator[tuple[float, Bound, float]]:
    """Checks the bounds of a small graph; yields the optimum, the bound, and the bound of all moments of the optimum's
    order.
    """
    graph, draw = small(seed, most), Random(seed)
    for budget, order, seconds in optima(graph, fractions):
        bound = tighter(graph, budget)
        assert lower_bound(graph, budget).seconds <= bound.seconds <= seconds * ROUNDING
        given = by_moments(graph, budget, draw, order)
        assert given <= seconds * ROUNDING
        assert by_moments(graph, budget, draw) <= seconds * ROUNDING
        assert tighter(graph, budget, order).seconds <= seconds * ROUNDING
        yield seconds, bound, given


@pytest.mark.parametrize("batch", range(3))
def test_never_above_the_optimum(batch: int):
    found = [entry for k in range(50) for entry in against_brute(5000 * batch + k, 8, (0.0, 0.3, 0.6))]
    assert sum(isclose(bound.seconds, seconds) for seconds, bound, _ in found) > 0.9 * len(found)
    assert sum(isclose(given, seconds) for seconds, _, given in found) > 0.9 * len(found)


@pytest.mark.parametrize(("count", "budget", "seconds"), [(4, 3, 11.0), (5, 3, 16.0), (5, 4, 12.0)])
def test_on_a_short_chain_the_bound_is_the_optimum(count: int, budget: int, seconds: float):
    graph = chain(count)
    assert isclose(seconds_in(graph, brute(graph, budget)), seconds)
    assert isclose(tighter(graph, budget).seconds, seconds)


def test_on_a_chain_the_bound_adds_recomputations_between_moments():
    graph = chain(10)
    bound = tighter(graph, 4)
    assert bound.method == "several moments" and lower_bound(graph, 4).seconds < 28
    assert isclose(bound.seconds, seconds_in(graph, get("rotor")(graph, 4)))


@pytest.mark.parametrize(
    ("graph", "fraction", "gain", "gap"),
    [(network(6), 0.4, 0.6, 0.2), (network(8, skips=True, shrink=0.7), 0.4, 0.01, 0.1), (network(10), 0.4, 0.2, 0.2)],
)
def test_on_blocks_the_bound_is_closer_to_a_plan(graph: Graph, fraction: float, gain: float, gap: float):
    rules = Rules(graph)
    everything = save_everything(rules)
    budget, least = int(fraction * peak_of(rules, everything)), seconds_of(rules, everything)
    one, several = lower_bound(graph, budget), tighter(graph, budget)
    assert several == tighter(graph, budget)
    assert 100 * (several.seconds - one.seconds) / least > gain
    plan = seconds_in(graph, get("auto")(graph, budget))
    assert several.seconds <= plan * ROUNDING
    assert 100 * (plan - several.seconds) / least < gap


def test_without_effort_the_bound_is_that_of_one_moment():
    graph = network(6)
    budget = int(0.4 * peak_of(Rules(graph), save_everything(Rules(graph))))
    bound = tighter(graph, budget, effort=ProgramEffort(0))
    assert bound == lower_bound(graph, budget) and bound.method == "integer program"


def test_several_moments_do_not_change_a_bound_that_one_moment_decides():
    graph = network(3)
    rules = Rules(graph)
    plain = peak_of(rules, save_everything(rules))
    assert tighter(graph, plain) == lower_bound(graph, plain) and tighter(graph, plain).method == "one run each"
    assert tighter(graph, 0) == Bound(math.inf, "any", "least peak")


def test_a_given_order_raises_the_bound():
    build = Builder()
    x = build.value(1)
    a, b = (build.node("large", [x], [4], seconds)[0] for seconds in (1.0, 2.0))
    c, d = (build.node("small", [v], [1], 1.0)[0] for v in (a, b))
    end = build.node("sum", [c, d], [1], 1.0)
    graph = Graph(tuple(build.nodes), tuple(build.values), (x,), (), tuple(end), (), boundary=5)
    assert tighter(graph, 8).seconds == 6.0
    bound = tighter(graph, 8, Order([0, 1, 2, 3, 4], []))
    assert isclose(bound.seconds, 8.0) and bound.scope == "given"
