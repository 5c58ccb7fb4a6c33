"""Progress on the terminal while planning takes long."""

from __future__ import annotations

import io
import sys

import pytest
from graphs import network

from fckpt import solve
from fckpt._planned.making import make_plan
from fckpt.graph import simulate
from fckpt.report.progress import Line


class Terminal(io.StringIO):
    """Where lines are written over."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.getvalue().split("\r")]


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_progress_is_shown_and_then_erased(monkeypatch: pytest.MonkeyPatch):
    terminal = on_terminal(monkeypatch)
    graph = network(40)
    peak = simulate(graph, solve.get("save_all")(graph, None)).peak_nbytes
    make_plan(graph, peak * 2 // 5, "auto", "2", time_limit=1.0)
    lines = terminal.lines
    assert "fckpt: proving a bound" in lines
    assert "fckpt: looking for plans to start from" in lines
    assert "fckpt: plans to start from: 1" in lines
    assert lines[-2:] == ["", ""]  # blank, and the cursor at its beginning


def test_fast_steps_are_not_reported(monkeypatch: pytest.MonkeyPatch):
    terminal = on_terminal(monkeypatch)
    make_plan(network(3), 1 << 40, "auto", "2")
    assert terminal.getvalue() == ""


def test_the_time_left_is_that_of_the_current_step(monkeypatch: pytest.MonkeyPatch):
    terminal = on_terminal(monkeypatch)
    clock = iter([0.0, 10.0, 12.0, 13.0]).__next__
    monkeypatch.setattr("fckpt.report.progress.time.perf_counter", clock)
    with Line() as line:
        line.say("proving a bound")
        line.update(1, 4, "moves: {} of {}")
        line.update(2, 4, "moves: {} of {}")
        line.update(3, 4, "moves: {} of {}")
    assert terminal.lines[1] == "fckpt: proving a bound"
    assert terminal.lines[2:4] == ["fckpt: moves: 2 of 4, 2.00 s left", "fckpt: moves: 3 of 4, 1.00 s left"]
