"""The curve of `fckpt.pareto`: its table, its picture, and how to choose a point."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
from torch import Tensor

import fckpt
from fckpt import solve

A100 = fckpt.cost.Analytic(fckpt.cost.profiles["A100"])


def loss(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(12):
        x = torch.tanh(x @ w)
    return x.sum()


@pytest.fixture(scope="module")
def curve() -> fckpt.Pareto:
    return fckpt.pareto(loss, torch.ones(16, 16, requires_grad=True), torch.ones(1024, 16), points=5, costs=A100)


def test_the_table_has_a_line_per_point(curve: fckpt.Pareto) -> None:
    header, *lines = str(curve).splitlines()
    assert header.split() == ["peak", "of", "plain", "extra", "time"]
    assert len(lines) == len(curve) >= 4
    assert lines[-1].split()[2:] == ["100.0%", "+0.0%"]


def test_the_picture_shows_every_point(curve: fckpt.Pareto) -> None:
    picture = ElementTree.fromstring(curve.svg())
    circles = [element for element in picture.iter() if element.tag.endswith("circle")]
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles]
    assert len(places) == len(curve)
    assert places == sorted(places)  # more memory to the right, less time below
    assert all(0 < x < 720 and 0 < y < 360 for x, y in places)
    assert str(curve).splitlines()[1] in curve._repr_html_()


def test_best_is_the_smallest_peak_in_time_or_the_fastest_in_memory(curve: fckpt.Pareto) -> None:
    for point in curve:
        assert curve.best(overhead=point.overhead) is point
        assert curve.best(seconds=point.plan.timeline.seconds) is point
        assert curve.best(peak_bytes=point.peak_bytes) is point
    assert curve.best(overhead=0.0).overhead == 0.0
    assert curve.best(peak_bytes="1GiB") is curve[-1]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "takes one of"),
        ({"overhead": 0.1, "seconds": 1.0}, "not 2 of them"),
        ({"overhead": -0.1}, "no point has overhead up to -0.1: the fastest takes .* an overhead of 0.0%"),
        ({"peak_bytes": 1}, "no point has peak_bytes up to 1: the smallest peak is"),
    ],
)
def test_best_says_what_cannot_be_met(curve: fckpt.Pareto, given: dict[str, Any], said: str) -> None:
    with pytest.raises(fckpt.ArgumentValueError, match=said):
        curve.best(**given)


def test_best_takes_numbers(curve: fckpt.Pareto) -> None:
    text: Any = "10 %"
    with pytest.raises(fckpt.ArgumentTypeError, match="overhead is a number, not str: '10 %'"):
        curve.best(overhead=text)


def deep(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for _ in range(24):
        x = torch.tanh(x @ w).sin() + x
    return x.sum()


def test_plans_are_found_quickly_and_are_nearly_as_fast_as_those_of_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (deep, torch.ones(16, 16, requires_grad=True), torch.ones(1024, 16))
    asked: list[str] = []
    solver_of = solve.get
    monkeypatch.setattr(solve, "get", lambda name: (asked.append(name), solver_of(name))[1])
    curve = fckpt.pareto(*given, points=6, costs=A100)
    assert "auto" not in asked[asked.index("greedy") :]  # only for the plan that recomputes nothing
    asked.clear()
    best = fckpt.pareto(*given, points=6, costs=A100, solver="auto")
    assert set(asked) == {"auto"} and len(curve) >= 5
    for point in curve:
        assert point.peak_bytes <= max(p.peak_bytes for p in best)
        assert point.overhead <= best.best(peak_bytes=max(point.peak_bytes, best[0].peak_bytes)).overhead + 0.02


def test_the_solver_runs_where_no_plan_is_found_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (deep, torch.ones(16, 16, requires_grad=True), torch.ones(1024, 16))
    monkeypatch.setattr("fckpt._planned.families.quick", lambda graph, nbytes: None)
    curve = fckpt.pareto(*given, points=3, costs=A100)
    assert len(curve) == 3 and curve[0].overhead > 0 == curve[-1].overhead
