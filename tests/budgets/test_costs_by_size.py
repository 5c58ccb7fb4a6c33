"""Costs at new sizes: memory equals that of a full measurement, and times lie between the times at other sizes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_sizes import MODELS
from torch import Tensor, nn

import fckpt
from fckpt._planned.planner import traced_without_running
from fckpt._trace.operations import Call, Ref, TensorSpec, Trace
from fckpt.cost import Measured
from fckpt.cost.by_size import CostsBySize, Operation
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
        assert costs.seconds(Operation(calls, 0, specs)) is None
        costs.add(Operation(calls, 0, specs), OpCost(seconds, 0, 0, (rows * 32,)))
    for rows, seconds in ((10, 1.0), (15, 1.5), (22, 2.2), (50, 5.0), (2, 0.5)):
        calls, specs = _call(rows)
        assert costs.seconds(Operation(calls, 0, specs)) == pytest.approx(seconds)
    found = costs.cost(Operation(*_position(*_call(15))))
    assert found is not None and (found.temporary_nbytes, found.storages) == (0, (15 * 32,))


def _position(calls: list[Call], specs: list[TensorSpec]) -> tuple[list[Call], int, list[TensorSpec]]:
    return calls, 0, specs


def test_an_operation_with_temporaries_is_measured_at_each_size() -> None:
    costs = CostsBySize()
    for rows in (10, 20, 30):
        calls, specs = _call(rows)
        costs.add(Operation(calls, 0, specs), OpCost(1.0, 0, 8 * (rows == 20), (rows * 32,)))
    assert costs.cost(Operation(*_position(*_call(25)))) is None
    assert costs.seconds(Operation(*_position(*_call(25)))) == 1.0


def _softmax(rows: int) -> tuple[list[Call], list[TensorSpec]]:
    specs = [TensorSpec((rows, 8), (8, 1), torch.float32, CPU, value) for value in range(2)]
    return [Call(torch.ops.aten._softmax.default, (Ref(0), 1, False), {}, (1,), 0)], specs


@pytest.mark.parametrize(
    ("nbytes", "known"),
    [
        ((0, 0, 0), {4: 0, 15: 0, 30: 0, 31: None}),  # none for larger tensors
        ((16, 16, 16), {4: None, 15: 16, 30: 16, 31: None}),  # a few numbers, whatever the size
        ((128, 128, 128), {4: None, 15: None, 30: 128, 31: None}),  # it may be another number between equal ones
        ((0, 0, 8), {4: None, 15: None, 20: 0, 25: None, 30: 8}),
        ((8, 0, 0), {4: None, 15: None, 20: 0, 25: None}),  # more for smaller tensors
        ((8, 16, 24), {10: 8, 15: None, 20: 16, 25: None}),
    ],
)
def test_memory_is_known_for_sizes_below_those_that_need_none(
    nbytes: tuple[int, ...], known: dict[int, int | None]
) -> None:
    costs = CostsBySize()
    for rows, temporary in zip((10, 20, 30), nbytes, strict=True):
        calls, specs = _softmax(rows)
        costs.add(Operation(calls, 0, specs), OpCost(1.0, 0, temporary, (rows * 32,)))
    for rows, temporary in known.items():
        found = costs.cost(Operation(*_position(*_softmax(rows))))
        assert (None if found is None else found.temporary_nbytes) == temporary, rows


@pytest.mark.parametrize("change", ["device", "convolution", "results"])
def test_memory_is_measured_where_it_does_not_grow_with_sizes(change: str) -> None:
    costs = CostsBySize()

    def call(rows: int) -> tuple[list[Call], list[TensorSpec]]:
        calls, specs = _softmax(rows)
        if change == "device":
            specs = [dataclasses.replace(spec, device=torch.device("cuda")) for spec in specs]
        op = torch.ops.aten._conv_depthwise2d.default if change == "convolution" else calls[0].op
        return [dataclasses.replace(calls[0], op=op)], specs

    for rows in (10, 20, 30):
        calls, specs = call(rows)
        costs.add(Operation(calls, 0, specs), OpCost(1.0, 0, 0, (rows * 32 + 64 * (change == "results"),)))
    assert costs.cost(Operation(*_position(*call(20)))) is None


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


def _products(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return (torch.bmm(h[None], w[None]) + torch.addmm(w[0], x, w)).sum()


def _norms(x: Tensor, w: Tensor) -> Tensor:
    h = nn.functional.layer_norm(x, x.shape[1:])
    h = nn.functional.group_norm(h[None].transpose(1, 2), 4)[0].t() + nn.functional.batch_norm(
        x, None, None, training=True
    )
    return h.softmax(0).logsumexp(1).sum() + h.log_softmax(1).mean(0).norm() + h.var(0).std()


def _reductions(x: Tensor, w: Tensor) -> Tensor:
    parts = [x.sum(0), x.amax(0), x.mean(1), x.prod(1), x.cumsum(0)[-1], x.norm(dim=0), x.median(0)[0], x.logsumexp(0)]
    return torch.cat(parts).sum() + x.sum() + x.mean() + x.max() + x.std() + (x > 0).sum()


def _indices(x: Tensor, w: Tensor) -> Tensor:
    order = x.argsort(0)
    picked = x.gather(0, order) + x[order[:, 0]] + x.index_select(0, order[:, 1]) + x.sort(1)[0]
    summed = torch.zeros_like(x).scatter_add(0, order, x) + torch.zeros_like(x).index_add(0, order[:, 0], x)
    return (picked + summed + x.topk(2)[0].sum() + nn.functional.embedding(order[:, 0], x)).square().sum()


def _images(x: Tensor, w: Tensor) -> Tensor:
    image = x[None, None]
    pooled = nn.functional.max_pool2d(image, 2).sum() + nn.functional.avg_pool2d(image, 2).sum()
    padded = nn.functional.pad(image, (1, 1, 1, 1), mode="reflect")
    return pooled + (padded.roll(1, 2).flip(3).tril() ** 2).sum() + torch.stack([image, image]).sum()


def _attention(x: Tensor, w: Tensor) -> Tensor:
    heads = (x @ w).unflatten(1, (4, -1)).transpose(0, 1)[None]
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    labels = torch.arange(x.shape[0]) % w.shape[0]
    return nn.functional.cross_entropy(attended[0].transpose(0, 1).flatten(1), labels)


def _promoted(x: Tensor, b: Tensor, step: int) -> Tensor:
    """A bias of another dtype is converted, which takes the same memory for any number of rows."""
    return (x + b.to(torch.bfloat16)).tanh().sum()


def _windows(x: Tensor, b: Tensor, step: int) -> Tensor:
    """A product copies an operand whose rows overlap."""
    return (x.flatten().unfold(0, 8, step) @ torch.ones(8, 3)).sum()


def _resized(x: Tensor, b: Tensor, step: int) -> Tensor:
    """Resizing with antialiasing takes no memory where the size stays."""
    return nn.functional.interpolate(x[None, None], size=(64, 64), mode="bilinear", antialias=True).sum()


@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (_resized, [(64, 64, 1), (70, 70, 1), (80, 64, 1), (60, 60, 1), (40, 64, 1)]),
        (_promoted, [(300, 16, 1), (600, 16, 1), (900, 16, 1), (2, 8192, 1), (2, 16, 1)]),
        (_windows, [(3000, 16, 64), (1000, 16, 32), (400, 16, 16), (60, 16, 40), (80, 16, 2), (80, 16, 5)]),
    ],
)
def test_memory_that_does_not_depend_on_sizes_alone_is_measured(fn: Any, sizes: list[tuple[int, int, int]]) -> None:
    costs = CostsBySize()
    for rows, columns, step in sizes:
        x, b = torch.randn(rows, columns, requires_grad=True), torch.randn(columns)
        trace, tensors = traced_without_running(partial(fn, step=step), (x, b), {})
        whole = price(trace, Measured(cache=False, repeats=1))
        fast = price(dataclasses.replace(trace, other_sizes=costs), Measured(cache=False, repeats=1))
        assert [n.temporary_nbytes for n in fast.nodes] == [n.temporary_nbytes for n in whole.nodes]
        del tensors


@pytest.mark.sweep(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fn", [_products, _norms, _reductions, _indices, _images, _attention])
def test_memory_at_any_size_is_that_of_a_whole_measurement(fn: Callable[..., Tensor], threads: int) -> None:
    costs, rng, w = CostsBySize(), random.Random(1), torch.randn(64, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in [3, 40, 900, 5000, *(int(2 ** rng.uniform(1.6, 13)) for _ in range(8))]:
            trace, tensors = traced_without_running(fn, (torch.randn(rows, 64, requires_grad=True), w), {})
            whole = price(trace, Measured(cache=False, repeats=1))
            fast = price(dataclasses.replace(trace, other_sizes=costs), Measured(cache=False, repeats=1))
            memory = lambda graph: [(n.op, n.temporary_nbytes) for n in graph.nodes]
            assert memory(fast) == memory(whole), rows
            assert [v.nbytes for v in fast.values] == [v.nbytes for v in whole.values], rows
            del tensors
    finally:
        torch.set_num_threads(before)


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
    assert counts[3] == (0, 0), counts
    assert all(count == 0 < many for count, many in counts[4:]), counts


def test_costs_under_other_settings_are_measured_anew() -> None:
    net, costs, peaks, before = nn.LayerNorm(64), CostsBySize(), {}, torch.get_num_threads()
    try:
        for threads, rows in ((1, 9), (1, 20), (1, 200), (2, 100), (1, 100)):
            torch.set_num_threads(threads)
            trace, tensors = traced_without_running(net, (torch.randn(rows, 64, requires_grad=True),), {})
            graph = price(dataclasses.replace(trace, other_sizes=costs), Measured(cache=False, repeats=1))
            (node,) = (node for node in graph.nodes if "layer_norm_backward" in node.op)
            peaks[threads, rows] = node.temporary_nbytes
            del tensors
    finally:
        torch.set_num_threads(before)
    assert 0 < peaks[1, 100] == peaks[1, 20] < peaks[2, 100], peaks  # a buffer for each thread


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
