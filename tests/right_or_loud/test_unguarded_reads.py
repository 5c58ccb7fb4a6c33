"""What Dynamo reads without a guard: orders of keys, distinct objects, special methods, methods added to tensors."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from helpers import leaf
from torch import Tensor, nn

import fckpt

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")


def assert_same(planned: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(planned(leaf(X)), plain(leaf(X)))


def first(**given: float) -> float:
    return next(iter(given.values()))


COPIES: dict[str, Callable[[Any], float]] = {
    "keywords": lambda held: first(**held),
    "spread": lambda held: next(iter({**held}.values())),
    "copy": lambda held: next(iter(held.copy().values())),
    "dict": lambda held: next(iter(dict(held).values())),
    "update": lambda held: next(iter((new := {}, new.update(held), new)[2].values())),
    "or": lambda held: next(iter((held | {"c": 3.0}).values())),
}


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda held: collections.defaultdict(float, held)])
@pytest.mark.parametrize("name", COPIES)
def test_the_order_of_keys_of_a_copied_dict(kind: Callable[[Any], Any], name: str) -> None:
    held = kind({"a": 1.0, "b": 2.0})
    plain = lambda x: (x.sin() * COPIES[name](held)).sum()
    planned = fckpt.remat(plain, budget=1.0)
    for _ in range(2):
        assert_same(planned, plain)
        held["a"] = held.pop("a")
    assert_same(planned, plain)


def test_equality_of_ordered_dicts() -> None:
    one, two = (collections.OrderedDict(a=1.0, b=2.0) for _ in range(2))
    plain = lambda x: (x.sin() if one == two else x.cos()).sum()
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    one.move_to_end("a")
    assert_same(planned, plain)


def test_what_the_factory_of_a_default_dict_reads() -> None:
    factor = [1.0]
    held = collections.defaultdict(lambda: factor[0], a=2.0)
    fn = lambda x: (x.sin() * held["new"]).sum()
    planned = fckpt.remat(fn, budget=1.0)
    for factor[0] in (1.0, 3.0):
        held.pop("new", None)
        assert torch.equal(planned(leaf(X)), (X.sin() * factor[0]).sum())
        assert held["new"] == factor[0]


class Missing(dict[str, float]):
    default = 1.0

    def __missing__(self, key: str) -> float:
        return self.default


def test_an_attribute_of_a_dict_that_covers_one_of_its_class() -> None:
    held = Missing()
    plain = lambda x: (x.sin() * held["key"]).sum()
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    held.default = 4.0
    assert_same(planned, plain)


class Thing:
    pass


COMPARED: dict[str, Callable[[Any], bool]] = {
    "is": lambda held: held.a is held.b,
    "is not": lambda held: held.a is not held.b,
    "equal": lambda held: held.a == held.b,
    "in": lambda held: held.a in [held.c, held.b],
}


@pytest.mark.parametrize("make", [Thing, lambda: nn.Linear(2, 2), list, dict])
@pytest.mark.parametrize("name", COMPARED)
def test_two_objects_become_one(make: Callable[[], Any], name: str) -> None:
    held = types.SimpleNamespace(a=make(), b=make(), c=make())
    plain = lambda x: (x.sin() if COMPARED[name](held) else x.cos()).sum()
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    kept, held.b = held.b, held.a
    assert_same(planned, plain)
    held.b = kept
    assert_same(planned, plain)


class Special:
    """An object on which Python calls methods that no code names."""

    def __getitem__(self, index: int) -> float:
        return 1.0

    def __len__(self) -> int:
        return 3

    def __enter__(self) -> float:
        return 1.0

    def __exit__(self, *_: Any) -> None:
        pass

    def __iter__(self) -> Any:
        return iter([1.0])

    def __contains__(self, key: Any) -> bool:
        return False

    def __add__(self, other: float) -> float:
        return other + 1.0

    def __eq__(self, other: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __float__(self) -> float:
        return 1.0

    def __index__(self) -> int:
        return 1

    __hash__ = None  # type: ignore[assignment]  # as Python sets it


def entered(held: Any) -> float:
    with held as found:
        return float(found)


SPECIAL: dict[str, tuple[Callable[[Any], float], Callable[..., Any]]] = {
    "__getitem__": (lambda held: held[0], lambda self, index: 9.0),
    "__len__": (len, lambda self: 9),
    "__enter__": (entered, lambda self: 9.0),
    "__iter__": (sum, lambda self: iter([9.0])),
    "__contains__": (lambda held: 2.0 if 1 in held else 1.0, lambda self, key: True),
    "__add__": (lambda held: held + 1.0, lambda self, other: 9.0),
    "__eq__": (lambda held: 2.0 if held == 1 else 1.0, lambda self, other: True),
    "__bool__": (lambda held: 2.0 if held else 1.0, lambda self: True),
    "__float__": (float, lambda self: 9.0),
    "__index__": (lambda held: [1.0, 2.0, 3.0][held], lambda self: 2),
}


@pytest.mark.parametrize("drawn", [False, True], ids=["captured", "traced"])
@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_method_that_is_replaced(name: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that is drawn from cannot be captured."""
    read, new = SPECIAL[name]
    held, generator = Special(), torch.Generator()

    if drawn:
        plain = lambda x: (x.sin() * read(held) * torch.rand((), generator=generator)).sum()
    else:
        plain = lambda x: (x.sin() * read(held)).sum()
    planned = fckpt.remat(plain, budget=1.0)
    for _ in range(2):
        found = []
        for fn in (planned, plain):
            generator.manual_seed(0)
            found.append(fn(leaf(X)))
        assert torch.equal(*found)
        monkeypatch.setattr(Special, name, new)


