"""Steps whose optimizer, state or frozen parameters change between calls keep their budget, or say that they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_step import OPTIMIZERS, mlp, squares
from torch import nn, optim

import fckpt
from fckpt import measure_peak


@pytest.mark.parametrize(
    ("name", "changed"),
    [("SGD", {"maximize": True}), ("SGD", {"weight_decay": 0.1}), ("RMSprop", {"weight_decay": 0.1})],
)
def test_an_option_that_makes_updates_take_more(name: str, changed: dict[str, Any]) -> None:
    """The operations stay the same; the memory of the updates does not."""
    torch.manual_seed(0)
    net = mlp()
    optimizer = getattr(optim, name)(net.parameters(), lr=0.1)
    batch = torch.randn(16, 32), torch.randn(16, 32)
    budget = fckpt.step(net, optimizer, squares, budget=1.0, solver="greedy").plan(batch).peak_bytes
    step = fckpt.step(net, optimizer, squares, budget=budget, solver="greedy")
    step(batch)
    optimizer.param_groups[0].update(changed)
    try:
        step(batch)
    except fckpt.BudgetError as error:
        assert error.least_bytes > budget
    else:
        assert measure_peak(lambda: step(batch)).peak_bytes <= budget
        assert measure_peak(lambda: step(batch)).peak_bytes == step.plan(batch).peak_bytes


def test_the_budgets_of_microbatches_are_found_again_for_another_loss() -> None:
    torch.manual_seed(0)
    net = mlp(8, 16)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    batch = torch.randn(512, 16), torch.randn(512, 16)
    step = fckpt.step(net, optimizer, squares, budget=0.6, solver="greedy", accumulate=4)
    step(batch)
    net[:12].requires_grad_(False)
    step(batch)
    fresh = fckpt.step(net, optimizer, squares, budget=0.6, solver="greedy", accumulate=4)
    fresh(batch)
    peaks = [measure_peak(lambda one=one: one(batch)).peak_bytes for one in (step, fresh)]
    assert peaks[0] == peaks[1]


def test_state_of_another_type_than_the_parameters() -> None:
    torch.manual_seed(0)
    net = mlp()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(16, 32), torch.randn(16, 32)
    step = fckpt.step(net, optimizer, squares, budget=1.0, solver="greedy")
    step(batch)
    net.double()
    batch = batch[0].double(), batch[1].double()
    step(batch)
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert measure_peak(lambda: step(batch)).peak_bytes == step.plan(batch).peak_bytes


def test_the_least_bytes_of_microbatches_are_enough_for_the_first_updates() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    batch = torch.randn(5, 16), torch.randn(5, 16)
    make = lambda budget: fckpt.step(net, OPTIMIZERS["sgd"](net.parameters()), squares, budget=budget, accumulate=3)
    with pytest.raises(fckpt.BudgetError) as caught:
        make(1.0).plan(batch)
    make(caught.value.least_bytes)(batch)
