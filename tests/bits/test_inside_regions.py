"""What the function of a region has inside or is given: checkpoints, mutating operations, TorchScript, odd tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import assert_equal, leaf
from test_module_wrappers import PLANS, X, estimated, gradients, made, under_a_plan
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fckpt


@torch.library.custom_op("fckpt_tests::double_into", mutates_args={"out"})
def double_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


def into_own(x: Tensor) -> Tensor:
    h = x.sin()
    out = torch.empty_like(h)
    double_into(h.detach(), out)
    return (h * out).exp().sin()


def conjugated(x: Tensor) -> Tensor:
    c = torch.view_as_complex(torch.tanh(x).view(4, 3, 2))
    return torch.view_as_real((c.conj() * c.conj() * c).conj().resolve_conj()).sum((1, 2)).sin()


FUNCTIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant checkpoint": lambda m, x: checkpoint(m, x.sin(), use_reentrant=True).exp().sin(),
    "checkpoint": lambda m, x: checkpoint(m, x.sin(), use_reentrant=False).exp().sin(),
    "cond": lambda m, x: torch.cond(x.sum() > 0, lambda x: x.sin().exp(), lambda x: x.cos().exp(), (m(x),)).sin(),
    "conjugation": lambda m, x: conjugated(m(x)),
    "an operation that mutates what the function made": lambda m, x: into_own(m(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_of_a_region(name: str) -> None:
    plain, module, fn = made(), made(), FUNCTIONS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # torch.cond asks for it
        expected = gradients(plain, lambda x: fn(plain, x))
        assert_equal(gradients(module, fckpt.remat(lambda x: fn(module, x))), expected)


NOT_PLANNED = {
    "checkpoint": r"torch.utils.checkpoint inside, and draws random numbers there.*preserve_rng_state=False",
    "cond": r"torch.s operator `cond`.*Write the branch",
}


@estimated
@under_a_plan
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NOT_PLANNED])
def test_inside_of_a_plan(name: str, options: dict[str, Any]) -> None:
    plain, module, fn = made(), made(), FUNCTIONS[name]
    region = fckpt.remat(lambda x: fn(module, x), **options)
    for call in range(2):
        warned = call == 0 and name == "reentrant checkpoint" and "budget" in options
        with pytest.warns(fckpt.BudgetWarning, match="use_reentrant=False") if warned else nullcontext():
            got = gradients(module, region)
        assert_equal(got, gradients(plain, lambda x: fn(plain, x)))


@under_a_plan
@pytest.mark.parametrize("name", NOT_PLANNED)
def test_what_is_refused_inside_of_a_plan_has_changed_nothing(name: str, options: dict[str, Any]) -> None:
    module, fn = made(), FUNCTIONS[name]
    with pytest.raises(fckpt.TraceError, match=NOT_PLANNED[name]):
        fckpt.remat(lambda x: fn(module, x), **options)(leaf(X))
    assert_equal(module.state_dict(), made().state_dict())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_inside_of_a_plan_keeps_a_budget_in_bytes(use_reentrant: bool) -> None:
    net = made(lambda: nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(6, 6), nn.Tanh(), nn.GELU()))))
    fn = lambda x: checkpoint(net, x.sin(), use_reentrant=use_reentrant).exp().sum()
    x, found = torch.randn(256, 6, requires_grad=True), []
    budget = fckpt.measure_peak(lambda: fn(x).backward()).peak_bytes * 7 // 10
    region = fckpt.remat(fn, budget=budget)
    region(x).backward()
    for f in (fn, region):
        x.grad = None
        net.zero_grad()
        peak = fckpt.measure_peak(lambda f=f: f(x).backward()).peak_bytes
        found.append([x.grad, *(p.grad for p in net.parameters())])
    assert peak <= budget
    assert_equal(*found)


@pytest.mark.parametrize("fn", [
    lambda x: torch.cond(x.sum() > 0, lambda x: x.sin().exp(), lambda x: x.cos().exp(), (x,)).sin(),
    lambda x: torch.cond(torch.tensor(True), lambda x: x.sin().exp(), lambda x: x.cos().exp(), (x,)).sin(),
])  # fmt: skip
def test_an_operator_of_functions_is_refused_under_a_plan_and_runs_as_before_without(fn: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # torch.cond asks for it
        with pytest.raises(fckpt.TraceError, match=r"torch.s operator `cond`.*Write the branch"):
            fckpt.remat(fn, budget=1.0)(leaf(X))
        got = []
        for f in (fn, fckpt.remat(fn)):
            x = leaf(X)
            f(x).sum().backward()
            got.append(x.grad)
    assert_equal(got[1], got[0])


class Around(nn.Module):
    """Holds a module of TorchScript."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).exp().sin()


