"""A recompute leaves no trace in Python state: what a call counts, logs and writes is there once."""

from __future__ import annotations

import array
import collections
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_equal, leaf
from torch import Tensor, nn

import fckpt

W = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)) / 3


def test_what_a_function_counts_itself_stays_where_it_puts_it() -> None:
    calls: list[int] = []
    counts = {"runs": 0}

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        counts["runs"] += 1
        return x.sin().exp().sin()

    x = leaf(W)
    (fckpt.remat(fn)(x) + fckpt.remat(fn)(x)).sum().backward()
    assert len(calls) == counts["runs"] == 4


def test_a_module_counts_its_calls_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls, self.log = nn.Linear(6, 6), 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.linear(x)
            self.log.append(self.calls)
            return (self.last * self.calls).sin().exp().sin()

    got = []
    for wrap in (lambda m: m, fckpt.remat):
        torch.manual_seed(0)
        inner = Counting()
        module = wrap(inner)
        out = sum(module(W).sum() for _ in range(3)) + inner.last.sum()
        out.backward()
        got.append([inner.linear.weight.grad, inner.calls, len(inner.log)])
    assert_equal(got[1], got[0])


class WithState(dict[str, int]):
    """A dict with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class Items(list[int]):
    """A list of a class of its own."""


def count(held: Any) -> None:
    held["a"] = held.get("a", 0) + 1


def next_item(held: Any) -> None:
    held.append(held[-1] + 1)


def raise_first(held: Any) -> None:
    held[0] += 1


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "dict": (dict, count),
    "OrderedDict": (collections.OrderedDict, count),
    "Counter": (collections.Counter, lambda c: c.update("ab")),
    "defaultdict": (lambda: collections.defaultdict(list), lambda d: d["a"].append(1)),
    "a class of dict": (WithState, count),
    "an attribute of a dict": (WithState, lambda d: setattr(d, "calls", d.calls + 1)),
    "UserDict": (collections.UserDict, count),
    "ChainMap": (collections.ChainMap, count),
    "list": (lambda: [0], next_item),
    "a class of list": (lambda: Items([0]), next_item),
    "UserList": (lambda: collections.UserList([0]), next_item),
    "deque": (lambda: collections.deque([0]), next_item),
    "bounded deque": (lambda: collections.deque([0, 0, 0], 3), next_item),
    "set": (set, lambda s: s.add(len(s))),
    "long list": (lambda: [0] * 5000, next_item),
    "bytearray": (lambda: bytearray(b"a"), next_item),
    "array": (lambda: array.array("i", [0]), raise_first),
    "NumPy array": (lambda: np.zeros(3), raise_first),
    "within": (lambda: [{"a": collections.Counter()}], lambda h: count(h[0]["a"])),
}


@pytest.mark.parametrize("where", ["attribute", "argument", "whole argument"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_what_a_call_counts_in_any_container_is_counted_once(kind: str, where: str) -> None:
    make, act = HOLDERS[kind]

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = make()

        def forward(self, x: Tensor, held: Any = None) -> Tensor:
            act(self.held if held is None else held)
            return (x @ W).sin().exp().sin()

    module, expected = Counting(), make()
    given = () if where == "attribute" else (make(),)
    region = fckpt.remat(module, static_argnums=(1,) if where == "whole argument" else ())
    for _ in range(2):
        region(leaf(W), *given).sum().backward()
        act(expected)
    held = given[0] if given else module.held
    assert repr(held) == repr(expected)
    assert getattr(held, "calls", None) == getattr(expected, "calls", None)


class Held:
    def __init__(self, held: Any) -> None:
        self.held = held


class Meter:
    def __init__(self) -> None:
        super().__init__()  # `Metric` is a module, too
        self.value, self.count, self.history = torch.zeros(()), 0, []
        self.by_key = {("loss", 1): torch.zeros(())}


class Metric(Meter, nn.Module):
    """A module that plain objects hold, as Lightning's trainer holds its metrics."""


def increase(meter: Any, loss: Tensor) -> None:
    meter.value = meter.value + loss
    meter.count += 1
    meter.history.append(loss)
    meter.by_key["loss", 1] = meter.by_key["loss", 1] + loss
    meter.by_key[meter.count] = loss


def contents(meter: Any) -> list[Any]:
    return [meter.value, meter.count, meter.history, list(meter.by_key), list(meter.by_key.values())]


