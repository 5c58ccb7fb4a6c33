"""Updates in a graph: nothing reads a parameter after its update, a recompute neither, and each update runs once."""

from __future__ import annotations

import dataclasses
import json
from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fckpt import solve
from fckpt._planned.late_writes import settled, solved_with_writes, without_recomputation
from fckpt.errors import ArgumentValueError, BudgetError, ScheduleError
from fckpt.graph import Compute, Graph, Node, Schedule, Value, schedule_of, simulate
from fckpt.graph.schedule import plain_schedule


def chain(sizes: list[int], *, early: bool = True) -> Graph:
    """A chain of layers, each with a parameter. The gradient of a layer's input reads its parameter, or its output."""
    count = len(sizes)
    values = [Value(i, 8, None) for i in range(count)]  # the parameters
    nodes: list[Node] = []

    def add(inputs: list[int], nbytes: int, **rest: object) -> int:
        node = Node(len(nodes), "op", tuple(inputs), (len(values),), seconds=1.0, **rest)  # type: ignore[arg-type]
        values.append(Value(len(values), nbytes, node.id))
        nodes.append(node)
        return len(values) - 1

    made: list[int] = []
    for i, size in enumerate(sizes):
        made.append(add([i, *made[-1:]], size))
    boundary, loss = len(nodes), made[-1]
    values.append(Value(len(values), 4, None))
    cotangent = arriving = len(values) - 1
    updates: list[tuple[int, int]] = []
    ends: list[int] = []
    for i in reversed(range(count)):
        gradient = add([arriving, *made[max(0, i - 1) : i]], 8, backward=True)
        if i:
            arriving = add([arriving, i, made[i]], sizes[i - 1], backward=True)
        updates.append((i, gradient))
        while early and updates:
            parameter, ready = updates.pop()
            ends.append(add([parameter, ready], 0, backward=True, writes=(parameter,)))
    for parameter, ready in updates:
        ends.append(add([parameter, ready], 0, backward=True, writes=(parameter,)))
    inputs = tuple(range(count))
    return Graph(tuple(nodes), tuple(values), inputs, (cotangent,), (loss,), tuple(ends), boundary)


def test_a_recompute_after_the_update_is_refused() -> None:
    graph = chain([100, 100, 4])
    late = [n.id for n in graph.nodes if n.backward]
    fine = schedule_of(graph, [0, 1, 2], late)
    simulate(graph, fine)
    update = next(n for n in graph.nodes if n.writes == (1,))
    again = schedule_of(graph, [0, 1, 2], [*late[: late.index(update.id) + 1], 1, *late[late.index(update.id) + 1 :]])
    with pytest.raises(ScheduleError, match="has written over value 1"):
        simulate(graph, again)
    mended = settled(graph, again)
    order = [step.node for step in mended.backward if isinstance(step, Compute)]
    assert order.index(update.id) > order.index(1)
    simulate(graph, mended)


def test_an_update_runs_exactly_once() -> None:
    graph = chain([100, 4])
    late = [n.id for n in graph.nodes if n.backward]
    with pytest.raises(ScheduleError, match="without the gradient"):
        simulate(graph, schedule_of(graph, [0, 1], late[:-1]))
    with pytest.raises(ScheduleError, match="has written over"):
        simulate(graph, schedule_of(graph, [0, 1], [*late, late[-1]]))


def test_the_program_reads_no_parameter_after_its_update() -> None:
    graph = chain([100, 4])
    nodes = list(graph.nodes)
    reader = dataclasses.replace(nodes[-1], inputs=(1, *nodes[-1].inputs))
    with pytest.raises(ArgumentValueError, match="reads a value that was overwritten"):
        dataclasses.replace(graph, nodes=(*nodes[:-1], reader))


def test_the_plain_order_is_that_of_the_baseline() -> None:
    graph = chain([100, 100, 4])
    late = [n.id for n in graph.nodes if n.backward]
    updates = [n.id for n in graph.nodes if n.writes]
    order = (0, 1, 2, *[i for i in late if i not in updates], *updates)
    plain = dataclasses.replace(graph, plain_order=order)
    ran = [s.node for s in (*plain_schedule(plain).forward, *plain_schedule(plain).backward) if isinstance(s, Compute)]
    assert tuple(ran) == order
    assert simulate(plain, plain_schedule(plain)).peak_nbytes >= simulate(graph, plain_schedule(graph)).peak_nbytes
    assert Graph.from_json(json.dumps(plain.to_json())) == plain
    with pytest.raises(ArgumentValueError, match="plain_order"):
        Graph.from_json({**plain.to_json(), "plain_order": [0, 0]})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.randoms(), st.booleans())
