"""Lower bounds: never above the optimum, and not far below it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from graphs import Builder, Layer, chain, differentiated, graphs, network, with_late_node
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fckpt.errors import BudgetError
from fckpt.graph import DECISIONS, Compute, Graph, Node, Schedule, simulate
from fckpt.solve import brute, get
from fckpt.solve.core.flow import FlowNetwork
from fckpt.solve.core.rules import Order, Rules, peak_of, replay, seconds_of
from fckpt.solve.core.starts import save_everything
from fckpt.solve.proofs.bounds import Bound, least_peak, lower_bound

ROUNDING = 1 + 1e-9


def isclose(bound: float, seconds: float) -> bool:
    return math.isclose(bound, seconds, rel_tol=1e-6)


def small(seed: int, most: int = 10) -> Graph:
    """A random training step of at most `most` nodes: like `graphs()`, but fast to make."""
    draw = Random(seed)
    while len((graph := _drawn(draw)).nodes) > most:
        pass
    return graph


def _drawn(draw: Random) -> Graph:
    build, sizes = Builder(), draw.choice([range(10), (2, 5), (1, 1, 8)])
    inputs = [build.value(draw.choice((0, *sizes))) for _ in range(draw.randint(1, 2))]
    known, layers = list(inputs), []
    flags = draw.choice([(None,), (None, None, None, "random", "once")])
    times = draw.choice([(0.0, 1.0, 2.0, 3.0), (0.1, 0.7, 1.3)])
    for _ in range(draw.randint(3, 6)):
        reads = draw.sample(known[-3:], draw.randint(1, min(2, len(known[-3:]))))
        made = [draw.choice(sizes) for _ in range(draw.choice((1, 1, 2)))]
        flag, seconds = draw.choice(flags), draw.choice(times)
        outputs = build.node("op", reads, made, seconds, draw.choice((0, 0, 3)), **({flag: True} if flag else {}))
        both = [*reads, *outputs]
        saved = draw.sample(both, min(draw.choice((0, 1, 1, 2)), len(both)))
        parameter = inputs[-1] if draw.random() < 0.3 else None
        layers.append(Layer(reads, outputs, saved, draw.choice(times), draw.choice((0, 0, 2)), parameter))
        known += outputs
    graph = differentiated(build, layers, inputs, draw.sample(known[len(inputs) :][-2:], 1))
    graph = with_late_node(graph) if draw.random() < 0.3 else graph
    nodes = [dataclasses.replace(n, overwrites=_overwrites(draw, graph, n)) for n in graph.nodes]
    values = list(graph.values)
    if draw.random() < 0.4:
        for v in (v for n in nodes[: graph.boundary] for v in n.outputs):
            values[v] = dataclasses.replace(values[v], decision=draw.choice(("", *DECISIONS)))
    return dataclasses.replace(graph, nodes=tuple(nodes), values=tuple(values))


def _overwrites(draw: Random, graph: Graph, node: Node) -> tuple[int, ...]:
    if len(node.outputs) != 1 or node.once:
        return ()
    size, values = graph.values[node.outputs[0]].nbytes, [graph.values[v] for v in node.inputs]
    return tuple(v.id for v in values if v.producer is not None and v.nbytes == size and draw.random() < 0.5)


def seconds_in(graph: Graph, schedule: Schedule) -> float:
    seconds = Rules(graph).seconds
    return math.fsum(seconds[s.node] for s in (*schedule.forward, *schedule.backward) if isinstance(s, Compute))


def least_budget(graph: Graph) -> int:
    with pytest.raises(BudgetError) as caught:
        brute(graph, -1)
    return caught.value.least_bytes


def first_runs(schedule: Schedule) -> Order:
    forward = list(dict.fromkeys(s.node for s in schedule.forward if isinstance(s, Compute)))
    backward = dict.fromkeys(s.node for s in schedule.backward if isinstance(s, Compute))
    return Order(forward, [i for i in backward if i not in forward])


def against_brute(graph: Graph, fractions: Sequence[float]) -> Iterator[tuple[float, Bound, Bound]]:
    """Checks the bounds of a graph; yields the optimum, the bound, and the bound for the optimum's order."""
    least, most = least_budget(graph), simulate(graph, get("save_all")(graph, None)).peak_nbytes
    assert least_peak(graph) <= least
    for budget in sorted({int(least + f * (most - least)) for f in fractions}):
        best = brute(graph, budget)
        seconds, bound = seconds_in(graph, best), lower_bound(graph, budget)
        given = lower_bound(graph, budget, first_runs(best))
        assert bound.seconds <= seconds * ROUNDING and bound.scope == "any"
        assert given.seconds <= seconds * ROUNDING and given.scope == "given"
        yield seconds, bound, given


@pytest.mark.parametrize("batch", range(8))
def test_never_above_the_optimum(batch: int):
    found = [pair for k in range(40) for pair in against_brute(small(1000 * batch + k, 7), (0.0, 0.3, 0.6))]
    assert len(found) > 40
    assert sum(isclose(bound.seconds, seconds) for seconds, bound, _ in found) > 0.9 * len(found)
    assert any(bound.method in ("minimum cut", "integer program") for _, bound, _ in found)


@pytest.mark.skipif(os.environ.get("FCKPT_PROFILE") != "slow", reason="takes five minutes; see CONTRIBUTING.md")
@pytest.mark.parametrize("batch", range(20))
def test_never_above_the_optimum_on_many_graphs(batch: int):
    found = [pair for k in range(1000) for pair in against_brute(small(100_000 + 1000 * batch + k, 7), (0.0, 0.3, 0.6))]
    assert len(found) > 1000


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graph=graphs(most=3, decisions=True), fraction=st.floats(0.0, 1.0))
def test_never_above_the_optimum_on_generated_graphs(graph: Graph, fraction: float):
    if len(graph.nodes) <= 9:
        list(against_brute(graph, (fraction,)))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graph=graphs(most=8, decisions=True), leaf=st.sampled_from([None, 1, 3]), data=st.data())
