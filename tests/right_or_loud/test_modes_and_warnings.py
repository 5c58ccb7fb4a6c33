"""Function modes, a default device, warnings and recorded graphs around and inside planned functions."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

import fckpt

pytestmark = pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
W = torch.randn(8, 8, requires_grad=True)
X = torch.randn(4, 8)


class Doubling(TorchFunctionMode):
    """Doubles what `torch.tanh` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.tanh(ctx.saved_tensors[0])


def _plain(x: Tensor) -> Tensor:
    return torch.tanh(x @ W).sum()


def _checkpointed(x: Tensor) -> Tensor:
    return torch_checkpoint.checkpoint(_plain, x, use_reentrant=False)


def _reentrant(x: Tensor) -> Tensor:
    return torch_checkpoint.checkpoint(_plain, x, use_reentrant=True)


def _own_formula(x: Tensor) -> Tensor:
    return Tanh.apply(x @ W).sum()


def _inside(x: Tensor) -> Tensor:
    with Doubling():
        return _checkpointed(x) + _own_formula(x)


def _refused(x: Tensor) -> Tensor:
    zlib.crc32(b"a")
    return _plain(x)


def _step(fn: Callable[[Tensor], Tensor], **mode: Any) -> tuple[Tensor, ...]:
    x = X.clone().requires_grad_()
    if mode:
        with mode["mode"]():
            loss = fn(x)
    else:
        loss = fn(x)
    W.grad = None
    loss.backward()
    assert x.grad is not None and W.grad is not None
    return loss.detach(), x.grad, W.grad


def _check(fn: Callable[[Tensor], Tensor], *modes: Any) -> None:
    planned = fckpt.remat(fn, budget=1.0)
    for mode in modes:
        given = {} if mode is None else {"mode": mode}
        want = _step(fn, **given)
        try:
            got = _step(planned, **given)
        except fckpt.TraceError:
            continue
        assert all(map(torch.equal, got, want))


@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")  # where the backward pass cannot be traced
@pytest.mark.parametrize("fn", [_plain, _checkpointed, _reentrant, _own_formula, _inside, _refused])
def test_a_function_mode_sees_what_it_sees_in_plain(fn: Callable[[Tensor], Tensor]) -> None:
    _check(fn, Doubling, None, Doubling)


@pytest.mark.parametrize("fn", [_plain, _refused])
def test_a_method_of_tensors_that_was_replaced_runs_once(
    fn: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda x: original(x) * 2)
    _check(fn, None, None)


@pytest.mark.parametrize("fn", [_plain, _checkpointed])
def test_a_default_device_does_not_prevent_a_capture(fn: Callable[[Tensor], Tensor]) -> None:
    planned = fckpt.remat(fn, budget=1.0)
    with torch.device("cpu"):
        assert torch.equal(planned(X), fn(X))
    assert fckpt.stats(planned).captures == 1


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_tensors_are_made_on_the_default_device(device: Any) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        made = torch.zeros(3), torch.arange(4), torch.tensor(1.0), torch.ones(2, device="cpu"), torch.full((2,), 1.0)
        return (x @ W).sum(), *made, torch.zeros_like(x)

    planned = fckpt.remat(fn, budget=1.0)
    for again in (None, device, None):
        with torch.device(again) if again is not None else warnings.catch_warnings():
            got, want = planned(X), fn(X)
        assert all(map(torch.equal, got, want)) and [t.device for t in got] == [t.device for t in want]


def _warns(x: Tensor, mask: Tensor, say: bool) -> Tensor:
    if say:
        warnings.warn("an old name", FutureWarning, stacklevel=2)
    return (x @ W).sum() if mask.all() else (x @ W).sin().sum()


def test_a_warning_is_given_when_the_function_is_captured() -> None:
    planned = fckpt.remat(_warns, budget=1.0)
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.warns(FutureWarning, match="an old name"):
        assert torch.equal(planned(X, mask, True), (X @ W).sum())
    assert fckpt.stats(planned).captures == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(planned(X, mask, True), (X @ W).sum())
        assert torch.equal(planned(X, mask, False), (X @ W).sum())


def test_a_warning_that_is_an_error_is_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(FutureWarning):
            fckpt.remat(_warns, budget=1.0)(X, torch.ones(3, dtype=torch.bool), True)


def test_the_obstacle_to_a_capture_is_named_before_what_follows_from_it() -> None:
    def fn(x: Tensor, mask: Tensor) -> Tensor:
        zlib.crc32(b"a")
        return (x @ W).sum() if mask.all() else (x @ W).sin().sum()

    with pytest.raises(fckpt.TraceError, match=r"(?s)^the function cannot be captured.*crc32.*depend on data"):
        fckpt.remat(fn, budget=1.0)(X, torch.ones(3, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:.*jit.trace.* is deprecated:DeprecationWarning")
def test_a_recorded_region_says_that_its_budget_is_not_kept() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    planned = fckpt.remat(net, budget=1.0)
    with pytest.warns(fckpt.BudgetWarning, match=r"torch\.jit\.trace"):
        traced = torch.jit.trace(planned, X)
    assert torch.equal(traced(X), net(X))
    assert fckpt.stats(planned).fallbacks["recorded"] >= 1


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "normalize": F.normalize,
    "softmax": lambda h: F.softmax(h, -1),
    "layer_norm": lambda h: F.layer_norm(h, (8,)),
    "mse_loss": lambda h: F.mse_loss(h, X),
    "cross_entropy": lambda h: F.cross_entropy(h, torch.arange(4)),
    "pad": lambda h: F.pad(h, (1, 1)),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "linear": nn.Linear(8, 8),
    "scaled_dot_product_attention": lambda h: ATTENTION(h[None], h[None], h[None], need_weights=False)[0],
}
ATTENTION = nn.MultiheadAttention(8, 2)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_torch_that_is_replaced(name: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper around it runs once, and a plan sees that it has come or gone."""

    def fn(x: Tensor) -> Tensor:
        if refused:
            zlib.crc32(b"a")
        called = FUNCTIONS[name]
        return (called if isinstance(called, nn.Module) or called.__name__ == "<lambda>" else getattr(F, name))(x @ W)

    planned = fckpt.remat(fn, budget=1.0)
    assert torch.equal(planned(X), fn(X))
    original = getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **kwargs: original(*args, **kwargs) * 3)
    assert torch.equal(planned(X), fn(X))
    assert torch.equal(fckpt.remat(fn, budget=1.0)(X), fn(X))
    monkeypatch.undo()
    assert torch.equal(planned(X), fn(X))


def _bound(x: Tensor) -> Any:
    return (x @ W).sum


HIDDEN: dict[str, Callable[[Tensor], Any]] = {
    "partial": lambda x: functools.partial(torch.mul, x @ W),
    "closure": lambda x: (lambda y: lambda: y)(x @ W),
    "method": _bound,
    "set": lambda x: {x @ W},
    "subclass": lambda x: Pair((x @ W, 1)),
}


class Pair(tuple[Any, ...]):
    """Not a node of trees of tensors."""


@pytest.mark.parametrize("name", HIDDEN)
def test_a_tensor_that_an_output_hides(name: str) -> None:
    def fn(x: Tensor) -> Any:
        zlib.crc32(b"a")
        return HIDDEN[name](x)

    with pytest.raises(fckpt.FckptError, match=r"holds a tensor|holds tensors"):
        fckpt.remat(fn, budget=1.0)(X)
