"""One plan a signature: what makes a new one, what does not, and what is kept alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, leaf, seeded
from planned import (
    NOTHING,
    X,
    model,
)
from torch import Tensor, nn

import fckpt


class Counts:
    """How often functions are traced and solved."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.traces = self.plans = 0
        trace, make = fckpt._planned.tracing.trace, fckpt._planned.planner.make_plan

        def counting_trace(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return trace(*args, **kwargs)

        def counting_plan(*args: Any, **kwargs: Any) -> Any:
            self.plans += 1
            return make(*args, **kwargs)

        patch.setattr("fckpt._planned.tracing.trace", counting_trace)
        patch.setattr("fckpt._planned.planner.make_plan", counting_plan)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def test_twenty_calls_are_traced_and_solved_once(counts: Counts) -> None:
    net, x = model("mlp")
    planned = fckpt.remat(net, budget=0.8)
    for _ in range(20):
        planned(x + torch.randn_like(x)).backward()
    assert (counts.traces, counts.plans) == (1, 1)


Change = Callable[[dict[str, Any]], None]
CHANGES: dict[str, Change] = {
    "shape": lambda s: s.update(x=torch.randn(5, 4)),
    "dtype": lambda s: s.update(x=s["x"].double(), w=s["w"].double()),
    "stride": lambda s: s.update(x=torch.randn(4, 3).t()),
    "a static leaf": lambda s: s.update(power=3),
    "the type of a static leaf": lambda s: s.update(power=2.0),
    "a closed-over int": lambda s: s["closed"].update(n=5),
    "the dropout rate": lambda s: setattr(s["dropout"], "p", 0.2),
    "training": lambda s: s["dropout"].eval(),
    "what requires grad": lambda s: s.update(frozen=True),
    "autocast": lambda s: s.update(autocast=True),
    "the default dtype": lambda s: s.update(default=torch.float64),
    "one tensor in two places": lambda s: s.update(x=s["w"]),
    "the structure": lambda s: s.update(wrap=tuple),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_signature_has_a_plan_of_its_own(change: str, counts: Counts) -> None:
    state: dict[str, Any] = {
        "x": torch.randn(3, 4), "w": torch.randn(4, 4), "power": 2, "closed": {"n": 2}, "dropout": nn.Dropout(0.7),
        "frozen": False, "autocast": False, "default": torch.float32, "wrap": list,
    }  # fmt: skip
    closed, dropout = state["closed"], state["dropout"]

    def fn(xs: Any, w: Tensor, power: Any) -> Tensor:
        noise = torch.rand(4)
        return dropout(torch.tanh(xs[0] @ w) ** power * closed["n"]).sin() * noise * (2 if type(xs) is list else 3)

    region = fckpt.remat(fn, policy=NOTHING)

    def run(f: Callable[..., Any]) -> Any:
        known = {id(state["x"]): leaf(state["x"]), id(state["w"]): leaf(state["w"])}
        x, w = known[id(state["x"])], known[id(state["w"])]
        w.requires_grad_(not state["frozen"] or w is x)
        torch.set_default_dtype(state["default"])
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=state["autocast"]):
                out = f(state["wrap"]([x]), w, state["power"])
        finally:
            torch.set_default_dtype(torch.float32)
        out.float().sum().backward()
        return out, x.grad, w.grad if w.requires_grad else 0

    for expected_traces in (1, 2):
        for _ in range(3):
            assert_equal(seeded(lambda: run(region)), seeded(lambda: run(fn)))
        assert counts.traces == expected_traces
        if expected_traces == 1:
            CHANGES[change](state)


def test_a_closed_over_int_of_a_cell_is_part_of_the_signature(counts: Counts) -> None:
    n = 2
    region = fckpt.remat(lambda x: (x * n).sin().exp(), policy=NOTHING)
    for n in (2, 5, 2):
        x, y = leaf(X), leaf(X)
        region(x).sum().backward()
        (y * n).sin().exp().sum().backward()
        assert_equal(x.grad, y.grad)
    assert counts.traces == 2


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
def test_a_parameter_that_is_swapped_or_frozen_is_seen(counts: Counts) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    region = fckpt.remat(net, policy=NOTHING)

    def run(f: Callable[..., Any]) -> Any:
        net.zero_grad()
        f(X.float()).square().sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    net[0].weight = nn.Parameter(torch.randn(4, 4))
    assert_equal(run(region), run(net))
    net[0].weight = nn.Parameter(torch.randn(4, 4))
    assert_equal(run(region), run(net))
    assert counts.traces == 1
    net[2].bias.requires_grad_(False)
    assert_equal(run(region), run(net))
    assert counts.traces == 2
    net[2].weight = net[0].weight  # tied
    assert_equal(run(region), run(net))
    assert counts.traces == 3


class TwiceIt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class ThriceIt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
@pytest.mark.parametrize("closed_over", [False, True])
def test_a_submodule_of_another_class_and_a_hook_that_goes_are_seen(closed_over: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = X.float()
    region = fckpt.remat((lambda x: net(x)) if closed_over else net, policy=NOTHING)

    def same() -> bool:
        return torch.equal(region(x), net(x))

    assert same()
    for module in (nn.Sigmoid(), TwiceIt(), ThriceIt()):  # they have no attributes that would tell them apart
        net[1] = module
        assert same()
    handle = net[1].register_forward_hook(lambda module, args, output: output * 5)
    assert same()
    handle.remove()
    assert same()


def test_nothing_outlives_the_function() -> None:
    class Big:
        pass

    weight, token = leaf(X), Big()
    weight_alive, token_alive = weakref.ref(weight), weakref.ref(token)

    def make(weight: Tensor, token: Big) -> Callable[[Tensor], Tensor]:
        return fckpt.remat(lambda x: (x * weight).sin().exp() * (token is not None), policy=NOTHING)

    region = make(weight, token)
    x = leaf(X)
    region(x).sum().backward()
    region_alive = weakref.ref(region)
    del weight, token, region
    gc.collect()
    assert region_alive() is None
    assert weight_alive() is None
    assert token_alive() is None


def test_a_call_keeps_no_argument_alive() -> None:
    region = fckpt.remat(lambda x: x.sin().exp(), policy=NOTHING)
    x = leaf(X)
    alive = weakref.ref(x)
    region(x).sum().backward()
    del x
    gc.collect()
    assert alive() is None


def test_an_object_whose_method_is_planned_is_not_kept_alive(counts: Counts) -> None:
    class Layer:
        def __init__(self) -> None:
            self.w = leaf(torch.ones(4, 4))

        @fckpt.remat(policy=NOTHING)
        def __call__(self, x: Tensor) -> Tensor:
            return (x @ self.w).sin().exp()

    alive = []
    for _ in range(3):
        layer = Layer()
        layer(torch.ones(2, 4)).sum().backward()
        assert layer.w.grad is not None
        alive += [weakref.ref(layer), weakref.ref(layer.w)]
        del layer
        gc.collect()
    assert [ref() for ref in alive] == [None] * 6
    assert counts.traces == 1  # a plan is valid for what was read, and that is alike in all three


def test_eight_threads_share_one_trace(counts: Counts) -> None:
    fn = lambda x: x.sin().exp().tanh()
    region = fckpt.remat(fn, policy=NOTHING)
    inputs = [leaf(X + i) for i in range(8)]
    start = threading.Barrier(8)

    def work(x: Tensor) -> None:
        start.wait()
        for _ in range(5):
            x.grad = None
            region(x).sum().backward()

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.traces == 1
    for x in inputs:
        assert_equal(x.grad, torch.autograd.grad(fn(x).sum(), x)[0])


def test_planning_twice_gives_the_same_plan() -> None:
    net, x = model("transformer")
    first, second = (fckpt.plan(net, x, budget=0.7) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.graph == second.graph
    assert first.fingerprint == second.fingerprint
