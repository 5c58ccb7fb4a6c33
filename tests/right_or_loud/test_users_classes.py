"""Classes of the user: reached through closures, made inside of a planned function, and written to by it. Each case
runs beside a plain twin, whose objects are its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from cases import Case, Cases, check
from torch import Tensor, nn

CASES = case = Cases()


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_class_is_what_it_is_in_python(name: str) -> None:
    check(CASES[name])


# -- classes in closures -----------------------------------------------------------------------


class Two:
    def __init__(self) -> None:
        self.k = 2.0


class Seven:
    def __init__(self) -> None:
        self.k = 7.0


@case
def rebound_variable() -> Case:
    kind: type[Any] = Two

    def fn(x: Tensor) -> Tensor:
        return x.sin() * kind().k

    def change(i: int) -> None:
        nonlocal kind
        kind = Two if i % 2 else Seven

    return Case(fn, change)


@case
def held_by_a_module() -> Case:
    module: Any = nn.Module()

    def fn(x: Tensor) -> Tensor:
        return x.sin() * module.kind().k

    return Case(fn, lambda i: setattr(module, "kind", Two if i % 2 else Seven))


@case
def held_by_containers() -> Case:
    table: dict[str, Any] = {}
    items: list[Any] = [Two]

    def fn(x: Tensor) -> Tensor:
        return x.sin() * table["kind"]().k * items[0]().k

    def change(i: int) -> None:
        table["kind"] = Two if i < 2 else Seven
        items[0] = Two if i < 3 else Seven

    return Case(fn, change)


@case
def replaced_methods() -> Case:
    class Local:
        def __init__(self) -> None:
            self.k = 2.0

        def scale(self) -> float:
            return 3.0

    def fn(x: Tensor) -> Tensor:
        made = Local()
        return x.sin() * made.k * made.scale()

    def change(i: int) -> None:
        if i == 1:
            Local.scale = lambda self: 5.0
        if i == 2:
            Local.__init__ = lambda self: setattr(self, "k", 7.0)

    return Case(fn, change)


@case
def an_added_constructor() -> Case:
    class Local:
        k = 2.0

    def fn(x: Tensor) -> Tensor:
        return x.sin() * Local().k

    def change(i: int) -> None:
        if i == 2:
            Local.__init__ = lambda self: setattr(self, "k", 7.0)

    return Case(fn, change)


@case
def constructor_of_a_dataclass() -> Case:
    @dataclasses.dataclass
    class Local:
        k: float = 2.0

    def fn(x: Tensor) -> Tensor:
        return x.sin() * Local().k

    def change(i: int) -> None:
        if i == 1:
            Local.__init__.__defaults__ = (9.0,)
        if i == 3:
            Local.__init__ = lambda self: setattr(self, "k", 7.0)  # type: ignore[method-assign]

    return Case(fn, change)


# -- methods of objects that the function makes ------------------------------------------------------


def scaled_by(settings: dict[str, float]) -> Callable[[Any], Any]:
    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def scaled(self: Any) -> float:
            return method(self) * settings["scale"]

        return scaled

    return decorate


@case
def decorated_methods_read_settings() -> Case:
    settings = {"scale": 1.0}

    class Local:
        @scaled_by(settings)
        def scale(self) -> float:
            return 2.0

        @property
        @scaled_by(settings)
        def other(self) -> float:
            return 3.0

        @staticmethod
        def third() -> float:
            return settings["scale"]

    def fn(x: Tensor) -> Tensor:
        made = Local()
        return x.sin() * made.scale() + made.other + made.third()

    return Case(fn, lambda i: settings.update(scale=1.0 + i // 2))


@case
def operators_close_over_settings() -> Case:
    held = [1.0]

    class Local:
        def __add__(self, other: float) -> float:
            return held[0] + other

        def __contains__(self, item: float) -> bool:
            return item == held[0]

        def __len__(self) -> int:
            return int(held[0])

        def __getattr__(self, name: str) -> float:
            return held[0]

        def __enter__(self) -> float:
            return held[0]

        def __exit__(self, *_: object) -> None:
            held.append(held[0])

    def fn(x: Tensor) -> Tensor:
        made = Local()
        with made as scale:
            return x.sin() * scale * (made + 1.0) * len(made) + made.anything + (2.0 in made)

    return Case(fn, lambda i: held.__setitem__(0, 1.0 + i // 2), seen=lambda: list(held))


def counted(log: list[int]) -> Callable[[Any], Any]:
    def decorate(method: Any) -> Any:
        count = 0

        def counting(self: Any) -> float:
            nonlocal count
            count += 1
            log.append(count)
            return method(self) * count

        return counting

    return decorate


@case
def decorated_methods_count() -> Case:
    log: list[int] = []

    class Local:
        @counted(log)
        def scale(self) -> float:
            return 1.0

    def fn(x: Tensor) -> Tensor:
        made = Local()
        return x.sin() * made.scale() * made.scale()

    return Case(fn, seen=lambda: list(log))


@case
def defaults_are_replaced() -> Case:
    class Local:
        def __init__(self, k: float = 1.0, *, j: float = 1.0) -> None:
            self.k = k * j

    def fn(x: Tensor) -> Tensor:
        return x.sin() * Local().k

    def change(i: int) -> None:
        if i == 2:
            Local.__init__.__defaults__ = (5.0,)
        if i == 3:
            Local.__init__.__kwdefaults__["j"] = 7.0  # type: ignore[attr-defined]

    return Case(fn, change)


@case
def a_default_is_a_list() -> Case:
    class Local:
        def __init__(self, held: list[int] = []) -> None:  # noqa: B006
            held.append(1)
            self.k = len(held)

    def fn(x: Tensor) -> Tensor:
        return x.sin() * Local().k

    return Case(fn, seen=lambda: list(Local.__init__.__defaults__[0]))  # type: ignore[attr-defined]


@case
def constructors_close_over_a_list() -> Case:
    made: list[float] = [1.0]

    @dataclasses.dataclass
    class Local:
        k: float = dataclasses.field(default_factory=lambda: made[0])

        def __post_init__(self) -> None:
            made[0] = self.k * 2.0
            made.append(self.k)

    def fn(x: Tensor) -> Tensor:
        return x.sin() * Local().k

    return Case(fn, seen=lambda: list(made))


@case
def a_module_makes_objects() -> Case:
    settings = {"scale": 1.0}

    class Activation:
        def __init__(self, x: Tensor) -> None:
            self.out = self.run(x)

        @staticmethod
        def run(x: Tensor) -> Tensor:
            return x.sin() * settings["scale"]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Activation(x).out

    return Case(Model(), lambda i: settings.update(scale=1.0 + i))


# -- attributes that the function assigns to classes ---------------------------------------------------


@case
def a_module_counts_in_its_class() -> Case:
    class Model(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return x.sin() * self.calls

    return Case(Model(), seen=lambda: Model.calls, most=2)


@case
def numbered_objects() -> Case:
    class Local:
        count = 0

        def __init__(self) -> None:
            Local.count += 1
            self.id = self.count

    def fn(x: Tensor) -> Tensor:
        return x.sin() * Local().id * Local().id

    return Case(fn, seen=lambda: Local.count, most=2)


def counted_classes() -> tuple[Any, Any]:
    """Returns a class that counts by a class method, and a class derived from it."""

    class Base:
        n = 1

        @classmethod
        def bump(cls) -> int:
            cls.n += 1
            return cls.n

    class Derived(Base):
        pass

    return Base, Derived


@case
def assigned_to_a_base() -> Case:
    Base, Derived = counted_classes()
    made = Derived()

    def fn(x: Tensor) -> Tensor:
        Base.bump()
        return x.sin() * made.n * Derived.n

    return Case(fn, seen=lambda: (Base.n, Derived.n, "n" in vars(Derived)))


@case
def assigned_to_base_and_derived() -> Case:
    Base, Derived = counted_classes()

    def change(i: int) -> None:
        if i == 2:
            Derived.n = 10

    def fn(x: Tensor) -> Tensor:
        return x.sin() * Base.bump() * Derived.bump()

    return Case(fn, change, seen=lambda: (Base.n, Derived.n))


@case
def read_by_super() -> Case:
    class Base:
        n = 0

    class Derived(Base):
        def __init__(self) -> None:
            Base.n += 1
            self.k = super().n

    return Case(lambda x: x.sin() * Derived().k, refused=True)


@case
def assigned_and_deleted() -> Case:
    class Base:
        n = 3.0

    class Derived(Base):
        n = 5.0

    made = Derived()

    def fn(x: Tensor) -> Tensor:
        Derived.n = 7.0
        y = x.sin() * made.n
        del Derived.n
        return y * made.n

    return Case(fn, lambda i: setattr(Derived, "n", 5.0), refused=True)


@case
def hidden_by_the_object() -> Case:
    class Local:
        n = 1

    made = Local()

    def fn(x: Tensor) -> Tensor:
        Local.n += 1
        y = x.sin() * made.n
        made.n = made.n * 2
        Local.n += 1
        return y * made.n

    def change(i: int) -> None:
        if i != 2:
            vars(made).pop("n", None)

    return Case(fn, change, seen=lambda: (Local.n, made.n))


@case
def another_list() -> Case:
    class Model(nn.Module):
        held: ClassVar[list[int]] = [0]

        def forward(self, x: Tensor) -> Tensor:
            type(self).held = [*self.held, 1]
            return x.sin() * len(self.held)

    return Case(Model(), seen=lambda: list(Model.held))


@case
def a_method_is_assigned() -> Case:
    class Local:
        def run(self, x: Tensor) -> Tensor:
            return x * 2

    made = Local()

    def fn(x: Tensor) -> Tensor:
        Local.run = lambda self, x: x * 3
        return made.run(x).sin()

    return Case(fn, refused=True)


@case
def a_class_attribute_appears() -> Case:
    class Local:
        pass

    made = Local()

    def fn(x: Tensor) -> Tensor:
        Local.n = getattr(made, "n", 0) + 1  # type: ignore[attr-defined]
        return x.sin() * (2 if hasattr(made, "n") else 3)

    return Case(fn, refused=True)
