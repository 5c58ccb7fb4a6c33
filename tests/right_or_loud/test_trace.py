"""What a trace sees: what a function closes over, gets and returns, and the graph that it becomes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, leaf
from planned import PLANNERS
from torch import Tensor, nn

import fckpt

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
planned = PLANNERS["nothing_saveable"]


# -- closures ------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, held: Any):
        self.held = held


def test_a_tensor_is_found_however_deep_unless_the_function_is_traced_as_python() -> None:
    for requires_grad in (False, True):
        deep: Any = torch.full((4,), 2.0, requires_grad=requires_grad)
        bottom = deep
        for _ in range(6):
            deep = Holder(deep)
        hidden = lambda x: x.sin() * deep.held.held.held.held.held.held
        x, y = leaf(X), leaf(X)
        planned(hidden)(x).sum().backward()
        first, bottom.grad = bottom.grad, None
        hidden(y).sum().backward()
        assert_equal(x.grad, y.grad)
        assert (first is None) == (not requires_grad) and (first is None or torch.equal(first, bottom.grad))

        def differentiates(x: Tensor) -> Tensor:
            return torch.autograd.grad(hidden(x).sum(), x, create_graph=True)[0]

        with pytest.raises(fckpt.TraceError, match=r"deeper than 4 levels|neither passed.*closure"):
            planned(differentiates)(leaf(X))


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_tensor_that_can_be_found_gets_its_gradient(depth: int) -> None:
    held: Any = leaf(torch.ones(4))
    weight = held
    for i in range(depth):
        held = (Holder(held), [held], {"held": held})[i % 3]

    def fn(x: Tensor) -> Tensor:
        inner = held
        for i in reversed(range(depth)):
            inner = (lambda h: h.held, lambda h: h[0], lambda h: h["held"])[i % 3](inner)
        return (x * inner).sin().exp()

    x, y = leaf(X), leaf(X)
    planned(fn)(x).sum().backward()
    actual, weight.grad = weight.grad, None
    fn(y).sum().backward()
    assert_equal((x.grad, actual), (y.grad, weight.grad))


class Statistics(nn.Module):
    """A running mean and a count, which its forward also reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total.mul_(0.9).add_(x.mean(0))
            self.count.add_(1)
        return (x.sin() * self.total).exp()


def test_statistics_of_a_module_change_once_a_call() -> None:
    def run(wrap: Callable[..., Any]) -> Any:
        module = Statistics()
        region, found = wrap(module), []
        for i in range(3):
            x = leaf(X + i)
            region(x).sum().backward()
            found += [x.grad, module.total.clone(), module.count.clone()]
        return found

    assert_equal(run(planned), run(lambda f: f))


def test_other_closed_over_tensors_are_written_once() -> None:
    total = torch.zeros(4)

    def adds(x: Tensor) -> Tensor:
        total.add_(1)
        return (x * total).sin()

    region = planned(adds)
    for count in (1, 2, 3):  # written once a call, as in the plain function
        x, y = leaf(X), leaf(X)
        region(x).sum().backward()
        (y * count).sin().sum().backward()
        assert_equal(x.grad, y.grad)
        assert torch.equal(total, torch.full((4,), float(count)))


def test_a_tensor_of_the_trace_that_is_stored_outside_is_refused() -> None:
    cache: dict[str, Tensor] = {}

    def caches(x: Tensor) -> Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(4.0).cos()
        return (x * cache["table"]).sin()

    try:
        planned(caches)(leaf(X))
    except fckpt.TraceError as error:
        assert "table" in str(error)
    assert "table" not in cache or not torch._is_functional_tensor(cache["table"])
    cache.clear()
    caches(X)  # filled by a plain call
    x, y = leaf(X), leaf(X)
    planned(caches)(x).sum().backward()
    caches(y).sum().backward()
    assert_equal(x.grad, y.grad)


def test_a_module_that_counts_its_calls_is_not_planned_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x).sin().exp()

    traces = 0
    trace = fckpt._planned.tracing.trace

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal traces
        traces += 1
        return trace(*args, **kwargs)

    monkeypatch.setattr("fckpt._planned.tracing.trace", counting)
    region = planned(Counting())
    for _ in range(20):
        region(X).sum().backward()
    assert traces <= 3


# -- arguments and results -----------------------------------------------------------------------------------


def test_results_that_hide_tensors_are_built_anew_or_refused() -> None:
    x = leaf(X)
    held = planned(lambda x: Holder(x.sin()))(x).held
    held.sum().backward()
    assert_equal([held, x.grad], [X.sin(), X.cos()])

    def differentiates(x: Tensor) -> Holder:
        return Holder(torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0])

    with pytest.raises(fckpt.OpaqueOutputError, match="Holder"):
        planned(differentiates)(leaf(X))


def test_parameters_and_buffers_of_all_kinds_are_traced() -> None:
    for tensor in (nn.Parameter(X), nn.Buffer(X), leaf(X)):
        w = leaf(X)
        planned(lambda t, w: (t * w).sin().exp())(tensor, w).sum().backward()
        (expected,) = torch.autograd.grad((tensor * w).sin().exp().sum(), w)
        assert_equal(w.grad, expected)