def test_settled_schedules_are_valid_where_the_order_is(sizes: list[int], random: object, early: bool) -> None:
    graph = chain(sizes, early=early)
    forward = list(range(graph.boundary))
    late = [n.id for n in graph.nodes if n.backward]
    order: list[int] = []
    for index in late:  # with recomputations of the whole forward pass at random places
        order += forward if random.random() < 0.4 else []  # type: ignore[attr-defined]
        order.append(index)
    simulate(graph, settled(graph, schedule_of(graph, forward, order)))


@settings(max_examples=40, deadline=None)
@example([2, 1, 1], "rotor")  # whose stages alone need a byte more
@given(st.lists(st.integers(1, 200), min_size=2, max_size=5), st.sampled_from(["auto", "greedy", "chen", "rotor"]))
def test_plans_of_solvers_that_know_nothing_of_updates(sizes: list[int], solver: str) -> None:
    graph = chain(sizes)
    most = simulate(graph, plain_schedule(graph)).peak_nbytes
    assert solved_with_writes(graph, most, solver, "").peak_bytes <= most
    assert simulate(graph, without_recomputation(graph)).peak_nbytes <= most


def test_a_valid_order_of_a_small_graph_passes_and_the_others_do_not() -> None:
    graph = chain([10, 4])
    late = [n.id for n in graph.nodes if n.backward]
    for order in permutations(late):
        update = next(n.id for n in graph.nodes if n.writes == (1,))
        reader = next(n.id for n in graph.nodes if n.backward and 1 in n.inputs and not n.writes)
        schedule = Schedule(schedule_of(graph, [0, 1], late).forward, tuple(Compute(i) for i in order))
        try:
            simulate(graph, schedule)
        except ScheduleError:
            continue
        assert order.index(update) > order.index(reader)


def test_what_reads_a_moved_update_is_moved_with_it() -> None:
    """Two writes in a row over one input, and a recomputation that reads its old value behind both."""
    sizes = [(8, None), (8, 0), (8, 1), (0, 2), (0, 3), (8, 4)]
    values = tuple(Value(i, nbytes, producer) for i, (nbytes, producer) in enumerate(sizes))
    nodes = (
        Node(0, "forward", (0,), (1,)),
        Node(1, "gradient", (1,), (2,), backward=True),
        Node(2, "mul_", (2, 0), (3,), backward=True, writes=(0,)),
        Node(3, "sub_", (3, 2), (4,), backward=True, writes=(3,)),
        Node(4, "late", (1, 2), (5,), backward=True),
    )
    graph = Graph(nodes, values, (0,), (), (), (4, 5), 1)
    schedule = schedule_of(graph, [0], [1, 2, 3, 0, 4])
    with pytest.raises(ScheduleError, match="node 2 has written over value 0"):
        simulate(graph, schedule)
    found = settled(graph, schedule)
    assert [step.node for step in found.backward if isinstance(step, Compute)] == [1, 0, 2, 3, 4]
    assert simulate(graph, found).peak_nbytes == 24


def test_the_least_budget_is_lower_than_what_the_smallest_plan_needs_once_its_updates_wait() -> None:
    graph = chain([8, 200, 200, 200, 60, 20, 20, 200, 60])
    with pytest.raises(BudgetError) as raised:
        solved_with_writes(graph, 1, "auto", "")
    least = raised.value.least_bytes
    relaxed = dataclasses.replace(graph, nodes=tuple(dataclasses.replace(node, writes=()) for node in graph.nodes))
    with pytest.raises(BudgetError) as raised:
        solve.auto(relaxed, 1)
    smallest = settled(graph, solve.auto(relaxed, raised.value.least_bytes, time_limit=0.1))
    assert least < simulate(graph, smallest).peak_nbytes
    assert solved_with_writes(graph, least, "auto", "", 0.1).peak_bytes <= least


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=2, max_size=6), st.sampled_from(["auto", "greedy", "chen"]))
def test_the_least_budget_of_an_error_is_kept(sizes: list[int], solver: str) -> None:
    graph = chain(sizes)
    with pytest.raises(BudgetError) as raised:
        solved_with_writes(graph, 1, solver, "")
    least = raised.value.least_bytes
    assert solved_with_writes(graph, least, solver, "").peak_bytes <= least
