"""The knapsack's choice against all choices and against torch's tables; a minimum cut against all cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import numpy as np
import pytest
from graphs import chain, graphs, network
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch._functorch._activation_checkpointing import knapsack as torchs

from fckpt.graph import Graph
from fckpt.solve._knapsack import UNITS, _Table
from fckpt.solve._min_cut import _saved
from fckpt.solve.core.rules import Rules
from fckpt.solve.core.starts import save_everything


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=9),
    capacity=st.integers(0, UNITS),
)
def test_no_choice_within_the_capacity_is_worth_more(items: list[tuple[int, int]], capacity: int):
    worth = [float(gain) for gain, _ in items]
    table = _Table(worth, [nbytes for _, nbytes in items])
    taken = table.at(capacity)
    assert sum(table.weights[k] for k in taken) <= capacity

    subsets = (s for n in range(len(items) + 1) for s in itertools.combinations(range(len(items)), n))
    fits = (s for s in subsets if sum(table.weights[k] for k in s) <= capacity)
    assert sum(worth[k] for k in taken) == max(sum(worth[k] for k in s) for s in fits)


@settings(max_examples=100, deadline=None)
@given(gains=st.lists(st.integers(0, 50), min_size=20, max_size=20), part=st.integers(0, 20), data=st.data())
def test_the_choice_is_worth_as_much_as_in_torchs_tables(gains: list[int], part: int, data: st.DataObject):
    """Weights are twentieths of the total, so that neither table has to round."""
    cuts = sorted(data.draw(st.lists(st.integers(1, 19), unique=True, max_size=12)))
    sizes = [end - start for start, end in itertools.pairwise([0, *cuts, 20])]
    worth = [float(gain) for gain in gains[: len(sizes)]]
    best, _, _ = torchs.dp_knapsack([size / 20 for size in sizes], worth, part / 20)
    taken = _Table(worth, sizes).at(UNITS * part // 20)
    assert sum(worth[k] for k in taken) == best


def cost_of(rules: Rules, saved: Collection[int], cost: np.ndarray, price: np.ndarray) -> float:
    """Returns the cost of a choice: the prices of saved values, and the costs of recomputed nodes, once each."""
    graph = rules.graph
    needed = [v for i in save_everything(rules).backward for v in graph.nodes[i].inputs]
    again: set[int] = set()
    while needed:
        value = needed.pop()
        producer = graph.values[value].producer
        if (
            producer is None
            or producer >= graph.boundary
            or value in saved
            or value in rules.permanent
            or producer in again
        ):
            continue
        if rules.pinned[producer]:
            return math.inf
        again.add(producer)
        needed += graph.nodes[producer].inputs
    return sum(float(cost[i]) for i in again) + sum(float(price[v]) for v in saved)


def savable(rules: Rules) -> list[int]:
    made = [v for node in rules.graph.nodes[: rules.graph.boundary] for v in node.outputs]
    return [v for v in made if v not in rules.permanent and v not in rules.unsaved]


def check_cut(rules: Rules, byte: float) -> None:
    graph, made = rules.graph, savable(rules)
    cost = np.array([0.0 if n.id >= graph.boundary else rules.seconds[n.id] for n in graph.nodes])
    price = np.array([byte * value.nbytes for value in graph.values])
    found = [v for v in _saved(rules, cost, price) if v not in rules.permanent]
    choices = (set(c) for n in range(len(made) + 1) for c in itertools.combinations(made, n))
    least = min(cost_of(rules, choice, cost, price) for choice in choices)
    assert cost_of(rules, found, cost, price) == pytest.approx(least, rel=1e-6)  # capacities are 30 bits wide


@pytest.mark.parametrize("byte", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("graph", [chain(8), network(1, size=2), network(2, size=4, parameters=False, shrink=0.5)])
def test_no_cut_is_cheaper(graph: Graph, byte: float):
    check_cut(Rules(graph), byte)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(graph=graphs(most=5), byte=st.sampled_from([0.2, 0.7, 1.5]))
def test_no_cut_of_a_generated_graph_is_cheaper(graph: Graph, byte: float):
    rules = Rules(graph)
    assume(len(savable(rules)) <= 8)
    check_cut(rules, byte)
