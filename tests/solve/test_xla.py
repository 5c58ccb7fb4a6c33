"""XLA's heuristic: bytes decide, not time; blocks, moved computations, and the properties of every plan."""

from __future__ import annotations

import sys

import pytest
from graphs import Builder, Layer, chain, differentiated, plain_nbytes
from hypothesis import HealthCheck, settings

from fckpt.graph import Compute, Graph, simulate
from fckpt.solve._greedy import greedy
from fckpt.solve._xla import BLOCK, _Pass, xla
from fckpt.solve.core.rules import Rules
from fckpt.solve.core.starts import save_everything

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def waiting() -> Graph:
    """Two values that wait for the backward pass, 30 bytes that take 9 seconds and 20 that take one; a temporary."""
    build = Builder()
    x = build.value(0)
    layers = []
    for nbytes, seconds in ((30, 9.0), (20, 1.0)):
        made = build.node("dear" if nbytes == 30 else "cheap", [x], [nbytes], seconds)
        first = build.node("reads", made, [0], 0.1)
        layers += [Layer([x], made, made, 0.1, 0), Layer(made, first, [], 0.1, 0)]
    wide = build.node("wide", [x], [0], 1.0, temporary=50)
    layers.append(Layer([x], wide, [], 0.1, 0))
    ends = [layers[1].outputs[0], layers[3].outputs[0], wide[0]]
    end = build.node("end", ends, [0], 0.1)
    return differentiated(build, [*layers, Layer(ends, end, [], 0.1, 0)], [x], end)


def test_bytes_decide_and_time_does_not():
    graph = waiting()
    again = {}
    for solver in (xla, greedy):
        schedule = solver(graph, 85)  # 15 of 100 must go
        computed = [s.node for s in (*schedule.forward, *schedule.backward) if isinstance(s, Compute)]
        again[solver.__name__] = {graph.nodes[i].op for i in computed if computed.count(i) > 1}
    assert again == {"xla": {"dear"}, "greedy": {"cheap"}}


def test_a_computation_that_was_not_read_yet_is_moved_at_no_cost():
    build = Builder()
    x = build.value(0)
    early = build.node("early", [x], [40], 5.0)
    wide = build.node("wide", [x], [0], 1.0, temporary=50)
    end = build.node("end", [*early, *wide], [0], 1.0)
    layers = [Layer([x], early, [], 1.0, 0), Layer([x], wide, [], 1.0, 0), Layer([*early, *wide], end, [], 1.0, 0)]
    graph = differentiated(build, layers, [x], end)
    schedule = xla(graph, 60)
    assert plain_nbytes(graph) == 90
    assert simulate(graph, schedule).recomputed_nodes == 0
    assert [s.node for s in schedule.forward if isinstance(s, Compute)] == [1, 0, 2]


@pytest.mark.parametrize(("limit", "singles", "blocks"), [(8, 31, 31), (6, None, 36)])
def test_blocks_are_recomputed_if_single_computations_do_not_help(
    limit: int, singles: int | None, blocks: int, monkeypatch: pytest.MonkeyPatch
):
    # Of a chain every other value can be computed from one that is still there; the rest takes more than one step.
    rules = Rules(chain(12))
    for most, expected in ((BLOCK, blocks), (1, singles)):
        monkeypatch.setattr(sys.modules["fckpt.solve._xla"], "BLOCK", most)
        order = _Pass(rules, save_everything(rules), limit).walk()
        assert (order and len(order.forward) + len(order.backward)) == expected


def test_the_highest_position_comes_first():
    graph = chain(12)
    rules = Rules(graph)
    order = _Pass(rules, save_everything(rules), 11).climb()
    assert order is not None
    counts = [(*order.forward, *order.backward).count(i) for i in range(len(graph.nodes))]
    assert max(counts) == 2  # what was computed again is not computed a third time
