"""The table of docs/from-pytorch-and-jax.md: what works under `torch.utils.checkpoint` and under fckpt."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pages import ROOT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fckpt

PAGE = ROOT / "docs" / "from-pytorch-and-jax.md"

Fn = Callable[..., Any]
Wrap = Callable[[Fn], Fn]

WAYS: dict[str, Wrap] = {
    "`torch.utils.checkpoint`, reentrant": lambda fn: lambda *a, **k: checkpoint(fn, *a, use_reentrant=True, **k),
    "non-reentrant": lambda fn: lambda *a, **k: checkpoint(fn, *a, use_reentrant=False, **k),
    "`fckpt.remat`": fckpt.remat,
}
PROBES: dict[str, Callable[[Wrap], list[Tensor]]] = {}


def probe(row: str) -> Any:
    def register(fn: Any) -> Any:
        PROBES[row] = fn
        return fn

    return register


def data() -> tuple[Tensor, Tensor]:
    """An input and a weight that both require grad, so that the reentrant checkpoint has its way."""
    return torch.randn(4, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)


def two_layers(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ w) @ w)


def by_backward(fn: Fn) -> list[Any]:
    x, w = data()
    fn(x, w).sum().backward()
    return [x.grad, w.grad]


@probe("`.backward()`")
def _(wrap: Wrap) -> Any:
    return by_backward(wrap(two_layers))


@probe("`torch.autograd.grad`")
def _(wrap: Wrap) -> Any:
    x, w = data()
    return torch.autograd.grad(wrap(two_layers)(x, w).sum(), (x, w))


@probe("second derivative, `create_graph=True`")
def _(wrap: Wrap) -> Any:
    x, w = data()
    (g,) = torch.autograd.grad(wrap(two_layers)(x, w).sum(), w, create_graph=True)
    return torch.autograd.grad(g.square().sum(), (x, w))


@probe("`torch.func.grad`")
def _(wrap: Wrap) -> Any:
    x, w = (t.detach() for t in data())
    return [torch.func.grad(lambda w: wrap(two_layers)(x, w).sum())(w)]


@probe("`torch.func.vmap` of `torch.func.grad`")
def _(wrap: Wrap) -> Any:
    x, w = (t.detach() for t in data())
    return [torch.func.vmap(torch.func.grad(lambda w, x: wrap(two_layers)(x, w).sum()), (None, 0))(w, x)]


@probe("`torch.func.jvp`")
def _(wrap: Wrap) -> Any:
    x, w = (t.detach() for t in data())
    return torch.func.jvp(lambda w: wrap(two_layers)(x, w), (w,), (w,))


@probe("parameters that a module holds, data that requires no grad")
def _(wrap: Wrap) -> Any:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last(wrap(lambda x: torch.tanh(first(x)))(torch.randn(4, 3))).sum().backward()
    return [p.grad for p in (*first.parameters(), *last.parameters())]


@probe("keyword arguments")
def _(wrap: Wrap) -> Any:
    x, w = data()
    wrap(lambda x, *, w: two_layers(x, w))(x, w=w).sum().backward()
    return [x.grad, w.grad]


@probe("dropout inside")
def _(wrap: Wrap) -> Any:
    return by_backward(wrap(lambda x, w: torch.tanh(F.dropout(torch.tanh(x @ w)) @ w)))


@probe("Python's `random` inside")
def _(wrap: Wrap) -> Any:
    return by_backward(wrap(lambda x, w: torch.tanh(torch.tanh(x @ w) * random.random()) @ w))


@probe("a `torch.Generator` of one's own inside")
def _(wrap: Wrap) -> Any:
    own = torch.Generator().manual_seed(3)
    return by_backward(wrap(lambda x, w: torch.tanh(torch.tanh(x @ w) * torch.rand(3, generator=own)) @ w))


@probe("BatchNorm's statistics")
def _(wrap: Wrap) -> Any:
    norm = nn.BatchNorm1d(3)
    by_backward(wrap(lambda x, w: torch.tanh(norm(torch.tanh(x @ w)) @ w)))
    return list(norm.buffers())


@probe("`rrelu` as the last operation")
def _(wrap: Wrap) -> Any:
    return by_backward(wrap(lambda x, w: F.rrelu(torch.tanh(x @ w) @ w, training=True)))


@probe("a closed-over tensor changed between forward and backward")
def _(wrap: Wrap) -> Any:
    x, w = data()
    shift = torch.ones(3)
    y = wrap(lambda x, w: torch.tanh(torch.tanh(x @ w) + shift) @ w)(x, w)
    shift.mul_(2)
    y.sum().backward()
    return [x.grad, w.grad]


@probe("a function that computes something else the second time")
def _(wrap: Wrap) -> Any:
    calls = []

    def fn(x: Tensor, w: Tensor) -> Tensor:
        calls.append(1)
        h = torch.sin(x @ w) if len(calls) == 1 else torch.cos(x @ w)
        return torch.tanh(h @ w)

    return by_backward(wrap(fn))


def outcome(run: Callable[[Wrap], Any], wrap: Wrap) -> list[Any] | None:
    torch.manual_seed(0)
    random.seed(0)
    with warnings.catch_warnings():
        # Torch warns of one of the failures that the table shows, and of nothing else here.
        warnings.simplefilter("ignore")
        try:
            return list(run(wrap))
        except (RuntimeError, ValueError):
            return None


def verdict(run: Callable[[Wrap], Any], wrap: Wrap) -> str:
    expected = outcome(run, lambda fn: fn)
    assert expected is not None and all(t is not None for t in expected), "the plain function must work"
    got = outcome(run, wrap)
    if got is None:
        return "error"
    equal = all(a is not None and torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    return "yes" if equal else "wrong"


def table() -> dict[str, dict[str, str]]:
    """The rows of the page's comparison."""
    section = PAGE.read_text().partition("\n## fckpt and torch.utils.checkpoint\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    header, _, *rows = lines
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def test_every_row_has_a_probe() -> None:
    assert list(table()) == list(PROBES)
    assert all(list(row) == list(WAYS) for row in table().values())


@pytest.mark.parametrize("row", PROBES)
def test_comparison(row: str) -> None:
    assert {way: verdict(PROBES[row], wrap) for way, wrap in WAYS.items()} == table()[row]
