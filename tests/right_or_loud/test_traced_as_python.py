"""Functions that are traced by running their Python code: what they read changes between calls, or they write to it.

A generator that is drawn from is what Dynamo cannot capture in all of these functions.
"""

from __future__ import annotations

import collections
import copy
import functools
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import leaf
from torch import Tensor, nn

import fckpt

GENERATOR = torch.Generator()
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")


def drawn(y: Tensor) -> Tensor:
    return (y * torch.rand((), generator=GENERATOR)).sum()


def assert_same(planned: Callable[..., Tensor], plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    """Compares results and gradients. The planned call comes first, so that it finds caches as they are."""
    found = []
    for fn in (planned, plain):
        GENERATOR.manual_seed(0)
        x = leaf(X)
        y = fn(x, *args, **kwargs)
        found.append((y, *torch.autograd.grad(y, x)))
    assert all(map(torch.equal, *found))


CONTENTS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "set": ({1}, len, lambda held: held.add(2)),
    "deque": (collections.deque([1.0]), lambda held: held[0], lambda held: held.append(held.popleft() + 1)),
    "array": (np.ones(2), lambda held: float(held[0]), lambda held: held.fill(3.0)),
    "namespace": (types.SimpleNamespace(b=1.0), lambda held: held.b, lambda held: setattr(held, "b", 4.0)),
    "OrderedDict": (collections.OrderedDict(a=1.0), lambda held: held["a"], lambda held: held.update(a=2.0)),
    "Counter": (collections.Counter("a"), lambda held: held["a"], lambda held: held.update("a")),
    "defaultdict": (collections.defaultdict(float, a=1.0), lambda held: held["a"], lambda held: held.update(a=3.0)),
    "partial": (functools.partial(lambda k: k, k=2.0), lambda held: held(), lambda held: held.keywords.update(k=5.0)),
    "list": ([types.SimpleNamespace(b=1.0)], lambda held: held[0].b, lambda held: setattr(held[0], "b", 4.0)),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_of_class_attributes(name: str) -> None:
    held, read, change = CONTENTS[name]

    class Settings:
        value = copy.deepcopy(held)

    plain = lambda x: drawn(torch.tanh(x) * read(Settings.value))
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    change(Settings.value)
    assert_same(planned, plain)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module of the user."""
    path = tmp_path / "settings_of_a_user.py"
    path.write_text(
        "factor = 2.0\ndef scaled(x): return x * factor\nclass Scale:\n    by = 1.0\n"
        "    def __call__(self, x): return x * self.by\nscale = Scale()\n"
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[path.stem] = module
    yield module
    del sys.modules[path.stem]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda held: setattr(held, "factor", 3.0),
    "function": lambda held: setattr(held, "scaled", lambda x: x * 11),
    "attribute": lambda held: setattr(held.scale, "by", 9.0),
    "object": lambda held: setattr(held, "scale", held.scaled),
}


@pytest.mark.parametrize("where", ["cell", "attribute", "container"])
@pytest.mark.parametrize("what", CHANGES)
def test_an_imported_module_in_a_variable(settings: Any, what: str, where: str) -> None:
    if where == "cell":
        plain = lambda x: drawn(settings.scale(settings.scaled(torch.tanh(x))))
    elif where == "attribute":
        holder = types.SimpleNamespace(held=settings)
        plain = lambda x: drawn(holder.held.scale(holder.held.scaled(torch.tanh(x))))
    else:
        held = [settings]
        plain = lambda x: drawn(held[0].scale(held[0].scaled(torch.tanh(x))))
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    CHANGES[what](settings)
    assert_same(planned, plain)


def test_a_module_that_python_cannot_import(settings: Any) -> None:
    """It was made from a file. Dynamo would import it."""
    name = settings.__name__
    del sys.modules[name]
    plain = lambda x: settings.scaled(torch.tanh(x)).sum()
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    settings.factor = 3.0
    assert_same(planned, plain)
    sys.modules[name] = settings


@pytest.mark.parametrize("where", ["cell", "attribute", "container"])
def test_a_cache_that_is_cleared(where: str) -> None:
    factors = [2.0]

    @functools.lru_cache
    def cached(n: int) -> float:
        return factors[0] * n

    holder, held = types.SimpleNamespace(cached=cached), [cached]
    plain = {
        "cell": lambda x: (torch.tanh(x) * cached(3)).sum(),
        "attribute": lambda x: (torch.tanh(x) * holder.cached(3)).sum(),
        "container": lambda x: (torch.tanh(x) * held[0](3)).sum(),
    }[where]
    planned = fckpt.remat(plain, budget=1.0)
    for factor, clears, fills in ((2.0, False, False), (5.0, False, False), (5.0, True, False), (7.0, False, False),
                                  (7.0, True, True), (8.0, False, False), (8.0, True, False)):  # fmt: skip
        factors[0] = factor
        if clears:
            cached.cache_clear()
        if fills:
            cached(3)
        assert_same(planned, plain)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())


class WithAll(nn.Module):
    """Reads all parameters and buffers there are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            x = x * tensor
        return x


def reversed_modules(net: nn.Module) -> None:
    net._modules = dict(reversed(net._modules.items()))


TREES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "append a module of the tree": (blocks, lambda net: net.append(net[0])),
    "insert a module of the tree": (blocks, lambda net: net.insert(1, net[2])),
    "replace by a module of the tree": (blocks, lambda net: net.__setitem__(1, net[3])),
    "reverse": (blocks, reversed_modules),
    "pop": (blocks, lambda net: net.pop(3)),
    "class": (blocks, lambda net: setattr(net[1], "__class__", nn.Sigmoid)),
    "parameter": (WithAll, lambda net: net.register_parameter("new", nn.Parameter(torch.full((8,), 2.0)))),
    "buffer": (WithAll, lambda net: net.register_buffer("new", torch.full((8,), 2.0))),
}