def scripted(*, with_buffers: bool = False) -> Any:
    layers = [nn.Linear(6, 6), nn.Tanh(), *([nn.BatchNorm1d(6)] if with_buffers else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        return torch.jit.script(nn.Sequential(*layers)) if with_buffers else torch.jit.trace(nn.Sequential(*layers), X)


@pytest.mark.parametrize("held", [False, True])
def test_torchscript_inside(held: bool) -> None:
    module = scripted()
    inner = Around(module)
    fn = inner if held else lambda x: module(x).exp().sin()
    got = []
    for f in (fn, fckpt.remat(fn)):
        x = leaf(X)
        for _ in range(3):  # it is compiled anew at the second call
            module.zero_grad()
            x.grad = None
            f(x).sum().backward()
        got.append([x.grad, *(p.grad for p in module.parameters())])
    assert_equal(got[1], got[0])
    with pytest.raises(fckpt.TraceError, match="TorchScript"):
        fckpt.remat(fn, budget=1.0)(leaf(X))
    with pytest.raises(fckpt.ArgumentTypeError, match=r"TorchScript module in training mode.*'2.running_mean'.*eval"):
        fckpt.remat(Around(scripted(with_buffers=True)))(leaf(X))


def test_a_function_of_torchscript_is_refused_under_a_plan() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function = torch.jit.script(scaled)
    with pytest.raises(fckpt.TraceError, match="TorchScript"):
        fckpt.remat(lambda x: function(x).sin(), budget=1.0)(leaf(X))


def scaled(x: Tensor) -> Tensor:
    return torch.tanh(x).exp()


@pytest.mark.parametrize("options", [{}, *PLANS], ids=["plain", "budget", "policy"])
def test_conjugated_arguments_and_cotangents(options: dict[str, Any]) -> None:
    z, g = (torch.randn(4, 3, dtype=torch.complex64) for _ in range(2))
    fn = lambda z: (z.exp() * z.conj()).sin()
    region = fckpt.remat(fn, **options)
    for cotangent in (g.conj(), g, g.t().contiguous().mH, g.conj()):
        got = []
        for f in (fn, region):
            x = leaf(z)
            f(x.conj()).backward(cotangent)
            got.append(x.grad)
        assert_equal(got[1], got[0])


def test_an_operation_that_mutates_what_is_not_the_functions() -> None:
    held = torch.zeros(4, 6)

    def fn(x: Tensor, out: Tensor) -> Tensor:
        double_into(x.detach(), out)
        return (x.sin() * out).exp().sin()

    with pytest.raises(fckpt.MutationError, match=r"args\[1\] was changed in place"):
        fckpt.remat(fn)(leaf(X), torch.zeros(4, 6))
    with pytest.raises(fckpt.MutationError, match="changed a captured tensor in place"):
        fckpt.remat(lambda x: fn(x, held))(leaf(X))


class Mutating(nn.Module):
    """Has a buffer that an operation overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("held", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        double_into(h.detach(), self.held)
        return (h.sin() * self.held).exp().sin()


@estimated
@under_a_plan
def test_an_operation_that_mutates_a_buffer_under_a_plan(options: dict[str, Any]) -> None:
    plain, region = made(Mutating), fckpt.remat(made(Mutating), **options)
    for _ in range(2):
        assert_equal(gradients(region), gradients(plain))


@estimated
@under_a_plan
def test_an_operation_that_mutates_an_argument_is_refused_under_a_plan(options: dict[str, Any]) -> None:
    def fn(x: Tensor, out: Tensor) -> Tensor:
        double_into(x.detach(), out)
        return (x.sin() * out).exp().sin()

    out = torch.zeros(4, 6)
    with pytest.raises(fckpt.MutationError, match=r"args\[1\] was changed in place.*Return the new value"):
        fckpt.remat(fn, **options)(leaf(X), out)
    assert_equal(out, torch.zeros(4, 6))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@under_a_plan
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("captured", [False, True])
def test_nested_tensors_are_refused_under_a_plan(captured: bool, layout: torch.layout, options: Any) -> None:
    t = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], requires_grad=True, layout=layout)
    region = fckpt.remat((lambda: t.sin()) if captured else (lambda t: t.sin()), **options)
    with pytest.raises(fckpt.TraceError, match="without policy and budget"):
        region(*([] if captured else [t]))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    linear = made(lambda: nn.Linear(6, 6))
    fn = lambda t: torch.relu(linear(torch.relu(linear(t))))
    got = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype, torch says
        for f in (fn, fckpt.remat(fn)):
            parts = [torch.ones(2, 6), torch.ones(3, 6)]
            t = torch.nested.nested_tensor(parts, requires_grad=True, layout=layout)
            torch.nested.to_padded_tensor(f(t), 0.0).sum().backward()
            assert t.grad is not None
            got.append([x.clone() for x in t.grad.unbind()])
    assert_equal(got[1], got[0])


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 6)
    fn = lambda w, x: torch.tanh(torch.sin(x) * w).exp()
    got = []
    for f in (fn, fckpt.remat(fn), fckpt.remat(lambda w, _: fn(w, x))):
        w = torch.ones(6, requires_grad=True)
        f(w, x).sum().backward()
        got.append(w.grad)
    assert_equal(got[1:], [got[0]] * 2)


@under_a_plan
@pytest.mark.parametrize("captured", [False, True])
def test_inference_tensors_are_refused_under_a_plan(captured: bool, options: dict[str, Any]) -> None:
    with torch.inference_mode():
        x = torch.randn(4, 6)
    fn = lambda w, x: torch.tanh(torch.sin(x) * w).exp()
    region = fckpt.remat((lambda w, _: fn(w, x)) if captured else fn, **options)
    with pytest.raises(fckpt.ArgumentValueError, match=r"made in inference mode.*torch.no_grad\(\), or pass its clone"):
        region(torch.ones(6, requires_grad=True), X if captured else x)


@pytest.mark.parametrize("options", [{}, *PLANS], ids=["plain", "budget", "policy"])
def test_jit_trace(options: dict[str, Any]) -> None:
    module = made().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        traced = torch.jit.trace(fckpt.remat(module, **options), leaf(X))
    assert_equal(gradients(module, traced), gradients(module))


@pytest.mark.parametrize("options", [{}, *PLANS], ids=["plain", "budget", "policy"])
def test_jit_trace_of_a_function(options: dict[str, Any]) -> None:
    fn, found = lambda w, x: torch.tanh(x @ w).exp().sin(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(fckpt.remat(fn, **options), (torch.ones(6, 6, requires_grad=True), leaf(X)))
    for f in (traced, fn):
        w = torch.linspace(-1, 1, 36).view(6, 6).requires_grad_()
        found.append(torch.autograd.grad(f(w, X).sum(), w))
    assert_equal(*found)


@under_a_plan
def test_jit_trace_inside_is_refused_under_a_plan(options: dict[str, Any]) -> None:
    module = made().eval()
    region = fckpt.remat(lambda x: torch.jit.trace(module, x.detach())(x).sin(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(fckpt.TraceError, match="without policy and budget takes any function"):
            region(leaf(X))
