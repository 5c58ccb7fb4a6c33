"""A recompute sees the Python state that its forward saw, and leaves no trace in it."""

from __future__ import annotations

import argparse
import array
import collections
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, leaf
from torch import Tensor, nn

import fckpt

FLAG = True
SETTINGS = {"temperature": 1.0, "nested": {"steps": [1, 2]}}
W = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)) / 3


class Config:
    temperature = 1.0

    def __init__(self) -> None:
        self.scale = 1.0
        self.modes = ["relu"]


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Block(nn.Module):
    factor = 1.0

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.1)
        self.config = config or Config()
        self.scale = 1.0
        self.sizes = [1.0, 2.0]

    def helper(self, h: Tensor) -> Tensor:
        return h * SETTINGS["temperature"] if FLAG else h.cos()

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.linear(x)))
        h = (
            self.helper(h)
            * self.scale
            * self.sizes[0]
            * self.config.scale
            * self.factor
            * type(self.config).temperature
        )
        return torch.tanh(h if self.config.modes[0] == "relu" else h.sin()).exp().sin()


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


Change = Callable[[Any], None]
IN_A_MODULE: dict[str, tuple[Change, Change]] = {
    "a global that a method reads": (lambda m: set_global("FLAG", False), lambda m: set_global("FLAG", True)),
    "an item of a global dict": (
        lambda m: SETTINGS.update(temperature=3.0),
        lambda m: SETTINGS.update(temperature=1.0),
    ),
    "an attribute": (lambda m: setattr(m, "scale", 2.0), lambda m: None),
    "an item of a list": (lambda m: m.sizes.__setitem__(0, 3.0), lambda m: None),
    "an attribute of a config": (lambda m: setattr(m.config, "scale", 0.5), lambda m: None),
    "an item of a list of a config": (lambda m: m.config.modes.insert(0, "sin"), lambda m: None),
    "another config": (lambda m: setattr(m, "config", argparse.Namespace(scale=2.0, modes=["x"], temperature=1.0)),
        lambda m: None),
    "a class attribute of the module": (
        lambda m: setattr(Block, "factor", 2.0),
        lambda m: setattr(Block, "factor", 1.0),
    ),
    "a class attribute of a config": (
        lambda m: setattr(Config, "temperature", 2.0),
        lambda m: setattr(Config, "temperature", 1.0),
    ),
    "the rate of dropout": (lambda m: setattr(m.drop, "p", 0.7), lambda m: None),
    "the mode": (lambda m: m.eval(), lambda m: None),
    "another activation": (lambda m: setattr(m, "drop", nn.Tanh()), lambda m: None),
}  # fmt: skip


def module_gradients(wrap: Any, change: Change, back: Change) -> list[Any]:
    """Two forwards, a change between them, and both backwards after it."""
    argparse.Namespace.temperature = 1.0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    block = Block()
    module = wrap(block)
    x = leaf(torch.randn(4, 6))
    try:
        first = module(x)
        change(block)
        second = module(x)
        (first.sum() + 2 * second.sum()).backward()
    finally:
        back(block)
        del argparse.Namespace.temperature  # type: ignore[attr-defined]
    return [first, second, x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("wrap", [fckpt.remat, lambda m: fckpt.remat(lambda x: m(x)), lambda m: fckpt.remat(m.forward)])
@pytest.mark.parametrize("name", IN_A_MODULE)
def test_state_of_modules_that_changes_between_two_forwards(name: str, wrap: Any) -> None:
    assert_equal(module_gradients(wrap, *IN_A_MODULE[name]), module_gradients(lambda m: m, *IN_A_MODULE[name]))


class Scaled:
    """An object that is no module; what its method reads is a global, a tensor and an attribute of its class."""

    factor = 1.0

    def value(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ W) * self.factor * SETTINGS["temperature"] * (1.0 if FLAG else 2.0)).sin().exp()


IN_AN_OBJECT: dict[str, tuple[str, Any]] = {
    "a global": ("FLAG", False),
    "another global dict": ("SETTINGS", {"temperature": 3.0}),
    "a global tensor": ("W", W + 1),
}