@pytest.mark.parametrize("name", TREES)
def test_a_module_tree_that_changes(name: str) -> None:
    make, change = TREES[name]
    net = make()
    plain = lambda x: drawn(net(x))
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    change(net)
    assert_same(planned, plain)


def weighted(x: Tensor, tensors: Any) -> Tensor:
    return drawn(sum(torch.sin(x * t) * i for i, t in enumerate(tensors)))


@pytest.mark.parametrize(
    "plain",
    [
        lambda x, one, two: weighted(x, {**one, **two}.values()),
        lambda x, given, **_: weighted(x, given["in"].values()),
        lambda x, **given: weighted(x, given.values()),
    ],
    ids=["positional", "nested", "keywords"],
)
def test_the_order_of_keys(plain: Callable[..., Tensor], request: pytest.FixtureRequest) -> None:
    planned = fckpt.remat(plain, budget=1.0)
    a, b = torch.randn(8), torch.randn(8)
    for held in ({"b": b, "a": a}, {"a": a, "b": b}, {"b": b, "a": a}):
        if request.node.callspec.id == "positional":
            assert_same(planned, plain, held, {})
        elif request.node.callspec.id == "nested":
            assert_same(planned, plain, {"in": held})
        else:
            assert_same(planned, plain, **held)


def test_keys_of_a_default_dict_in_another_order() -> None:
    plain = lambda x, held: weighted(x, held.values())
    planned = fckpt.remat(plain, budget=1.0)
    a, b = torch.randn(8), torch.randn(8)
    for pairs in ([("b", b), ("a", a)], [("a", a), ("b", b)]):
        assert_same(planned, plain, collections.defaultdict(list, pairs))


