"""Texts that a planned function makes of values, which change between calls: as in plain, or refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fckpt

pytestmark = pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
W = torch.randn(8, 8, requires_grad=True)
X = torch.randn(4, 8)


@dataclasses.dataclass
class Data:
    a: int = 1


class Represented:
    a = 1

    def __repr__(self) -> str:
        return f"R{self.a}"


class Written(Represented):
    def __str__(self) -> str:
        return f"S{self.a}"

    def __format__(self, spec: str) -> str:
        return f"F{self.a}{spec}"


class OfMeta(type):
    a: int

    def __repr__(cls) -> str:
        return f"C{cls.a}"


class Items(list[int]):
    a = 1

    def __repr__(self) -> str:
        return f"L{self.a}"


class Entries(dict[str, int]):
    a = 1

    def __repr__(self) -> str:
        return f"D{self.a}"


class Kind(enum.Enum):
    A = 1


class Block(torch.nn.Module):
    a = 1

    def extra_repr(self) -> str:
        return f"a={self.a}"


class Pair(typing.NamedTuple):
    first: Any
    second: int = 1


OBJECTS: dict[str, Callable[[], Any]] = {
    "dataclass": Data,
    "repr": Represented,
    "str": Written,
    "class": lambda: OfMeta("C", (), {"a": 1}),
    "list": Items,
    "dict": Entries,
    "module": Block,
    "namespace": lambda: types.SimpleNamespace(a=1),
}
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda o: o,
    "list": lambda o: [o],
    "tuple": lambda o: (o,),
    "named tuple": Pair,
    "dict": lambda o: {"k": o},
    "ordered dict": lambda o: collections.OrderedDict(k=o),
    "default dict": lambda o: collections.defaultdict(int, k=o),
    "deque": lambda o: collections.deque([o], maxlen=2),
}
VALUES: dict[str, Any] = {
    "deque": collections.deque([1, 2], maxlen=2),
    "free deque": collections.deque([1, 2]),
    "ordered dict": collections.OrderedDict(a=1),
    "default dict": collections.defaultdict(int, a=1),
    "counter": collections.Counter("aab"),
    "keys": {"a": 1}.keys(),
    "items": {"a": 1}.items(),
    "proxy": types.MappingProxyType({"a": 1}),
    "set": {1},
    "frozen set": frozenset([1]),
    "constants": [1, "a'b", None, 1.0, True, 1j, b"a", (), Kind.A, torch.float32, int],
    "size": torch.Size([1, 2]),
    "range": range(3),
    "tensor": torch.ones(2),
    "tensors": [torch.ones(2)],
    "parameter": torch.nn.Parameter(torch.ones(2)),
}
WAYS: dict[str, Callable[[Any], str]] = {
    "repr": repr,
    "str": str,
    "ascii": ascii,
    "f": lambda v: f"{v}",
    "f!r": lambda v: f"{v!r}",
    "f!s:": lambda v: f"{v!s:>30}",
    "%s": lambda v: "%s" % (v,),  # noqa: UP031  # this way is tested
    "format": lambda v: "{}".format(v),  # noqa: UP032  # this way is tested
    "join": lambda v: " ".join(map(str, [v])),
    "method": lambda v: repr(v) if isinstance(v, type) else v.__repr__(),
}


def _texts(fn: Callable[..., Any], value: Any, changing: Any = None) -> list[str]:
    found = []
    for number in (1, 2, 1):
        if changing is not None:
            changing.a = number
        found.append(re.sub("0x[0-9a-f]+", "", fn(X)[1]))
    return found


def _check(way: Callable[[Any], str], value: Any, changing: Any = None) -> bool:
    """Returns whether planned texts are right, or False if they are refused; fails for wrong ones."""
    held = {"value": value}
    fn = lambda x: ((x @ W).sum(), way(held["value"]))
    want = _texts(fn, value, changing)
    try:
        got = _texts(fckpt.remat(fn, budget=1.0), value, changing)
    except fckpt.FckptError:
        assert _texts(fn, value, changing) == want  # nothing is left behind
        return False
    assert got == want
    return True


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_text_of_an_object_that_changes(name: str, holder: str) -> None:
    for way in WAYS.values():
        changing = OBJECTS[name]()
        _check(way, HOLDERS[holder](changing), changing)


@pytest.mark.parametrize("way", WAYS)
def test_a_text_of_a_value(way: str) -> None:
    known = {name for name, value in VALUES.items() if _check(WAYS[way], value)}
    assert {"constants", "size", "range"} <= known


def test_a_text_of_an_object_is_right() -> None:
    for name in ("repr", "str", "module"):
        changing = OBJECTS[name]()
        assert _check(WAYS["f"], changing, changing)


def test_a_text_of_a_tensor_is_of_its_data_in_each_call() -> None:
    def fn(x: Tensor) -> tuple[Tensor, str]:
        y = (x @ W).sum()
        return y, f"{y:.3f}"

    planned = fckpt.remat(fn, budget=1.0)
    for x in (X, X * 2):
        assert planned(x)[1] == fn(x)[1]


def test_the_data_of_a_tensor_decide_nothing_as_a_text() -> None:
    def fn(x: Tensor) -> Tensor:
        y = (x @ W).sum()
        return y * len(str(y))

    with pytest.raises(fckpt.TraceError, match="text"):
        fckpt.remat(fn, budget=1.0)(X)
