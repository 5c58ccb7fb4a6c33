"""Tensors whose layout or part in autograd a function changes in place: as in a plain call, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judge import Session, judge
from torch import Tensor, nn

import fckpt

HELD = [torch.ones(2, 16)]
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda b: b.t_(),
    "transpose_": lambda b: b.transpose_(0, 1),
    "swapaxes_": lambda b: b.swapaxes_(0, 1),
    "unsqueeze_": lambda b: b.unsqueeze_(0),
    "squeeze_": lambda b: b.squeeze_(),
    "resize_": lambda b: b.resize_(4, 16),
    "as_strided_": lambda b: b.as_strided_((16,), (1,)),
    "set_": lambda b: b.set_(torch.zeros(3)),
    "t_ of a view": lambda b: b.view(2, 16).t_(),
    "t_ of an alias": lambda b: b[:].t_(),
    "t_ of detached": lambda b: b.detach().t_(),
    "t_ of a copy": lambda b: b.clone().t_(),
}


class Changing(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any], place: str) -> None:
        super().__init__()
        self.linear, self.change, self.place = nn.Linear(16, 16), change, place
        self.register_buffer("buffer", torch.ones(2, 16))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        tensor: Any = {"buffer": self.buffer, "argument": given, "global": HELD[0]}[self.place]
        self.change(tensor)
        return torch.tanh(self.linear(x)) * (1 + tensor.sum())


@pytest.mark.parametrize("place", ["buffer", "argument", "global"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layout_that_changes(change: str, place: str) -> None:
    outcomes = []
    for planned in (False, True):
        torch.manual_seed(0)
        model, given, x = Changing(CHANGES[change], place), torch.ones(2, 16), torch.randn(32, 16)
        HELD[0] = torch.ones(2, 16)
        f = fckpt.remat(model, budget=10**6, solver="greedy") if planned else model
        try:
            result = f(x, given)
        except fckpt.TraceError:
            assert planned and "_ of" not in change
            return
        outcomes.append((result, *((t.shape, t.stride()) for t in (model.buffer, given, HELD[0]))))  # type: ignore
    assert outcomes[0][1:] == outcomes[1][1:]
    assert torch.equal(outcomes[0][0], outcomes[1][0])


def _written_row(w: Tensor) -> Tensor:
    base = torch.zeros(2, 16)
    base[0].add_(w)
    return base


def _set_row(w: Tensor) -> Tensor:
    base = torch.zeros(2, 16)
    base[0] = w
    return base


def _view_of_written(w: Tensor) -> Tensor:
    base = torch.zeros(2, 16)
    view = base[0]
    base.add_(w)
    return view


def _written_detached(w: Tensor) -> Tensor:
    rows = torch.zeros(2, 16).unbind(0)
    rows[0].detach().add_(w.detach())
    return rows[0]


@pytest.mark.parametrize("make", [_written_row, _set_row, _view_of_written, _written_detached, torch.zeros_like])
def test_whether_a_result_requires_gradients(make: Callable[[Tensor], Tensor]) -> None:
    def scenario(session: Session) -> None:
        x, w = session.leaf(32, 16), session.leaf(16)
        f = session.region(lambda x, w: torch.tanh(x * w) * (2 if make(w).requires_grad else 3))
        session.step(lambda: f(x, w), times=2)

    verdict = judge(scenario, budget=0.9)
    assert verdict.outcome == "equal", verdict.error