@pytest.mark.parametrize("budget", [None, 1.0])
def test_keys_that_are_moved_in_an_ordered_dict(budget: float | None) -> None:
    """The order of insertion, by which optree flattens an OrderedDict, is another one."""
    plain = lambda x, held: weighted(x, held.values())
    planned = fckpt.remat(plain, budget=budget)
    held = collections.OrderedDict(a=torch.randn(8), b=torch.randn(8), c=torch.randn(8))
    for key in "abb":
        assert_same(planned, plain, held)
        held.move_to_end(key)
    assert_same(planned, plain, held)


@pytest.mark.parametrize("budget", [None, 1.0])
def test_keys_that_are_moved_in_a_result(budget: float | None) -> None:
    def plain(x: Tensor) -> dict[str, Tensor]:
        made = collections.OrderedDict(a=x.sin() * torch.rand((), generator=GENERATOR), b=x.cos())
        made.move_to_end("a")
        return made

    found = fckpt.remat(plain, budget=budget)(leaf(X))
    assert list(found) == ["b", "a"]
    assert torch.equal(found["b"], X.cos())


TYPES: dict[str, Callable[[Tensor, nn.Parameter], bool]] = {
    "type": lambda x, w: type(x) is Tensor,
    "type of a parameter": lambda x, w: type(w) is nn.Parameter,
    "class": lambda x, w: x.__class__ is Tensor and w.__class__ is nn.Parameter,
    "type of a result": lambda x, w: type(x @ w) is Tensor and type(w.t()) is Tensor,
    "name": lambda x, w: type(w).__name__ == "Parameter" and type(x).__module__ == "torch",
    "key": lambda x, w: {Tensor: True}.get(type(x), False),
    "instance": lambda x, w: isinstance(w, nn.Parameter) and not isinstance(x, nn.Parameter),
}


@pytest.mark.parametrize("name", TYPES)
def test_types_of_tensors(name: str) -> None:
    """The tensors of a trace seem to have the types of the tensors of a call."""
    net = nn.Linear(8, 8)
    plain = lambda x: drawn(net(x).sin() * (2.0 if TYPES[name](x, net.weight) else 3.0))
    assert TYPES[name](leaf(X), net.weight)
    assert_same(fckpt.remat(plain, budget=1.0), plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.grad, "reads `.grad`"),
        (lambda h: setattr(h, "grad", None), "sets `.grad`"),
        (lambda h: setattr(h, "data", h.data), "replaces the memory"),
        (copy.deepcopy, "copy.deepcopy"),
    ],
    ids=["grad", "set grad", "data", "deepcopy"],
)
def test_what_is_refused_of_the_tensors_of_a_trace(change: Callable[[Tensor], Any], message: str) -> None:
    def fn(x: Tensor) -> Tensor:
        change(x)
        return drawn(x)

    with pytest.raises(fckpt.TraceError, match=message):
        fckpt.remat(fn, budget=1.0)(leaf(X))


class Base:
    pass


KEPT: list[type] = []
LISTED: dict[str, tuple[Callable[[], int], Callable[[pytest.MonkeyPatch], Any]]] = {
    "names in the environment": (lambda: len([*os.environ]), lambda patch: patch.setenv("FCKPT_TEST_OTHER", "1")),
    "environment": (lambda: len(os.environ), lambda patch: patch.setenv("FCKPT_TEST_OTHER", "1")),
    "copied environment": (lambda: len(os.environ.copy()), lambda patch: patch.setenv("FCKPT_TEST_OTHER", "1")),
    "name of a class": (lambda: len(Base.__name__), lambda patch: setattr(Base, "__name__", "Other")),
    "subclasses": (lambda: len(Base.__subclasses__()), lambda patch: KEPT.append(type("Sub", (Base,), {}))),
}


@pytest.mark.parametrize("name", LISTED)
def test_what_python_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = LISTED[name]
    plain = lambda x: drawn(x.sin() * (1.0 + read()))
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    change(monkeypatch)
    assert_same(planned, plain)


WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "append": (list, lambda held: held.append(1)),
    "pop": (lambda: [1, 2], lambda held: held.pop()),
    "entry": (lambda: {"n": 1}, lambda held: held.update(n=held["n"] + 1)),
    "number": (lambda: [1], lambda held: held.__setitem__(0, held[0] + 1)),
    "deque": (collections.deque, lambda held: held.append(1)),
    "nested": (lambda: {"list": []}, lambda held: held["list"].append(1)),
    "order": (lambda: {"a": 1, "b": 2}, lambda held: held.update(a=held.pop("a"))),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_a_container_among_the_arguments_are_refused(name: str) -> None:
    make, write = WRITES[name]

    def plain(x: Tensor, held: Any) -> Tensor:
        write(held)
        return drawn(torch.tanh(x))

    held = make()
    with pytest.raises(fckpt.TraceError, match=r"changes args\[1\]"):
        fckpt.remat(plain, budget=1.0)(leaf(X), held)
    assert held == make()


class Pair(tuple[float, ...]):
    factor = 1.0


def test_attributes_of_tuples_and_tensors() -> None:
    pair, net = Pair((1.0, 2.0)), nn.Linear(8, 8)
    net.register_buffer("buffer", torch.ones(8))
    net.weight.scale = net.buffer.scale = 1.0  # type: ignore[attr-defined]  # a tensor may have any

    def plain(x: Any) -> Tensor:
        return drawn(net(x) * pair[0] * pair.factor * net.weight.scale * net.buffer.scale * x.scale)

    def given(scale: float) -> Tensor:
        x = leaf(X)
        x.scale = scale  # type: ignore[attr-defined]  # a tensor may have any
        return x

    planned = fckpt.remat(plain, budget=1.0)
    changes: list[tuple[float, Callable[[], Any]]] = [
        (1.0, lambda: None),
        (1.0, lambda: setattr(Pair, "factor", 3.0)),
        (1.0, lambda: setattr(pair, "factor", 5.0)),
        (1.0, lambda: setattr(net.weight, "scale", 7.0)),
        (1.0, lambda: setattr(net.buffer, "scale", 9.0)),
        (2.0, lambda: None),
    ]
    for scale, change in changes:
        change()
        found = []
        for fn in (planned, plain):
            GENERATOR.manual_seed(0)
            found.append(fn(given(scale)))
        assert torch.equal(*found)


def test_a_parameter_is_one() -> None:
    held = {"weight": torch.ones(8)}
    plain = lambda x: drawn(x * held["weight"] * (2.0 if isinstance(held["weight"], nn.Parameter) else 3.0))
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    held["weight"] = nn.Parameter(torch.ones(8), requires_grad=False)
    assert_same(planned, plain)


def test_the_backward_pass_of_a_function_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    plain = lambda x: drawn(Scaled.apply(torch.tanh(x)))
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    monkeypatch.setattr(Scaled, "backward", staticmethod(lambda ctx, grad: grad * 5))
    assert_same(planned, plain)


class Thing:
    pass


def test_two_objects_become_one() -> None:
    held = [Thing(), Thing()]
    plain = lambda x: drawn(x.sin() if any(one is held[0] for one in held[1:]) else x.cos())
    planned = fckpt.remat(plain, budget=1.0)
    assert_same(planned, plain)
    held[1] = held[0]
    assert_same(planned, plain)


def test_an_attribute_of_a_tensor_that_is_assigned_is_refused() -> None:
    def counting(x: Any) -> Tensor:
        x.count = x.count + 1
        return drawn(torch.tanh(x))

    x = leaf(X)
    x.count = 0  # type: ignore[attr-defined]  # a tensor may have any
    with pytest.raises(fckpt.TraceError, match="assigns count"):
        fckpt.remat(counting, budget=1.0)(x)


