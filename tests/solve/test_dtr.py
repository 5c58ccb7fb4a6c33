"""Dynamic tensor rematerialisation: its evictions, its theorem on chains, and the properties of every plan."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from graphs import Builder, Layer, chain, differentiated, graphs, plain_nbytes
from hypothesis import HealthCheck, given, settings

from fckpt.graph import Compute, Graph, Schedule, simulate
from fckpt.solve._dtr import dtr

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def repeated(graph: Graph, schedule: Schedule) -> set[str]:
    computed = [s.node for s in (*schedule.forward, *schedule.backward) if isinstance(s, Compute)]
    return {graph.nodes[i].op for i in computed if computed.count(i) > 1}


@few
@given(graph=graphs(most=8))
def test_without_a_budget_nothing_is_evicted(graph: Graph):
    assert simulate(graph, dtr(graph)).recomputed_nodes == 0


def waiting(sizes: list[int], costs: list[float]) -> tuple[Graph, int]:
    """Values a, b, c that are made one after the other and wait for the backward pass, while d needs memory.

    Returns:
        The graph, and the budget that has room for d and for all of them except the smallest.
    """
    build = Builder()
    x = build.value(0)
    layers, ends = [], []
    for name, nbytes, seconds in zip("abc", sizes, costs, strict=True):
        made = build.node(name, [x], [nbytes], seconds)
        read = build.node("read", made, [0], 0.0)
        layers += [Layer([x], made, [], 0.1, 0), Layer(made, read, made, 0.1, 0)]
        ends += read
    ends += build.node("d", [x], [0], 1.0, temporary=50)
    end = build.node("end", ends, [0], 0.1)
    return differentiated(build, [*layers, Layer(ends, end, [], 0.1, 0)], [x], end), sum(sizes) - min(sizes) + 50


@pytest.mark.parametrize(
    ("sizes", "costs", "evicted"),
    [
        ([10, 10, 10], [1.0, 1.0, 1.0], "a"),  # 1 / (10 * 2) against 1 / (10 * 1); c was read right now
        ([10, 10, 10], [9.0, 2.0, 4.0], "b"),  # 9 / (10 * 6) against 2 / (10 * 4)
        ([10, 40, 10], [2.0, 2.0, 1.0], "b"),  # 2 / (10 * 3) against 2 / (40 * 1)
    ],
)
def test_the_value_with_the_least_cost_per_byte_and_staleness_is_evicted(
    sizes: list[int], costs: list[float], evicted: str
):
    graph, budget = waiting(sizes, costs)
    assert repeated(graph, dtr(graph, budget)) == {evicted}


def test_neighbours_are_evicted_last():
    # Once a value of a chain is evicted, recomputing its successor would take two computations.
    graph = chain(8)
    schedule = dtr(graph, plain_nbytes(graph) - 3)
    twice = sorted(s.node for s in schedule.backward if isinstance(s, Compute) and s.node < graph.boundary)
    assert len(twice) == 3 and all(b - a > 1 for a, b in pairwise(twice))


@pytest.mark.parametrize("factor", [2, 3])
def test_a_chain_takes_linear_time_within_the_square_root_of_its_memory(factor: int):
    # Kirisame et al., theorem 3.1: O(n) computations of an n layer network in a memory of Omega(sqrt n).
    ratios = []
    for count in (64, 144, 324):
        graph = chain(count)
        budget = factor * math.isqrt(count) + 2
        schedule = dtr(graph, budget)
        assert simulate(graph, schedule).peak_nbytes <= budget
        ratios.append(sum(isinstance(s, Compute) for s in (*schedule.forward, *schedule.backward)) / (2 * count + 2))
    assert max(ratios) < 1.5  # each layer runs at most once more: 2 n + n
    assert ratios[-1] < 1.1 * ratios[0]
