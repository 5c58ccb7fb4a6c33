"""Planned functions under `vmap`: planned as functions of the batches, once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, seeded
from torch import Tensor
from torch.func import grad, vmap

import fckpt
from fckpt import policies
from fckpt._planned import tracing
from fckpt.report.table import Residual, residuals

P = [torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8).roll(k) for k in range(3)]
X = torch.linspace(-2, 2, 512, dtype=torch.float64).reshape(64, 8)
ENSEMBLE = [torch.stack([w, w.t(), w.cos()]) for w in P]
Fn = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCKPT_CACHE", str(tmp_path))


def block(p: list[Tensor], x: Tensor) -> Tensor:
    for w in p:
        x = torch.tanh(x @ w)
    return F.dropout(x, 0.2).sin()


def backward(f: Fn) -> list[Tensor]:
    p = [w.clone().requires_grad_() for w in P]
    vmap(lambda x: f(p, x), randomness="different")(X).sum().backward()
    return [w.grad for w in p if w.grad is not None]


WAYS: dict[str, Callable[[Fn], Any]] = {
    "backward": backward,
    "grad": lambda f: grad(lambda p: vmap(lambda x: f(p, x), randomness="different")(X).sum())(P),
    "same randomness": lambda f: grad(lambda p: vmap(lambda x: f(p, x), randomness="same")(X).sum())(P),
    "ensemble": lambda f: grad(lambda p: vmap(lambda p: f(p, X), randomness="different")(p).sum())(ENSEMBLE),
    "two levels": lambda f: grad(
        lambda p: vmap(lambda p: vmap(lambda x: f(p, x), randomness="different")(X), randomness="different")(p).sum()
    )(ENSEMBLE),
    "closed over": lambda f: grad(lambda c: vmap(lambda x: f(P, x * c), randomness="different")(X).sum())(P[0][0]),
    "second dimension": lambda f: grad(lambda p: vmap(lambda x: f(p, x), 1, 1, randomness="different")(X.t()).sum())(P),
    # Planned as a whole is not what happens here; right it must be.
    "per sample": lambda f: vmap(grad(lambda p, x: f(p, x).sum()), (None, 0), randomness="different")(P, X),
    "no gradient": lambda f: vmap(lambda x: f(P, x), randomness="different")(X),
}


@pytest.mark.parametrize("options", [{"policy": policies.dots_saveable}, {"budget": 0.8}], ids=["policy", "budget"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_bitwise_those_of_the_plain_function(way: str, options: dict[str, Any]) -> None:
    if way in ("per sample", "no gradient") and "budget" in options:
        options = {"budget": 1.0}  # the results alone are nearly all of the plain peak
    region = fckpt.remat(block, **options)
    for _ in range(2):
        actual, state = seeded(lambda: WAYS[way](region))
        expected, plain_state = seeded(lambda: WAYS[way](block))
        assert_equal(actual, expected)
        assert torch.equal(state, plain_state)


def test_a_batched_call_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    trace = tracing.trace
    monkeypatch.setattr(tracing, "trace", lambda *args, **kw: (traces.append(1), trace(*args, **kw))[1])
    region = fckpt.remat(block, policy=policies.dots_saveable)
    for _ in range(3):
        WAYS["two levels"](region)
    assert len(traces) == 1
    WAYS["ensemble"](region)
    assert len(traces) == 2


def saved(region: Any) -> list[list[Residual]]:
    """The intermediates that each program of a region saves."""
    captures = region._fckpt_region.planner.captures
    programs = [made.likely() for _, known in captures for made in known.values()]
    return [[row for row in residuals(p.graph, p.schedule) if row.kind == "intermediate"] for p in programs]


def test_a_policy_means_the_same_under_vmap() -> None:
    """A product is one of matrices, whatever `vmap` makes of it."""
    policy = policies.dots_with_no_batch_dims_saveable
    region = fckpt.remat(block, policy=policy)
    WAYS["grad"](region)
    WAYS["ensemble"](region)
    assert [len(rows) for rows in saved(region)] == [3, 3]


def named(w: Tensor, x: Tensor) -> Tensor:
    h = fckpt.checkpoint_name(torch.tanh(x @ w), "hidden")
    return fckpt.checkpoint_name((h @ w).exp(), "out").sin().sum()


def named_batch(w: Tensor, xs: Tensor) -> Tensor:
    return vmap(lambda x: named(w, x))(xs).sum()


NAMES: dict[str, tuple[policies.Policy, list[str]]] = {
    "the first": (policies.save_only_these_names("hidden"), ["hidden"]),
    "the second": (policies.save_only_these_names("out"), ["out"]),
    "both": (policies.save_only_these_names("hidden", "out"), ["hidden", "out"]),
    "none": (policies.nothing_saveable, []),
}


@pytest.mark.parametrize("which", NAMES)
def test_a_policy_saves_values_by_name_under_vmap_of_grad(which: str) -> None:
    policy, names = NAMES[which]
    region = fckpt.remat(named, policy=policy)
    found = [vmap(grad(f), (None, 0))(P[0], X) for f in (region, region, named)]
    assert_equal(found[:2], [found[2]] * 2)
    (rows,) = saved(region)
    assert [(row.name, row.shape) for row in rows] == [(name, (64, 8)) for name in names]


@pytest.mark.parametrize("which", NAMES)
def test_a_policy_saves_values_that_are_named_within_a_vmap_inside(which: str) -> None:
    policy, names = NAMES[which]
    region, w = fckpt.remat(named_batch, policy=policy), P[0].clone().requires_grad_()
    found = [torch.autograd.grad(f(w, X), w) for f in (region, region, named_batch)]
    assert_equal(found[:2], [found[2]] * 2)
    rows = [row for row in fckpt.saved_residuals(region, w, X) if row.kind == "intermediate"]
    assert [(row.name, row.shape) for row in rows] == [(name, (64, 8)) for name in names]
    assert fckpt.stats(region).fallbacks == {}


def test_closed_over_parameters_get_their_gradient() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Tensor]:
        p = [w.clone().requires_grad_() for w in P]
        vmap(wrap(lambda x: block(p, x)), randomness="different")(X).sum().backward()
        return [w.grad for w in p if w.grad is not None]

    actual, _ = seeded(lambda: run(lambda fn: fckpt.remat(fn, policy=policies.nothing_saveable)))
    expected, _ = seeded(lambda: run(lambda fn: fn))
    assert len(actual) == 3
    assert_equal(actual, expected)


def reads_sizes(x: Tensor) -> Tensor:
    if x.shape[0] > 3:
        return (x.sin() * x.shape[0]).sum()
    return (torch.cat([x.cos(), x], x.dim() - 1) * x.dim()).exp().sum()


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
def test_sizes_that_a_function_reads_are_those_that_it_sees() -> None:
    """One region meets tensors of other sizes, batched and not: what it captured for some is not used for others."""
    region = fckpt.remat(reads_sizes, budget=0.9)
    transforms: list[Callable[[Any], Any]] = [
        grad,
        lambda f: vmap(grad(f)),
        lambda f: grad(lambda x: vmap(f)(x).sum()),
        lambda f: grad(lambda x: vmap(f, in_dims=-1)(x).sum()),
        lambda f: grad(lambda x: vmap(vmap(f))(x.expand(2, *x.shape)).sum()),
    ]
    for shape in ((3, 4), (4, 3), (2, 5), (3, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        for transform in transforms:
            assert torch.equal(transform(region)(x), transform(reads_sizes)(x))
    captured = fckpt.stats(region).captures
    for transform in transforms:
        transform(region)(x)
    assert fckpt.stats(region).captures == captured  # what was captured holds


@pytest.mark.parametrize(
    ("fn", "loud"),
    [
        (lambda x: (x * 2 + 1).relu() * x, False),
        (lambda x: x.as_strided((3, 2), (5, 1)).exp(), True),  # its gradient is written into zeros
    ],
)
def test_batches_of_cotangents_that_reach_a_write_in_place(fn: Callable[[Tensor], Tensor], loud: bool) -> None:
    planned, x = fckpt.remat(fn, budget=1.0), torch.randn(3, 5, requires_grad=True)
    out = planned(x)
    out.backward(torch.randn(out.t().shape).t())  # the gradient is copied into the layout of the leaf
    cotangents = torch.randn(4, *out.shape)
    out = planned(x)
    with pytest.warns(fckpt.BudgetWarning, match="batched") if loud else contextlib.nullcontext():
        (found,) = torch.autograd.grad(out, x, cotangents, is_grads_batched=True)
    assert torch.equal(found, torch.autograd.grad(fn(x), x, cotangents, is_grads_batched=True)[0])


class TwoResults(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layers(x)
        return h.sin(), h.tanh().sum(0)


@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
def test_batched_cotangents_of_a_module_that_draws_and_has_statistics() -> None:
    found = []
    for wrap in (lambda module: module, lambda module: fckpt.remat(module, budget=1.0)):
        torch.manual_seed(0)
        module = TwoResults()
        x = torch.randn(6, 4, requires_grad=True)
        _, output = wrap(module)(x)
        (grad,) = torch.autograd.grad(output, x, torch.eye(8), is_grads_batched=True)
        found.append((grad, *module.buffers(), torch.get_rng_state()))
    assert all(map(torch.equal, *found))
