"""Every solver on small random graphs: its contract, and comparison with exhaustive search."""

from __future__ import annotations

import pytest
from graphs import graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fckpt import solve
from fckpt.errors import ArgumentValueError, BudgetError
from fckpt.graph import Compute, Graph, Schedule, Timeline, schedule_of, simulate
from fckpt.solve._moments import lazy_order
from fckpt.solve.core.rules import Order, Rules, peak_of, profile_of, replay
from fckpt.solve.core.starts import backward_orders, save_everything, segmented
from fckpt.solve.repair.editable import EditableSchedule
from fckpt.solve.repair.repair import Repair, prune

NAMES = (
    "auto", "chen", "dtr", "greedy", "hierarchy", "knapsack", "lower_sets", "min_cut", "moments", "ogc", "policy",
    "recompute_all", "revolve", "rotor", "save_all", "xla",
)  # fmt: skip
"""All except `brute` and solvers whose programs take seconds, which have separate tests."""


def examples(count: int):
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def planned(name: str, graph: Graph, budget: int | None) -> tuple[Schedule | None, Timeline | None, BudgetError | None]:
    try:
        schedule = solve.get(name)(graph, budget)
    except BudgetError as error:
        return None, None, error
    return schedule, simulate(graph, schedule), None


def live_between_passes(graph: Graph, schedule: Schedule) -> set[int]:
    """Returns the values that are live between the passes, without inputs and outputs."""
    live: set[int] = set()
    for step in schedule.forward:
        if isinstance(step, Compute):
            live.update(graph.nodes[step.node].outputs)
        else:
            live.discard(step.value)
    return live - set(graph.outputs)


def computed(schedule: Schedule) -> list[int]:
    return [s.node for s in (*schedule.forward, *schedule.backward) if isinstance(s, Compute)]


def budget_of(graph: Graph, fraction: float) -> int:
    return int(fraction * simulate(graph, solve.get("save_all")(graph, None)).peak_nbytes)


@pytest.mark.parametrize("name", NAMES)
@examples(60)
@given(graph=graphs(most=8, decisions=True), fraction=st.floats(0.2, 1.0))
def test_a_plan_fits_or_the_least_budget_succeeds(name: str, graph: Graph, fraction: float):
    budget = budget_of(graph, fraction)
    schedule, timeline, error = planned(name, graph, budget)
    if error is not None:
        assert error.least_bytes > budget
        schedule, timeline, again = planned(name, graph, error.least_bytes)
        assert again is None
        budget = error.least_bytes
    assert timeline is not None and timeline.peak_nbytes <= budget
    assert solve.get(name)(graph, budget) == schedule


@pytest.mark.parametrize("name", NAMES)
@examples(60)
@given(graph=graphs(most=8, decisions=True), fraction=st.none() | st.floats(0.3, 1.0))
def test_decisions_of_a_policy_are_respected(name: str, graph: Graph, fraction: float | None):
    schedule, _, _ = planned(name, graph, None if fraction is None else budget_of(graph, fraction))
    if schedule is None:
        return
    counts = [computed(schedule).count(n.id) for n in graph.nodes]
    for node in graph.nodes[: graph.boundary]:
        decisions = {graph.values[v].decision for v in node.outputs}
        if node.once or "must_save" in decisions:
            assert counts[node.id] <= 1
        elif "must_recompute" in decisions:
            forbidden = {v for v in node.outputs if graph.values[v].decision == "must_recompute"}
            assert forbidden.difference(graph.gradients).isdisjoint(live_between_passes(graph, schedule))


@examples(40)
@given(graph=graphs(most=3, decisions=True), fraction=st.floats(-0.1, 1.0))
def test_no_solver_is_faster_than_exhaustive_search(graph: Graph, fraction: float):
    if len(graph.nodes) > 9:
        return
    _, _, hopeless = planned("brute", graph, -1)
    assert hopeless is not None
    least = hopeless.least_bytes
    budget = int(least + fraction * (budget_of(graph, 1.0) - least))
    _, best, error = planned("brute", graph, budget)
    for name in NAMES:
        _, timeline, other = planned(name, graph, budget)
        if timeline is not None:
            assert best is not None and best.seconds <= timeline.seconds
        if error is not None:
            assert other is not None and error.least_bytes <= other.least_bytes


