"""Places where Python programs keep numbers that a function reads: data, objects, classes.

Imported anew for each use (`judge.fresh`), so that classes, globals and caches belong to one test. A place has `read`,
which a function under a plan calls, and `write`, which a test calls between its calls. `PLACES` has the rest, in
`places_code.py`: places in code and surroundings.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import fractions
import math
import pathlib
import re
import types
import weakref
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch

PLACES: dict[str, type[Place]] = {}


class Place:
    """A number somewhere, which is 2 at first."""

    def __init_subclass__(cls) -> None:
        """Registers a place by its name."""
        PLACES[cls.__name__] = cls

    def read(self) -> Any:
        """Returns the number."""
        raise NotImplementedError

    def write(self, number: int) -> None:
        """Puts another number in the place."""
        raise NotImplementedError


# Attributes of objects and classes.


class Attribute(Place):
    def __init__(self) -> None:
        self.number: Any = 2

    def read(self) -> Any:
        return self.number

    def write(self, number: int) -> None:
        self.number = number


class Settings:
    number: Any = 2


class ClassAttribute(Place):
    def read(self) -> Any:
        return Settings.number

    def write(self, number: int) -> None:
        Settings.number = number


class ClassAttributeByInstance(Place):
    def __init__(self) -> None:
        self.settings = Settings()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        Settings.number = number


class DerivedSettings(Settings):
    pass


class InheritedClassAttribute(Place):
    def read(self) -> Any:
        return DerivedSettings.number

    def write(self, number: int) -> None:
        Settings.number = number


class ShadowedClassAttribute(Place):
    """Written on the subclass, where nothing was before."""

    def __init__(self) -> None:
        self.settings = DerivedSettings()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        DerivedSettings.number = number


class ShadowedByInstance(Place):
    def __init__(self) -> None:
        self.settings = Settings()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        self.settings.number = number


class Meta(type):
    number: Any = 2


class WithMeta(metaclass=Meta):
    pass


class MetaclassAttribute(Place):
    def read(self) -> Any:
        return WithMeta.number

    def write(self, number: int) -> None:
        Meta.number = number


class OwnClassAttribute(Place):
    number: Any = 2

    def read(self) -> Any:
        return type(self).number

    def write(self, number: int) -> None:
        type(self).number = number


class PrivateSlots(Place):
    __slots__ = ("__number",)

    def __init__(self) -> None:
        self.__number: Any = 2

    def read(self) -> Any:
        return self.__number

    def write(self, number: int) -> None:
        self.__number = number


@dataclasses.dataclass
class Config:
    number: Any = 2
    unread: Any = 0


class DataclassField(Place):
    def __init__(self) -> None:
        self.config = Config()

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config.number = number


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    number: Any = 2


class FrozenDataclass(Place):
    def __init__(self) -> None:
        self.config = FrozenConfig()

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config = FrozenConfig(number)


class Pair(NamedTuple):
    number: Any
    other: Any


class NamedTupleField(Place):
    def __init__(self) -> None:
        self.config = Pair(2, 0)

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config = Pair(number, 0)


class Namespace(Place):
    def __init__(self) -> None:
        self.config = types.SimpleNamespace(number=2)

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config.number = number


class DynamicAttribute(Place):
    def __init__(self) -> None:
        self.number: Any = 2

    def read(self) -> Any:
        return getattr(self, "num" + "ber")

    def write(self, number: int) -> None:
        self.number = number


class ByVars(Place):
    def __init__(self) -> None:
        self.number: Any = 2

    def read(self) -> Any:
        return vars(self)["number"]

    def write(self, number: int) -> None:
        self.number = number


class AbsentAttribute(Place):
    def read(self) -> Any:
        return getattr(self, "number", 2)

    def write(self, number: int) -> None:
        self.number = number


class HasAttribute(Place):
    def read(self) -> Any:
        return 3 if hasattr(self, "flag") else 2

    def write(self, number: int) -> None:
        self.flag = True


class Fallback:
    def __init__(self) -> None:
        self.inner = {"number": 2}

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return self.inner[name]


class GetAttr(Place):
    def __init__(self) -> None:
        self.config = Fallback()

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config.inner["number"] = number


class Descriptor:
    number: Any = 2

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.number


class WithDescriptor:
    number = Descriptor()


class DescriptorAttribute(Place):
    def __init__(self) -> None:
        self.config = WithDescriptor()

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        vars(WithDescriptor)["number"].number = number


class Property(Place):
    def __init__(self) -> None:
        self._number = 2

    @property
    def number(self) -> Any:
        return self._number

    def read(self) -> Any:
        return self.number

    def write(self, number: int) -> None:
        self._number = number


class WeakReference(Place):
    def __init__(self) -> None:
        self.config = Config()
        self.reference = weakref.ref(self.config)

    def read(self) -> Any:
        config = self.reference()
        return config.number if config is not None else 0

    def write(self, number: int) -> None:
        self.config.number = number


class WeakProxy(Place):
    def __init__(self) -> None:
        self.config = Config()
        self.proxy = weakref.proxy(self.config)

    def read(self) -> Any:
        return self.proxy.number

    def write(self, number: int) -> None:
        self.config.number = number


class Other(Config):
    @property
    def factor(self) -> int:
        return 3


class Plain(Config):
    @property
    def factor(self) -> int:
        return 2


class ClassOfObject(Place):
    def __init__(self) -> None:
        self.config: Any = Plain()

    def read(self) -> Any:
        return self.config.factor

    def write(self, number: int) -> None:
        self.config.__class__ = Other


class IsInstance(Place):
    def __init__(self) -> None:
        self.config: Any = Plain()

    def read(self) -> Any:
        return 3 if isinstance(self.config, Other) else 2

    def write(self, number: int) -> None:
        self.config = Other()


# Containers.


class Contained(Place):
    """A number within a container, under a key."""

    key: Any = "number"

    def make(self) -> Any:
        raise NotImplementedError

    def __init__(self) -> None:
        self.items = self.make()

    def read(self) -> Any:
        return self.items[self.key]

    def write(self, number: int) -> None:
        self.items[self.key] = number


class Dict(Contained):
    def make(self) -> Any:
        return {"number": 2}


class DictOfOneKeyMore(Contained):
    def make(self) -> Any:
        return {}

    def read(self) -> Any:
        return self.items.get("number", 2)


class DictMembership(Contained):
    def make(self) -> Any:
        return {}

    def read(self) -> Any:
        return 3 if "number" in self.items else 2


class DictByIntegers(Contained):
    key = 7

    def make(self) -> Any:
        return {7: 2}


class OrderedDict(Contained):
    def make(self) -> Any:
        return collections.OrderedDict(number=2)


class DefaultDict(Contained):
    def make(self) -> Any:
        return collections.defaultdict(int, number=2)


class Counter(Contained):
    def make(self) -> Any:
        return collections.Counter(number=2)


class ChainMap(Contained):
    def make(self) -> Any:
        return collections.ChainMap({}, {"number": 2})


class UserDict(Contained):
    def make(self) -> Any:
        return collections.UserDict(number=2)


class DictKind(dict[str, Any]):
    pass


class DictSubclass(Contained):
    def make(self) -> Any:
        return DictKind(number=2)


class MappingProxy(Contained):
    def make(self) -> Any:
        self.below = {"number": 2}
        return types.MappingProxyType(self.below)

    def write(self, number: int) -> None:
        self.below["number"] = number


class Nested(Contained):
    """Deeper than four levels."""

    def make(self) -> Any:
        return {"a": [{"b": ({"c": [{"d": 2}]},)}]}

    def read(self) -> Any:
        return self.items["a"][0]["b"][0]["c"][0]["d"]

    def write(self, number: int) -> None:
        self.items["a"][0]["b"][0]["c"][0]["d"] = number


class LongDict(Contained):
    key = 2500

    def make(self) -> Any:
        return dict.fromkeys(range(3000), 2)


class List(Contained):
    key = 1

    def make(self) -> Any:
        return [0, 2]


class LongList(Contained):
    key = 2500

    def make(self) -> Any:
        return [2] * 3000


class ListKind(list[Any]):
    pass


class ListSubclass(Contained):
    key = 1

    def make(self) -> Any:
        return ListKind([0, 2])


class ListLength(Contained):
    def make(self) -> Any:
        return [None, None]

    def read(self) -> Any:
        return len(self.items)

    def write(self, number: int) -> None:
        self.items.append(None)


class ListSum(Contained):
    def make(self) -> Any:
        return [1, 1]

    def read(self) -> Any:
        return sum(self.items)

    def write(self, number: int) -> None:
        self.items[0] = 2


class Tuple(Contained):
    def make(self) -> Any:
        return (0, (1, 2))

    def read(self) -> Any:
        return self.items[1][1]

    def write(self, number: int) -> None:
        self.items = (0, (1, number))


class Deque(Contained):
    key = 0

    def make(self) -> Any:
        return collections.deque([2, 0], maxlen=4)


class Set(Contained):
    def make(self) -> Any:
        return {"two"}

    def read(self) -> Any:
        return 3 if "three" in self.items else 2

    def write(self, number: int) -> None:
        self.items.add("three")


class FrozenSet(Set):
    def make(self) -> Any:
        return frozenset({"two"})

    def write(self, number: int) -> None:
        self.items = frozenset({"two", "three"})


class DictOrder(Contained):
    """What comes first."""

    def make(self) -> Any:
        return {"two": 2, "three": 3}

    def read(self) -> Any:
        first, second = self.items.values()
        return first * 10 + second

    def write(self, number: int) -> None:
        self.items["two"] = self.items.pop("two")


class OwnContainer(Place):
    """Read by `__getitem__`, `__len__`, `__iter__` and `__contains__`."""

    def __init__(self) -> None:
        self._items = {"number": 2}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def read(self) -> Any:
        return self["number"] + len(self) + len(list(self)) + ("more" in self)

    def write(self, number: int) -> None:
        self._items["more"] = number


# Values of other types.


class NumPyScalar(Attribute):
    def __init__(self) -> None:
        self.number = np.float32(2)

    def write(self, number: int) -> None:
        self.number = np.float32(number)


class NumPyInteger(Attribute):
    def __init__(self) -> None:
        self.number = np.int64(2)

    def write(self, number: int) -> None:
        self.number = np.int64(number)


class NumPyArray(Place):
    def __init__(self) -> None:
        self.array = np.array([0.0, 2.0])

    def read(self) -> Any:
        return float(self.array[1])

    def write(self, number: int) -> None:
        self.array[1] = number


class NumPyArrayAsTensor(NumPyArray):
    def read(self) -> Any:
        return torch.from_numpy(self.array)[1]


class ZeroDimensionalArray(Attribute):
    def __init__(self) -> None:
        self.number = np.array(2.0)

    def read(self) -> Any:
        return self.number.item()

    def write(self, number: int) -> None:
        self.number[...] = number


class TorchSize(Attribute):
    def __init__(self) -> None:
        self.number = torch.Size([2, 4])

    def read(self) -> Any:
        return self.number[0]

    def write(self, number: int) -> None:
        self.number = torch.Size([number, 4])


class Range(Attribute):
    def __init__(self) -> None:
        self.number = range(2)

    def read(self) -> Any:
        return len(list(self.number))

    def write(self, number: int) -> None:
        self.number = range(number)


class Slice(Attribute):
    def __init__(self) -> None:
        self.number = slice(0, 2)

    def read(self) -> Any:
        return self.number.stop

    def write(self, number: int) -> None:
        self.number = slice(0, number)


class DecimalNumber(Attribute):
    def __init__(self) -> None:
        self.number = Decimal(2)

    def read(self) -> Any:
        return float(self.number)

    def write(self, number: int) -> None:
        self.number = Decimal(number)


class FractionNumber(Attribute):
    def __init__(self) -> None:
        self.number = fractions.Fraction(2)

    def read(self) -> Any:
        return float(self.number)

    def write(self, number: int) -> None:
        self.number = fractions.Fraction(number)


class Float(Attribute):
    def __init__(self) -> None:
        self.number = 2.0

    def write(self, number: int) -> None:
        self.number = number + 0.5


class SignOfZero(Attribute):
    """Equal to what it was, and yet another number."""

    def __init__(self) -> None:
        self.number = 0.0

    def read(self) -> Any:
        return math.copysign(2.0, self.number)

    def write(self, number: int) -> None:
        self.number = -0.0


class KindOfNumber(Attribute):
    """2 becomes 2.0, which is equal and computes another type."""

    def read(self) -> Any:
        return 2 if isinstance(self.number, int) else 3

    def write(self, number: int) -> None:
        self.number = 2.0


class Text(Attribute):
    def __init__(self) -> None:
        self.number = "two"

    def read(self) -> Any:
        return 3 if self.number == "three" else 2

    def write(self, number: int) -> None:
        self.number = "three"


class Bytes(Attribute):
    def __init__(self) -> None:
        self.number = b"\x02"

    def read(self) -> Any:
        return self.number[0]

    def write(self, number: int) -> None:
        self.number = bytes([number])


class NoneOrNumber(Attribute):
    def __init__(self) -> None:
        self.number = None

    def read(self) -> Any:
        return 2 if self.number is None else self.number


class Complex(Attribute):
    def __init__(self) -> None:
        self.number = 2 + 1j

    def read(self) -> Any:
        return self.number.real

    def write(self, number: int) -> None:
        self.number = number + 1j


class Mode(enum.Enum):
    TWO = 2
    THREE = 3


class EnumMember(Attribute):
    def __init__(self) -> None:
        self.number = Mode.TWO

    def read(self) -> Any:
        return self.number.value

    def write(self, number: int) -> None:
        self.number = Mode.THREE


class EnumComparison(EnumMember):
    def read(self) -> Any:
        return 3 if self.number is Mode.THREE else 2


class DtypeAttribute(Attribute):
    def __init__(self) -> None:
        self.number = torch.float32

    def read(self) -> Any:
        return torch.ones((), dtype=self.number) / 3

    def write(self, number: int) -> None:
        self.number = torch.float64


class SignOfZeroInTuple(Attribute):
    def __init__(self) -> None:
        self.number = (0.0, 1)

    def read(self) -> Any:
        return math.copysign(2.0, self.number[0])

    def write(self, number: int) -> None:
        self.number = (-0.0, 1)


class KindOfNumberInTuple(Attribute):
    def __init__(self) -> None:
        self.number = (1.0, 1)

    def read(self) -> Any:
        return 3 if self.number[0] is True else 2

    def write(self, number: int) -> None:
        self.number = (True, 1)


# Of Python's own, with data that lie in C.


class TimeDelta(Attribute):
    def __init__(self) -> None:
        self.number = datetime.timedelta(seconds=2)

    def read(self) -> Any:
        return self.number.total_seconds()

    def write(self, number: int) -> None:
        self.number = datetime.timedelta(seconds=number)


class PathOfLength(Attribute):
    def __init__(self) -> None:
        self.number = pathlib.PurePosixPath("ab")

    def read(self) -> Any:
        return len(self.number.name)

    def write(self, number: int) -> None:
        self.number = pathlib.PurePosixPath("a" * number)


class Pattern(Attribute):
    def __init__(self) -> None:
        self.number = re.compile("a{2}")

    def read(self) -> Any:
        return len(self.number.match("a" * 10).group(0))

    def write(self, number: int) -> None:
        self.number = re.compile(f"a{{{number}}}")


class Bytearray(Attribute):
    def __init__(self) -> None:
        self.number = bytearray(b"2")

    def read(self) -> Any:
        return int(self.number[0]) - 48

    def write(self, number: int) -> None:
        self.number[0] = 48 + number


class TextKind(str):
    """A str of a class of its own."""


class TextSubclass(Attribute):
    def __init__(self) -> None:
        self.number = TextKind("ab")

    def read(self) -> Any:
        return len(self.number)

    def write(self, number: int) -> None:
        self.number = TextKind("a" * number)


class FloatKind(float):
    """A float of a class of its own."""


class FloatSubclass(Attribute):
    def __init__(self) -> None:
        self.number = FloatKind(2)

    def read(self) -> Any:
        return float(self.number)

    def write(self, number: int) -> None:
        self.number = FloatKind(number)


class ViewOfDict(Place):
    def __init__(self) -> None:
        self.numbers = {"a": 2}
        self.view = self.numbers.values()

    def read(self) -> Any:
        return sum(self.view)

    def write(self, number: int) -> None:
        self.numbers["a"] = number


class Picky:
    """Raises KeyError for what it has not, as many a configuration does."""

    def __init__(self) -> None:
        self.__dict__["held"] = {"number": 2}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["held"][name]


class RaisingGetAttr(Place):
    def __init__(self) -> None:
        self.settings = Picky()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        self.settings.held["number"] = number


class OneBase:
    number = 2


class OtherBase:
    number = 3


class WithBases(OneBase):
    pass


class BasesOfClass(Place):
    def __init__(self) -> None:
        self.settings = WithBases()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        OtherBase.number = number
        WithBases.__bases__ = (OtherBase,)
