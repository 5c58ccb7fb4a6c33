"""The integer program of moments: cuts keep every plan, and bring its fractions closer to whole numbers."""

from __future__ import annotations

import pytest
from graphs import network
from test_bounds import isclose

from benches.common.graphs import layered
from fckpt.graph import Graph
from fckpt.solve import windows
from fckpt.solve.core.rules import Order, Rules, peak_of
from fckpt.solve.core.starts import save_everything
from fckpt.solve.proofs.bounds import Problem
from fckpt.solve.proofs.program import Program

EXACT = {"branches": 10_000, "gap": 0.0}


def program(graph: Graph, fraction: float, count: int, *, given: bool) -> Program | None:
    """Returns the program of `count` moments, spread over a step whose peak is to fall to a fraction."""
    rules = Rules(graph)
    order: Order = save_everything(rules)
    problem = Problem(graph, order if given else None)
    sequence = [i for i in (*order.forward, *order.backward) if problem.certain.required[i]]
    chain: list[int] = []
    for k in range(count):
        index = sequence[(k + 1) * len(sequence) // (count + 1)]
        if all(problem.moment(index).before[c] for c in chain):
            chain.append(index)
    found = Program(problem, [problem.moment(i) for i in chain], int(fraction * peak_of(rules, order)))
    return found if found.columns else None


@pytest.mark.parametrize("given", [True, False])
def test_cuts_do_not_change_the_optimum(given: bool, monkeypatch: pytest.MonkeyPatch):
    cuts: list[int] = []
    for seed in range(20):
        answers: list[float | None] = []
        for looks in (8, 0):
            monkeypatch.setattr(windows, "LOOKS", looks)
            made = program(layered(20, seed=seed), 0.5, 6, given=given)
            assert made is not None
            answers.append(made.solve(**EXACT).fun)
            cuts.append(len(made.cuts))
            assert looks or not made.cuts
        with_cuts, without = answers
        if with_cuts is None or without is None:
            assert with_cuts == without
        else:
            assert abs(with_cuts - without) <= 1e-6 * windows.UNIT
    assert sum(count > 0 for count in cuts) >= 8


@pytest.mark.parametrize(("graph", "given"), [(network(8), True), (network(8), False), (network(6), True)])
def test_with_cuts_the_fractions_are_closer_to_whole_numbers(graph: Graph, given: bool):
    made = program(graph, 0.4, 6, given=given)
    assert made is not None
    weak = made._answer(whole=False, options={}).fun  # pyright: ignore[reportPrivateUsage]
    whole = made.solve(**EXACT).fun
    strong = made._answer(whole=False, options={}).fun  # pyright: ignore[reportPrivateUsage]
    assert len(made.cuts) > 0 and weak < strong <= whole * (1 + 1e-6)
    assert whole - strong < 0.8 * (whole - weak)


def test_cuts_are_handed_on_to_longer_programs():
    graph = network(8)
    short = program(graph, 0.4, 4, given=True)
    assert short is not None
    short.solve(**EXACT)
    problem, budget = short.problem, int(0.4 * peak_of(Rules(graph), save_everything(Rules(graph))))
    again = Program(problem, short.moments, budget, short.cuts)
    assert list(again.cuts) == list(short.cuts) and again.rows == short.rows
    assert isclose(again.solve(**EXACT).fun, short.solve(**EXACT).fun)
    assert not Program(problem, short.moments[:1], budget, [c for c in short.cuts if c.last is not None]).cuts