@examples(100)
@given(graph=graphs(most=8, decisions=True), fraction=st.floats(0.3, 1.0))
def test_an_editable_schedule_has_the_simulated_profile(graph: Graph, fraction: float):
    rules = Rules(graph)
    schedule = EditableSchedule(rules, save_everything(rules))
    budget = int(fraction * schedule.profile.max())
    if Repair(schedule, budget).run():
        prune(schedule, budget)
        assert schedule.profile.max() <= budget
    order = schedule.order()
    assert [m for m, at in zip(schedule.profile, schedule.at, strict=True) if schedule.node[at] >= 0] == list(
        profile_of(rules, order)
    )
    assert_simulated(graph, rules, order)


def assert_simulated(graph: Graph, rules: Rules, order: Order):
    """Checks that the profile equals the simulation, computation by computation."""
    schedule = schedule_of(graph, *order)
    timeline = simulate(graph, schedule)
    computes = [isinstance(step, Compute) for step in (*schedule.forward, *schedule.backward)]
    held = [nbytes for nbytes, is_compute in zip(timeline.live_nbytes, computes, strict=True) if is_compute]
    assert held == profile_of(rules, order).tolist()
    assert timeline.peak_nbytes == peak_of(rules, order)


@examples(100)
@given(graph=graphs(most=8, decisions=True), leaf=st.sampled_from([None, 1, 2, 4]), data=st.data())
def test_any_set_can_be_saved(graph: Graph, leaf: int | None, data: st.DataObject):
    saved = data.draw(st.sets(st.sampled_from(range(len(graph.values)))))
    rules = Rules(graph)
    order = replay(rules, saved, leaf=leaf)
    assert_simulated(graph, rules, order)
    timeline = simulate(graph, solve.from_saved(graph, saved))
    assert timeline.recomputed_nodes <= len(graph.nodes)
    for order in segmented(rules):
        simulate(graph, schedule_of(graph, *order))
    for backward in backward_orders(rules):
        simulate(graph, schedule_of(graph, *save_everything(rules, backward)))


@examples(100)
@given(graph=graphs(most=8, flags=False))
def test_saving_everything_recomputes_nothing(graph: Graph):
    assert simulate(graph, solve.get("save_all")(graph, None)).recomputed_nodes == 0


@examples(60)
@given(graph=graphs(most=8, decisions=True))
def test_the_solver_policy_saves_exactly_the_decided_values(graph: Graph):
    schedule = solve.get("policy")(graph, None)
    free = {
        v
        for n in graph.nodes
        if n.once or any(graph.values[o].decision == "must_save" for o in n.outputs)
        for v in n.outputs
    }
    wanted = {v.id for v in graph.values if v.decision in ("must_save", "prefer_save")}
    assert live_between_passes(graph, schedule) <= wanted | free | set(graph.gradients)


def test_the_registry():
    assert solve.names() == (
        "auto", "brute", "checkmate", "checkmate_lp", "chen", "dtr", "greedy", "hierarchy", "knapsack", "lower_sets",
        "min_cut", "moccasin", "moccasin3", "moments", "ogc", "policy", "recompute_all", "revolve", "rotor", "save_all",
        "xla",
    )  # fmt: skip
    with pytest.raises(ArgumentValueError, match=r"no solver 'magic'\. The solvers are auto, brute, checkmate"):
        solve.get("magic")
    with pytest.raises(ArgumentValueError, match=r"no solver 'gredy'\. Did you mean 'greedy'\? The solvers are auto"):
        solve.get("gredy")


@examples(200)
@given(graph=graphs(most=8, decisions=True), data=st.data())
def test_any_held_values_have_a_lazy_order(graph: Graph, data: st.DataObject):
    rules = Rules(graph)
    base = save_everything(rules)
    moments = data.draw(st.sets(st.integers(0, len(base.forward) + len(base.backward) - 1), max_size=3))
    held = {moment: data.draw(st.sets(st.sampled_from(range(len(graph.values))))) for moment in sorted(moments)}
    order, stages = lazy_order(rules, base, held)
    assert len(stages) == len(order.forward) + len(order.backward)
    simulate(graph, schedule_of(graph, *order))
