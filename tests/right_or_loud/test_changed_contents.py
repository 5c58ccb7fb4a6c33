"""Memory that is overwritten between forward and backward without autograd's knowledge, through `.data` or NumPy.

The plain function has saved what it computed from that memory. A plan that recomputes from it says so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import assert_equal
from planned import least_bytes_of
from torch import Tensor, nn

import fckpt
from fckpt._call.contents import contents

BUDGETS = [1.0, 0.8, "least", fckpt.policies.nothing_saveable]
RECOMPUTES = BUDGETS[2:]
"""The budgets whose plans recompute everything."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.Tanh())])


def planned(fn: Callable[..., Tensor], budget: object, *args: object) -> Callable[..., Tensor]:
    if isinstance(budget, (float, int)):
        return fckpt.remat(fn, budget=budget)
    if budget == "least":
        return fckpt.remat(fn, budget=least_bytes_of(fn, *args))
    return fckpt.remat(fn, policy=budget)  # type: ignore[arg-type]  # a policy


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    net.zero_grad()
    loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def right_or_loud(net: nn.Module, found: Callable[[], Tensor], expected: Callable[[], Tensor]) -> bool:
    """Whether the gradients are those of plain; otherwise the error must say what was overwritten."""
    wanted = gradients(net, expected())
    try:
        assert_equal(gradients(net, found()), wanted)
    except fckpt.MutationError as error:
        assert "has been overwritten between forward and backward" in str(error)
        return False
    return True


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gaps", "small"])
def test_a_buffer_of_numpy_that_is_used_again(budget: object, layout: str) -> None:
    net = network()
    shape = {"contiguous": (256, 16), "transposed": (16, 256), "gaps": (256, 32), "small": (8, 16)}[layout]
    buffer = np.zeros(shape, dtype=np.uint8)

    def observed() -> Tensor:
        seen = torch.from_numpy(buffer)
        return {"transposed": seen.T, "gaps": seen[:, ::2]}.get(layout, seen)

    def loss(seen: Tensor) -> Tensor:
        return net(seen.float() / 255 - 0.5).logsumexp(1).sum()

    if layout == "small" and budget == 0.8:
        budget = 1.0  # gradients are most of the peak
    region = planned(loss, budget, observed())

    def steps(fn: Callable[..., Tensor]) -> Tensor:
        rng, losses = np.random.default_rng(0), []
        for _ in range(3):
            buffer[...] = rng.integers(0, 255, buffer.shape)
            losses.append(fn(observed()))
        return torch.stack(losses).sum()

    right = [right_or_loud(net, lambda: steps(region), lambda: steps(loss)) for _ in range(2)]
    if budget in RECOMPUTES:
        assert not all(right)
    copied = lambda fn: lambda seen: fn(seen.clone())
    assert right_or_loud(net, lambda: steps(copied(region)), lambda: steps(copied(loss)))


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("how", ["scaled", "assigned", "biases", "vector", "same"])
def test_parameters_with_other_data(budget: object, how: str) -> None:
    net, x = network(), torch.randn(256, 16)
    region = planned(net, budget, x)
    start = [p.detach().clone() for p in net.parameters()]

    def changed(fn: Callable[..., Tensor]) -> Tensor:
        for p, before in zip(net.parameters(), start, strict=True):
            p.data = before.clone()
        loss = fn(x).sum()
        if how == "vector":
            vector = nn.utils.parameters_to_vector(net.parameters()).detach()
            nn.utils.vector_to_parameters(vector * 0.9, net.parameters())
        for p in net.parameters():
            if how == "same":
                p.data = p.data.clone()
            elif how == "assigned":
                p.data = p.data * 0.9
            elif how == "scaled" or (how == "biases" and p.dim() == 1):
                p.data.mul_(0.9)
        return loss

    right = [right_or_loud(net, lambda: changed(region), lambda: changed(net)) for _ in range(2)]
    if how == "same":
        assert all(right)
    elif budget in RECOMPUTES:
        assert not any(right)


def test_a_teacher_that_is_updated_before_backward() -> None:
    net, teacher, x = network(), network(), torch.randn(64, 16)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return (net(x) - target).square().mean()

    region = fckpt.remat(loss, policy=fckpt.policies.nothing_saveable)

    def step(fn: Callable[..., Tensor]) -> Tensor:
        found = fn(x)
        for p in teacher.parameters():
            p.data.mul_(1.1)
        return found

    torch.manual_seed(1)
    assert not right_or_loud(net, lambda: step(region), lambda: step(loss))


def test_the_message_names_the_tensor_and_a_way_out() -> None:
    net, x = network(), torch.randn(64, 16)
    loss = fckpt.remat(lambda x: net(x).sum(), policy=fckpt.policies.nothing_saveable)(x)
    net[0].bias.data.add_(1.0)
    with pytest.raises(fckpt.MutationError, match=r"0\.bias has been overwritten .*call the function with a copy"):
        loss.backward()


@pytest.mark.parametrize("number", [16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_samples(number: int, dtype: torch.dtype) -> None:
    whole = torch.zeros(64, 48, 2, dtype=dtype)
    views = {
        "whole": whole,
        "transposed": whole.permute(2, 0, 1),
        "columns": whole[:, 3:9],
        "every other": whole[::2, ::3],
        "expanded": whole[:1].expand(64, 48, 2),
        "scalar": whole[5, 7, 1],
        "row": whole[5],
        "none": whole[:0],
    }
    for name, view in views.items():
        before = contents(view, number)
        assert contents(view, number) == before
        whole.fill_(1)
        assert (contents(view, number) != before) == (view.numel() > 0), name
        whole.fill_(0)
        others = torch.ones_like(whole, dtype=torch.bool)
        others.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        whole[others] = 1  # what lies between the elements does not count
        assert contents(view, number) == before, name
        whole.fill_(0)
    assert contents(torch.zeros(3, device="meta"), number) is None
