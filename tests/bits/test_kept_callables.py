"""Rematerialised bound methods, partials and callable objects that a model keeps: copies, pickles, outer regions."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fckpt

GENERATOR = torch.Generator()
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

pytestmark = [
    pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning"),  # a budget inside of a region, and untraceable functions
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it in intermediate results
]

WAYS: dict[str, Callable[[Any], Any]] = {
    "remat": fckpt.remat,
    "budget": functools.partial(fckpt.remat, budget=1.0),
    "policy": functools.partial(fckpt.remat, policy=fckpt.policies.dots_saveable),
    "twice": lambda fn: fckpt.remat(fckpt.remat(fn)),
}


def as_it_is(fn: Any) -> Any:
    return fn


class Loss:
    """A callable object that holds a model."""

    def __init__(self, model: Any, scale: float = 0.5):
        self.model, self.scale = model, scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model._loss(x, self.scale)


KINDS: dict[str, Callable[[Any], Any]] = {
    "method": lambda model: model._loss,
    "partial": lambda model: functools.partial(model._loss, scale=0.5),
    "nested partial": lambda model: functools.partial(functools.partial(Net._loss, model), scale=0.5),
    "partial of a parameter": lambda model: functools.partial(of_weight, model.layer.weight),
    "object": Loss,
    "method of an object": lambda model: Loss(model).__call__,
}


def of_weight(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ weight)).square().sum()


class Net(nn.Module):
    loss: Any

    def __init__(self, kind: str = "method", wrap: Callable[[Any], Any] = as_it_is):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.loss = wrap(KINDS[kind](self))

    def _loss(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """A loss."""
        return (torch.tanh(torch.tanh(self.norm(self.layer(x)))) * scale).square().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


def changed(model: Any, factor: float = 3.0) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def gradients(model: Any, run: Callable[[Any], Any] | None = None) -> Any:
    """The loss, the gradients that a model's parameters receive, and the buffers then."""
    GENERATOR.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(X) if run is None else run(X)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], [b.clone() for b in model.buffers()]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("via", [copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_computes_with_its_own_weights(way: str, kind: str, via: Callable[[Any], Any]) -> None:
    plain, region = Net(kind), Net(kind, WAYS[way])
    first = gradients(plain)
    assert_equal(gradients(region), first)
    for _ in range(2):  # the second time, a copy of the copy
        plain_copy, region_copy = changed(via(plain)), changed(via(region))
        assert_equal(gradients(region_copy), gradients(plain_copy))
        assert_equal([p.grad for p in region.parameters()], [p.grad for p in plain.parameters()])
        assert_equal(gradients(region), gradients(plain))
        plain, region = plain_copy, region_copy
    assert list(region.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in region.named_modules()] == ["", "layer", "norm"]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_rematerialised(way: str) -> None:
    region: Any = Net("object", WAYS[way])
    region(X).backward()
    for other in (copy.deepcopy(region), pickled(region), AveragedModel(region).module):
        assert other.loss._fckpt_region is not region.loss._fckpt_region
        other(X)  # the first call finds out which buffers are written
        held = [fckpt.measure_peak(lambda m=m: m(X)).retained_bytes for m in (region, other, Net("object"))]
        assert held[0] == held[1] < held[2]
    if way in ("budget", "policy"):
        other = copy.deepcopy(region)
        assert fckpt.stats(other.loss).calls == 0 < fckpt.stats(region.loss).calls
        other(X)
        assert fckpt.stats(other.loss).calls == fckpt.stats(other.loss).plans == 1


def test_averaged_model() -> None:
    results = []
    for wrap in (as_it_is, *WAYS.values()):
        model = Net("method", wrap)
        average = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).backward()
            optimizer.step()
            average.update_parameters(model)
        results.append((average(X).detach(), model(X).detach()))
    for result in results[1:]:
        assert_equal(result, results[0])


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(model.loss(x)) + model.loss(x * 2)


def twice_drawn(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Dynamo cannot capture a generator that is drawn from, so this is traced by running it."""
    return twice(model, x) * torch.rand((), generator=GENERATOR)


def twice_branching(model: Any, x: torch.Tensor) -> torch.Tensor:
    return twice(model, x) if float(x.sum()) else x.sum()


AROUND: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "remat": (twice, fckpt.remat),
    "budget": (twice, WAYS["budget"]),
    "traced as Python": (twice_drawn, WAYS["budget"]),
    "untraceable": (twice_branching, functools.partial(fckpt.remat, budget=1.0, untraceable="remat")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", AROUND)
def test_in_an_enclosing_region(around: str, way: str, kind: str) -> None:
    fn, outer = AROUND[around]
    plain, region = Net(kind), Net(kind, WAYS[way])
    whole = outer(lambda x: fn(region, x))
    for _ in range(2):
        assert_equal(gradients(region, whole), gradients(plain, lambda x: fn(plain, x)))
        changed(plain)
        changed(region)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_in_a_training_step(way: str, kind: str) -> None:
    results = []
    for wrap in (as_it_is, WAYS[way]):
        model = Net(kind, wrap)
        step = fckpt.step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x), budget=1.0)
        results.append(([step(X) for _ in range(3)], model.state_dict()))
    assert_equal(*results)


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", AROUND)
def test_changed_attributes_are_seen(around: str, way: str) -> None:
    fn, outer = AROUND[around]
    plain, region = Net(), Net()
    held = Loss(plain), Loss(region)
    plain.loss, region.loss = held[0], WAYS[way](held[1])
    whole = outer(lambda x: fn(region, x))
    for scale in (0.5, 0.25, 2.0):
        held[0].scale = held[1].scale = scale
        assert_equal(gradients(region, whole), gradients(plain, lambda x: fn(plain, x)))
        if around != "traced as Python":  # which cannot compare the plans that a region inside of it then has
            assert_equal(gradients(region), gradients(plain))


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", AROUND)
def test_another_callable_is_seen(around: str, way: str) -> None:
    fn, outer = AROUND[around]
    plain, region = Net(), Net()
    whole = outer(lambda x: fn(region, x))
    for kind, scale in (("object", 0.5), ("object", 0.25), ("method", 2.0), ("partial", 2.0)):
        for model, wrap in ((plain, as_it_is), (region, WAYS[way])):
            model.loss = wrap(Loss(model, scale) if kind == "object" else KINDS[kind](model))
        assert_equal(gradients(region, whole), gradients(plain, lambda x: fn(plain, x)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_and_its_copy_in_one_enclosing_region(way: str, kind: str) -> None:
    plain, region = Net(kind), Net(kind, WAYS[way])
    plain_copy, region_copy = changed(copy.deepcopy(plain)), changed(copy.deepcopy(region))
    whole = fckpt.remat(lambda m, x: twice(m, x), budget=1.0)
    for _ in range(2):
        for expected, model in ((plain, region), (plain_copy, region_copy)):
            result = gradients(model, lambda x, model=model: whole(model, x))
            assert_equal(result, gradients(expected, lambda x, expected=expected: twice(expected, x)))
    both = fckpt.remat(lambda x: region.loss(x) + region_copy.loss(x), budget=1.0)
    sums = gradients(region, both), gradients(plain, lambda x: plain.loss(x) + plain_copy.loss(x))
    assert_equal(*sums)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_under_torch_compile(way: str, kind: str) -> None:
    torch._dynamo.reset()
    full = way in ("remat", "twice")  # a region with a plan is compiled by itself
    plain, region = Net(kind), Net(kind, WAYS[way])
    copies = changed(copy.deepcopy(plain)), changed(copy.deepcopy(region))
    pairs: list[Any] = [(plain, region), copies]
    for expected, model in pairs:
        for fn in (model, model.loss):
            compiled = torch.compile(fn, backend="aot_eager", fullgraph=full)
            assert_equal(gradients(model, compiled), gradients(expected))


@pytest.mark.parametrize("way", WAYS)
def test_looks_like_the_callable(way: str) -> None:
    model = Net()
    for fn in (model._loss, functools.partial(model._loss, scale=0.5), Loss(model), torch.tanh):
        region = WAYS[way](fn)
        assert inspect.signature(region) == inspect.signature(fn) if fn is not torch.tanh else callable(region)
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            assert getattr(region, name, None) == getattr(fn, name, None)
        assert region.__wrapped__ is fn or region.__wrapped__.__wrapped__ is fn
        assert region == region != WAYS[way](fn) and len({region, region}) == 1
        assert not inspect.iscoroutinefunction(region)
        assert weakref.ref(region)() is region
        assert_equal(region(X), fn(X))
    assert fckpt.check(WAYS[way](model._loss), X)


def test_functions_stay_functions() -> None:
    class Methods(Net):
        decorated = fckpt.remat(Net._loss)
        kept = fckpt.remat(torch.tanh)

    assert inspect.isfunction(Methods.decorated)
    model: Any = Methods()
    assert_equal(model.decorated(X), model._loss(X))
    assert_equal(model.kept(X), torch.tanh(X))  # a built-in function is no method


def test_keywords_of_any_name() -> None:
    class Held:
        def method(self, region: torch.Tensor, *, fn: torch.Tensor) -> torch.Tensor:
            return region * fn

    for way in (fckpt.remat, WAYS["budget"]):
        assert_equal(way(Held().method)(region=X, fn=X), X * X)
        assert_equal(torch.func.grad(lambda x, way=way: way(Held().method)(x, fn=X).sum())(X), X)


def test_static_and_donated_arguments_of_a_copy() -> None:
    class Held:
        def scaled(self, x: torch.Tensor, by: list[float]) -> torch.Tensor:
            return x * by[0]

    for options in ({}, {"budget": 1.0}, {"budget": 1.0, "donate_argnums": 0}):
        fn = copy.deepcopy(fckpt.remat(Held().scaled, static_argnums=1, **options))  # type: ignore[call-overload]
        assert fn._fckpt_region.static.nums == (1,)
        x = X.clone()
        y = fn(x, [3.0])
        assert_equal(y, X * 3)
        assert (y is x) == ("donate_argnums" in options)


def test_the_plan_of_a_copy() -> None:
    plain = Net()
    plan = fckpt.plan(plain._loss, X, budget=1.0)
    region = Net("method", functools.partial(fckpt.remat, plan=plan))
    expected = gradients(plain)
    for model in (copy.deepcopy(region), pickled(region), region):
        assert_equal(gradients(model), expected)
