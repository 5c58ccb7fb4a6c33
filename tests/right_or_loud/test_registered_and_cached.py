"""Functions whose outcome Python keeps elsewhere: singledispatch registries and caches."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from helpers import assert_equal, leaf
from torch import Tensor, nn

import fckpt

X = torch.randn(5, generator=torch.Generator().manual_seed(0))


def planned(fn: Any) -> Any:
    return fckpt.remat(fn, policy=fckpt.policies.nothing_saveable)


def dispatching() -> tuple[Any, Callable[[Tensor], Tensor]]:
    @functools.singledispatch
    def chosen(kind: Any, h: Tensor) -> Tensor:
        return h.sin()

    return chosen, lambda x: (chosen(1, x * 2) * x).exp()


def test_a_registration_between_forward_and_backward() -> None:
    """A recompute with the old registry would leave its choice in the dispatcher's cache, for all later calls."""
    chosen, fn = dispatching()
    x = leaf(X)
    result = fckpt.remat(fn)(x).sum()
    chosen.register(int)(lambda kind, h: h.cos())
    with pytest.raises(fckpt.ImpureFunctionError, match="a function for int was registered"):
        result.backward()
    assert_equal(fn(x), (torch.cos(x * 2) * x).exp())


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
@pytest.mark.parametrize("wrap", [fckpt.remat, planned])
def test_a_registration_between_two_steps(wrap: Any) -> None:
    chosen, fn = dispatching()
    region, x = wrap(fn), leaf(X)
    for function in (torch.sin, torch.cos, torch.tanh):
        chosen.register(int)(lambda kind, h, function=function: function(h))
        assert_equal(torch.autograd.grad(region(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


@pytest.mark.parametrize("wrap", [fckpt.remat, planned])
@pytest.mark.parametrize("cleared", [False, True])
def test_a_cached_function_whose_variables_change(wrap: Any, cleared: bool) -> None:
    """The cache returns what it has, until it is cleared."""
    settings = {"factor": 2.0}

    @functools.lru_cache
    def factor(n: int) -> float:
        return settings["factor"] * n

    region, x = wrap(lambda x: ((x * 2).sin() * factor(3) * x).exp()), leaf(X)
    for value in (2.0, 5.0):
        settings["factor"] = value
        if cleared:
            factor.cache_clear()
        expected = ((x * 2).sin() * (3 * (value if cleared else 2.0)) * x).exp()
        result = region(x)
        assert_equal(result, expected)
        assert_equal(torch.autograd.grad(result.sum(), x), torch.autograd.grad(expected.sum(), x))


W = torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
LOG: list[int] = []


class Box:
    def __init__(self) -> None:
        self.bias = torch.zeros(5)
        self.scale = 2.0


def counted(n: int) -> float:
    LOG.append(n)
    return 2.0


def written(x: Tensor, get: Any) -> Tensor:
    h = (x @ W + get(5)).tanh()
    get(5).add_(h.detach())
    return h


def appended(x: Tensor, get: Any) -> Tensor:
    get(3).append(0.5)
    return (x @ W * sum(get(3))).tanh()


def squared(x: Tensor, get: Any) -> Tensor:
    return (x @ W + get(5)).tanh()


Cached = tuple[Callable[[int], Any], Callable[[Tensor, Any], Any], Callable[[Any], Any]]
CACHED: dict[str, Cached] = {
    "random": (torch.randn, squared, lambda get: None),
    "written by the caller": (torch.zeros, squared, lambda get: get(5).add_(1)),
    "written by the function": (torch.zeros, written, lambda get: None),
    "cleared": (torch.zeros, squared, lambda get: (get(5).add_(1), get.cache_clear() if get(5)[0] > 1.5 else None)),
    "returned": (torch.zeros, lambda x, get: ((x @ W).tanh(), get(5)), lambda get: None),
    "list": (lambda n: [1.0] * n, lambda x, get: (x @ W * sum(get(3))).tanh(), lambda get: get(3).append(2.0)),
    "list of a tensor": (
        lambda n: [torch.zeros(n)],
        lambda x, get: (x @ W + get(5)[0]).tanh(),
        lambda get: get(5).__setitem__(0, get(5)[0] + 1),
    ),
    "list written by the function": (lambda n: [1.0] * n, appended, lambda get: None),
    "dict": (
        lambda n: {"scale": 1.0},
        lambda x, get: (x @ W * get(3)["scale"]).tanh(),
        lambda get: get(3).update(scale=get(3)["scale"] + 1),
    ),
    "object": (
        lambda n: Box(),
        lambda x, get: (x @ W * get(3).scale + get(3).bias).tanh(),
        lambda get: (setattr(get(3), "scale", get(3).scale + 1), get(3).bias.add_(1)),
    ),
    "counted": (counted, lambda x, get: (x @ W * get(3) * len(LOG)).tanh(), lambda get: None),
    "pure": (lambda n: n / 2, lambda x, get: (x @ W * get(3)).tanh(), lambda get: None),
    "pure of a size": (lambda n: (n + 7) // 8, lambda x, get: (x @ W * get(len(x))).tanh(), lambda get: None),
    "drawn number": (lambda n: random.random(), lambda x, get: (x @ W * get(3)).tanh(), lambda get: None),
}
DRAWN_OR_COUNTED = ("random", "counted", "drawn number")
"""The cached functions whose first call a plan cannot make at the right time."""


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("name", CACHED)
def test_what_a_cache_holds_is_read_and_written(name: str, filled: bool, limit: int | None) -> None:
    make, use, change = CACHED[name]

    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        LOG.clear()
        get = functools.lru_cache(limit)(lambda n: make(n))  # a lambda, as Dynamo takes no functions of torch
        if filled:
            get(3), get(5)
        region, found = wrap(lambda x: use(x, get)), list[Any]()
        for number in range(5):
            result = region(X + number)
            loss, *rest = result if isinstance(result, tuple) else (result,)
            assert all(value is get(5) for value in rest)
            found += [loss, torch.autograd.grad(loss.sum(), W), torch.rand(()), len(LOG)]
            change(get)
        return found

    want = run(lambda fn: fn)
    if filled or name not in DRAWN_OR_COUNTED:
        assert_equal(run(planned), want)
    else:
        with pytest.raises(fckpt.TraceError):
            run(planned)


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [2.0], sum, lambda held: held.append(1.0)),
    "dict": (lambda: {"a": 2.0}, lambda held: held["a"], lambda held: held.update(a=held["a"] + 1)),
    "object": (Box, lambda held: held.scale, lambda held: setattr(held, "scale", held.scale + 1)),
    "tensor": (lambda: torch.ones(5), lambda held: held, lambda held: held.mul_(2)),
}


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("name", HELD)
def test_what_a_cache_holds_for_an_object(name: str, filled: bool) -> None:
    make, use, change = HELD[name]

    class Held:
        @functools.lru_cache  # noqa: B019  # such a cache is the subject
        def read(self) -> Any:
            return make()

    held = Held()
    if filled:
        held.read()
    fn = lambda x: x @ W * use(held.read())
    region = planned(fn)
    for number in range(4):
        assert_equal(region(X), fn(X))
        if number == 2:
            Held.read.cache_clear()
        else:
            change(held.read())


class Positions(nn.Module):
    """Computes what its layers need when it is first asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale, self.calls = nn.Parameter(torch.ones(5)), 3, 0

    @functools.lru_cache(8)  # noqa: B019  # such a cache is the subject
    def positions(self, n: int) -> Tensor:
        return torch.arange(n) * 1.0 * self.factor()

    @functools.lru_cache(8)  # noqa: B019  # such a cache is the subject
    def counted(self, n: int) -> float:
        self.calls += 1
        return n / 2

    @functools.cached_property
    def table(self) -> Tensor:
        return torch.arange(5.0) * self.root

    @functools.cached_property
    def root(self) -> float:
        self.calls += 1
        return self.scale**0.5

    def factor(self) -> int:
        return self.scale


FORWARDS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "method": (lambda net, x: (x * net.weight + net.positions(x.shape[-1])).sin().sum(), True),
    "after a change": (
        lambda net, x: (setattr(net, "scale", net.scale + 1), x * net.weight + net.positions(5))[1].sin().sum(),
        False,
    ),
    "counted": (lambda net, x: (x * net.weight * net.counted(3)).sin().sum(), False),
    "properties": (lambda net, x: (x * net.weight * net.root + net.table).sin().sum(), True),
}


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("name", FORWARDS)
def test_methods_and_properties_with_a_cache(name: str) -> None:
    forward, works = FORWARDS[name]
    one, two = Positions(), Positions()
    region = planned(forward)
    if not works:
        with pytest.raises(fckpt.TraceError, match="assign"):
            region(one, X)
        return
    for number in range(5):
        found = []
        for fn, net in ((forward, two), (region, one)):
            if number == 3:
                net.scale = 7
                vars(net).pop("table", None)
                Positions.positions.cache_clear()
            loss = fn(net, X + number)
            found.append([loss, *torch.autograd.grad(loss, net.weight)])
        assert_equal(*found)
        assert (one.calls, list(vars(one))) == (two.calls, list(vars(two)))
    assert fckpt.stats(region).captures <= 4


def test_pure_cached_functions_are_captured() -> None:
    @functools.lru_cache
    def padded(n: int) -> tuple[int, torch.dtype]:
        return (n + 7) // 8 * 8, torch.float64

    plan = planned(lambda x: (x @ W * padded(5)[0]).to(padded(5)[1]))
    assert plan(X).dtype == torch.float64
    assert fckpt.stats(plan).captures


def test_a_structure_that_is_closed_over_and_changes() -> None:
    """By the Python tracer, too, which Dynamo's refusal of `id` leads to."""
    spec = optree.tree_structure((0, 1))

    def fn(x: Tensor) -> Tensor:
        h = x * 2
        known = {id(h): h}
        return optree.tree_unflatten(spec, [known[id(h)].sin(), h])[0].exp()

    region, x = planned(fn), leaf(X)
    for made in (optree.tree_structure((0, 1)), optree.tree_structure(((0,), 1)), optree.tree_structure((0, 1))):
        spec = made
        if made.num_children == 2 and made.child(0).is_leaf():
            assert_equal(torch.autograd.grad(region(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))
        else:
            with pytest.raises(AttributeError):  # a tuple has no exp, in the plain function as well
                region(x)


@pytest.mark.parametrize("keeping", ["cache", "list of an object", "default"])
def test_a_trace_that_is_refused_leaves_no_tensors_behind(keeping: str) -> None:
    """Tensors of a trace have no memory: a call that found one in a cache would crash."""

    @functools.lru_cache(None)
    def table(n: int) -> Tensor:
        print("made", end="")  # refused, after the table is made
        return torch.arange(n).float()

    class Kept:
        __slots__ = ("tables",)

        def __init__(self) -> None:
            self.tables: list[Tensor] = []

        def get(self, n: int) -> Tensor:
            if not self.tables:
                self.tables.append(torch.arange(n).float())
                print("made", end="")
            return self.tables[0]

    def kept(n: int, tables: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
        if n not in tables:
            tables[n] = torch.arange(n).float()
            print("made", end="")
        return tables[n]

    get: Any = {"cache": table, "list of an object": Kept().get, "default": kept}[keeping]
    x = torch.ones(4, requires_grad=True)
    fn = lambda x: (x * get(4)).sin().sum()
    planned = fckpt.remat(fn, budget=1.0)
    with contextlib.suppress(fckpt.TraceError):
        planned(x)
    assert torch.equal(get(4), torch.arange(4).float())
    assert torch.equal(planned(x), fn(x))


INDEX_SOURCE = """
import functools
import torch

@functools.lru_cache(8)
def index(size):
    count = size[0] * size[1]
    return (torch.arange(count)[:, None] * 3 + torch.arange(count)) % 100
"""


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("package", ["users", "site-packages"])
def test_a_tensor_that_is_cached_by_size_is_held_once(package: str, filled: bool) -> None:
    """As BEiT's index of relative positions: made in each call, it would take memory that the plain function does
    not.
    """
    scope: dict[str, Any] = {}
    exec(compile(INDEX_SOURCE, f"/{package}/tables.py", "exec"), scope)
    index, table, layer = scope["index"], leaf(torch.randn(100, 4)), nn.Linear(16, 16)

    def fn(x: Tensor) -> Tensor:
        length = x.shape[1]
        bias = table[index((length // 8, 8)).view(-1)].view(length, length, 4).sum(-1)
        return torch.tanh((x @ layer(x).mT + bias).softmax(-1) @ x).square().mean()

    region = fckpt.remat(fn, budget=1.0)
    for length in (64, 64, 32):
        x = torch.randn(2, length, 16)
        if filled:
            fn(x).backward()
        region(x).backward()
        assert_equal(region(x), fn(x))
        peaks = [fckpt.measure_peak(lambda f=f, x=x: f(x).backward()).peak_bytes for f in (fn, region)]
        assert peaks[1] <= peaks[0]
