"""Repairs: what their moves gain, how wide they are, and when they give up."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import numpy as np
import pytest
from graphs import chain, graphs, network
from hypothesis import given, settings

from fckpt import solve
from fckpt.errors import BudgetError
from fckpt.graph import Graph
from fckpt.solve.base import Rules
from fckpt.solve.bounds import least_peak
from fckpt.solve.repair import Repair
from fckpt.solve.seeds import saving
from fckpt.solve.tape import Tape

repairs = importlib.import_module("fckpt.solve.repair")


def repaired(graph: Graph, budget: int) -> tuple[Repair, bool]:
    rules = Rules(graph)
    repair = Repair(Tape(rules, saving(rules)[0]), budget)
    return repair, repair.run()


def moves(repair: Repair) -> Iterator[tuple[list[int], list[int], int]]:
    """Yields what a repair weighs for its tape as it is: nodes, the values that live longer for them, and when."""
    gaps, highest = repair.gaps, int(repair.tape.memory.argmax())
    if not len(gaps.crossing(highest)):
        return
    repair.best(highest)  # sums up where it is over the budget
    for row in np.flatnonzero(gaps.second[: gaps.count]).tolist():
        repair._forget()
        moment = int(gaps.second[row])
        for nodes, extended in repair.closures(int(gaps.value[row]), moment):
            yield nodes, extended, moment


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_a_move_gains_what_it_is_weighed_by(graph: Graph):
    plain = dataclasses.replace(graph, nodes=tuple(dataclasses.replace(n, overwrites=()) for n in graph.nodes))
    rules = Rules(plain)
    order = saving(rules)[0]
    budget = int(0.7 * Tape(rules, order).memory.max())
    repair = Repair(Tape(rules, order), budget)
    for _ in range(4):
        for nodes, extended, moment in moves(repair):
            changes = repair.changes(nodes, extended, moment)
            most, gain = repair.most(changes, moment), repair.gain(nodes, extended, changes, moment)
            tape = repair.tape.copy()
            tape.insert(nodes, moment)
            fall = repair.excess() - int(np.maximum(tape.memory - budget, 0).sum())
            assert fall <= most
            assert gain == fall if gain > 0 else fall <= gain
        move = repair.best(int(repair.tape.memory.argmax()))
        if move is None:
            return
        repair.apply(move)


def test_moves_widen_when_no_narrow_one_helps(monkeypatch: pytest.MonkeyPatch):
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
    assert int(wide.tape.memory.max()) <= budget


def test_a_repair_gives_up_when_it_has_weighed_enough():
    rules = Rules(network(12))
    tape = Tape(rules, saving(rules)[0])
    budget = int(0.6 * tape.memory.max())
    assert not Repair(tape, budget).run(effort=0)
    assert tape.memory.max() > budget
    assert Repair(tape, budget).run()  # it goes on from where the other stopped


def test_what_is_far_from_fitting_is_refused_before_programs_are_solved(monkeypatch: pytest.MonkeyPatch):
    graph = network(12, skips=True)
    with pytest.raises(BudgetError) as caught:
        solve.auto(graph, 0)
    least = caught.value.least_bytes
    budget = int(0.9 * least)
    assert least_peak(graph) <= budget  # so that this is not why

    def solved(*_: object):
        raise AssertionError("a program was solved")

    monkeypatch.setattr(importlib.import_module("fckpt.solve.auto"), "retained", solved)
    with pytest.raises(BudgetError) as again:
        solve.auto(graph, budget)
    assert again.value.least_bytes == least
