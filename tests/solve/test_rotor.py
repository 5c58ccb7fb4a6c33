"""Chains of unequal stages: against exhaustive search, and on graphs as chains."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from graphs import Builder, Layer, chain, differentiated, network, plain_nbytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fckpt.errors import BudgetError
from fckpt.graph import Graph, simulate
from fckpt.solve._chen import chen
from fckpt.solve._revolve import revolve
from fckpt.solve._rotor import Table, curves, rotor
from fckpt.solve.chains.stages import Costs, Option, Stages, Step
from fckpt.solve.core.rules import Rules, peak_of, seconds_of


def examples(count: int):
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Chain(NamedTuple):
    """Costs, and the values from which `Costs.beside` was made: (stage that makes it, last that reads it, bytes)."""

    costs: Costs
    values: list[tuple[int, int, int]]

    def inputs_of(self, stage: int) -> set[int]:
        return {k for k, (made, last, _) in enumerate(self.values) if made < stage <= last}

    def nbytes(self, values: set[int]) -> int:
        return sum(self.values[k][2] for k in values)


@st.composite
def chains(draw: st.DrawFn, most: int, most_options: int, least: int = 1) -> Chain:
    length = draw(st.integers(least, most))
    size, seconds = st.integers(0, 4), st.integers(0, 5).map(float)
    values = [(i, i + 1, draw(size)) for i in range(length - 1)]
    for _ in range(draw(st.integers(0, 2))):  # skips
        made = draw(st.integers(0, length - 1))
        values.append((made, draw(st.integers(made, length - 1)), draw(size)))
    onward = [sum(n for made, last, n in values if made == i < last) for i in range(length)]

    forward = [(draw(seconds), nbytes + draw(size)) for nbytes in onward]

    def option(i: int) -> tuple[Option, Option]:
        """For a stage that others follow, and for one that is reversed next: that one need not make their input."""
        more, back, saved = draw(seconds), draw(seconds), draw(size)
        first = Option(
            onward[i] + saved, forward[i][0] + more, back, forward[i][1] + draw(size), onward[i] + saved + draw(size)
        )
        less = first._replace(
            forward_seconds=draw(st.integers(0, int(first.forward_seconds)).map(float)),
            forward_nbytes=draw(st.integers(0, first.forward_nbytes)),
        )
        return first, less

    beside = np.zeros((length, length), dtype=np.int64)
    for s in range(length):
        for t in range(s + 1, length):
            beside[s, t] = sum(n for made, last, n in values if made < t <= last and not made < s <= last)
    options = [[option(i) for _ in range(draw(st.integers(1, most_options)))] for i in range(length)]
    costs = Costs(
        forward_seconds=[seconds for seconds, _ in forward],
        forward_nbytes=[nbytes for _, nbytes in forward],
        beside=beside,
        arriving=[draw(size) for _ in range(length)],
        options=[[option for option, _ in pairs] for pairs in options],
        leaves=[[leaf for _, leaf in pairs] for pairs in options],
    )
    return Chain(costs, values)


class State(NamedTuple):
    """The state of a schedule between two operations."""

    stored: frozenset[int]
    """Stages whose input is stored until their backward."""
    saved: frozenset[tuple[int, int]]
    """Stages that were run with everything saved, and the option."""
    passing: int
    """The stage whose input is live, but not stored; -1: none."""
    left: int
    """The number of stages that are still to be reversed."""


def exhaustive(chain: Chain, limit: int) -> float:
    """Returns the least time of any persistent schedule, by Dijkstra's algorithm over all of them."""
    start = State(frozenset([0]), frozenset(), -1, len(chain.costs.forward_seconds))
    best, queue = {start: 0.0}, [(0.0, 0, start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if not state.left:
            return seconds
        if seconds > best[state]:
            continue
        for nbytes, more, after in moves(chain, state):
            if nbytes <= limit and seconds + more < best.get(after, np.inf):
                best[after] = seconds + more
                heapq.heappush(queue, (seconds + more, len(best), after))
    return np.inf


def moves(chain: Chain, state: State) -> Iterator[tuple[int, float, State]]:
    """Yields the bytes and seconds of all next operations, and the state after them."""
    costs, last = chain.costs, state.left - 1
    inputs = state.stored | {i + 1 for i, _ in state.saved}
    held = held_nbytes(chain, state)
    for i, k in state.saved:
        if i == last:
            rest = state._replace(saved=state.saved - {(i, k)})
            after = rest._replace(stored=state.stored - {i}, left=last)
            yield held_nbytes(chain, rest) + costs.options[i][k].backward_nbytes, 0.0, after
    there = [state.passing] if state.passing >= 0 else [i for i in inputs if i <= last]
    for i in there:
        if i not in inputs:
            yield 0, 0.0, state._replace(stored=state.stored | {i}, passing=-1)
        if i < last:
            yield (
                held + costs.forward_nbytes[i] + costs.arriving[last],
                costs.forward_seconds[i],
                state._replace(passing=i + 1),
            )
    for i in inputs if state.passing < 0 else ():
        if i == last and not any(j == i for j, _ in state.saved):
            for option in costs.leaves[i]:
                nbytes = max(costs.arriving[i] + option.forward_nbytes, option.backward_nbytes)
                after = state._replace(stored=state.stored - {i}, left=last)
                yield held + nbytes, option.forward_seconds + option.backward_seconds, after
        if i < last and not any(j == i for j, _ in state.saved):
            for k, option in enumerate(costs.options[i]):
                after = state._replace(saved=state.saved | {(i, k)})
                yield (
                    held + costs.arriving[last] + option.forward_nbytes,
                    option.forward_seconds + option.backward_seconds,  # whatever is saved is reversed once
                    after,
                )


def held_nbytes(chain: Chain, state: State) -> int:
    """What is there, each value once. What a saved stage leaves includes the next one's input."""
    own = sum(chain.costs.options[i][k].saved_nbytes - onward(chain, i) for i, k in state.saved)
    inputs = state.stored | {i + 1 for i, _ in state.saved} | {state.passing}
    return own + chain.nbytes(set().union(*(chain.inputs_of(i) for i in inputs)))


def onward(chain: Chain, stage: int) -> int:
    return chain.nbytes({k for k in chain.inputs_of(stage + 1) if chain.values[k][0] == stage})


def check(chain: Chain, limits: list[int]) -> None:
    table = Table(chain.costs, max(limits), slots=max(limits))
    assert table.unit == 1
    for limit in limits:
        assert table.seconds[limit] == exhaustive(chain, limit)
        if np.isfinite(table.seconds[limit]):
            check_steps(chain, table.steps(limit), limit, float(table.seconds[limit]))


def check_steps(chain: Chain, steps: list[Step], limit: int, seconds: float) -> None:
    """Executes the table's schedule in the same model."""
    costs = chain.costs
    state = State(frozenset([0]), frozenset(), -1, len(costs.forward_seconds))
    leaf, total = -1, 0.0
    for step in steps:
        i, last = step.stage, state.left - 1
        if step.kind == "backward":
            options = costs.leaves if leaf == i else costs.options
            rest = state._replace(saved=state.saved - {(i, step.option)})
            assert i == last
            assert held_nbytes(chain, rest) + options[i][step.option].backward_nbytes <= limit
            state = rest._replace(stored=state.stored - {i}, left=last, passing=-1)
            total += options[i][step.option].backward_seconds
            continue
        if step.kind != "none":
            state = state._replace(stored=state.stored | {i})
        held = held_nbytes(chain, state) + costs.arriving[last]
        if step.kind == "all":
            leaf = i if i == last else leaf
            option = (costs.leaves if i == last else costs.options)[i][step.option]
            assert held + option.forward_nbytes <= limit
            total += option.forward_seconds
            if i < last:
                state = state._replace(saved=state.saved | {(i, step.option)}, passing=-1)
        else:
            assert held + costs.forward_nbytes[i] <= limit
            total += costs.forward_seconds[i]
            state = state._replace(passing=i + 1)
    assert state.left == 0
    assert total == seconds


@examples(80)
@given(chain=chains(most=5, most_options=3), limits=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_no_persistent_schedule_is_faster(chain: Chain, limits: list[int]):
    check(chain, limits)


@examples(30)
@given(chain=chains(least=6, most=8, most_options=2), limits=st.lists(st.integers(1, 30), min_size=1, max_size=2))
def test_no_persistent_schedule_of_eight_stages_is_faster(chain: Chain, limits: list[int]):
    check(chain, limits)


@pytest.mark.parametrize("solver", [chen, revolve, rotor])
def test_an_infeasible_budget_is_an_error_with_a_feasible_one(solver):
    graph = network(8)
    with pytest.raises(BudgetError, match=f"the solver '{solver.__name__}' finds") as caught:
        solver(graph, 1 << 20)
    least = caught.value.least_bytes
    assert simulate(graph, solver(graph, least)).peak_nbytes == least


def seconds(solver, graph: Graph, budget: int) -> float:
    return simulate(graph, solver(graph, budget)).seconds


@pytest.mark.parametrize("budget", [10, 16, 30])
def test_on_equal_layers_rotor_is_as_fast_as_the_binomial_schedule(budget: int):
    graph = chain(50)
    assert seconds(rotor, graph, budget) <= seconds(revolve, graph, budget)


@pytest.mark.parametrize("fraction", [0.3, 0.4, 0.6, 0.8])
def test_on_networks_rotor_is_faster_than_revolve_and_chen(fraction: float):
    graph = network(12, shrink=0.8)
    budget = int(fraction * plain_nbytes(graph))
    assert seconds(rotor, graph, budget) < min(seconds(chen, graph, budget), seconds(revolve, graph, budget))


def test_without_a_budget_nothing_is_recomputed():
    assert simulate(network(8), rotor(network(8))).recomputed_nodes == 0


def test_stages_have_options():
    graph = network(6)
    rules = Rules(graph)
    stages = Stages(rules, cuts=5, choices=[()])
    assert sum(len(options) == 2 for options in stages.saves) > len(stages) / 2  # some have no choice
    full, none = stages.costs.options[2]
    assert none.saved_nbytes < full.saved_nbytes
    assert none.backward_seconds > full.backward_seconds


def test_curves_go_from_the_smallest_plan_to_the_plain_one():
    graph = network(12)
    rules = Rules(graph)
    plans = [(peak_of(rules, order), seconds_of(rules, order)) for curve in curves(rules) for order in curve.spread()]
    assert min(s for _, s in plans) == graph.seconds
    assert min(p for p, _ in plans) < 0.25 * plain_nbytes(graph)
    assert len({s for _, s in plans}) > 20


def test_gradients_of_shared_parameters_are_added_early():
    """An unrolled loop: every stage makes a gradient of the same parameter, which is added to those before."""
    build = Builder()
    parameter, h = build.value(1000), build.value(10)
    layers, inputs = [], [parameter, h]
    for _ in range(20):
        reads = [h, parameter]
        h = build.node("step", reads, [10])[0]
        layers.append(Layer(reads, [h], reads, 1.0, 0))
    graph = differentiated(build, layers, inputs, [h])
    plain = plain_nbytes(graph)
    assert plain < 4000
    assert simulate(graph, rotor(graph)).peak_nbytes <= plain
