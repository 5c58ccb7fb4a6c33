"""Repairs: how wide their moves are, and when they give up."""

from __future__ import annotations

import importlib

import pytest
from graphs import chain, network

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
