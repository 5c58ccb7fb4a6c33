"""Entries, keys, lengths and orders of containers. See `places`."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from typing import Any

from places import registry

PLACES, Place = registry()


class Contained(Place, abstract=True):
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


class ViewOfDict(Place):
    def __init__(self) -> None:
        self.numbers = {"a": 2}
        self.view = self.numbers.values()

    def read(self) -> Any:
        return sum(self.view)

    def write(self, number: int) -> None:
        self.numbers["a"] = number