def test_never_above_a_plan(graph: Graph, leaf: int | None, data: st.DataObject):
    rules = Rules(graph)
    plan = replay(rules, data.draw(st.sets(st.sampled_from(range(len(graph.values))))), leaf=leaf)
    peak, seconds = peak_of(rules, plan), seconds_of(rules, plan)
    assert least_peak(graph) <= peak
    assert lower_bound(graph, peak).seconds <= seconds * ROUNDING
    assert lower_bound(graph, peak, plan).seconds <= seconds * ROUNDING


@pytest.mark.parametrize("count", [5, 20, 100])
def test_on_a_chain_each_missing_byte_costs_one_layer(count: int):
    graph = chain(count)
    assert least_peak(graph) == 3
    for budget in {4, count // 2, count, count + 1} - set(range(4)):
        bound = lower_bound(graph, budget)
        assert isclose(bound.seconds, 2 * count + max(0, count + 1 - budget)), bound


def test_on_a_short_chain_the_bound_is_the_optimum():
    graph = chain(4)
    for budget in (4, 5):
        assert isclose(lower_bound(graph, budget).seconds, seconds_in(graph, brute(graph, budget)))


@pytest.mark.parametrize(
    ("graph", "percent"),
    [
        (network(10), {0.7: 1.5, 0.3: 9.0}),
        (network(8, dense=3), {0.7: 1.5, 0.3: 6.0}),
        (network(8, skips=True, shrink=0.7), {0.7: 1.5, 0.5: 3.0}),
    ],
)
def test_on_blocks_the_bound_is_close_to_a_plan(graph: Graph, percent: dict[float, float]):
    rules = Rules(graph)
    everything = save_everything(rules)
    for fraction, least in percent.items():
        budget = int(fraction * peak_of(rules, everything))
        seconds, bound = seconds_in(graph, get("greedy")(graph, budget)), lower_bound(graph, budget)
        overhead, proven = (100 * (s / seconds_of(rules, everything) - 1) for s in (seconds, bound.seconds))
        assert least < proven <= overhead * ROUNDING < proven + 1.5
        assert bound == lower_bound(graph, budget)


def test_a_large_graph():
    graph = network(300)
    rules = Rules(graph)
    everything = save_everything(rules)
    bound = lower_bound(graph, peak_of(rules, everything) // 2)
    assert bound.method == "minimum cut"
    assert 1.02 * seconds_of(rules, everything) < bound.seconds < 1.1 * seconds_of(rules, everything)


def test_a_large_budget_has_no_overhead_and_an_impossible_one_an_infinite_bound():
    graph = network(3)
    plain = simulate(graph, get("save_all")(graph, None))
    bound = lower_bound(graph, plain.peak_nbytes)
    assert bound == Bound(bound.seconds, "any", "one run each") and isclose(bound.seconds, plain.seconds)
    assert lower_bound(graph, least_peak(graph) - 1) == Bound(math.inf, "any", "least peak")


def test_a_given_order_raises_the_bound():
    build = Builder()
    x = build.value(1)
    a, b = (build.node("large", [x], [4], seconds)[0] for seconds in (1.0, 2.0))
    c, d = (build.node("small", [v], [1], 1.0)[0] for v in (a, b))
    end = build.node("sum", [c, d], [1], 1.0)
    graph = Graph(tuple(build.nodes), tuple(build.values), (x,), (), tuple(end), (), boundary=5)
    assert lower_bound(graph, 8) == Bound(6.0, "any", "one run each")
    bound = lower_bound(graph, 8, Order([0, 1, 2, 3, 4], []))
    assert isclose(bound.seconds, 8.0) and bound.scope == "given"


def test_decisions_of_a_policy_count():
    graph = chain(4)
    values = [dataclasses.replace(v, decision="must_recompute" if v.producer is not None else "") for v in graph.values]
    graph = dataclasses.replace(graph, values=tuple(values))
    assert isclose(lower_bound(graph, 100).seconds, seconds_in(graph, brute(graph, 100)))
    values = [dataclasses.replace(v, decision="must_save" if v.producer is not None else "") for v in graph.values]
    graph = dataclasses.replace(graph, values=tuple(values))
    assert least_peak(graph) == least_budget(graph)


@pytest.mark.parametrize("spread", [1, 6])
def test_a_minimum_cut_has_the_least_price(spread: int):
    draw = Random(spread)
    for _ in range(100):
        count = draw.randint(2, 6)
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j and draw.random() < 0.4]
        pairs += [(count, i) for i in range(count)] + [(i, count + 1) for i in range(count)]
        prices = np.array([math.inf if draw.random() < 0.1 else 10 ** draw.uniform(-spread, spread) for _ in pairs])
        tails, heads = np.array(pairs).T
        sides = [np.array([*(k >> i & 1 for i in range(count)), 1, 0], dtype=bool) for k in range(2**count)]
        least = min(prices[side[tails] & ~side[heads]].sum() for side in sides)
        if not 0 < least < math.inf:
            continue
        found, near = FlowNetwork(count, tails, heads).cut(prices, least * draw.choice((1.0, 1.7, 10.0)))
        assert least * (1 - 1e-6) <= found <= least * ROUNDING
        assert isclose(prices[near[tails] & ~near[heads]].sum(), least)
