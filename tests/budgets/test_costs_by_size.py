"""Costs at new sizes, of which only the memory is measured: the memory of a whole measurement, and times in between."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from test_sizes import MODELS
from torch import Tensor

import fckpt
from fckpt._planned.planner import traced_without_running
from fckpt._trace.operations import Call, Ref, TensorSpec, Trace
from fckpt.cost import Measured
from fckpt.cost.by_size import CostsBySize
from fckpt.cost.calls import OpCost
from fckpt.cost.pricing import price

CPU = torch.device("cpu")


def _call(rows: int) -> tuple[list[Call], list[TensorSpec]]:
    specs = [TensorSpec((rows, 8), (8, 1), torch.float32, CPU, value) for value in range(2)]
    return [Call(torch.ops.aten.tanh.default, (Ref(0),), {}, (1,), 0)], specs


def test_times_lie_between_those_of_neighbouring_sizes() -> None:
    costs = CostsBySize()
    for rows, seconds in ((10, 1.0), (30, 3.0), (20, 2.0)):
        calls, specs = _call(rows)
        assert costs.seconds(calls, 0, specs) is None
        costs.add(calls, 0, specs, OpCost(seconds, 0, 0, (rows * 32,)))
    for rows, seconds in ((10, 1.0), (15, 1.5), (22, 2.2), (50, 5.0), (1, 0.5)):
        calls, specs = _call(rows)
        assert costs.seconds(calls, 0, specs) == pytest.approx(seconds)
    found = costs.cost(*_position(*_call(15)))
    assert found is not None and (found.temporary_nbytes, found.storages) == (0, (15 * 32,))


def _position(calls: list[Call], specs: list[TensorSpec]) -> tuple[list[Call], int, list[TensorSpec]]:
    return calls, 0, specs


def test_an_operation_with_temporaries_is_measured_at_each_size() -> None:
    costs = CostsBySize()
    for rows in (10, 20, 30):
        calls, specs = _call(rows)
        costs.add(calls, 0, specs, OpCost(1.0, 0, 8 * (rows == 20), (rows * 32,)))
    assert costs.cost(*_position(*_call(25))) is None
    assert costs.seconds(*_position(*_call(25))) == 1.0


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_memory_at_a_new_size_is_that_of_a_whole_measurement(name: str) -> None:
    make, sizes = MODELS[name]
    torch.manual_seed(0)
    net, generator, costs = make(), random.Random(2), CostsBySize()
    for _ in range(7):
        given = sizes(generator)
        trace, tensors = traced_without_running(net, given, {})
        whole = price(trace, Measured(cache=False, repeats=1))
        fast = price(dataclasses.replace(trace, other_sizes=costs), Measured(cache=False, repeats=1))
        memory = lambda graph: [[n.temporary_nbytes for n in graph.nodes], [v.nbytes for v in graph.values]]
        assert memory(fast) == memory(whole)
        del tensors


def test_times_are_measured_for_the_first_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    original = Measured._measure

    def measure(self: Measured, call: Call, *rest: Any) -> OpCost | None:
        measured.append(rest[3] is None)
        return original(self, call, *rest)

    monkeypatch.setattr(Measured, "_measure", measure)
    monkeypatch.setattr("fckpt._planned.making.Measured", lambda: Measured(cache=False, repeats=1))
    w = torch.randn(16, 16, requires_grad=True)
    loss = fckpt.remat(lambda x: torch.tanh(x @ w).softmax(0).square().sum(), budget=1.0)
    counts = []
    for rows in (5, 9, 12, 7, 20, 33):
        measured.clear()
        loss(torch.randn(rows, 16))
        counts.append((sum(measured), len(measured)))
    assert all(count == many > 3 for count, many in counts[:3]), counts
    assert all(count == 0 < many for count, many in counts[3:]), counts


def test_a_trace_without_other_sizes_is_measured_whole() -> None:
    trace: Trace = traced_without_running(lambda x: x.tanh().sum(), (torch.ones(3, requires_grad=True),), {})[0]
    assert trace.other_sizes is None


def test_other_outputs_of_other_dtypes_are_measured_for_themselves() -> None:
    """The backward pass of the second output casts an operand, which takes memory."""
    w = torch.randn(64, 64)

    def fn(x: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        for _ in range(3):
            h = h.sin()
        return h * q, h * p

    def peak(rows: int, which: int) -> int:
        x, q = torch.randn(rows, 64), torch.randn(rows, 64, requires_grad=True)
        p = torch.randn(rows, 64, dtype=torch.float64, requires_grad=True)
        of, dtype = ((q, torch.float32), (p, torch.float64))[which]

        def step() -> Any:
            return torch.autograd.grad(planned(x, q, p)[which], [of], torch.ones(rows, 64, dtype=dtype))

        step()
        return fckpt.measure_peak(step).peak_bytes

    planned = fckpt.remat(fn, budget=900_000)
    for rows in (100, 150, 200, 250, 300, 180):
        assert peak(rows, 0) <= 900_000
    for rows in (400, 390, 360):
        with pytest.raises(fckpt.BudgetError):
            peak(rows, 1)
