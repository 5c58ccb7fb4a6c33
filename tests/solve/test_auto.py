"""The default solver: never slower than its starts, reproducible, and interruptible at any time."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from typing import Any

import pytest
from graphs import Builder, chain, graphs, network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fckpt import solve
from fckpt.errors import BudgetError
from fckpt.graph import Graph, simulate
from fckpt.solve.core.rules import Rules, peak_of, seconds_of
from fckpt.solve.core.starts import segmented
from fckpt.solve.proofs.bounds import least_peak, lower_bound
from fckpt.solve.proofs.certificate import tighter
from fckpt.solve.repair.search import Search

OTHERS = [n for n in solve.names() if n not in ("auto", "brute", "checkmate_lp", "moccasin", "moccasin3", "moments")]
NETWORKS = {
    "transformer": network(6),
    "dense": network(8, dense=4),
    "unet": network(8, skips=True, shrink=0.7),
    "chain": chain(12),
}


def peak(graph: Graph) -> int:
    return simulate(graph, solve.get("save_all")(graph, None)).peak_nbytes


def seconds(name: str, graph: Graph, budget: int) -> float:
    try:
        timeline = simulate(graph, solve.get(name)(graph, budget))
    except BudgetError:
        return float("inf")
    return timeline.seconds if timeline.peak_nbytes <= budget else float("inf")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("fraction", [0.7, 0.5, 0.35])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_other_solver_is_faster(name: str, fraction: float):
    graph = NETWORKS[name]
    budget = int(fraction * peak(graph))
    mine = seconds("auto", graph, budget)
    assert lower_bound(graph, budget).seconds <= tighter(graph, budget).seconds * (1 + 1e-9) <= mine * (1 + 2e-9)
    for other in OTHERS:
        if other != "checkmate" or len(graph.nodes) <= 40:
            assert mine <= seconds(other, graph, budget) + 1e-4 * graph.seconds, other


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graph=graphs(most=3), fraction=st.floats(0.0, 0.9))
def test_the_optimum_lies_between_the_bound_and_the_plan(graph: Graph, fraction: float):
    if len(graph.nodes) > 8 or not graph.seconds:
        return
    try:
        solve.get("brute")(graph, -1)
    except BudgetError as error:
        least = error.least_bytes
    budget = int(least + fraction * (peak(graph) - least))
    best, mine = seconds("brute", graph, budget), seconds("auto", graph, budget)
    assert lower_bound(graph, budget).seconds <= best * (1 + 1e-9) <= mine * (1 + 1e-9) + 1e-9
    assert least_peak(graph) <= least


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_limits_and_seeds_give_equal_plans_and_a_longer_search_is_never_slower(name: str):
    graph = NETWORKS[name]
    budget = int(0.35 * peak(graph))
    short = solve.auto(graph, budget, time_limit=0.3, seed=1)
    assert solve.auto(graph, budget, time_limit=0.3, seed=1) == short
    longer = solve.auto(graph, budget, time_limit=0.8, seed=1)
    assert simulate(graph, longer).seconds <= simulate(graph, short).seconds


def test_weight_gradients_are_computed_early_if_that_lowers_the_peak():
    count = 8
    build = Builder()
    values = [build.value(10)]
    for _ in range(count):
        values += build.node("layer", values[-1:], [10])
    layers = build.node("loss", values[-1:], [0])
    cotangents = [build.cotangent(0)]
    arrived = [*build.node("backward", [values[-1], *cotangents], [10])]
    for _ in range(count - 1):
        arrived += build.node("backward", arrived[-1:], [10])
    pairs = zip(reversed(values[:-1]), arrived, strict=True)
    gradients = [build.node("backward_weight", [*pair], [1])[0] for pair in pairs]  # all of them at the end
    ends = {"cotangents": tuple(cotangents), "outputs": tuple(layers), "gradients": tuple(gradients)}
    graph = Graph(tuple(build.nodes), tuple(build.values), tuple(values[:1]), **ends, boundary=count + 1)

    budget = int(0.7 * peak(graph))
    timeline = simulate(graph, solve.auto(graph, budget))
    assert timeline.peak_nbytes <= budget
    assert timeline.recomputed_nodes == 0  # another order is enough


def test_an_interrupt_returns_the_best_plan_so_far():
    graph = NETWORKS["unet"]
    budget = int(0.35 * peak(graph))
    seen: list[tuple[int, int]] = []

    def interrupting(_: str, done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted while it searched for a plan, and uses the best"):
        schedule = solve.auto(graph, budget, watch=interrupting)
    assert simulate(graph, schedule).peak_nbytes <= budget
    assert all(before < after for (before, _), (after, _) in itertools.pairwise(seen))
    assert simulate(graph, schedule).seconds >= simulate(graph, solve.auto(graph, budget)).seconds


def test_an_interrupt_between_starts_returns_the_best_start():
    graph = network(40)  # large enough that progress is reported before the search
    budget = int(0.4 * peak(graph))
    seen: list[tuple[str, int, int]] = []

    def interrupting(*what: Any) -> None:
        seen.append(what)
        if what[:2] == ("plans to start from", 2):
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="uses the best"):
        schedule = solve.auto(graph, budget, watch=interrupting)
    assert seen[:2] == [("proving a bound", 0, 0), ("looking for plans to start from", 0, 0)]
    assert seen[-1] == ("plans to start from", 2, 0)
    assert simulate(graph, schedule).peak_nbytes <= budget


def test_an_interrupt_before_any_plan_is_raised(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("fckpt.solve._auto"), "certified", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve.auto(NETWORKS["unet"], int(0.35 * peak(NETWORKS["unet"])))


def test_a_nearly_optimal_plan_is_replaced_by_the_optimum(monkeypatch: pytest.MonkeyPatch):
    graph = NETWORKS["transformer"]
    rules, budget = Rules(graph), peak(graph) // 2
    poor = next(order for order in segmented(rules) if peak_of(rules, order) <= budget)
    least = tighter(graph, budget).seconds
    module = importlib.import_module("fckpt.solve._auto")
    monkeypatch.setattr(module._Starts, "feasible", lambda *_: [poor])
    monkeypatch.setattr(module, "GOOD_ENOUGH", 1.0)
    assert seconds_of(rules, poor) > 1.01 * least
    assert seconds("auto", graph, budget) == pytest.approx(least, rel=1e-6)  # the bound is a little below the optimum


def test_the_error_has_the_lower_bound_on_the_peak():
    graph = NETWORKS["transformer"]
    with pytest.raises(
        BudgetError, match=rf"No plan at all needs less than .* \({least_peak(graph)} bytes\)"
    ) as caught:
        solve.auto(graph, 1)
    assert least_peak(graph) <= caught.value.least_bytes


def test_a_search_never_returns_a_slower_plan():
    rules = Rules(NETWORKS["unet"])
    budget = int(0.5 * peak(rules.graph))
    starts = [o for o in segmented(rules) if peak_of(rules, o) <= budget]
    search = Search(rules, starts[:1], budget)
    search.run(2000, 0.0)
    times = [seconds_of(rules, order) for order in search.found]
    assert len(times) > 3 and times == sorted(times, reverse=True)


def test_a_search_ends_after_so_many_moves_without_a_better_plan():
    rules = Rules(NETWORKS["unet"])
    budget = int(0.5 * peak(rules.graph))
    start = next(o for o in segmented(rules) if peak_of(rules, o) <= budget)
    whole, idle = Search(rules, [start], budget), Search(rules, [start], budget)
    whole.run(20_000, 0.0)
    idle.run(20_000, 0.0, idle_moves=1000)
    assert idle.found == whole.found[: len(idle.found)] and 1000 < idle.moves < whole.moves


@pytest.mark.parametrize("fraction", [0.6, 0.4, 0.25])
def test_larger_graphs_end_at_a_plan_that_is_good_enough_unless_there_is_a_time_limit(fraction: float):
    graph = network(40)
    budget = int(fraction * peak(graph))
    soon, late = (simulate(graph, solve.auto(graph, budget, time_limit=limit)) for limit in (None, 3.0))
    assert late.seconds * (1 - 1e-9) <= soon.seconds <= late.seconds + 5e-3 * graph.seconds


def test_calls_on_equal_graphs_share_what_they_find_out(monkeypatch: pytest.MonkeyPatch):
    known = importlib.import_module("fckpt.solve._known_orders")
    module = importlib.import_module("fckpt.solve._auto")
    made: list[str] = []
    for place, name in ((known, "curves"), (known, "lowered"), (module, "certified")):
        found = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, of=found, what=name, **k: made.append(what) or of(*a, **k))
    graph, other = network(12), network(11)

    def least() -> int:
        with pytest.raises(BudgetError) as caught:
            solve.auto(graph, 1)
        return caught.value.least_bytes

    with known.remembering():
        budget = least()
        first = solve.auto(dataclasses.replace(graph), budget)
        assert made.count("curves") == 1
        lowered, certified = made.count("lowered"), made.count("certified")
        assert solve.auto(dataclasses.replace(graph), budget) == first and made.count("certified") == certified
        with known.remembering():
            assert least() == budget
        assert made.count("lowered") == lowered and made.count("curves") == 1
        solve.auto(other, int(0.2 * peak(other)))  # only one graph is remembered
    assert least() == budget and made.count("lowered") == 2 * lowered
    assert solve.auto(graph, budget) == first


def test_the_bound_and_the_plan_include_recomputations_that_a_policy_requires():
    graph = NETWORKS["transformer"]
    matmuls = {v for node in graph.nodes[: graph.boundary] if node.op == "matmul" for v in node.outputs}
    values = tuple(dataclasses.replace(v, decision="must_recompute" if v.id in matmuls else "") for v in graph.values)
    ordered = dataclasses.replace(graph, values=values)
    budget = int(0.5 * peak(graph))
    assert seconds("auto", ordered, budget) >= lower_bound(ordered, budget).seconds * (1 - 1e-9)
    assert lower_bound(ordered, budget).seconds > lower_bound(graph, budget).seconds


def test_the_error_has_one_number_if_the_least_peak_is_reached():
    graph = chain(4)
    with pytest.raises(BudgetError, match=r"or a smaller batch\. No plan at all needs less\.$") as caught:
        solve.auto(graph, 1)
    assert caught.value.least_bytes == least_peak(graph)
