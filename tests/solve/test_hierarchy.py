"""Equal blocks, and plans of chains of blocks."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
from graphs import Builder, Layer, chain, differentiated, graphs, network, plain_nbytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fckpt.errors import BudgetError
from fckpt.graph import Graph, schedule_of, simulate
from fckpt.solve._auto import auto
from fckpt.solve._hierarchy import Chain, ChainSolver, hierarchy
from fckpt.solve._rotor import rotor
from fckpt.solve.chains.blocks import Repeat, cut_out, cut_positions, repeats, with_rest, without_rest
from fckpt.solve.chains.stages import Stages, Step
from fckpt.solve.core.cuts import CutPoints
from fckpt.solve.core.rules import Rules, peak_of, profile_of, replay, seconds_of
from fckpt.solve.core.starts import save_everything

module = importlib.import_module("fckpt.solve._hierarchy")
automatic = importlib.import_module("fckpt.solve._auto")
known = importlib.import_module("fckpt.solve._known_orders")


def examples(count: int):
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# ---- where a sequence repeats itself ----------------------------------------------------------------------


@examples(300)
@given(st.lists(st.integers(0, 2), max_size=40))
def test_repeats_are_equal_and_disjoint(labels: list[int]):
    end = 0
    for found in repeats(labels):
        assert found.first >= end
        end = found.end
        assert found.times > 1
        part = labels[found.first : end]
        assert part == part[: found.period] * found.times
    assert end <= len(labels)


@examples(200)
@given(
    period=st.integers(4, 9), times=st.integers(2, 6), before=st.integers(0, 5), after=st.integers(0, 5), rest=st.data()
)
def test_every_repeat_is_found(period: int, times: int, before: int, after: int, rest: st.DataObject):
    """Labels outside the repeat occur once, so that it is the only repeat, and no other period covers as much."""
    labels = [*range(100, 100 + before), *([*range(period)] * times), *range(200, 200 + after)]
    assert repeats(labels) == [Repeat(before, period, times)]


def test_several_repeats_are_found_in_order():
    assert repeats("x" + "abcde" * 3 + "yz" + "fghi" * 6 + "abcdabcd") == [
        Repeat(1, 5, 3),
        Repeat(18, 4, 6),
        Repeat(42, 4, 2),
    ]


def test_the_number_of_repeats_is_limited():
    row = [f"{k}{letter}" for k in range(300) for letter in "abcd" * 2]
    assert len(repeats(row)) == 100
    assert len(repeats(row, 7)) == 7


def test_among_periods_of_equal_cover_the_shortest_is_returned():
    assert repeats("abcd" * 12) == [Repeat(0, 4, 12)]


def forward_of(graph: Graph) -> tuple[Rules, list[int]]:
    rules = Rules(graph)
    return rules, save_everything(rules).forward


def test_layers_are_cut_once_per_period_at_their_residual_connection():
    rules, forward = forward_of(network(12))
    ops = [rules.graph.nodes[forward[cut]].op for cut in cut_positions(rules, forward, 99)]
    assert ops == ["add"] * 12
    assert len(cut_positions(rules, forward, 5)) <= 5


def test_many_repeats_make_at_most_the_allowed_number_of_cuts():
    build = Builder()
    values, layers = [build.value(10)], []
    for k in range(70):
        for op in "abcd" * 3:
            made = build.node(f"{op}{k}", values[-1:], [10])
            layers.append(Layer(values[-1:], made, values[-1:], 1.0, 0))
            values += made
    graph = differentiated(build, layers, values[:1], values[-1:])
    rules, forward = forward_of(graph)
    for most in (0, 1, 20, 59, 100):
        assert len(cut_positions(rules, forward, most)) <= most


def test_without_repeats_cuts_are_where_few_bytes_live():
    graph = network(6, shrink=0.8)
    rules, forward = forward_of(graph)
    cuts = cut_positions(rules, forward, 4)
    assert 1 <= len(cuts) <= 4
    assert cuts == CutPoints(rules, forward).low(4)


# ---- blocks ------------------------------------------------------------------------------------------


def test_equal_layers_are_one_block():
    found = Chain(Rules(network(40)))
    assert len(found.blocks) == 41
    assert len(found.count) <= 4  # the first, the inner ones, the last, the loss
    assert found.repeats and not Chain(Rules(network(20, shrink=0.9))).repeats


def test_a_layer_that_takes_longer_is_another_block():
    graph = network(20)
    slow = next(n for n in graph.nodes if n.op == "gelu" and n.id > 40)
    changed = tuple(dataclasses.replace(n, seconds=9.0) if n is slow else n for n in graph.nodes)
    assert len(Chain(Rules(dataclasses.replace(graph, nodes=changed))).count) == len(Chain(Rules(graph)).count) + 1


@examples(200)
@given(graphs(most=8, decisions=True), st.integers(0, 5))
def test_blocks_are_graphs_that_hold_every_node_once(graph: Graph, cuts: int):
    rules = Rules(graph)
    stages = Stages(rules, cuts=cuts)
    blocks = [cut_out(stages, i) for i in range(len(stages))]  # an inconsistent Graph raises
    whole = save_everything(rules)
    assert sorted(i for block in blocks for i in block.nodes) == sorted({*whole.forward, *whole.backward})
    for block in blocks:
        for node, index in zip(block.graph.nodes, block.nodes, strict=True):
            original = graph.nodes[index]
            assert (node.op, len(node.inputs), node.random, node.once) == (
                original.op, len(original.inputs), original.random, original.once,
            )  # fmt: skip
            assert [block.graph.values[v].nbytes for v in node.outputs] == [
                graph.values[v].nbytes for v in original.outputs
            ]


@examples(200)
@given(graphs(most=8), st.integers(0, 50))
def test_with_rest_adds_only_a_node_between_the_passes(graph: Graph, nbytes: int):
    inner = with_rest(graph, nbytes)
    plan = replay(Rules(inner), ())
    outer = without_rest(graph, plan)
    assert outer == replay(Rules(graph), ())
    profile = profile_of(Rules(inner), plan).tolist()
    between = profile.pop(len(plan.forward) - 1)
    assert profile == profile_of(Rules(graph), outer).tolist()
    held = simulate(graph, schedule_of(graph, *outer)).forward_nbytes
    assert between == held + nbytes


# ---- plans -------------------------------------------------------------------------------------------


@examples(200)
@given(graphs(most=6), st.data())
def test_a_stage_holds_at_most_the_cost_of_its_option(graph: Graph, data: st.DataObject):
    rules = Rules(graph)
    stages = Stages(rules, cuts=0)
    block = cut_out(stages, 0)
    made = [v for node in block.graph.nodes[: block.graph.boundary] for v in node.outputs]
    saved = data.draw(st.lists(st.sampled_from(made), unique=True))
    leaf = data.draw(st.sampled_from([None, 1]))  # frees values, and runs nodes several times
    plan = without_rest(block.graph, replay(Rules(with_rest(block.graph, 0)), saved, leaf=leaf))
    again = [block.nodes[k] for k in plan.backward]
    stages.add(0, again)
    option = stages.option_nodes[0].index(again)
    order = stages.order([Step("all", 0, option), Step("backward", 0, option)])
    simulate(graph, schedule_of(graph, *order))  # it is legal
    figures = stages.costs.leaves[0][option]
    fixed = sum(rules.nbytes[v] for v in stages.fixed)
    profile = profile_of(rules, order)[len(order.forward) :]
    assert profile.max(initial=0) <= figures.backward_nbytes + fixed


def test_each_distinct_block_is_planned_once(monkeypatch: pytest.MonkeyPatch):
    planned: list[Graph] = []
    find = module._pairs

    def counted(block: Graph, *rest: object):
        planned.append(block)
        return find(block, *rest)

    monkeypatch.setattr(module, "_pairs", counted)
    ChainSolver().curves(Chain(Rules(network(40))))
    assert 0 < len(planned) == len(set(planned)) <= 4


def test_a_block_has_plans_that_hold_little():
    found = Chain(Rules(network(40)))
    ChainSolver().curves(found)
    option = found.stages.costs.options[20]
    held = {o.saved_nbytes for o in option}
    assert len(held) >= 4
    assert min(held) < 0.5 * max(held)


def test_blocks_within_blocks(monkeypatch: pytest.MonkeyPatch):
    graph = network(48)
    monkeypatch.setattr(module, "STAGES", 8)
    monkeypatch.setattr(module, "SMALL", 40)
    planner = ChainSolver()
    curves = planner.curves(Chain(Rules(graph)))
    sizes = {len(block.nodes) for block in planner._known}
    assert max(sizes) > 80  # several layers
    assert min(size for size in sizes if size > 10) < 30  # and one
    rules = Rules(graph)
    for fraction in (0.2, 0.5):
        budget = int(fraction * plain_nbytes(graph))
        plans = [order for curve in curves for order in curve.around(budget) if peak_of(rules, order) <= budget]
        nested = min(seconds_of(rules, order) for order in plans)
        assert nested <= 1.05 * simulate(graph, rotor(graph, budget)).seconds


def test_without_effort_blocks_are_planned_by_minimum_cuts_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "EFFORT", 0)
    monkeypatch.setattr(module, "_pairs", lambda *_: pytest.fail("there is no effort left"))
    graph = network(20)
    budget = plain_nbytes(graph) // 2
    assert simulate(graph, hierarchy(graph, budget)).peak_nbytes <= budget


@pytest.mark.parametrize("fraction", [0.15, 0.3, 0.6])
def test_equal_blocks_are_about_as_fast_as_the_chain_of_rotor(fraction: float):
    graph = network(60)
    budget = int(fraction * plain_nbytes(graph))
    assert simulate(graph, hierarchy(graph, budget)).seconds <= 1.01 * simulate(graph, rotor(graph, budget)).seconds


def test_an_infeasible_budget_is_an_error_with_a_feasible_one():
    graph = network(8)
    with pytest.raises(BudgetError, match="the solver 'hierarchy' finds") as caught:
        hierarchy(graph, 1 << 20)
    least = caught.value.least_bytes
    assert simulate(graph, hierarchy(graph, least)).peak_nbytes <= least


def test_stages_count_values_that_are_freed_and_made_again():
    """The second run of the first node needs no memory beside its first output, which has been freed."""
    graph = chain(3, nbytes=10)
    rules = Rules(graph)
    stages = Stages(rules, cuts=0)
    first, second = stages.forward[0][:2]
    backward = stages.backward[0]
    again = [first, second, *backward[:2], first, *backward[2:]]
    once = stages._peak([first, second, *backward], set())
    assert stages._peak(again, set()) < once


# ---- auto --------------------------------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a graph of a few hundred operations count as large."""
    monkeypatch.setattr(known, "LARGE", 100)


