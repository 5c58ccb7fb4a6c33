"""Outlines: what a schedule holds at other sizes, without a simulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from graphs import graphs
from hypothesis import given
from hypothesis import strategies as st

from fckpt import solve
from fckpt.errors import ScheduleError
from fckpt.graph.graph import Graph, Node, Value
from fckpt.graph.outline import Outline
from fckpt.graph.schedule import Compute, Schedule, plain_schedule
from fckpt.graph.simulation import Timeline, simulate


def resized(graph: Graph, draw: Any) -> Graph:
    """Returns the graph with other sizes, equal where values that a node may overwrite were equal."""
    factor = draw(st.integers(0, 3))
    change = draw(st.lists(st.integers(0, 9), min_size=10, max_size=10))
    values = [dataclasses.replace(v, nbytes=change[v.nbytes] * factor) for v in graph.values]
    count = len(graph.nodes)
    spent = draw(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=count, max_size=count))
    nodes = [
        dataclasses.replace(n, seconds=float(a), temporary_nbytes=b, replayed_nbytes=c if n.random else 0)
        for n, (a, b, c) in zip(graph.nodes, spent, strict=True)
    ]
    return dataclasses.replace(graph, nodes=tuple(nodes), values=tuple(values))


def timeline_of(outline: Outline, graph: Graph) -> Any:
    nodes = graph.nodes
    spent = [n.seconds for n in nodes], [n.temporary_nbytes for n in nodes], [n.replayed_nbytes for n in nodes]
    return outline.timeline(*spent, [v.nbytes for v in graph.values])


def assert_same(found: Timeline, expected: Timeline) -> None:
    """Compares timelines; times up to rounding errors, because an outline adds them up in another order."""
    for name in ("seconds", "recomputed_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12, abs=0)
    times = {"seconds": 0.0, "recomputed_seconds": 0.0}
    assert dataclasses.replace(found, **times) == dataclasses.replace(expected, **times)


@given(graphs(most=5), st.data())
def test_timelines_at_other_sizes_are_those_of_the_simulator(graph: Graph, data: st.DataObject) -> None:
    small = max(v.nbytes for v in graph.values) <= 9
    for schedule, of in ((plain_schedule(graph), graph.eager), (solve.greedy(graph, None), graph)):
        outline = Outline(of, schedule)
        assert_same(timeline_of(outline, of), simulate(of, schedule))
        if small:
            other = resized(of, data.draw)
            assert outline.is_valid([v.nbytes for v in other.values])
            assert_same(timeline_of(outline, other), simulate(other, schedule))
            assert bool(simulate(other, schedule).recomputed_nodes) == outline.recomputes


@given(graphs(most=5))
def test_an_outline_is_not_valid_if_less_may_be_overwritten(graph: Graph) -> None:
    outline = Outline(graph, plain_schedule(graph))
    for node in graph.nodes:
        for value in node.overwrites:
            sizes = [v.nbytes for v in graph.values]
            sizes[value] += 1
            assert not outline.is_valid(sizes)


def test_a_schedule_of_another_graph_is_refused() -> None:
    graph = Graph((Node(0, "op", (), (0,)),), (Value(0, 4, 0),), (), (), (0,), (), 1)
    with pytest.raises(ScheduleError):
        Outline(graph, Schedule((Compute(1),), ()))
