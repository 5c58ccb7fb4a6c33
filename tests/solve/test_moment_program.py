"""The integer program of moments: cutting planes exclude no plan, and tighten the linear relaxation."""

from __future__ import annotations

import pytest
from graphs import network
from test_bounds import isclose

from benches.common.graphs import layered
from fckpt.graph import Graph
from fckpt.solve.core.rules import Order, Rules, peak_of
from fckpt.solve.core.starts import save_everything
from fckpt.solve.proofs import moment_program
from fckpt.solve.proofs.bounds import Problem
from fckpt.solve.proofs.moment_program import MomentProgram

EXACT = {"branches": 10_000, "gap": 0.0, "searches": 25}


def program(graph: Graph, fraction: float, count: int, *, given: bool) -> MomentProgram | None:
    """Returns the program of `count` moments, spread over a step whose peak must fall to `fraction`."""
    rules = Rules(graph)
    order: Order = save_everything(rules)
    problem = Problem(graph, order if given else None)
    sequence = [i for i in (*order.forward, *order.backward) if problem.certain.required[i]]
    chain: list[int] = []
    for k in range(count):
        index = sequence[(k + 1) * len(sequence) // (count + 1)]
        if all(problem.moment(index).before[c] for c in chain):
            chain.append(index)
    found = MomentProgram(problem, [problem.moment(i) for i in chain], int(fraction * peak_of(rules, order)))
    return found if found.columns else None


@pytest.mark.parametrize("given", [True, False])
def test_planes_do_not_change_the_optimum(given: bool):
    planes: list[int] = []
    for seed in range(20):
        answers: list[float | None] = []
        for looks in (8, 0):
            made = program(layered(20, seed=seed), 0.5, 6, given=given)
            assert made is not None
            answers.append(made.solve(**{**EXACT, "searches": looks}).fun)
            planes.append(len(made.planes))
            assert looks or not made.planes
        with_cuts, without = answers
        if with_cuts is None or without is None:
            assert with_cuts == without
        else:
            assert abs(with_cuts - without) <= 1e-6 * moment_program.UNIT
    assert sum(count > 0 for count in planes) >= 8


@pytest.mark.parametrize(("graph", "given"), [(network(8), True), (network(8), False), (network(6), True)])
def test_planes_tighten_the_relaxation(graph: Graph, given: bool):
    made = program(graph, 0.4, 6, given=given)
    assert made is not None
    weak = made._answer(whole=False, options={}).fun  # pyright: ignore[reportPrivateUsage]
    whole = made.solve(**EXACT).fun
    strong = made._answer(whole=False, options={}).fun  # pyright: ignore[reportPrivateUsage]
    assert len(made.planes) > 0 and weak < strong <= whole * (1 + 1e-6)
    assert whole - strong < 0.8 * (whole - weak)


def test_planes_are_passed_to_longer_programs():
    graph = network(8)
    short = program(graph, 0.4, 4, given=True)
    assert short is not None
    short.solve(**EXACT)
    problem, budget = short.problem, int(0.4 * peak_of(Rules(graph), save_everything(Rules(graph))))
    again = MomentProgram(problem, short.moments, budget, short.planes)
    assert list(again.planes) == list(short.planes) and again.rows == short.rows
    assert isclose(again.solve(**EXACT).fun, short.solve(**EXACT).fun)
    assert not MomentProgram(problem, short.moments[:1], budget, [c for c in short.planes if c.last is not None]).planes