@pytest.mark.parametrize("graph", [network(40), network(40, dense=4)])
@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.9])
def test_large_graphs_are_planned_as_a_hierarchy(
    graph: Graph, fraction: float, large: None, monkeypatch: pytest.MonkeyPatch
):
    for place, name in ((known, "curves"), (known, "segmented"), (automatic, "moment_orders"), (known, "cheapest")):
        monkeypatch.setattr(place, name, lambda *_: pytest.fail("this is for smaller graphs"))
    budget = int(fraction * plain_nbytes(graph))
    timeline = simulate(graph, auto(graph, budget))
    assert timeline.peak_nbytes <= budget
    assert timeline.seconds <= (1 + 1e-9) * simulate(graph, rotor(graph, budget)).seconds  # sums are rounded


def test_the_least_of_a_large_graph_does_not_depend_on_the_budget(large: None):
    graph = network(30)
    with pytest.raises(BudgetError) as caught:
        auto(graph, 1)
    least = caught.value.least_bytes
    with pytest.raises(BudgetError) as caught:  # here the lower bound does not prove that no plan fits
        auto(graph, least - 1)
    assert caught.value.least_bytes == least
    assert simulate(graph, auto(graph, least)).peak_nbytes <= least


def test_blocks_are_planned_if_a_graph_repeats_itself(monkeypatch: pytest.MonkeyPatch):
    planned: list[Chain] = []
    curves = ChainSolver.curves
    monkeypatch.setattr(ChainSolver, "curves", lambda self, found: planned.append(found) or curves(self, found))
    for graph, often in ((network(30), True), (network(20, shrink=0.9), False)):
        planned.clear()
        auto(graph, int(0.12 * plain_nbytes(graph)) if often else int(0.4 * plain_nbytes(graph)), time_limit=0.1)
        assert bool(planned) == often


