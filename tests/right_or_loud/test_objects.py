"""Objects and containers that a planned function changes: their classes, order, aliases, and methods of subclasses."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from helpers import assert_equal
from torch import Tensor

import fckpt

Case = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]
"""A function, and what it has changed."""


class Plain:
    k: Any


def moved(key: str, **options: Any) -> Case:
    held = collections.OrderedDict(a=1.0, b=2.0, c=3.0)

    def fn(x: Tensor) -> Tensor:
        held.move_to_end(key, **options)
        return x.sin() * next(iter(held.values()))

    return fn, lambda: list(held)


def least_recently_used() -> Case:
    held: collections.OrderedDict[int, float] = collections.OrderedDict()
    calls = [1, 2, 3, 1, 4, 1, 2, 5]

    def fn(x: Tensor) -> Tensor:
        key = calls[0]
        if key in held:
            held.move_to_end(key)
        else:
            held[key] = key * 2.0
        if len(held) > 3:
            held.popitem(last=False)
        return x.sin() * held[key]

    return fn, lambda: (calls.append(calls.pop(0)), list(held))[1]


def attribute_again() -> Case:
    held = Plain()
    held.k, held.other = 1.0, 2.0  # type: ignore[attr-defined]

    def fn(x: Tensor) -> Tensor:
        value = held.k
        del held.k
        held.k = value
        return x.sin() * value

    return fn, lambda: list(vars(held))


class Twice:
    def scale(self) -> int:
        return 2


class Thrice(Twice):
    def scale(self) -> int:
        return 3


def class_assigned() -> Case:
    held = Twice()

    def fn(x: Tensor) -> Tensor:
        held.__class__ = Thrice if type(held) is Twice else Twice
        return x.sin() * held.scale()

    return fn, lambda: type(held).__name__


def class_assigned_outside() -> Case:
    held = Twice()

    def change() -> None:
        held.__class__ = Thrice if type(held) is Twice else Twice

    return lambda x: x.sin() * held.scale(), change


class Doubling(set[int]):
    def add(self, value: int) -> None:
        super().add(value * 2)


class Measured(list[float]):
    def __len__(self) -> int:
        return 3


class Storing(dict[str, float]):
    def __setitem__(self, key: str, value: float) -> None:
        super().__setitem__(key, value * 2)


class Last(list[float]):
    def last(self) -> float:
        return self[-1]


def subclass(held: Any, change: Callable[[Any], Any], seen: Callable[[Any], Any] = list) -> Case:
    return lambda x: (x.sin(), change(held))[0], lambda: seen(held)


class Borg:
    shared: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        self.__dict__ = self.shared


def borg(make: bool) -> Case:
    Borg.shared.clear()
    Borg.shared["k"] = 0
    one, other = Borg(), Borg()

    def fn(x: Tensor) -> Tensor:
        held: Any = Borg() if make else one
        held.k += 1
        return x.sin() * (Borg() if make else other).k

    return fn, lambda: dict(Borg.shared)


def with_dict(write: bool, through: bool) -> Case:
    held = Plain()
    held.k = 1
    items = vars(held)

    def fn(x: Tensor) -> Tensor:
        if write:
            if through:
                items["k"] += 1
            else:
                held.k += 1
        return x.sin() * held.k * items["k"]

    return fn, lambda: held.k if write else setattr(held, "k", held.k + 1)


class Asking:
    """Asks its `__dict__` for one key at each access, as Hugging Face's configurations do."""

    def __init__(self) -> None:
        self.k, self.j, self.asked = 1, 2, "other"

    def __getattribute__(self, name: str) -> Any:
        held = super().__getattribute__("__dict__").get(super().__getattribute__("asked"))
        if name == "j" and held is not None:
            return held * super().__getattribute__(name)
        return super().__getattribute__(name)


def asking(key: str) -> Case:
    held: Any = Asking()
    held.asked = key

    def fn(x: Tensor) -> Tensor:
        held.k = 3 if held.j else None
        return x.sin() * held.j

    return fn, lambda: vars(held)["k"]


CASES: dict[str, Callable[[], Case]] = {
    "asks for another key": lambda: asking("other"),
    "asks for the key": lambda: asking("k"),
    "moved to the end": lambda: moved("a"),
    "moved to the start": lambda: moved("c", last=False),
    "a cache of what was used last": least_recently_used,
    "an attribute deleted and set again": attribute_again,
    "a class assigned": class_assigned,
    "a class assigned outside": class_assigned_outside,
    "a set with its own add": lambda: subclass(Doubling([1]), lambda held: held.add(len(held) + 3), sorted),
    "a list with its own length": lambda: subclass(Measured([1.0]), lambda held: held.append(3.0), list.copy),
    "a dict with its own items": lambda: subclass(Storing(), lambda held: held.update(a=len(held)), dict),
    "a dict with its own assignment": lambda: subclass(
        Storing(), lambda held: held.__setitem__("a", held.get("a", 1.0)), dict
    ),
    "a list with another method": lambda: subclass(Last([1.0]), lambda held: held.append(held.last() + 1)),
    "objects that share a dict": lambda: borg(False),
    "new objects that share a dict": lambda: borg(True),
    "an object and its dict": lambda: with_dict(True, False),
    "an object through its dict": lambda: with_dict(True, True),
    "an object and its dict, read": lambda: with_dict(False, False),
}
RIGHT = {
    "moved to the end", "moved to the start", "a cache of what was used last", "a class assigned outside",
    "a list with another method", "an object and its dict, read", "asks for another key",
}  # fmt: skip
EITHER = {"asks for the key"}


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("name", CASES)
def test_changes_of_objects(name: str) -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        fn, seen = CASES[name]()
        region, found = wrap(fn), []
        for _ in range(8):
            x = torch.ones(2, requires_grad=True)
            out = region(x)
            found += [out.detach(), torch.autograd.grad(out.sum(), x), seen()]
        return found

    want = run(lambda fn: fn)
    if name in EITHER:  # torch 2.11 takes the `__dict__` for another object
        with contextlib.suppress(fckpt.TraceError):
            assert_equal(run(lambda fn: fckpt.remat(fn, budget=1.0)), want)
        return
    if name in RIGHT:
        assert_equal(run(lambda fn: fckpt.remat(fn, budget=1.0)), want)
        return
    with pytest.raises(fckpt.TraceError, match="the function assigns"):
        run(lambda fn: fckpt.remat(fn, budget=1.0))


@pytest.mark.parametrize("name", ["an attribute deleted and set again", "a class assigned", "an object and its dict"])
def test_a_refused_change_is_undone(name: str) -> None:
    fn, seen = CASES[name]()
    before = seen()
    with pytest.raises(fckpt.TraceError):
        fckpt.remat(fn, budget=1.0)(torch.ones(2, requires_grad=True))
    assert seen() == before