class Scaled(nn.Module):
    """A module that is given a tensor before its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, scale: Tensor, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.inner(x).sin().exp() * scale
        return drawn(y if shift is None else y + shift)


@pytest.mark.parametrize("how", ["position", "keyword", "nested", "method"])
def test_tensors_that_a_partial_holds(how: str) -> None:
    torch.manual_seed(0)
    module, held = Scaled(), leaf(torch.rand(8))
    fn: Any = {
        "position": functools.partial(module, held),
        "keyword": functools.partial(module, held, shift=held),
        "nested": functools.partial(functools.partial(module, held), shift=held),
        "method": functools.partial(module.forward, held),
    }[how]
    planned = fckpt.remat(fn, budget=1.0)
    found = []
    for run in (planned, fn, planned):
        GENERATOR.manual_seed(0)
        x = leaf(X)
        found.append(torch.autograd.grad(run(x), [x, held, *module.parameters()]))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[2], found[1]))
    assert fckpt.plan(fn, X, budget=1.0).peak_bytes > 0


class Number:
    """A number in a slot."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Computed(Number):
    """A number that a property of the same name computes, otherwise every time."""

    __slots__ = ()
    calls = itertools.count()

    @property
    def value(self) -> float:
        return 1.0 + next(self.calls) * 0

    @value.setter
    def value(self, number: float) -> None:
        raise AttributeError(number)

    def __init__(self) -> None:
        pass


def test_a_slot_that_a_property_replaces_is_no_place() -> None:
    held = Computed()
    fn = lambda x: drawn(x.sin().exp() * held.value)
    before = next(Computed.calls)
    assert_same(fckpt.remat(fn, budget=1.0), fn)
    assert next(Computed.calls) - before == 3  # the trace and the plain call


class Drawing(nn.Module):
    """A module whose method draws from a generator that a function of an imported module finds in its globals."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "torch":
            number = drawing_functions.of_torch()
        elif self.name == "python":
            number = drawing_functions.of_python()
        else:
            number = drawing_functions.of_numpy() if self.name == "numpy" else drawing_functions.of_new()
        return ((x * number).sin() * x).sum()


drawing_functions: Any = types.ModuleType("drawing_functions")
exec(
    """
import random
import numpy
import torch
TORCH, PYTHON = torch.Generator(), random.Random(0)
NUMPY, NEW = numpy.random.RandomState(0), numpy.random.default_rng(0)
def of_torch(): return torch.rand((), generator=TORCH)
def of_numpy(): return float(NUMPY.rand())
def of_new(): return float(NEW.random())
def of_python(): return PYTHON.random()
def start():
    TORCH.manual_seed(0), NUMPY.seed(0), PYTHON.seed(0)
    NEW.bit_generator.state = numpy.random.default_rng(0).bit_generator.state
""",
    vars(drawing_functions),
)


@pytest.mark.parametrize("name", ["torch", "numpy", "new", "python"])
@pytest.mark.parametrize("where", ["module", "child", "closure", "partial"])
def test_generators_in_globals_behind_methods(name: str, where: str) -> None:
    module = Drawing(name)
    fn: Any = {
        "module": lambda: module,
        "child": lambda: nn.Sequential(module),
        "closure": lambda: lambda x: module(x),
        "partial": lambda: functools.partial(module),
    }[where]()
    found = []
    planned = (fckpt.remat(fn, budget=1.0),) if name == "torch" else ()  # numbers of others are read by Python
    for run in (fn, fckpt.remat(fn), *planned, *planned):
        drawing_functions.start()
        x = leaf(X)
        found.append((*torch.autograd.grad(run(x), x), drawing_functions.of_torch(), drawing_functions.of_numpy()))
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert other[1:] == found[0][1:]


class LazyModule(types.ModuleType):
    """Like the modules of packages that import lazily: they hold large sets of names."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.scale, self.unread = 1.0, set(range(5000))


LAZY: Any = LazyModule("lazy")


def test_a_module_of_a_class_of_its_own() -> None:
    plain = lambda x: drawn(x.sin() * LAZY.scale)
    planned = fckpt.remat(plain, budget=1.0)
    for LAZY.scale in (1.0, 2.0):
        assert_same(planned, plain)
