"""State that changes to an equal value of another kind, or in another order, or to another callable: seen, or refused.

Each program runs as Dynamo captures it, and with a call that Dynamo refuses, so that its Python code is traced.
"""

from __future__ import annotations

import collections
import decimal
import functools
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fckpt

pytestmark = pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
W = torch.randn(8, 8, requires_grad=True)
X = torch.randn(4, 8)


class Net(nn.Module):
    """A function of the input, and of an attribute."""

    value: Any

    def __init__(self, read: Callable[[Any, Tensor], Any], refused: bool):
        super().__init__()
        self.read = read
        self.refused = refused

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        if self.refused:
            zlib.crc32(b"a")
        y = torch.tanh(x @ W)
        return y.sum(), self.read(self.value, y)


def _seen(fn: Callable[..., Any], net: Net, values: list[Any]) -> list[Any]:
    found = []
    for value in values:
        net.value = value
        try:
            loss, read = fn(X)
        except (TypeError, AttributeError) as error:
            found.append(type(error).__name__)
            continue
        kind = (read.requires_grad, read.sum().item()) if isinstance(read, Tensor) else (type(read).__name__, read)
        found.append((loss.item(), repr(kind)))
    return found


def _check(read: Callable[[Any, Tensor], Any], make: Callable[[], list[Any]]) -> None:
    for refused in (False, True):
        net = Net(read, refused)
        want = _seen(net, net, make())
        try:
            assert _seen(fckpt.remat(net, budget=1.0), net, make()) == want
        except fckpt.FckptError:
            continue


def _double(x: Tensor) -> Tensor:
    return x * 2


EQUAL: dict[str, list[Any]] = {
    "numbers": [0.0, -0.0, 0, False, True, 1, 1.0, 1 + 0j],
    "tuples": [(0.0,), (-0.0,), (0,), (False,), (True,), (1,), (1.0,), (1, (2.0,)), (1, (2,))],
    "lists": [[0.0], [-0.0], [0], [False], [1], [1.0]],
    "dicts": [{"a": 0.0}, {"a": -0.0}, {"a": 0}, {"a": False}],
    "keys": [{0: 1}, {False: 1}, {0.0: 1}, {-0.0: 1}],
    "sets": [{0}, {False}, {0.0}, {-0.0}],
    "frozen sets": [frozenset([1]), frozenset([True]), frozenset([1.0])],
    "decimals": [decimal.Decimal("1.5"), decimal.Decimal("1.50")],
    "held decimals": [(decimal.Decimal("1.5"),), (decimal.Decimal("1.50"),)],
    "ranges": [range(0, 3, 2), range(0, 4, 2)],
    "held ranges": [[range(0, 3, 2)], [range(0, 4, 2)]],
    "slices": [slice(0, 3, 2), slice(0, 4, 2)],
    "sizes": [torch.Size([1]), (1,)],
}
READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "text": lambda v, y: str(v),
    "items": lambda v, y: str([*v]) if hasattr(v, "__iter__") else str(v),
    "stop": lambda v, y: getattr(v, "stop", 0),
    "first": lambda v, y: y * next(iter(v)) if isinstance(v, (tuple, list)) and not isinstance(v[0], str) else None,
    "itself": lambda v, y: v,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_of_other_kinds(name: str, read: str) -> None:
    _check(READS[read], lambda: EQUAL[name])


CALLABLES: dict[str, Callable[[], list[Any]]] = {
    "methods of tensors": lambda: [torch.Tensor.exp, torch.Tensor.sin, F.relu, "nothing", torch.Tensor.exp],
    "partials": lambda: [functools.partial(f, other=2) for f in (torch.Tensor.mul, torch.Tensor.add)],
    "grad modes": lambda: [torch.no_grad()(_double), torch.enable_grad()(_double), torch.no_grad()(_double)],
    "switches": lambda: [torch.set_grad_enabled(on)(_double) for on in (False, True, False)],
}


@pytest.mark.parametrize("name", CALLABLES)
def test_other_callables(name: str) -> None:
    _check(lambda v, y: v(y), CALLABLES[name])