def test_starts_of_blocks_are_tried_in_addition_to_the_others(monkeypatch: pytest.MonkeyPatch):
    graph = network(30)
    budget = int(0.15 * plain_nbytes(graph))
    tried: list[object] = []
    fit = automatic.fit
    monkeypatch.setattr(automatic, "fit", lambda rules, order, *rest: tried.append(order) or fit(rules, order, *rest))
    auto(graph, budget, time_limit=0.1)
    with_blocks = list(tried)
    tried.clear()
    monkeypatch.setattr(ChainSolver, "curves", lambda *_: [])
    auto(graph, budget, time_limit=0.1)
    assert all(order in with_blocks for order in tried)
    assert len(with_blocks) > len(tried)


def costs_of(stages: Stages) -> tuple[object, ...]:
    costs = stages.costs
    return costs.forward_seconds, costs.forward_nbytes, costs.options, costs.leaves


def awaited() -> Graph:
    """Equal layers; the backward of an early layer reads a value that a later layer makes."""
    build = Builder()
    values, layers, results = [build.value(10)], [], []
    for _ in range(14):
        for op, nbytes in zip("abcd", (20, 30, 40, 10), strict=True):
            made = build.node(op, values[-1:], [nbytes])
            layers.append(Layer(values[-1:], made, values[-1:], 1.0, 0))
            values += made
        results += values[-1:]
    layers[5].saved = [*layers[5].saved, results[8]]
    return differentiated(build, layers, values[:1], values[-1:])


@pytest.mark.parametrize(
    "graph",
    [network(40), network(30, dense=3), network(24, skips=True), awaited()],
    ids=["layers", "dense", "skips", "awaited"],
)
def test_equal_stages_have_equal_costs(graph: Graph):
    """Costs computed once for all equal stages equal the costs computed for each."""
    found = Chain(Rules(graph))
    ChainSolver().curves(found)
    stages = found.stages
    assert len(set(stages.twin)) < len(stages)
    once = costs_of(stages)
    stages.twin = list(range(len(stages)))
    del stages.costs, stages.backward_peaks
    assert costs_of(stages) == once
