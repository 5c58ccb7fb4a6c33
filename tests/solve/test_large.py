"""Solvers on chains with known optima, and on graphs of the size of networks."""

from __future__ import annotations

import math
import time

import pytest
from graphs import chain, network

from fckpt import solve
from fckpt.errors import ArgumentValueError, BudgetError
from fckpt.graph import simulate
from fckpt.solve._greedy import smallest
from fckpt.solve.core.rules import Rules

LAYERS = 1000


def overhead(name: str, graph, budget: int | None) -> float:
    timeline = simulate(graph, solve.get(name)(graph, budget))
    assert budget is None or timeline.peak_nbytes <= budget
    return timeline.overhead


def test_saving_all_of_a_chain():
    graph = chain(LAYERS)
    timeline = simulate(graph, solve.get("save_all")(graph, None))
    # the inputs of all layers except the first, which the caller holds, and the cotangents before and after a layer
    assert timeline.peak_nbytes == LAYERS + 1
    assert timeline.recomputed_nodes == 0


def test_recomputing_all_of_a_chain_runs_it_twice_and_has_the_same_peak():
    graph = chain(LAYERS)
    timeline = simulate(graph, solve.get("recompute_all")(graph, None))
    assert timeline.peak_nbytes == LAYERS + 1
    assert timeline.recomputed_seconds == LAYERS
    assert timeline.forward_nbytes == 0


@pytest.mark.parametrize("budget", [700, 120])
def test_greedy_recomputes_one_layer_per_missing_byte_of_a_chain(budget: int):
    """Each recomputation of a layer frees one byte: at least as many are needed as bytes are missing."""
    graph = chain(LAYERS)
    repeated = overhead("greedy", graph, budget) * graph.seconds
    least = LAYERS + 1 - budget
    assert least <= repeated <= 1.01 * least + 10


def test_greedy_fits_a_chain_into_the_square_root():
    """Segments of sqrt(n): about 2 sqrt(n) bytes for one more forward pass."""
    graph = chain(LAYERS)
    budget = 2 * math.isqrt(LAYERS) + 4
    assert overhead("greedy", graph, budget) * graph.seconds <= 1.1 * LAYERS


def test_greedy_fits_a_chain_into_the_logarithm():
    graph = chain(256)
    with pytest.raises(BudgetError) as caught:
        solve.get("greedy")(graph, 5)
    assert caught.value.least_bytes <= 2 * math.log2(256)
    assert overhead("greedy", graph, caught.value.least_bytes) < 10
    assert "no plan fits 5 B (5 bytes): the least that the solver 'greedy' finds" in str(caught.value)


@pytest.mark.parametrize(
    ("graph", "fraction", "most"),
    [
        (network(60), 0.4, 0.07),
        (network(60), 0.15, 0.16),
        (network(40, dense=5), 0.4, 0.05),
        (network(40, dense=5), 0.15, 0.15),
        (network(20, skips=True, shrink=0.7), 0.6, 0.03),
        (network(20, skips=True, shrink=0.7), 0.3, 0.12),
    ],
    ids=["transformer-.4", "transformer-.15", "dense-.4", "dense-.15", "unet-.6", "unet-.3"],
)
def test_networks(graph, fraction: float, most: float):
    budget = int(fraction * simulate(graph, solve.get("save_all")(graph, None)).peak_nbytes)
    best = overhead("auto", graph, budget)
    assert best <= most
    assert best <= overhead("greedy", graph, budget) + 1e-9  # sums are rounded in another order


def test_the_least_does_not_depend_on_the_budget():
    graph = network(20, skips=True, shrink=0.7)
    found = set()
    for budget in (1, 1000, 10**6):
        with pytest.raises(BudgetError) as caught:
            solve.get("greedy")(graph, budget)
        found.add(caught.value.least_bytes)
    assert len(found) == 1
    assert overhead("greedy", graph, found.pop()) < 1


def test_the_minimum_cut_recomputes_only_cheap_operations():
    """Torch's rule recomputes norms and activations of a transformer, and saves the results of matmuls."""
    graph = network(30)
    timeline = simulate(graph, solve.get("min_cut")(graph, None))
    repeated = {
        graph.nodes[s[0]].op for s in solve.get("min_cut")(graph, None).backward if type(s).__name__ == "Compute"
    }
    assert "matmul" not in repeated and "gelu" in repeated
    assert timeline.overhead < 0.05


def test_brute_refuses_large_graphs():
    with pytest.raises(ArgumentValueError, match=r"takes graphs of at most 12 nodes, not 22"):
        solve.get("brute")(chain(10), 5)


@pytest.mark.slow
def test_nine_thousand_nodes_in_a_minute():
    graph = network(690)
    assert len(graph.nodes) > 8900
    budget = int(0.3 * simulate(graph, solve.get("save_all")(graph, None)).peak_nbytes)
    start = time.perf_counter()
    assert overhead("greedy", graph, budget) <= 0.095
    assert time.perf_counter() - start < 60


def test_twenty_thousand_nodes_need_no_deep_recursion():
    graph = chain(10_000)
    assert len(graph.nodes) > 20_000
    simulate(graph, solve.get("recompute_all")(graph, None))
    simulate(graph, solve.get("min_cut")(graph, None))
    assert Rules(graph).backward


def test_smallest_is_deterministic():
    rules = Rules(network(30))
    assert smallest(rules) == smallest(Rules(network(30)))