def _unpacked(v: Any) -> Any:
    first, *_ = v
    return first


ORDERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "star": lambda v: (lambda *k: k)(*v),
    "display": lambda v: [*v],
    "unpacked": _unpacked,
    "join": "".join,
    "extend": lambda v: (lambda found: (found.extend(v), found)[1])([]),
    "format": lambda v: "{}{}".format(*v),
    "repr": repr,
    "keywords": lambda v: (lambda **k: list(k))(**v),
    "sorted": lambda v: sorted(v, key=lambda k: 0),
    "values": lambda v: [*v.values()],
    "items": lambda v: tuple(v.items()),
    "enumerate": lambda v: list(enumerate(v)),
    "next": lambda v: next(iter(v)),
    "reversed": lambda v: list(reversed(v)),
    "fromkeys": lambda v: list(dict.fromkeys(v)),
    "max": lambda v: max(v, key=lambda k: 0),
}


@pytest.mark.parametrize("name", ORDERS)
def test_other_orders_of_keys(name: str) -> None:
    orders = [{"p": 1, "q": 2}, {"q": 2, "p": 1}, {"p": 1, "q": 2}]
    for kind in (dict, collections.OrderedDict, functools.partial(collections.defaultdict, int)):
        _check(lambda v, y: ORDERS[name](v), lambda kind=kind: [kind(order) for order in orders])


def _moved(last: bool) -> list[str]:
    held = collections.OrderedDict(p=1, q=2, r=3)
    held.move_to_end("q", last=last)
    return [*held, held.popitem(last=last)[0]]


NUMBERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "in a range": lambda v, y: v in range(5),
    "range from": lambda v, y: 3 in range(v, 10),
    "range to a size": lambda v, y: v in range(y.shape[0]),
    "times truth": lambda v, y: y * (2 if (v in range(5)) is True else 3),
    "moved": lambda v, y: _moved(v != 2),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_truth_of_numbers(name: str) -> None:
    _check(NUMBERS[name], lambda: [1, 3, 2, 7])


@pytest.mark.parametrize("draw", [lambda v, y: v.random(), lambda v, y: v.randint(0, 99), lambda v, y: random.random()])
def test_a_number_that_is_drawn_is_not_repeated(draw: Callable[[Any, Tensor], Any]) -> None:
    state = random.getstate()

    def make() -> list[Any]:
        random.setstate(state)
        return [random.Random(1)] * 3

    _check(draw, make)


KIND: Any = np.float32


@pytest.mark.parametrize("refused", [False, True])
def test_a_class_of_a_library_in_a_global(refused: bool) -> None:
    global KIND

    def fn(x: Tensor) -> Tensor:
        if refused:
            zlib.crc32(b"a")
        return (x @ W) * torch.from_numpy(np.full(8, 0.7, KIND))

    planned = fckpt.remat(fn, budget=1.0)
    for kind in (np.float32, np.float64, np.float32):
        KIND = kind
        got, want = planned(X), fn(X)
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_a_slot_that_is_deleted_is_not_none() -> None:
    class Slotted:
        __slots__ = ("held",)

    held = Slotted()

    def fn(x: Tensor) -> tuple[Tensor, bool]:
        zlib.crc32(b"a")
        return (x @ W).sum(), held.held is None

    planned = fckpt.remat(fn, budget=1.0)
    for value in (None, 3):
        held.held = value
        assert planned(X)[1] == fn(X)[1]
    del held.held
    with pytest.raises((AttributeError, fckpt.TraceError)):
        planned(X)


def test_hooks_of_state_dict_are_called_or_refused() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, list[str]]:
            zlib.crc32(b"a")
            return self.part(x).sum(), list(self.part.state_dict())

    holder = Holder()
    planned = fckpt.remat(holder, budget=1.0)
    planned(X)
    calls: list[int] = []
    holder.part._register_state_dict_hook(lambda *_: calls.append(1))
    try:
        planned(X)
    except fckpt.TraceError:
        return
    assert calls == [1]
