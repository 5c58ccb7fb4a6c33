"""Steps whose optimizer, state or frozen parameters change between calls keep their budget, or say that they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from trained import OPTIMIZERS, mlp, squares

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


def regularised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyError, KeyboardInterrupt])
def test_a_loss_that_raises_leaves_what_a_plain_call_leaves(
    kind: type[BaseException], late: bool, accumulate: int
) -> None:
    """Random numbers and statistics of the forward pass up to the error; the next step goes on from there."""

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            raise kind("a bad batch")

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch["x"])
        if batch["bad"] and late:
            out = Bad.apply(out)
        elif batch["bad"]:
            raise kind("a bad batch")
        return out.square().mean()

    found = []
    for planned in (False, True):
        net = regularised()
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        step = fckpt.step(net, optimizer, loss_fn, accumulate=accumulate)

        def plain(batch: Any, net: nn.Module = net, optimizer: optim.Optimizer = optimizer) -> None:
            for part in batch["x"].chunk(accumulate):
                (loss_fn(net, {**batch, "x": part}) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()

        torch.manual_seed(1)
        for i in range(4):
            batch = {"x": torch.arange(24.0).view(6, 4) * 0.1 + i, "bad": i == 1}
            if i == 1:
                with pytest.raises(kind, match="a bad batch"):
                    (step if planned else plain)(batch)
            else:
                (step if planned else plain)(batch)
        if planned:
            with pytest.raises(kind, match="a bad batch"):
                step.plan({"x": torch.ones(6, 4), "bad": True})
        found.append([*net.state_dict().values(), *optimizer.state[net[0].weight].values(), torch.rand(1)])
    assert all(map(torch.equal, *found))


def test_no_state_appears_for_parameters_that_have_none() -> None:
    net = mlp()
    groups = [{"params": [p], "momentum": 0.9 * (i == 0)} for i, p in enumerate(net.parameters())]
    optimizer = optim.SGD(groups, lr=0.1)
    step = fckpt.step(net, optimizer, squares)
    batch = torch.randn(16, 32), torch.randn(16, 32)
    step(batch)
    optimizer.param_groups[1]["momentum"] = 0.9
    step(batch)
    assert list(optimizer.state_dict()["state"]) == [0, 1]


def test_an_update_that_plain_code_refuses_too() -> None:
    """State of Adam that was loaded, or made before the conversion, has another dtype than the parameter."""
    net = mlp()
    optimizer = optim.AdamW(net.parameters())
    step = fckpt.step(net, optimizer, squares)
    step((torch.randn(16, 32), torch.randn(16, 32)))
    net.bfloat16()
    batch = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    with pytest.raises(fckpt.TraceError, match=r"AdamW raises an error when it updates.*Make the optimizer after"):
        step(batch)
    squares(net, batch).backward()
    with pytest.raises(RuntimeError, match="dtype"):
        optimizer.step()