@pytest.mark.parametrize("name", [*IN_AN_OBJECT, "a class attribute"])
@pytest.mark.parametrize("how", ["a closure", "a method"])
def test_what_methods_of_objects_read_that_changes_before_the_backward(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, x = Scaled(), leaf(torch.randn(4, 6))
    wanted = torch.autograd.grad(found.value(x).sum(), x)
    result = fckpt.remat(found.value if how == "a method" else lambda x: found.value(x))(x)
    if name in IN_AN_OBJECT:
        place, value = IN_AN_OBJECT[name]
        monkeypatch.setitem(globals(), place, value)
    else:
        monkeypatch.setattr(Scaled, "factor", 2.0)
    assert_equal(torch.autograd.grad(result.sum(), x), wanted)


def in_closures() -> Iterator[Any]:
    flag, settings, config, slotted = True, {"a": 1.0, "deep": {"b": [1.0]}}, Config(), Slotted()
    space, ordered = types.SimpleNamespace(scale=1.0), collections.OrderedDict(a=1.0)
    names = {"relu"}

    def fn(x: Tensor) -> Tensor:
        h = torch.relu(x @ W)
        h = h * settings["a"] * settings["deep"]["b"][0] * config.scale * slotted.scale * space.scale  # type: ignore[index]
        h = h * ordered["a"] * Config.temperature
        h = h if flag and FLAG and "relu" in names else h.cos()
        return torch.tanh(h if "debug" not in settings else h.sin()).exp().sin()

    def switch() -> None:
        nonlocal flag
        flag = not flag

    def both(set_: Any, name: str, old: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        return lambda: set_(name, 2.0), lambda: set_(name, old)

    yield fn
    yield switch, lambda: None
    yield lambda: set_global("FLAG", False), lambda: set_global("FLAG", True)
    yield lambda: settings.update(a=3.0), lambda: None
    yield lambda: settings.update(debug=True), lambda: None
    yield lambda: settings["deep"]["b"].insert(0, 2.0), lambda: None  # type: ignore[index]
    yield lambda: setattr(config, "scale", 2.0), lambda: None
    yield lambda: setattr(slotted, "scale", 2.0), lambda: None
    yield lambda: setattr(space, "scale", 2.0), lambda: None
    yield lambda: setattr(Config, "temperature", 2.0), lambda: setattr(Config, "temperature", 1.0)
    yield lambda: names.add("other") or names.discard("relu"), lambda: None


def closure_gradients(number: int, region: bool, seed: int) -> list[Tensor]:
    changes = in_closures()
    fn = next(changes)
    change, back = list(changes)[number]
    fn = fckpt.remat(fn) if region else fn
    x = leaf(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
    try:
        first = fn(x)
        change()
        second = fn(x)
        (first.sum() + 2 * second.sum()).backward()
    finally:
        back()
    return [first, second, x.grad]


@pytest.mark.parametrize("number", range(10))
def test_state_of_closures_that_changes_between_two_forwards(number: int) -> None:
    for seed in range(20):
        assert_equal(closure_gradients(number, True, seed), closure_gradients(number, False, seed))


def test_a_difference_that_no_walk_finds_shows_in_a_sample_spread_over_the_values() -> None:
    """Relu makes the head of a value zero; what is compared lies all over it."""
    missed = 0
    for seed in range(200):
        factors = iter([1.0, 2.0])
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        x[0] = -1.0
        fn = fckpt.remat(lambda x: torch.relu(x * next(factors)).square().sin())
        try:
            fn(x.requires_grad_()).sum().backward()
        except fckpt.ImpureFunctionError:
            continue
        missed += 1
    assert missed == 0


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


def test_memory_that_an_operation_leaves_as_it_was_is_not_compared() -> None:
    """`ctc_loss` saves a table with gaps: what lies there is whatever was there before."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)  # with other threads about, by-products are looked at
    thread.start()
    try:
        x = torch.randn(50, 4, 20, requires_grad=True)
        targets = torch.randint(1, 20, (4, 30))

        def loss(x: torch.Tensor) -> torch.Tensor:
            return F.ctc_loss((x * 2).log_softmax(-1), targets, (50,) * 4, (5, 6, 10, 3))

        expected = torch.autograd.grad(loss(x), x)[0]
        region = fckpt.remat(loss)
        for _ in range(8):
            value = region(x)
            dirt = [torch.full((4, 50, 61), float(i)) for i in range(8)]
            del dirt  # which the recompute may be given
            assert torch.equal(torch.autograd.grad(value, x)[0], expected)
    finally:
        stop.set()
        thread.join()


def test_dropout_around_a_gradient_inside_while_another_thread_is_idle() -> None:
    """The backward pass inside of the forward recomputes a part, which ends with other random numbers to come."""

    def penalty(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(F.dropout(torch.tanh(x @ w), 0.3).sum(), x, create_graph=True)
        return found.square().mean() + F.dropout(found, 0.5).sum()

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        w, x = torch.randn(8, 8, requires_grad=True), torch.randn(16, 8)
        found = []
        for fn in (penalty, fckpt.remat(penalty)):
            torch.manual_seed(0)
            found.append((*torch.autograd.grad(fn(w, x), w), torch.get_rng_state()))
        assert all(map(torch.equal, *found))
    finally:
        stop.set()
        thread.join()


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


@pytest.mark.parametrize("where", ["closure", "buffer", "argument"])
def test_a_recompute_finds_the_attributes_of_tensors(where: str) -> None:
    scale = torch.ones(6)
    scale.factor = 2.0  # type: ignore[attr-defined]
    holder = nn.Module()
    holder.register_buffer("scale", scale)

    def fn(x: Tensor, held: Any = None) -> Tensor:
        held = held if where == "argument" else holder.scale if where == "buffer" else scale
        return (x.sin() * held * held.factor).exp().sin()  # type: ignore[union-attr]

    got = []
    for f in (fn, fckpt.remat(fn)):
        x = leaf(W)
        f(x, *((scale,) if where == "argument" else ())).sum().backward()
        got.append(x.grad)
    assert_equal(got[1], got[0])


class Holder(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("place", ["variable", "dict", "namespace", "attribute"])
def test_a_captured_tensor_that_was_filled_in_place_before(place: str, shape: tuple[int, ...]) -> None:
    """Its version is not 0, but that of the copy on which a recompute may write is."""
    mask = torch.ones(shape)
    mask[..., 0] = 0.5
    mask.mul_(2)
    named: dict[str, Any] = {"mask": mask}
    space, holder = types.SimpleNamespace(mask=mask), Holder(mask)
    reads = {
        "variable": lambda: mask,
        "dict": lambda: named["mask"],
        "namespace": lambda: space.mask,
        "attribute": lambda: holder.mask,
    }
    read, w = reads[place], torch.randn(4, 4, requires_grad=True)
    fn = lambda x: (torch.sin(x @ w) * read()[..., None, :]).tanh().sum()
    wrapped = fckpt.remat(fn)
    for turn in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(torch.autograd.grad(wrapped(x), w)[0], torch.autograd.grad(fn(x), w)[0])
        if turn == 1:
            mask.add_(1)


class Kept(nn.Module):
    """Holds a method of another module, as `PeftModelForCausalLM` does, which reads a name of a built-in function."""

    def __init__(self, inner: nn.Module, kept: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.kept = inner, kept(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).cos().sum()


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin() * float("2")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "kept", [lambda m: m.forward, lambda m: [m.forward], lambda m: type(m).forward, lambda m: m.linear.forward]
)
def test_a_module_that_holds_a_method_of_another(kept: Callable[[Any], Any], whole: bool) -> None:
    model, x = Kept(Numbers(), kept), torch.randn(2, 6)
    model(x).backward()
    weight: Any = model.inner.linear.weight
    expected, weight.grad = weight.grad, None
    (fckpt.remat(model) if whole else fckpt.remat(lambda x: model(x)))(x).backward()
    assert torch.equal(weight.grad, expected) and "float" not in globals()


def test_a_global_that_is_made_after_the_forward_is_absent_in_the_recompute() -> None:
    def fn(x: Tensor) -> Tensor:
        try:
            scale = ADDED  # type: ignore[name-defined]
        except NameError:
            scale = 1.0
        return (x.sin() * scale).sum()

    x = leaf(W)
    y = fckpt.remat(fn)(x)
    globals()["ADDED"] = 2.0
    try:
        y.backward()
        assert globals()["ADDED"] == 2.0
    finally:
        del globals()["ADDED"]
    assert_equal(x.grad, W.cos())


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize("place", ["block", "inside"])
def test_hooks_with_keyword_arguments_that_are_there_for_one_forward(kind: str, place: str) -> None:
    """As peft registers them for `adapter_names` and aLoRA."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled(6, 6)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.inner(x).sin() * scale

    hooks: dict[str, Any] = {
        "forward": lambda module, args, kwargs, out: out * 2,
        "forward_pre": lambda module, args, kwargs: (args, {**kwargs, "scale": 2.0}),
    }
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 6)
    got = []
    for net in (model, nn.Sequential(*map(fckpt.remat, model))):
        chosen: list[Any] = [block if place == "block" else block.inner for block in net]
        handles = [getattr(m, f"register_{kind}_hook")(hooks[kind], with_kwargs=True) for m in chosen]
        loss = net(x).cos().sum()
        for handle in handles:
            handle.remove()
        got.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    assert_equal(got[1], got[0])
