"""What a training step refuses, and why; an error leaves everything as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import nn, optim
from trained import mlp, squares

import fckpt


def refused(model: Any, optimizer: Any, loss_fn: Any = squares, batch: Any = None, **options: Any) -> str:
    """The error of a step that cannot run."""
    data = (torch.randn(4, 8), torch.randn(4, 8)) if batch is None else batch
    with pytest.raises(fckpt.FckptError) as error:
        fckpt.step(model, optimizer, loss_fn, **options)(data)
    return str(error.value)


class Counting(optim.SGD):
    """An optimizer that counts the calls of `zero_grad`."""

    count = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.count += 1
        super().zero_grad(set_to_none)


def test_options_that_a_step_does_not_support() -> None:
    model = nn.Linear(8, 8)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    assert "LBFGS" in refused(model, optim.LBFGS(model.parameters()))
    assert "SparseAdam" in refused(model, optim.SparseAdam(model.parameters()))
    assert "foreach=True" in refused(model, optim.SGD(model.parameters(), lr=0.1, foreach=True))
    assert "its own zero_grad" in refused(model, Counting(model.parameters(), lr=0.1))
    lazy = nn.Sequential(nn.LazyLinear(8))
    assert "a lazy module" in refused(lazy, optim.SGD(lazy.parameters(), lr=0.1))
    assert "not float" in refused(model, 0.1)
    assert "nn.Module" in refused(squares, sgd)
    assert "accumulate" in refused(model, sgd, accumulate=0)
    assert "clip_norm" in refused(model, sgd, clip_norm=-1.0)
    assert "clip_value" in refused(model, sgd, clip_value=0.0)
    assert "which clips first" in refused(model, sgd, clip_norm=1.0, clip_value=1.0)
    assert "needs a budget" in refused(model, sgd, solver="rotor")
    assert "needs a budget" in refused(model, sgd, tile=True)
    handle = sgd.register_step_post_hook(lambda *_: None)
    assert "step hooks" in refused(model, sgd)
    handle.remove()
    sgd.step = lambda: None  # type: ignore[method-assign]
    assert "was replaced" in refused(model, sgd)


def test_parameters_that_a_step_cannot_update() -> None:
    model = nn.Linear(8, 8)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    squares(model, (torch.randn(4, 8), torch.randn(4, 8))).backward()
    assert "zero_grad" in refused(model, sgd)
    sgd.zero_grad()
    handle = model.weight.register_hook(lambda g: g)
    assert "weight has a hook" in refused(model, sgd)
    handle.remove()
    flat = model.weight.detach()
    assert "shares memory" in refused(model, sgd, lambda m, b: squares(m, b) + flat.sum())
    assert "in no group" in refused(model, optim.SGD([model.weight], lr=0.1), clip_norm=1.0)
    twice = nn.Parameter(model.weight.data)
    assert "share memory" in refused(model, optim.SGD([model.weight, twice], lr=0.1))


def test_losses_and_batches_that_a_step_cannot_use() -> None:
    model = nn.Linear(8, 8)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    assert "one number" in refused(model, sgd, lambda m, b: m(b[0]))
    assert "does not require grad" in refused(model, sgd, lambda m, b: squares(m, b).detach())
    before = [p.detach().clone() for p in model.parameters()]
    for wrapped in (
        lambda m, b: (squares(m, b), b),
        lambda m, b: {"loss": squares(m, b)},
        lambda m, b: [squares(m, b)],
    ):
        assert "must return the loss alone" in refused(model, sgd, wrapped)
    assert_equal([*model.parameters()], before)
    assert "requires grad" in refused(model, sgd, batch=(torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)))
    assert "first dimension" in refused(model, sgd, batch=(torch.randn(4, 8), torch.randn(8)), accumulate=2)
    outside = torch.ones(8, requires_grad=True) * 2
    assert "other code computed" in refused(model, sgd, lambda m, b: (squares(m, b) * outside).sum())
    with torch.no_grad():
        assert "no_grad" in refused(model, sgd)


def test_an_error_leaves_everything_as_it_was() -> None:
    model = mlp()
    optimizer = optim.Adam(model.parameters())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fckpt.BudgetError):
        fckpt.step(model, optimizer, squares, budget="1KB")((torch.randn(64, 32), torch.randn(64, 32)))
    assert_equal(model.state_dict(), before)
    assert optimizer.state_dict()["state"] == {}
