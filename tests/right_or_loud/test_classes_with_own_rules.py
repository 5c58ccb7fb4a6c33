"""Classes of the user with rules of their own: metaclasses, enumerations, equality, and lookups of names. Each case
runs beside a plain twin, whose objects are its own.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from cases import Case, Cases, check
from torch import Tensor, nn

import fckpt

CASES = case = Cases()


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_class_is_what_it_is_in_python(name: str) -> None:
    check(CASES[name])


# -- metaclasses and enumerations -----------------------------------------------------------------


@case
def methods_of_a_metaclass() -> Case:
    class Meta(type):
        def __len__(cls) -> int:
            return 2

        def __getattr__(cls, name: str) -> float:
            return 3.0

    class Local(metaclass=Meta):
        pass

    def fn(x: Tensor) -> Tensor:
        return x.sin() * len(Local) * Local.scale

    def change(i: int) -> None:
        if i == 1:
            Meta.__len__ = lambda cls: 7
        if i == 2:
            Meta.__getattr__ = lambda cls, name: 5.0
        if i == 3:
            Local.scale = 11.0  # type: ignore[attr-defined]

    return Case(fn, change)


@case
def assigned_to_a_metaclass() -> Case:
    class Meta(type):
        n = 0

    class Local(metaclass=Meta):
        pass

    def fn(x: Tensor) -> Tensor:
        Meta.n += 1
        return x.sin() * Local.n

    return Case(fn, seen=lambda: Meta.n)


@case
def changed_in_a_metaclass() -> Case:
    class Meta(type):
        n = 0

    class Local(metaclass=Meta):
        pass

    return Case(lambda x: x.sin() * Local.n * Meta.n, lambda i: setattr(Meta, "n", i))


@case
def a_metaclass_changes_arguments() -> Case:
    class Meta(type):
        def __call__(cls, k: float) -> Any:
            return super().__call__(k * 10)

    class Local(metaclass=Meta):
        def __init__(self, k: float) -> None:
            self.k = k

    return Case(lambda x: x.sin() * Local(2.0).k)


@case
def a_metaclass_counts() -> Case:
    class Meta(type):
        count = 0

        def __call__(cls) -> Any:
            Meta.count += 1
            return super().__call__()

    class Local(metaclass=Meta):
        pass

    def fn(x: Tensor) -> Tensor:
        Local()
        return x.sin() * Meta.count

    return Case(fn, seen=lambda: Meta.count, refused=True)


@case
def one_object_for_all() -> Case:
    class Single(type):
        made: ClassVar[dict[Any, Any]] = {}

        def __call__(cls) -> Any:
            if cls not in cls.made:
                cls.made[cls] = super().__call__()
            return cls.made[cls]

    class Local(metaclass=Single):
        def __init__(self) -> None:
            self.k = 0

    def fn(x: Tensor) -> Tensor:
        made = Local()
        made.k += 1
        return x.sin() * made.k

    return Case(fn, seen=lambda: [made.k for made in Single.made.values()], refused=True)


@case
def members_are_looked_up() -> Case:
    class Color(enum.Enum):
        RED = 1
        BLUE = 2

        @classmethod
        def _missing_(cls, value: object) -> Color:
            return cls.BLUE

    number = [1]
    return Case(lambda x: x.sin() * Color(number[0]).value, lambda i: number.__setitem__(0, i))


MISSED = [0]


@case
def looking_up_counts() -> Case:
    MISSED[0] = 0

    class Color(enum.Enum):
        RED = 1

        @classmethod
        def _missing_(cls, value: object) -> Color:
            MISSED[0] += 1
            return cls.RED

    return Case(lambda x: x.sin() * Color(5).value, refused=True)


# -- objects with their own equality ----------------------------------------------------------------


class Key:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)


@case
def an_equal_key() -> Case:
    key, table, held = Key(1), {Key(1): 2.0, Key(2): 3.0}, {Key(1)}

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * table.get(key, 7.0) * (5 if key in held else 11)
        return y * (1.0 * table[key] if key in table else 13.0)

    return Case(fn, lambda i: setattr(key, "number", 1 + i % 3))


@case
def a_key_made_inside() -> Case:
    number, table = [1], {Key(1): 2.0, Key(2): 3.0}
    return Case(lambda x: x.sin() * table.get(Key(number[0]), 7.0), lambda i: number.__setitem__(0, 1 + i % 3))


@case
def a_set_made_inside() -> Case:
    first, second = Key(1), Key(1)
    return Case(lambda x: x.sin() * len({first, second}), lambda i: setattr(first, "number", 1 + i % 2))


@case
def a_key_in_a_tuple() -> Case:
    key, table = Key(1), {(Key(1), 0): 2.0, (Key(2), 0): 3.0}
    return Case(lambda x: x.sin() * table.get((key, 0), 7.0), lambda i: setattr(key, "number", 1 + i % 3))


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: int


@case
def a_frozen_dataclass() -> Case:
    keys, table = [Frozen(1)], {Frozen(1): 2.0, Frozen(2): 3.0}

    def fn(x: Tensor) -> Tensor:
        return x.sin() * table.get(keys[0], 7.0) * table.get(Frozen(2), 11.0)

    return Case(fn, lambda i: keys.__setitem__(0, Frozen(1 + i % 3)))


@dataclasses.dataclass(frozen=True)
class Rounded:
    number: int
    note: str = dataclasses.field(default="", compare=False)


@case
def a_field_that_is_not_compared() -> Case:
    keys, table = [Rounded(1)], {Rounded(1, "a"): 2.0, Rounded(2, "a"): 3.0}
    return Case(lambda x: x.sin() * table.get(keys[0], 7.0), lambda i: keys.__setitem__(0, Rounded(1 + i % 3, "b")))


@case
def members_as_keys() -> Case:
    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    colors, table = [Color.RED], {Color.RED: 2.0, Color.BLUE: 3.0}
    return Case(lambda x: x.sin() * table[colors[0]], lambda i: colors.__setitem__(0, Color(1 + i % 2)), most=2)


# -- names and lookups that a class answers itself --------------------------------------------------------


def test_a_module_that_answers_for_any_name() -> None:
    class Model(nn.Module):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return 9.0

        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * self.scale

    x = torch.ones(3, requires_grad=True)
    assert torch.equal(fckpt.remat(Model(), budget=1.0)(x), x.sin() * 9.0)


@case
def a_class_answers_for_all_names() -> Case:
    class Local:
        k = 2.0

    made = Local()

    def change(i: int) -> None:
        if i == 2:
            Local.__getattribute__ = lambda self, name: 11.0

    return Case(lambda x: x.sin() * made.k, change)


# -- Python code that is traced by running it --------------------------------------------------------------


def untraceable(keys: set[Key]) -> int:
    """Returns the number of keys; Dynamo cannot capture it."""
    return len(keys)


def _counting_variable(keys: set[Key]) -> Callable[[Tensor], Tensor]:
    count = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal count
        count += untraceable(keys)
        return x.sin() * count

    return fn


def _counting_class(keys: set[Key]) -> Callable[[Tensor], Tensor]:
    class Model(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += untraceable(keys)
            return x.sin() * self.calls

    return Model()


def _new_attribute(keys: set[Key]) -> Callable[[Tensor], Tensor]:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kind: Any = type(self)
            kind.calls = getattr(kind, "calls", 0) + untraceable(keys)
            return x.sin() * kind.calls

    return Model()


def _class_in_a_list(keys: set[Key]) -> Callable[[Tensor], Tensor]:
    class Local:
        calls = 0

    held = [Local]

    def fn(x: Tensor) -> Tensor:
        held[0].calls += untraceable(keys)
        return x.sin() * held[0].calls

    return fn


def _default_of_a_method(keys: set[Key]) -> Callable[[Tensor], Tensor]:
    class Local:
        def count(self, held: list[int] = []) -> int:  # noqa: B006
            held.append(untraceable(keys))
            return len(held)

    return lambda x: x.sin() * Local().count()


@pytest.mark.parametrize(
    "make", [_counting_variable, _counting_class, _new_attribute, _class_in_a_list, _default_of_a_method]
)
def test_side_effects_on_classes_are_refused_in_traced_python(make: Any) -> None:
    planned, x = fckpt.remat(make({Key(1)}), budget=1.0), torch.ones(3, requires_grad=True)
    for _ in range(2):
        with pytest.raises(fckpt.TraceError, match="while it runs"):
            planned(x)