DEEPER: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "object": (Held, lambda h: h.held),
    "list": (lambda m: [m], lambda h: h[0]),
    "tuple": (lambda m: (m,), lambda h: h[0]),
    "dict with tuples as keys": (lambda m: {("k", 1): m}, lambda h: h["k", 1]),
}


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda held: held, lambda way: way),
    "proxy": (weakref.proxy, lambda way: way),
    "weak reference": (weakref.ref, lambda way: way()),
    "weak dict": (lambda held: weakref.WeakValueDictionary({1: held}), lambda way: way[1]),
    "proxy and weak set": (
        lambda held: (weakref.proxy(held), weakref.WeakSet([held])),
        lambda way: next(iter(way[1])),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", DEEPER)
@pytest.mark.parametrize("levels", [0, 2, 4])  # below one that may be referred to weakly, which takes up to three
@pytest.mark.parametrize("meter_class", [Meter, Metric])
def test_what_a_call_adds_to_a_meter_far_away_is_added_once(
    meter_class: type[Any], levels: int, kind: str, way: str
) -> None:
    (deeper, inner), (refer, follow) = DEEPER[kind], WAYS[way]

    def run(wrap: Any) -> list[Any]:
        meter = meter_class()
        top: Any = meter
        for _ in range(levels):
            top = deeper(top)
        keep = Held(top)

        class Logging(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(6, 6)
                self.way = refer(keep)

            def step(self, x: Tensor) -> Tensor:
                loss = self.linear(x).tanh().square().mean()
                found = follow(self.way).held
                for _ in range(levels):
                    found = inner(found)
                increase(found, loss.detach())
                return loss.exp().sin()

        torch.manual_seed(0)
        module = Logging()
        step = wrap(module.step)
        for _ in range(3):
            step(W).backward()
        return [module.linear.weight.grad, *contents(meter)]

    assert_equal(run(fckpt.remat), run(lambda fn: fn))


def test_a_tensor_far_away_that_is_changed_in_place_is_refused() -> None:
    held = Held([[[[[Held(torch.zeros(()))]]]]])

    def fn(x: Tensor) -> Tensor:
        held.held[0][0][0][0][0].held += x.detach().sum()
        return x.sin().exp()

    with pytest.raises(fckpt.MutationError, match="changed a captured tensor in place"):
        fckpt.remat(fn)(leaf(W))


METRIC = Metric()
NORM = nn.BatchNorm1d(6)


def test_a_global_module_that_only_a_method_names_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def log(self, x: Tensor) -> Tensor:
            METRIC.value = METRIC.value + x.detach().sum()
            METRIC.count += 1
            return NORM(x)

        def step(self, x: Tensor) -> Tensor:
            return self.log(self.linear(x)).tanh().square().mean().exp().sin()

    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        monkeypatch.setitem(globals(), "METRIC", Metric())
        monkeypatch.setitem(globals(), "NORM", nn.BatchNorm1d(6))
        step = wrap(Logging().step)
        for _ in range(2):
            step(W).backward()
        return [*contents(METRIC), *NORM.state_dict().values()]

    assert_equal(run(fckpt.remat), run(lambda fn: fn))


def test_what_a_function_in_an_attribute_counts_is_counted_once() -> None:
    def counter() -> Callable[[], int]:
        count = 0

        def add() -> int:
            nonlocal count
            count += 1
            return count

        return add

    module: Any = nn.Linear(6, 6)
    module.add = counter()
    fckpt.remat(lambda x: (module(x) * module.add()).sin().exp().sum())(W).backward()
    assert module.add() == 2


def test_a_dict_that_the_recompute_finds_shorter_keeps_its_order() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logged = Fixed()

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin().exp().sum()
            for i, name in enumerate("dbac"):  # a recompute ends before
                self.logged.entries.setdefault(name, i)
            return y

    module = Once()
    module.logged.entries["e"] = 4
    fckpt.remat(module)(leaf(W)).backward()
    assert list(module.logged.entries.items()) == [("e", 4), ("d", 0), ("b", 1), ("a", 2), ("c", 3)]


class Fixed:
    """An object that no recompute copies."""

    def __init__(self) -> None:
        self.entries: dict[str, int] = {}

    def __del__(self) -> None:
        pass


class Cache:
    """What decoders append to."""

    def __init__(self) -> None:
        self.layers: list[Any] = [types.SimpleNamespace(keys=None) for _ in range(2)]

    def update(self, k: Tensor, layer: int) -> Tensor:
        held = self.layers[layer]
        held.keys = k if held.keys is None else torch.cat([held.keys, k])
        return held.keys


@pytest.mark.parametrize("filled", [False, True])
def test_an_argument_that_the_function_changes_is_changed_once(filled: bool) -> None:
    def fn(x: Tensor, cache: Cache, log: list[Any], state: dict[str, Any]) -> Tensor:
        k = cache.update((x @ W).sin(), 1)
        log.append(len(log))
        state["calls"] = state.get("calls", 0) + 1
        state["x"] = x * 2
        return (k @ W).sin().exp().sin() * state["calls"]

    got = []
    for f in (fn, fckpt.remat(fn)):
        cache, log, state, x = Cache(), [], {"x": W}, leaf(W)
        if filled:
            cache.layers[1].keys = W.cos()
        f(x, cache, log, state).sum().backward()
        got.append([x.grad, cache.layers[1].keys, log, state["calls"], state["x"]])
    assert_equal(got[1], got[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Tanh())
        self.aside = [self.block]
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.register_buffer("mean", torch.zeros(6))
        self.call = self.norm.forward

    def forward(self, x: Tensor) -> Tensor:
        x = self.aside[0](x)
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return torch.tanh(self.call(x) + self.mean).exp().sin()


net = Net()
REGIONS: dict[str, Callable[[Net], Any]] = {
    "a module": fckpt.remat,
    "its method": lambda m: fckpt.remat(m.forward),
    "a closure": lambda m: fckpt.remat(lambda x: m(x)),
    "a global": lambda m: fckpt.remat(lambda x: net(x)),
    "an argument": lambda m: lambda x: fckpt.remat(lambda m, x: m(x))(m, x),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("switched", [False, True])
def test_a_recompute_never_touches_the_live_module(name: str, switched: bool) -> None:
    """Another thread reads the module's state all the time while regions are replayed."""
    model = net if name == "a global" else Net()
    model.train()
    region = REGIONS[name](model)
    x = leaf(torch.randn(64, 6))
    outs = [region(x).sum() for _ in range(20)]
    if switched:
        model.eval()
    state = lambda: [(id(b), b._version) for b in model.buffers()] + [m.training for m in model.modules()]
    then, values = state(), [b.clone() for b in model.buffers()]
    seen: set[bool] = set()
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            seen.add(state() == then and all(map(torch.equal, model.buffers(), values)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for out in outs:
            out.backward()
    finally:
        stop.set()
        sampler.join()
    assert seen == {True}
    assert state() == then


def test_statistics_of_a_forward_beside_a_replay_are_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
    region = fckpt.remat(model)
    data = [torch.randn(32, 6) for _ in range(40)]
    started = threading.Event()

    def forwards() -> None:
        started.wait(5)
        with torch.no_grad():
            for x in data:
                region(x)

    other = threading.Thread(target=forwards)
    other.start()
    outs = [region(leaf(x)).sum() for x in data]
    started.set()
    for out in outs:
        out.backward()
    other.join()
    assert int(model[1].num_batches_tracked) == 80


class Making(collections.OrderedDict[str, type]):
    """Makes an object of the class that lies there, as Hugging Face's table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


@pytest.mark.parametrize("options", [{}, {"budget": 1.0}])
def test_a_dict_that_makes_what_is_asked_for_stays_as_it_is(options: dict[str, Any]) -> None:
    table = Making(tanh=nn.Tanh, relu=nn.ReLU)
    generator = torch.Generator()

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.calls = table, [0]

        def forward(self, x: Tensor) -> Tensor:
            if not options:
                self.calls[0] += 1
            h = self.table["tanh"](x @ W)
            return (h * torch.rand(6, generator=generator)).sin()

    fckpt.remat(Choosing(), **options)(leaf(W)).sum().backward()
    assert list(dict.values(table)) == [nn.Tanh, nn.ReLU]


@pytest.mark.parametrize("options", [{}, {"budget": 10**6}, {"policy": fckpt.policies.dots_saveable}], ids=repr)
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("outer", [False, True], ids=["alone", "within another"])
@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
def test_what_a_hook_writes_to_its_module_is_written_once(options: dict[str, Any], kind: str, outer: bool) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen, self.log = nn.Linear(4, 4), 0, []
            getattr(self.linear, kind)(lambda *_: self.note())

        def note(self) -> None:
            self.seen += 1
            self.log.append(self.seen)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(torch.tanh(self.linear(x)))).sin()

    model, x = Counting(), torch.randn(3, 4, requires_grad=True)
    region = fckpt.remat(model, **options)
    step = fckpt.remat(lambda x: region(x)) if outer else region
    for _ in range(2):
        step(x).sum().backward()
    assert model.seen == 4 and model.log == [1, 2, 3, 4]
