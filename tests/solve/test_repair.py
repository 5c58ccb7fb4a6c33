"""Repairs: the gains and the width of moves, and when repairs are abandoned."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
from graphs import chain, graphs, network
from hypothesis import given, settings

from fckpt import solve
from fckpt.errors import BudgetError
from fckpt.graph import Graph
from fckpt.solve.core.rules import Rules
from fckpt.solve.core.starts import save_everything_orders
from fckpt.solve.proofs.bounds import least_peak
from fckpt.solve.repair.editable import EditableSchedule
from fckpt.solve.repair.repair import Repair

repairs = importlib.import_module("fckpt.solve.repair.repair")


def repaired(graph: Graph, budget: int) -> tuple[Repair, bool]:
    rules = Rules(graph)
    repair = Repair(EditableSchedule(rules, save_everything_orders(rules)[0]), budget)
    return repair, repair.run()


def check_moves(graph: Graph, exact: bool) -> int:
    """Compares what moves of repairs of a graph are weighed by with what they do; returns how many gain something.

    Args:
        graph: one training step.
        exact: whether gains are; they are not where inputs are overwritten.
    """
    rules = Rules(graph)
    order = save_everything_orders(rules)[0]
    budget = int(0.7 * EditableSchedule(rules, order).profile.max())
    repair = Repair(EditableSchedule(rules, order), budget)
    gaps, helping = repair.gaps, 0
    for _ in range(4):
        highest = int(repair.schedule.profile.argmax())
        over = repair.schedule.profile[highest] > budget and len(gaps.rows_around(highest))
        if not over or (move := repair.best(highest)) is None:
            break
        for row in np.flatnonzero(gaps.second[: gaps.count]).tolist():
            value, run = int(gaps.value[row]), int(gaps.second[row])
            fresh = Repair(repair.schedule, budget, gaps)  # it has looked nothing up
            fresh.over_before = repair.over_before
            ratios = [np.inf]
            for nodes, extended in fresh.closures(value, run):
                changes = fresh.changes(nodes, extended, run)
                gain, fall = fresh.gain(nodes, extended, changes, run), fallen(repair, nodes, run)
                assert gain <= fresh.most_gain(changes, run)
                made = {v for index in nodes for v in graph.nodes[index].outputs}
                if exact and made.isdisjoint(extended):  # what is made after all need not live longer
                    assert gain == fall if gain > 0 else fall <= gain
                if gain > 0:
                    ratios.append(sum([fresh.price(index, run) for index in nodes]) / gain)
            assert repair.evaluate(value, run)[0] == min(ratios)
            helping += len(ratios) - 1
        repair.apply(move)
    return helping


def fallen(repair: Repair, nodes: list[int], run: int) -> int:
    """Returns the reduction of the excess if `nodes` run before `run`."""
    schedule = repair.schedule.copy()
    schedule.insert(nodes, run)
    return repair.excess() - int(np.maximum(schedule.profile - repair.budget, 0).sum())


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_the_computed_gain_of_a_move_is_its_gain(graph: Graph):
    check_moves(graph, exact=False)
    plain = dataclasses.replace(graph, nodes=tuple(dataclasses.replace(n, overwrites=()) for n in graph.nodes))
    check_moves(plain, exact=True)


@pytest.mark.parametrize("graph", [network(12), network(12, skips=True), network(12, dense=4)])
def test_some_moves_gain(graph: Graph):
    assert check_moves(graph, exact=True) > 0


def test_moves_become_wider_if_no_narrow_one_helps(monkeypatch: pytest.MonkeyPatch):
    graph, budget = chain(24), 12
    monkeypatch.setattr(repairs, "NARROW", 1)
    monkeypatch.setattr(repairs, "WIDE", 1)
    narrow, fits = repaired(graph, budget)
    assert not fits
    assert narrow.width == 1
    monkeypatch.setattr(repairs, "WIDE", 64)
    wide, fits = repaired(graph, budget)
    assert fits
    assert 1 < wide.width <= 64
    assert int(wide.schedule.profile.max()) <= budget


def test_a_repair_is_abandoned_after_its_effort():
    rules = Rules(network(12))
    schedule = EditableSchedule(rules, save_everything_orders(rules)[0])
    budget = int(0.6 * schedule.profile.max())
    assert not Repair(schedule, budget).run(effort=0)
    assert schedule.profile.max() > budget
    assert Repair(schedule, budget).run()  # it goes on from where the other stopped


def test_a_budget_far_below_all_peaks_is_refused_before_integer_programs(monkeypatch: pytest.MonkeyPatch):
    graph = network(12, skips=True)
    with pytest.raises(BudgetError) as caught:
        solve.auto(graph, 0)
    least = caught.value.least_bytes
    budget = int(0.9 * least)
    assert least_peak(graph) <= budget  # so that this is not why

    def solved(*_: object):
        raise AssertionError("a program was solved")

    monkeypatch.setattr(importlib.import_module("fckpt.solve._auto"), "moment_orders", solved)
    with pytest.raises(BudgetError) as again:
        solve.auto(graph, budget)
    assert again.value.least_bytes == least
