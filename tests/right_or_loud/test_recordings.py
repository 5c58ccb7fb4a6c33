"""Calls while torch's profiler records: plans keep their budgets, and nothing that it has recorded is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fckpt


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement is known yet."""
    monkeypatch.setenv("FCKPT_CACHE", str(tmp_path))


def recurrent() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns a function whose operations need memory that only a measurement tells."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.LSTM(32, 64, 2), nn.Linear(64, 8)])
    return net, lambda x: net[1](net[0](x)[0]).square().mean()


def peak(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    def step() -> None:
        net.zero_grad()
        run(x).backward()

    step()
    return fckpt.measure_peak(step).peak_bytes


@pytest.mark.parametrize("recording", ["profiler", "measure_peak"])
def test_a_first_call_during_a_recording_is_planned_with_measurements(recording: str) -> None:
    net, loss = recurrent()
    x = torch.randn(60, 32, 32)
    limit = peak(net, loss, x) * 3 // 4
    planned = fckpt.remat(loss, budget=limit)
    first = lambda: planned(x).backward()
    if recording == "profiler":
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):
            first()
    else:
        fckpt.measure_peak(first)
    assert peak(net, planned, x) <= limit
    assert fckpt.stats(planned).plans == 1


def test_a_first_step_during_a_recording() -> None:
    torch.manual_seed(0)
    net, plain = nn.Linear(64, 64), nn.Linear(64, 64)
    plain.load_state_dict(net.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters())
    step = fckpt.step(net, torch.optim.AdamW(net.parameters()), lambda model, x: model(x).square().mean(), budget=1.0)
    x = torch.randn(100, 64)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        step(x)
    plain(x).square().mean().backward()
    optimizer.step()
    assert all(map(torch.equal, net.parameters(), plain.parameters()))


def test_a_measurement_within_a_recording_is_an_error() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(fckpt.MeasurementError, match="recording already"):
        fckpt.measure_peak(lambda: fckpt.measure_peak(lambda: x @ x))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recording:
        x.sin()
        with pytest.raises(fckpt.MeasurementError, match="recording already"):
            fckpt.measure_peak(lambda: x @ x)
        x.cos()
    assert {"aten::sin", "aten::cos"} <= {event.name for event in recording.events()}
    assert fckpt.measure_peak(lambda: x @ x).peak_bytes == 256


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_no_plan_is_made_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True, raising=False)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    if where == "step":
        optimizer = torch.optim.SGD(net.parameters())
        call = fckpt.step(net, optimizer, lambda model, x: model(x).square().mean(), budget=1.0)
    else:
        planned = fckpt.remat(lambda x: (net(x).sin(), net(x).cos()), budget=1.0)
        planned(x)[0].sum().backward()  # a plan for the first result alone
        y = planned(x) if where == "backward" else ()
        call = (lambda _: sum(map(torch.sum, y)).backward()) if y else planned
    capturing[0] = True
    given = x if where != "forward" else torch.randn(5, 2, 8)
    with pytest.raises(fckpt.MeasurementError, match="cannot be planned while a CUDA graph is captured"):
        call(given)
    capturing[0] = False
    if where != "backward":  # that pass is over
        call(given)
        capturing[0] = True
        call(given)