def test_a_method_that_was_added_to_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph would refer to it by its name."""
    monkeypatch.setattr(torch.Tensor, "twice", lambda self: self * 2, raising=False)
    plain = lambda x: x.sin().twice().sum()
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    monkeypatch.setattr(torch.Tensor, "twice", lambda self: self * 7)
    assert_same(planned, plain)


def test_a_dict_that_is_passed_to_a_built_in_function() -> None:
    held = {"b": 1.0, "a": 2.0}
    plain = lambda x: (x.sin() * held[max(held, key=held.get)]).sum()  # type: ignore[arg-type]  # `get` may return None
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    held["z"] = 9.0
    assert_same(planned, plain)


def test_a_method_with_a_cache() -> None:
    class Held:
        factor = 1.0

        @functools.lru_cache  # noqa: B019  # such a cache is the subject
        def read(self) -> float:
            return self.factor

    held = Held()
    plain = lambda x: (x.sin() * held.read()).sum()
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    held.factor = 3.0
    assert_same(planned, plain)
    Held.read.cache_clear()
    assert_same(planned, plain)


@pytest.mark.parametrize("kind", [set, dict.fromkeys])
def test_tensors_in_a_set_are_refused(kind: Callable[[Any], Any]) -> None:
    """Neither Dynamo's tensors nor those of a trace are in it."""
    net = nn.Linear(8, 8)
    decaying = kind([net.weight])
    with pytest.raises(fckpt.TraceError):
        fckpt.remat(lambda x: net(x).sum() * (2.0 if net.weight in decaying else 1.0), budget=1.0)(leaf(X))


class Deciding(type):
    ours = False

    def __instancecheck__(cls, value: object) -> bool:
        return Deciding.ours


class Decided(metaclass=Deciding):
    pass


@runtime_checkable
class Scaled(Protocol):
    scale: float


class Plain:
    scale: float


def test_a_metaclass_that_decides_what_its_instances_are() -> None:
    plain = lambda x: (x.sin() if isinstance(3.0, Decided) else x.cos()).sum()
    planned = fckpt.remat(plain, budget=1.0)
    for ours in (False, True, False):
        Deciding.ours = ours
        assert_same(planned, plain)


@pytest.mark.parametrize("kind", [Scaled, (int, Scaled), int | Scaled])
def test_an_object_that_meets_a_protocol_later(kind: Any) -> None:
    held = Plain()
    plain = lambda x: (x.sin() if isinstance(held, kind) else x.cos()).sum()
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    held.scale = 2.0
    assert_same(planned, plain)
    del held.scale
    assert_same(planned, plain)


STATES: dict[str, Callable[[Tensor], Any]] = {
    "_version": lambda x: x._version,
    "_base": lambda x: x._base is None,
    "output_nr": lambda x: x.output_nr,
    "retains_grad": lambda x: x.retains_grad,
    "_backward_hooks": lambda x: bool(x._backward_hooks),
    "is_view": lambda x: x._is_view(),
    "is_conj": lambda x: x.is_conj(),
    "torch.is_conj": torch.is_conj,
    "is_neg": lambda x: x.is_neg(),
    "torch.is_neg": torch.is_neg,
    "is_shared": lambda x: x.is_shared(),
    "untyped_storage": lambda x: x.untyped_storage().nbytes(),
    "storage_offset": lambda x: x.storage_offset(),
    "of a view": lambda x: x[1:].storage_offset(),
    "by name": operator.attrgetter("_version"),
}


@pytest.mark.parametrize("as_python", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_the_state_of_a_tensor_is_refused(name: str, as_python: bool) -> None:
    """A plan would keep the state of the first tensor, or of a stand-in, for all others."""
    read = STATES[name]

    def loss(x: Tensor) -> Tensor:
        if as_python:
            id(len)  # not known to Dynamo
        return (x.sin() * (1.0 + read(x))).sum()

    with pytest.raises(fckpt.TraceError, match="of a tensor here"):
        fckpt.remat(loss, budget=1.0)(leaf(X))
    assert_same(fckpt.remat(loss), loss)
    with pytest.warns(fckpt.BudgetWarning):
        assert_same(fckpt.remat(loss, budget=1.0, untraceable="remat"), loss)
