"""Tests take turns: the part of them that runs today.

Of each file, an eighth of the cases run each day. `@pytest.mark.sweep(4)` makes four parts of the cases of a function,
and `sweep(1)` runs all. Always run: tests of pages and names (`tests/house`), files with few cases, and cases that are
asked for by name. The head of pytest's output names the day: `FCKPT_DAY=739944` runs again what was run that day.
`FCKPT_DAY=all` runs everything, and so does `FCKPT_PROFILE=slow`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import date
from typing import TypeVar
from zlib import crc32

import pytest

__all__ = ["DAY", "SLOW", "WHOLE", "left_for_other_days", "todays"]

SLOW = os.environ.get("FCKPT_PROFILE") == "slow"
# In the environment, so that all workers have the same day, also around midnight.
_DAY = os.environ.setdefault("FCKPT_DAY", str(date.today().toordinal()))
WHOLE = SLOW or _DAY == "all"
DAY = 0 if _DAY == "all" else int(_DAY)

MANY = 8
"""The number of cases of a file from which an eighth of them run each day."""
PARTS = 8
"""The number of days in which all cases of a file have their turn."""

T = TypeVar("T")


def todays(items: Iterable[T], parts: int, shift: int = 0) -> list[T]:
    """Every `parts`-th of the items, so that each has its turn within `parts` days; all of them where all run.

    Several calls with shifts 0 to `parts - 1` cover all items each day.
    """
    found = list(items)
    return found if WHOLE else found[(DAY + shift) % parts :: parts]


def left_for_other_days(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of sweeps whose turn it is not.

    The order in which cases take turns is that of a checksum of their names: a product of parameters is not cut along
    one of them, and each parameter meets the others in another way every day. Functions with the same parameters that
    are marked with other shifts, `sweep(2)` and `sweep(2, 1)`, run different ones of their cases.
    """
    sweeps: dict[tuple[str, str, int, int], list[pytest.Item]] = {}
    for item in items:
        if WHOLE or "tests/house/" in item.nodeid or not item.nodeid.startswith("tests/"):
            continue
        marker = item.get_closest_marker("sweep")
        parts, shift = (*marker.args, 0)[:2] if marker else (PARTS, 0)
        split = "[" if marker else "::"  # a marked function takes turns by itself, all others of a file together
        sweeps.setdefault((item.nodeid.partition(split)[0], split, parts, shift), []).append(item)
    left: set[pytest.Item] = set()
    for (_, split, parts, shift), cases in sweeps.items():
        if split == "::" and len(cases) < MANY:
            continue
        cases.sort(key=lambda item, split=split: crc32(item.nodeid.partition(split)[2].encode()))
        left |= {*cases} - {*todays(cases, min(parts, len(cases)), shift)}
    return left
