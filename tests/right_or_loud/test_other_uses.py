"""Operands that a planned call uses several times, and that the caller uses, too: plain's bits, or a warning."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import Tensor

import fckpt
from fckpt import measure_peak

Fn = Callable[[Tensor, Tensor], Tensor]

LOUD = "uses .* more than once, and .* is used outside of the call as well"


def several(x: Tensor, w: Tensor) -> Tensor:
    """Uses both operands several times."""
    return torch.tanh(x @ w) * torch.sin(x) + (x * 0.3) @ w


def once(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


PROGRAMS: dict[str, tuple[Fn, Callable[[Fn, Tensor, Tensor], Tensor], bool]] = {
    # A function, a program that calls it, and whether others contribute to a sum before the call does.
    "nothing else": (several, lambda f, x, w: f(x, w), False),
    "a residual": (several, lambda f, x, w: x + f(x, w), True),
    "a residual that is used later": (several, lambda f, x, w: f(x, w) + torch.cos(x), True),
    "once inside": (once, lambda f, x, w: x + f(x, w) + torch.cos(x), False),
    "before the call": (several, lambda f, x, w: torch.cos(x) + f(x, w), False),
    "two calls": (several, lambda f, x, w: f(x, w) - f(x * 2, w), True),
    "two calls, each once": (once, lambda f, x, w: f(x, w) - f(x * 2, w), False),
    "a penalty": (several, lambda f, x, w: f(x, w).sum() + w.square().sum(), True),
}


def test_views_of_an_operand_among_the_results() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x.flip(0)[::2].sin(), x[..., None, :].sum(-1), x[[2, 0]], x[-1], x[None], x.unfold(0, 2, 1)

    region = fckpt.remat(fn, budget=1.0)
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for run in (fn, region):
        x = start.clone().requires_grad_()
        loss = sum(((i + 1.3) * part).sin().sum() for i, part in enumerate(run(x)))
        with pytest.warns(fckpt.GradientWarning, match=LOUD) if run is region else contextlib.nullcontext():
            loss.backward()  # type: ignore[union-attr]  # the sum of no tensors would be an int
        found.append(x.grad)
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6)


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 64, generator=generator) / 8, torch.randn(64, 64, generator=generator) / 8


def gradients(program: Callable[[Tensor, Tensor], Tensor], how: str) -> list[Tensor]:
    first, w = (t.requires_grad_() for t in operands())
    x = first if how == "leaves" else first * 1.5
    loss = program(x, w).sum()
    if how == "grad":
        return [*torch.autograd.grad(loss, [x, w])]
    loss.backward()
    assert not first._backward_hooks and not w._backward_hooks and not x._backward_hooks
    return [first.grad, w.grad]


@pytest.mark.parametrize("how", ["leaves", "computed", "grad"])
@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": fckpt.policies.nothing_saveable}, {}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bits_of_plain_or_a_warning(name: str, options: dict[str, Any], how: str) -> None:
    fn, program, warned = PROGRAMS[name]
    region = fckpt.remat(fn, **options)
    expected = gradients(lambda x, w: program(fn, x, w), how)
    for call in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = gradients(lambda x, w: program(region, x, w), how)
        texts = [str(w.message) for w in caught]
        if options and warned and call == 0:
            with pytest.warns(fckpt.GradientWarning, match=LOUD):
                for w in caught:
                    warnings.warn(w.message, stacklevel=1)
            assert len(texts) == 1, texts
        else:
            assert not texts, texts
        if not options or not warned:
            assert_equal(found, expected)
        else:
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)  # another order of the same sum


def test_hooks_of_the_caller_run_once_and_may_change_gradients() -> None:
    region = fckpt.remat(several, budget=1.0)
    x, w = (t.requires_grad_() for t in operands())
    seen: list[str] = []
    w.register_hook(lambda grad: seen.append("w") or grad * 2)
    for _ in range(2):
        region(x, w).sum().backward()
    assert seen == ["w", "w"]
    plain = [t.requires_grad_() for t in operands()]
    for _ in range(2):
        several(*plain).sum().backward()
    assert_equal([x.grad, w.grad / 2], [t.grad for t in plain])


def test_watching_takes_no_memory() -> None:
    x, w = (t.requires_grad_() for t in operands())
    loss = lambda x, w: several(x, w).sum()
    region = fckpt.remat(loss, budget=1.0)
    for _ in range(2):
        x.grad = w.grad = None
        region(x, w).backward()
    x.grad = w.grad = None
    assert measure_peak(lambda: region(x, w).backward()).peak_bytes == fckpt.plan(loss, x, w, budget=1.0).peak_bytes


class Tied(torch.nn.Module):
    """An embedding whose weight also scores the words, and a linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(16, 8)
        self.mix = torch.nn.Linear(8, 8)

    def forward(self, words: Tensor) -> Tensor:
        h = torch.tanh(self.mix(torch.tanh(self.mix(self.words(words)))))
        return torch.nn.functional.linear(h, self.words.weight).logsumexp(-1).sum()


@pytest.mark.parametrize("penalty", [True, False])
def test_modules_that_share_weights(penalty: bool) -> None:
    torch.manual_seed(0)
    net, words = Tied(), torch.arange(12)
    region = fckpt.remat(net, budget=1.0)

    def run(fn: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        net.zero_grad()
        loss = fn(words)
        (loss + sum(p.square().sum() for p in net.parameters()) if penalty else loss).backward()
        return [p.grad for p in net.parameters()]

    want = run(net)
    with pytest.warns(fckpt.GradientWarning, match=LOUD) if penalty else contextlib.nullcontext():
        got = run(region)
    if not penalty:
        assert_equal(got, want)


def _outside(loss: Callable[[Any, Tensor], Tensor], weights: Any, words: Tensor) -> Tensor:
    return loss(weights, words) + sum(w.exp().sum() for w in weights.values())


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_other_uses_under_torch_func(outside: bool, batched: bool) -> None:
    if batched and torch.torch_version.TorchVersion(torch.__version__) < (2, 12):
        pytest.skip("such a vmap is not planned on torch 2.11")
    torch.manual_seed(0)
    net = Tied()
    weights = {name: p.detach() for name, p in net.named_parameters()}
    words = torch.arange(12).view(3, 4) if batched else torch.arange(12)
    loss = lambda weights, words: torch.func.functional_call(net, weights, (words,))
    region = fckpt.remat(loss, budget=1.0)

    def run(fn: Callable[[Any, Tensor], Tensor]) -> dict[str, Tensor]:
        whole = (lambda weights, words: _outside(fn, weights, words)) if outside else fn
        take = torch.func.grad(whole)
        return (torch.func.vmap(take, in_dims=(None, 0)) if batched else take)(weights, words)

    want = run(loss)
    with pytest.warns(fckpt.GradientWarning, match=LOUD) if outside else contextlib.nullcontext():
        got = run(region)
    if not outside:
        assert_equal(got, want)