def test_an_error_of_the_function_itself_comes_through_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same reduction dim"):
        planned(lambda x: x @ x)(leaf(X))
    with pytest.raises(ZeroDivisionError):
        planned(lambda x: x * (1 // 0))(leaf(X))
    with pytest.raises(TypeError):
        planned(lambda x: x.sin())(leaf(X), 3, nonsense=4)


def test_a_warning_of_the_function_is_seen() -> None:
    def warns(x: Tensor) -> Tensor:
        warnings.warn("deprecated", stacklevel=1)
        return x.sin()

    with pytest.warns(UserWarning, match="deprecated"):
        planned(warns)(leaf(X))


# -- the graph -----------------------------------------------------------------------------------------------


def test_the_graph_says_where_values_come_from() -> None:
    def fn(params: Any, x: Tensor) -> Tensor:
        h = fckpt.checkpoint_name(torch.tanh(x @ params["w"]), "hidden")
        return h.sin().sum()

    plan = fckpt.plan(fn, {"w": leaf(torch.randn(4, 5))}, X)
    graph = plan.graph
    assert {graph.values[v].origin for v in graph.inputs} == {"args[0]['w']", "args[1]"}
    (hidden,) = [v for v in graph.values if v.names == ("hidden",)]
    assert (hidden.shape, hidden.nbytes, hidden.dtype) == ((3, 5), 60, "float32")
    forward, backward = graph.nodes[: graph.boundary], graph.nodes[graph.boundary :]
    assert [n.op.split(".")[1] for n in forward] == ["mm", "tanh", "sin", "sum"]
    assert "aten.tanh_backward.default" in [n.op for n in backward]
    first = fn.__code__.co_firstlineno
    assert [n.source for n in forward] == [f"test_trace.py:{first + i} (fn)" for i in (1, 1, 2, 2)]
    assert [n.source for n in backward if "tanh" in n.op] == [f"test_trace.py:{first + 1} (fn)"]


def test_dead_code_and_views_are_no_nodes() -> None:
    def fn(x: Tensor) -> Tensor:
        x.cos().exp()  # nobody reads it
        return x.t().reshape(2, 6).unsqueeze(0)[0].sin()

    plan = fckpt.plan(fn, leaf(X))
    assert [n.op.split(".")[1] for n in plan.graph.nodes[: plan.graph.boundary]] == ["clone", "sin"]


def test_frozen_parameters_have_no_gradient_nodes() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    both = fckpt.plan(net, X).graph
    net[0].requires_grad_(False)
    one = fckpt.plan(net, X).graph
    assert len(one.gradients) == 2
    assert len(both.gradients) == 4
    assert len(one.nodes) < len(both.nodes)


def test_plans_are_made_for_tensors_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fn(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.tanh(x @ w)
        return x.sum()

    with FakeTensorMode():
        w, x = torch.randn(64, 64, requires_grad=True), torch.randn(2**20, 64)
    plan = fckpt.plan(fn, w, x, budget=0.5)
    assert plan.peak_bytes <= plan.baseline_peak_bytes / 2
    assert plan.baseline_peak_bytes > 20 * 2**20 * 64 * 4


SETTINGS: dict[str, Any] = {"scale": 1.0, "act": torch.tanh}


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
def test_numbers_and_functions_in_the_closure_are_part_of_the_signature() -> None:
    class Config:
        power = 1.0

    config = Config()
    config.power = 2.0
    fn = lambda x: (SETTINGS["act"](x) * SETTINGS["scale"]) ** config.power
    region = planned(fn)
    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    try:
        for change in (lambda: None, lambda: SETTINGS.update(scale=3.0), lambda: SETTINGS.update(act=torch.sin)):
            change()
            assert_equal(region(x), fn(x))
        config.power = 3.0
        assert_equal(region(x), fn(x))
    finally:
        SETTINGS.update(scale=1.0, act=torch.tanh)


def test_the_caller_may_change_what_it_gets() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tensor([1.0, 2.0])
        return torch.tanh(x) * scale, scale

    region, x = planned(fn), torch.ones(2, requires_grad=True)
    region(x)[1].add_(100)
    assert_equal(region(x), fn(x))
    hidden = planned(lambda x: torch.tanh(x @ x) @ x)(torch.eye(3, requires_grad=True))
    hidden += 1  # nobody needs it for backward
    hidden.sum().backward()


def test_operands_of_all_layouts_get_their_gradient() -> None:
    fn = lambda x: (x * x.sin()).sum()
    for view in (lambda p: p.unfold(0, 4, 2), lambda p: p.expand(3, 10), lambda p: p[::2], lambda p: p[:, None].T):
        grads = []
        for f in (fn, planned(fn)):
            p = (torch.arange(10.0) / 5).requires_grad_()
            f(view(p)).backward()
            grads.append(p.grad)
        assert_equal(*grads)
    z = torch.randn(3, dtype=torch.complex64).conj().requires_grad_()
    real = lambda z: torch.view_as_real(z.resolve_conj()).sin().sum()
    plain, region = (torch.autograd.grad(f(z), z)[0].resolve_conj() for f in (real, planned(real)))
    assert_equal(region, plain)


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
def test_settings_of_modules_that_are_no_numbers_are_part_of_the_signature() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv1d(2, 2, 3), torch.tanh

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.conv(x))

    block, x = Block(), torch.randn(1, 2, 9)
    region = planned(block)
    assert_equal(region(x), block(x))
    block.conv.stride = (2,)
    assert_equal(region(x), block(x))
    block.act = torch.sigmoid
    assert_equal(region(x), block(x))
