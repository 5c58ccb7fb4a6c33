"""Classes of the user: reached through closures, made and assigned inside of a planned function, with metaclasses, and
with their own equality. Each case runs beside a plain twin, whose objects are its own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fckpt

OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
"""Whether torch is a version whose Dynamo refuses more functions, which may then be refused as a whole."""


@dataclasses.dataclass
class Case:
    """A function, what happens before each call, and what can be observed after it."""

    fn: Callable[[Tensor], Tensor]
    change: Callable[[int], Any] = lambda i: None
    seen: Callable[[], Any] = lambda: None
    refused: bool = False
    """Whether the function is refused, because its Python code has side effects and Dynamo cannot capture it."""
    most: int = 4
    """The most captures in four calls."""


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def outcome(case: Case, wrap: Callable[[Any], Any]) -> list[Any]:
    run, found = wrap(case.fn), []
    for i in range(4):
        case.change(i)
        x = torch.linspace(0.5, 1.5, 4).requires_grad_()
        y = run(x)
        before = case.seen()
        y.sum().backward()
        assert x.grad is not None
        found.append((y.tolist(), x.grad.tolist(), before, case.seen()))
    return found


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_class_is_what_it_is_in_python(name: str) -> None:
    planned, plain = CASES[name](), CASES[name]()
    want = outcome(plain, lambda fn: fn)
    regions: list[Any] = []

    def wrap(fn: Any) -> Any:
        regions.append(fckpt.remat(fn, budget=1.0))
        return regions[0]

    if planned.refused:
        with pytest.raises(fckpt.TraceError, match="while it runs"):
            outcome(planned, wrap)
        assert planned.seen() == CASES[name]().seen()  # nothing stays of the attempt
        return
    try:
        got = outcome(planned, wrap)
    except fckpt.TraceError:
        assert OLD
        return
    assert got == want
    assert fckpt.stats(regions[0]).captures <= planned.most


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


# -- metaclasses and enumerations -----------------------------------------------------------------


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
