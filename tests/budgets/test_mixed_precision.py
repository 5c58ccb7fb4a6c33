"""Budgets under autocast: kernels that keep statistics in single precision, and what fckpt itself allocates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(3000), (16, 3000)),
    "layer norm without weights": (lambda: nn.LayerNorm(3000, elementwise_affine=False), (16, 3000)),
    "group norm": (lambda: nn.GroupNorm(2, 8), (8, 8)),
    "batch norm": (lambda: nn.BatchNorm2d(8), (8, 8)),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), (8, 8)),
    "RMS norm": (lambda: nn.RMSNorm(3000), (16, 3000)),
}


def built(name: str) -> tuple[nn.Module, nn.Module, list[nn.Parameter], Callable[[int], Tensor]]:
    """Returns a layer, a normalisation of its results, their parameters, and a function that draws a batch."""
    make, (width, features) = CASES[name]
    norm = make()
    if features > 8:
        layer: nn.Module = nn.Linear(width, features)
        draw = lambda size: torch.randn(size, width)
    else:
        layer = nn.Conv2d(3, features, 3)
        draw = lambda size: torch.randn(size, 3, 12, 12)
    return layer, norm, [*layer.parameters(), *norm.parameters()], draw


def run(fn: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    for parameter in parameters:
        parameter.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        loss = fn(x)
    loss.backward()
    return [loss.detach(), *[p.grad for p in parameters if p.grad is not None]]


@pytest.mark.parametrize("name", CASES)
def test_normalisations_within_their_budgets(name: str) -> None:
    layer, norm, parameters, draw = built(name)

    def fn(x: Tensor) -> Tensor:
        return norm(layer(x)).float().square().mean() * F.mse_loss(layer(x), torch.ones(()).expand_as(layer(x)))

    for size in (4, 7, 12):
        x = draw(size)
        with torch.autocast("cpu", torch.bfloat16):
            least = fckpt.plan(fn, x, budget=1.0).peak_bytes
        region = fckpt.remat(fn, budget=least)
        for _ in range(2):
            assert fckpt.measure_peak(lambda: run(region, x, parameters)).peak_bytes <= least
        assert all(map(torch.equal, run(region, x, parameters), run(fn, x, parameters)))


@pytest.mark.parametrize("name", CASES)
def test_a_budget_for_all_sizes(name: str) -> None:
    """The traces of later sizes are made from one with symbols."""
    layer, norm, parameters, draw = built(name)
    fn = lambda x: norm(layer(x)).float().square().mean()
    region = fckpt.remat(fn, budget=10**9)
    for size in (4, 7, 12, 20):
        x = draw(size)
        with torch.autocast("cpu", torch.bfloat16):
            expected = fckpt.plan(fn, x, budget=10**9).peak_bytes
        run(region, x, parameters)
        assert fckpt.measure_peak(lambda: run(region, x, parameters)).peak_bytes <= expected


def test_what_cannot_be_measured_is_said_and_takes_no_memory(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCKPT_CACHE", str(tmp_path))
    lengths = torch.tensor([5, 15])
    fn = lambda x: torch.segment_reduce(x.sin(), "sum", lengths=lengths, axis=0).exp().sum()
    x = torch.randn(20, 64, requires_grad=True)

    def step(loss: Callable[[Tensor], Tensor]) -> None:
        loss(x).backward()

    step(fn)
    region = fckpt.remat(fn, budget=1.0)

    def first() -> None:
        with pytest.warns(fckpt.BudgetWarning, match=r"only if the estimates are right.*aten.segment_reduce"):
            step(region)

    assert fckpt.measure_peak(first).peak_bytes <= 4 * fckpt.measure_peak(lambda: step(fn)).peak_bytes
