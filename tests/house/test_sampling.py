"""Sweeps: every case has its turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sampling
from sampling import left_for_other_days, todays


class Case:
    """What a sweep looks at of a test."""

    def __init__(self, nodeid: str, *marked: int) -> None:
        self.nodeid, self.marked = nodeid, marked

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=self.marked) if self.marked else None


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sampling, "WHOLE", False)
    return lambda number: monkeypatch.setattr(sampling, "DAY", number)


def test_every_item_has_its_turn_once_in_as_many_days_as_there_are_parts(day: Any) -> None:
    found = []
    for number in range(739_944, 739_947):
        day(number)
        found += todays(range(20), 3)
        assert sorted([*todays(range(20), 3), *todays(range(20), 3, 1), *todays(range(20), 3, 2)]) == [*range(20)]
    assert sorted(found) == [*range(20)]


@pytest.mark.parametrize("count", [1, 2, 20])
def test_every_case_of_a_sweep_has_its_turn_and_other_tests_always_run(day: Any, count: int) -> None:
    cases: list[Any] = [Case(f"tests/bits/test_a.py::test_sweep[{i}-{i % 3}]", 3) for i in range(count)]
    plain: Any = Case("tests/bits/test_a.py::test_plain[0]")
    ran: list[Any] = []
    for number in range(3):
        day(number)
        left = left_for_other_days([*cases, plain])
        assert left < {*cases} and plain not in left
        ran += [case for case in cases if case not in left]
    assert {*ran} == {*cases}
    assert count < 3 or len(ran) == count


@pytest.mark.parametrize(("count", "run"), [(7, {7}), (8, {1}), (12, {1, 2}), (16, {2})])
def test_an_eighth_of_the_cases_of_a_file_run_each_day(day: Any, count: int, run: set[int]) -> None:
    cases: list[Any] = [Case(f"tests/bits/test_a.py::test_{i % 4}[{i}]") for i in range(count)]
    always: list[Any] = [Case(f"tests/house/test_a.py::test_{i}") for i in range(count)]
    always += [Case(f"tests/bits/test_a.py::test_all[{i}]", 1) for i in range(count)]
    always += [Case(f"fckpt/a.py::fckpt.a.f{i}") for i in range(count)]
    ran: list[Any] = []
    for number in range(8):
        day(number)
        left = left_for_other_days([*cases, *always])
        assert left <= {*cases} and count - len(left) in run
        ran += [case for case in cases if case not in left]
    assert {*ran} == {*cases}


def test_shifted_sweeps_over_the_same_parameters_run_different_cases(day: Any) -> None:
    day(1)
    one: list[Any] = [Case(f"tests/bits/test_a.py::test_one[{i}]", 2) for i in range(10)]
    two: list[Any] = [Case(f"tests/bits/test_a.py::test_two[{i}]", 2, 1) for i in range(10)]
    left = left_for_other_days([*one, *two])
    assert [case in left for case in one] == [case not in left for case in two]


def test_all_cases_run_if_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE", True)
    cases: list[Any] = [Case(f"tests/bits/test_a.py::test_sweep[{i}]", 3) for i in range(9)]
    assert left_for_other_days(cases) == set() and todays(range(9), 3) == [*range(9)]
