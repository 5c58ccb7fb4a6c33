"""Nodes that overwrite a tensor that the caller sees, like running statistics: nothing may read its old content
afterwards.
"""

from __future__ import annotations

import dataclasses

import pytest
from graphs import graphs
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_solvers import NAMES, budget_of, planned

from fckpt import solve
from fckpt.errors import ArgumentValueError, ScheduleError
from fckpt.graph import Compute, Free, Graph, Schedule, Value, simulate
from fckpt.graph.schedule import Step

MARKS = st.lists(st.sampled_from(["", "", "read", "write"]), min_size=8, max_size=8)


def with_buffer(graph: Graph, marks: list[str], once: bool) -> Graph:
    """Returns the same graph with forward nodes that read a buffer, or overwrite it; `once` as in a traced graph."""
    values = [*graph.values, Value(len(graph.values), 64, None, "a buffer")]
    present, nodes = len(graph.values), []
    for node, mark in zip(graph.nodes, [*marks, *[""] * len(graph.nodes)], strict=False):
        if mark and node.id < graph.boundary and not node.backward:
            node = dataclasses.replace(node, overwrites=(), in_place=False)
            if mark == "write":
                made = len(values)
                values.append(Value(made, 0, node.id))
                node = dataclasses.replace(node, outputs=(*node.outputs, made), writes=(present,))
                present = made
            else:
                node = dataclasses.replace(node, inputs=(*node.inputs, present), once=once or node.once)
        nodes.append(node)
    inputs = (*graph.inputs, len(graph.values))
    return dataclasses.replace(graph, nodes=tuple(nodes), values=tuple(values), inputs=inputs)


def reads_old_content(graph: Graph, schedule: Schedule, buffer: int) -> bool:
    """Runs a schedule: whether a node finds a content of the buffer other than the recorded one."""
    content, done = buffer, set[int]()
    versions = {buffer, *(v for node in graph.nodes for v in node.outputs if node.writes and v == node.outputs[-1])}
    for step in (*schedule.forward, *schedule.backward):
        if isinstance(step, Compute):
            node = graph.nodes[step.node]
            writes = node.writes if step.node not in done else ()
            if any(v in versions and v != content for v in (*node.inputs, *writes)):
                return True
            if writes:
                content = node.outputs[-1]
            done.add(step.node)
    return False


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", NAMES)
@examples(40)
@given(graph=graphs(most=8), marks=MARKS, fraction=st.none() | st.floats(0.3, 1.0))
def test_every_solver_reads_a_buffer_before_it_is_written(
    name: str, graph: Graph, marks: list[str], fraction: float | None
) -> None:
    whole = with_buffer(graph, marks, once=True)
    schedule, timeline, _ = planned(name, whole, None if fraction is None else budget_of(whole, fraction))
    if schedule is not None:
        assert timeline is not None
        assert not reads_old_content(whole, schedule, len(graph.values))


@examples(400)
@given(graph=graphs(most=8), marks=MARKS, data=st.data())
def test_schedules_accepted_by_simulate_read_the_recorded_content(
    graph: Graph, marks: list[str], data: st.DataObject
) -> None:
    whole = with_buffer(graph, marks, once=False)
    assume(any(node.writes for node in whole.nodes))
    # Everything is live and nothing is freed, so only the buffer can cause an error.
    forward: list[Step] = [Compute(i) for i in range(whole.boundary) if not whole.nodes[i].backward]
    backward: list[Step] = [Compute(node.id) for node in whole.nodes if node.backward or node.id >= whole.boundary]
    again = st.sampled_from([step.node for step in forward if isinstance(step, Compute)])
    for steps in (forward, backward):
        for _ in range(data.draw(st.integers(0, 3))):
            steps.insert(data.draw(st.integers(0, len(steps))), Compute(data.draw(again)))
    schedule = Schedule(tuple(forward), tuple(backward))
    try:
        simulate(whole, schedule)
    except ScheduleError:
        return
    assert not reads_old_content(whole, schedule, len(graph.values))


def small() -> Graph:
    """A node that reads a buffer, a node that overwrites it, and a node that reads the new content."""
    from graphs import Builder

    build = Builder()
    x, buffer = build.value(4), build.value(8)
    (a,) = build.node("reads", [x, buffer], [4])
    b, after = build.node("writes", [a], [4, 0])
    (c,) = build.node("reads", [b, after], [4])
    build.nodes[1] = dataclasses.replace(build.nodes[1], writes=(buffer,))
    return Graph(tuple(build.nodes), tuple(build.values), (x, buffer), (), (c,), (), boundary=3)


def test_a_recomputation_that_reads_an_overwritten_value_is_refused() -> None:
    graph = small()
    fine = [Compute(0), Compute(1), Compute(2)]
    simulate(graph, Schedule(tuple(fine), ()))
    simulate(graph, Schedule(tuple(fine), (Compute(1),)))  # only its first run writes
    for steps in ([*fine, Free(2), Compute(0)], [Compute(0), Compute(1), Compute(0), Compute(2)]):
        with pytest.raises(ScheduleError, match="node 1 has written over value 1"):
            simulate(graph, Schedule(tuple(steps), ()))
    with pytest.raises(ScheduleError, match="written over"):
        simulate(graph, Schedule(tuple(fine), (Compute(0),)))


def test_a_node_that_writes_a_buffer_must_run() -> None:
    build_only = [Compute(0)]
    graph = dataclasses.replace(small(), outputs=(2,))
    with pytest.raises(ScheduleError, match="must run in the forward pass"):
        simulate(graph, Schedule(tuple(build_only), ()))
    for name in NAMES:
        schedule = solve.get(name)(graph, None)
        assert Compute(1) in schedule.forward


def test_a_graph_in_which_a_later_node_reads_the_old_content_is_refused() -> None:
    graph = small()
    nodes = (*graph.nodes[:2], dataclasses.replace(graph.nodes[2], inputs=(3, 1)))
    with pytest.raises(ArgumentValueError, match="overwritten"):
        dataclasses.replace(graph, nodes=nodes)
