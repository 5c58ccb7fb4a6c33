"""Chen's segments: sqrt(n) layers each, and b bytes each."""

from __future__ import annotations

import math

import pytest
from graphs import chain, network, plain_nbytes

from fckpt.graph import simulate
from fckpt.solve._chen import chen, segment_orders
from fckpt.solve.core.rules import Rules, peak_of, seconds_of


def test_on_a_chain_the_peak_is_about_the_square_root():
    layers = 400
    graph = chain(layers)
    timeline = simulate(graph, chen(graph))
    # the segments' inputs, one segment, and the cotangents before and after a layer
    assert timeline.peak_nbytes <= 2 * math.isqrt(layers) + 3
    # all segments but the last run twice, up to the input of their last layer
    assert layers - 3 * math.isqrt(layers) <= timeline.recomputed_seconds <= layers - math.isqrt(layers)


@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.7, 1.0])
def test_segments_of_equal_bytes_fit(fraction: float):
    graph = network(24)
    budget = int(fraction * plain_nbytes(graph))
    timeline = simulate(graph, chen(graph, budget))
    assert timeline.peak_nbytes <= budget
    forward = sum(n.seconds for n in graph.nodes[: graph.boundary])
    assert timeline.recomputed_seconds <= forward  # nothing runs more than twice
    assert (timeline.recomputed_seconds == 0) == (fraction == 1.0)


def test_no_plan_runs_anything_three_times():
    graph = network(10, skips=True)
    for order in segment_orders(Rules(graph)):
        runs = [*order.forward, *order.backward]
        assert max(runs.count(i) for i in runs) <= 2


def test_cuts_divide_unequal_layers_by_bytes():
    """Activations shrink by half per block: equal counts of blocks are poor segments, equal bytes are not."""
    graph = network(16, shrink=0.5)
    rules = Rules(graph)
    root, *greedy = [(peak_of(rules, order), seconds_of(rules, order)) for order in segment_orders(rules)]
    assert min(greedy) < root


def test_it_cuts_graphs_without_articulation_points():
    graph = network(12, skips=True)
    budget = int(0.75 * plain_nbytes(graph))
    assert simulate(graph, chen(graph, budget)).peak_nbytes <= budget
