"""Traces of new sizes from a trace with symbolic sizes: the traces that tracing gives, or tracing."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import OLD
from helpers import assert_equal, seeded
from planned import Squared, measured
from test_sizes import MODELS, results
from torch import Tensor, nn

import fckpt
from fckpt._planned import lower, sized_traces
from fckpt._planned.program import Program
from fckpt._trace.operations import Backward, Trace
from fckpt._trace.sized import same_trace

WITHOUT_ATTENTION = OLD
"""Whether torch's attention does not run on symbolic sizes."""
Tracer = Callable[[Backward], Trace]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By trace that was made without tracing: whether tracing gives the same."""
    found: list[bool] = []
    made_by = sized_traces.SizedTraces.tracer

    def tracer(self: Any, function: Any, key: Any, layouts: Any, tracer: Tracer, *rest: Any) -> Tracer:
        made, count = made_by(self, function, key, layouts, tracer, *rest), self._count

        def traced(backward: Backward) -> Trace:
            sized: list[bool] = []
            self._count = lambda: (count(), sized.append(True))
            trace = made(backward)
            if sized:
                found.append(same_trace(trace, tracer(backward), function.graph.computed))
            return trace

        return traced

    monkeypatch.setattr(sized_traces.SizedTraces, "tracer", tracer)
    return found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By schedule whose code was written for another size: whether the same would be written for this size."""
    found: list[bool] = []
    shared_by, write = lower._written, lower._Writer.write
    writes: list[Any] = []

    def written(*given: Any) -> lower._Written:
        writes.clear()
        code = shared_by(*given)
        if not writes:
            found.append(code == write(lower._Writer(*given)))
        return code

    at = Program.at

    def again(self: Program, trace: Any, plan: Any) -> Program:
        program = at(self, trace, plan)
        found.append(program.lowered.written == write(lower._Writer(trace, plan.schedule, plan.graph)))
        return program

    monkeypatch.setattr(Program, "at", again)
    monkeypatch.setattr(lower._Writer, "write", lambda self: (writes.append(self), write(self))[1])
    monkeypatch.setattr(lower, "_written", written)
    return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MODELS)
def test_most_new_sizes_are_not_traced_and_have_the_trace_that_tracing_gives(
    name: str, compared: list[bool], shared: list[bool]
) -> None:
    make, sizes = MODELS[name]
    torch.manual_seed(0)
    plain = make()
    planned = fckpt.remat(copy.deepcopy(plain), budget=1.0)
    generator = random.Random(1)
    for number in range(14):
        given = sizes(generator)
        plain.load_state_dict(planned.state_dict())
        got = seeded(lambda given=given: results(planned, given), seed=number)
        assert_equal(got, seeded(lambda given=given: results(plain, given), seed=number))
    assert all(compared) and fckpt.stats(planned).sized == len(compared)
    # The steps of an unrolled network are other operations for each length; few images have a size of their own.
    least = {"lstm": 0, "unet": 1, "transformer": 0 if WITHOUT_ATTENTION else 4}
    assert len(compared) >= least.get(name, 4)
    assert all(shared) and len(shared) >= len(compared) // 2


def test_a_trace_without_tracing_keeps_a_budget_in_bytes(shared: list[bool]) -> None:
    net = Squared(nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(32, 32), nn.Tanh())]))
    budget = int(fckpt.plan(net, torch.randn(100, 32), budget=1.0).baseline_peak_bytes * 0.7)
    planned = fckpt.remat(net, budget=budget)
    for rows in (100, 20, 130, 60, 127, 77, 81, 133, 3):
        assert measured(planned, torch.randn(rows, 32)) <= budget
    assert fckpt.stats(planned).sized >= 5
    assert all(shared) and shared


W = torch.randn(6, 6, requires_grad=True)


def _lengths(x: Tensor, y: Tensor) -> Tensor:
    return (x @ W).tanh().sum(0) @ (y @ W).sin().sum(0)


def _paired(x: Tensor, y: Tensor) -> Tensor:
    scores = (x @ W) @ (y @ W).T
    return scores.softmax(-1).square().sum() / scores.shape[0] + scores.numel() ** 0.5


def _sliced(x: Tensor, y: Tensor) -> Tensor:
    half = x.shape[0] // 2
    return (x[:half] @ W).exp().sum() + (x[half:, 1:] @ W[1:]).tanh().sum() + y[-2:].sum() * (y[:, :3] @ W[:3]).sum()


def _folded(x: Tensor, y: Tensor) -> Tensor:
    both = torch.cat([x, y]) @ W
    rows = both.reshape(both.shape[0], 2, 3).transpose(0, 1).reshape(2, -1).sigmoid()
    return F.pad(rows, (1, 2)).unfold(1, 3, 2).sum() * rows.new_full((rows.shape[1],), 2.0).mean()


def _causal(x: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones(x.shape[0], y.shape[0], dtype=torch.bool).tril()
    found = F.scaled_dot_product_attention((x @ W)[None], (y @ W)[None], y[None], attn_mask=mask[None])
    return found.square().mean() + torch.arange(x.shape[0], dtype=x.dtype) @ (x @ W)[:, 0]


def _branching(x: Tensor, y: Tensor) -> Tensor:
    h = (x @ W).exp() if x.shape[0] > y.shape[0] else (x @ W).sin()
    return h.sum() * (torch.tensor(float(y.shape[0])) * (y @ W).cos()).sum()


FUNCTIONS = [_lengths, _paired, _sliced, _folded, _causal, _branching]
PAIRS = [(5, 9), (8, 3), (4, 7), (11, 6), (6, 6), (2, 13), (1, 5), (9, 1), (7, 7), (12, 31), (31, 12), (3, 2), (0, 4)]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__.strip("_"))
def test_two_sizes_that_may_be_equal_or_one_or_none(fn: Callable[..., Tensor], compared: list[bool]) -> None:
    planned = fckpt.remat(fn, budget=1.0)
    for rows in PAIRS:
        x, y = (torch.randn(n, 6) for n in rows)
        assert_equal(torch.autograd.grad(planned(x, y), W), torch.autograd.grad(fn(x, y), W))
    assert all(compared)
    assert compared or (fn is _causal and WITHOUT_ATTENTION)


def test_a_number_that_changes_is_a_symbol_too(compared: list[bool]) -> None:
    def loss(x: Tensor, first: int, by: int) -> Tensor:
        return (x[first:].roll(by, 0) @ W).tanh().mul(by).sum()

    planned = fckpt.remat(loss, budget=1.0)
    x = torch.randn(40, 6)
    for first, by in ((2, 5), (3, 7), (9, 4), (12, 20), (0, 1), (1, 0), (-4, -3), (30, 8), (11, 11)):
        assert_equal(torch.autograd.grad(planned(x, first, by), W), torch.autograd.grad(loss(x, first, by), W))
    assert compared and all(compared)


def test_memory_formats_and_other_strides_of_an_argument(compared: list[bool]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.GELU())
    loss = lambda x: net(x).square().mean()
    planned = fckpt.remat(loss, budget=1.0)
    parameters = list(net.parameters())
    for n, edge in ((2, 9), (4, 12), (3, 7), (5, 10), (6, 8), (2, 13)):
        x = torch.randn(n, 3, edge, edge + 1)
        for given in (
            x,
            x.to(memory_format=torch.channels_last),
            x.transpose(2, 3),
            torch.randn(n, 3, 99, 99)[..., :9, :8],
        ):
            expected = torch.autograd.grad(loss(given), parameters)
            assert_equal(torch.autograd.grad(planned(given), parameters), expected)
    assert compared and all(compared)


def test_other_outputs_are_differentiated_after_the_first_sizes(compared: list[bool]) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ W).tanh()
        return h, (h @ W).exp()

    planned = fckpt.remat(fn, budget=1.0)
    for number, rows in enumerate((4, 7, 9, 5, 12, 6, 3, 11)):
        x, which = torch.randn(rows, 6), number % 2
        assert_equal(torch.autograd.grad(planned(x)[which].sum(), W), torch.autograd.grad(fn(x)[which].sum(), W))
    assert compared and all(compared)


def test_a_buffer_that_is_written_is_written_once_for_each_size(compared: list[bool]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
            self.register_buffer("total", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.linear(x))
            self.total += h.detach().sum(0)
            return (h * self.total).relu().sum()

    plain = Counting()
    planned = fckpt.remat(copy.deepcopy(plain), budget=1.0)
    for rows in (4, 7, 9, 5, 12, 6):
        x = torch.randn(rows, 6)
        assert_equal(results(planned, (x,)), results(plain, (x,)))
    assert compared and all(compared)


FLOATS: list[Callable[[int], float]] = [
    lambda n: n * 0.1 * 3.0,
    lambda n: n * 0.1 + n * 0.2,
    lambda n: n / 10 + 0.2 + 0.1,
    lambda n: 1e-3 * n / 100 + 5e-4 * (1 - n / 100),
    lambda n: 1.0 - 0.9 * n / 50 - 0.05,
    lambda n: (n + 0.1) - 0.1,
    lambda n: int(n * 0.7 * 10) // 10,
    lambda n: n**-0.5 / 3 / 7,
]


@pytest.mark.parametrize("number", range(len(FLOATS)))
def test_floats_that_are_computed_from_sizes_and_counters_round_as_in_python(number: int) -> None:
    w, of = torch.randn(6, 6, dtype=torch.float64, requires_grad=True), FLOATS[number]
    functions: list[Callable[[Tensor, int], Tensor]] = [
        lambda x, step: (x @ w).sin().sum() * of(step),
        lambda x, step: (x[: max(1, int(of(x.shape[0])))] @ w).sin().mul(of(x.shape[0])).sum(),
    ]
    for fn in functions:
        planned = fckpt.remat(fn, budget=1.0)
        for size in (4, 8, 16, 5, 7, 11, 14, 25, 90, 3, 19, 22):
            x = torch.randn(size, 6, dtype=torch.float64)
            assert_equal(torch.autograd.grad(planned(x, size), w), torch.autograd.grad(fn(x, size), w))
        assert fckpt.stats(planned).sized >= 5


COMPARED: dict[str, Callable[[int], bool]] = {
    "product and size": lambda n: n * 0.1 * 10 == n,
    "product and number": lambda n: n * 0.7 * 10 >= 42,
    "sum and product": lambda n: n * 0.1 + n * 0.2 > 0.3 * n,
    "rounded product": lambda n: int(n * 0.7 * 10) > 40,
    "least": lambda n: min(n * 0.1 * 3, 2.1) == 2.1,
}


@pytest.mark.parametrize("name", COMPARED)
def test_branches_on_floats_of_sizes_are_those_of_python(name: str) -> None:
    w, holds = torch.eye(4, requires_grad=True), COMPARED[name]
    loss = lambda x: ((x @ w) * 2 if holds(x.shape[0]) else x @ w).sum()
    planned = fckpt.remat(loss, budget=1.0)
    for size in (20, 3, 6, 7, 9, 12, 30):
        assert_equal(planned(torch.ones(size, 4)), loss(torch.ones(size, 4)))


@pytest.mark.parametrize(
    "fn", [torch.var, torch.std, lambda x: (x - x.mean(0)) / x.std(0, correction=0)], ids=["var", "std", "standardised"]
)
def test_gradients_that_are_divided_by_a_size(fn: Callable[[Tensor], Tensor], compared: list[bool]) -> None:
    planned = fckpt.remat(lambda x: fn(x @ W).sum(), budget=1.0)
    for rows in (4, 7, 9, 5, 12, 6, 3, 11):
        x = torch.randn(rows, 6)
        assert_equal(torch.autograd.grad(planned(x), W), torch.autograd.grad(fn(x @ W).sum(), W))
    assert compared and all(compared)


RECURRENT: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, batch first": (nn.LSTM, {"num_layers": 2, "batch_first": True}),
    "lstm, both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.2}),
    "lstm, no biases": (nn.LSTM, {"num_layers": 2, "bias": False}),
    "lstm, projected": (nn.LSTM, {"proj_size": 3}),
    "lstm, float64": (nn.LSTM, {"dtype": torch.float64, "batch_first": True}),
    "gru": (nn.GRU, {"num_layers": 2, "batch_first": True, "dropout": 0.2}),
    "rnn": (nn.RNN, {"bidirectional": True}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("name", RECURRENT)
def test_sequences_of_any_length_need_one_capture(name: str, compared: list[bool]) -> None:
    kind, options = RECURRENT[name]
    torch.manual_seed(0)
    net = kind(6, 6, **options)
    parameters, generator = list(net.parameters()), random.Random(0)

    def loss(x: Tensor) -> Tensor:
        outputs, state = net(x)
        return outputs.sin().sum() + sum(t.cos().sum() for t in (state if isinstance(state, tuple) else [state]))

    planned = fckpt.remat(loss, budget=1.0)
    for number in range(8):
        x = torch.randn(generator.randint(2, 9), generator.randint(2, 9), 6, dtype=options.get("dtype"))
        got = seeded(lambda x=x: torch.autograd.grad(planned(x), parameters), seed=number)
        assert_equal(got, seeded(lambda x=x: torch.autograd.grad(loss(x), parameters), seed=number))
    assert fckpt.stats(planned).captures == 1
    assert all(compared)
    assert compared or name in ("lstm, projected", "lstm, float64", "gru", "rnn")  # each step is an operation


RESIZED: list[dict[str, Any]] = [
    {"scale_factor": 2},
    {"scale_factor": 2, "mode": "nearest-exact"},
    {"scale_factor": 1.7},
    {"scale_factor": (0.6, 3), "mode": "bilinear"},
    {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    {"scale_factor": 1.3, "mode": "bilinear", "antialias": True, "recompute_scale_factor": True},
    {"scale_factor": 0.5, "mode": "bicubic"},
    {"scale_factor": 0.5, "mode": "bicubic", "antialias": True},
    {"scale_factor": 2, "mode": "area"},
    {"size": 7, "mode": "bilinear"},
    {"size": (7, 9)},
]


@pytest.mark.parametrize("options", RESIZED, ids=str)
def test_images_of_any_size_are_resized(options: dict[str, Any], compared: list[bool]) -> None:
    net, more = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    parameters, generator = [*net.parameters(), *more.parameters()], random.Random(0)
    loss = lambda x: more(F.interpolate(net(x), **options)).sin().sum()
    planned = fckpt.remat(loss, budget=1.0)
    for _ in range(8):
        x = torch.randn(generator.randint(2, 4), 3, generator.randint(8, 16), generator.randint(8, 16))
        assert_equal(torch.autograd.grad(planned(x), parameters), torch.autograd.grad(loss(x), parameters))
    assert fckpt.stats(planned).captures == 1
    assert compared and all(compared)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("batch", [1, 2])
def test_convolutions_of_any_size_need_one_capture(
    batch: int, channels: int, layout: torch.memory_format, compared: list[bool]
) -> None:
    first, second = nn.Conv2d(channels, 8, 3, padding=1, stride=2), nn.Conv2d(8, 8, 1)
    loss = lambda x: second(first(x).relu()).sin().square().sum()
    planned = fckpt.remat(loss, budget=1.0)
    for edge in (16, 20, 24, 80, 12, 64, 48):  # from 20,480 elements on, one image has another kernel
        x = torch.randn(batch, channels, edge, edge, requires_grad=True)
        x = x.detach().to(memory_format=layout).requires_grad_()
        inputs, found = (x, *first.parameters(), *second.parameters()), []
        for fn in (planned, loss):
            value = fn(x)
            value.backward()
            found.append((value.detach(), *[t.grad for t in inputs]))
            for t in inputs:
                t.grad = None
        assert_equal(*found)
    assert all(compared)
    if channels > 1 and layout is torch.contiguous_format:
        assert fckpt.stats(planned).captures == 1 and len(compared) == 4


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_images_in_channels_last_are_resized(mode: str, compared: list[bool]) -> None:
    net = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
    loss = lambda x: net(F.interpolate(net(x), scale_factor=2, mode=mode)).sin().sum()
    planned, generator = fckpt.remat(loss, budget=1.0), random.Random(0)
    for _ in range(8):
        x = torch.randn(generator.randint(2, 4), 3, generator.randint(8, 16), generator.randint(8, 16))
        x = x.to(memory_format=torch.channels_last)
        assert_equal(*(torch.autograd.grad(f(x), list(net.parameters())) for f in (planned, loss)))
    assert compared and all(compared)


@pytest.mark.parametrize(
    ("mode", "dims"), [("nearest", 1), ("nearest", 3), ("nearest-exact", 3), ("linear", 1), ("trilinear", 3)]
)
def test_signals_and_volumes_of_any_size_are_resized(mode: str, dims: int, compared: list[bool]) -> None:
    loss = lambda x: F.interpolate((x @ W).movedim(-1, 1), scale_factor=2, mode=mode).sin().sum()
    planned, generator = fckpt.remat(loss, budget=1.0), random.Random(0)
    for _ in range(8):
        x = torch.randn(2, *(generator.randint(2, 6) for _ in range(dims)), 6)
        assert_equal(torch.autograd.grad(planned(x), W), torch.autograd.grad(loss(x), W))
    assert all(compared) and (compared or OLD)  # 2.11 has no symbolic `x @ W`


def test_a_counter_among_the_results_is_no_obstacle(compared: list[bool]) -> None:
    def fn(x: Tensor, step: int) -> tuple[Tensor, int, int]:
        return (x @ W).sin().sum(), step + 1, x.shape[0] * 2

    planned = fckpt.remat(fn, budget=1.0)
    for step, rows in enumerate((4, 7, 9, 5, 12, 6, 3, 11)):
        x = torch.randn(rows, 6)
        loss, then, twice = planned(x, step)
        assert (then, twice) == (step + 1, rows * 2)
        assert_equal(torch.autograd.grad(loss, W), torch.autograd.grad(fn(x, step)[0], W))
    assert compared and all(compared)


def _in_windows(x: Tensor, w: Tensor, size: int) -> Tensor:
    """Applies a layer to windows of an image, which is padded to whole windows, as Swin does."""
    n, height, width, channels = x.shape
    x = F.pad(x, (0, 0, 0, -width % size, 0, -height % size))
    rows, columns = x.shape[1] // size, x.shape[2] // size
    x = x.view(n, rows, size, columns, size, channels).transpose(2, 3).reshape(-1, size * size, channels)
    x = torch.tanh(x @ w).view(n, rows, columns, size, size, channels)
    return x.transpose(2, 3).reshape(n, rows * size, columns * size, channels)


def test_expressions_of_sizes_that_grow_do_not_stall_a_capture() -> None:
    """Sympy would simplify them for hours. The sizes are constants of such a capture."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        for size in (4, 7, 3, 5, 7, 4):
            x = _in_windows(x, w, size)
            x = F.avg_pool2d(x.permute(0, 3, 1, 2), 2, 1, 1).permute(0, 2, 3, 1)
        return x.square().sum()

    planned, w = fckpt.remat(fn, budget=0.9), torch.randn(6, 6, requires_grad=True)
    for edge in (8, 9):
        x = torch.randn(2, edge, edge, 6)
        assert_equal(torch.autograd.grad(planned(x, w), w), torch.autograd.grad(fn(x, w), w))
    assert fckpt.stats(planned).captures == 2


V = torch.randn(6, 6)
K, DEPTHWISE = torch.randn(6, 2, 3, 3, requires_grad=True), torch.randn(6, 1, 3, 3, requires_grad=True)


def _image(h: Tensor) -> Tensor:
    return h.movedim(-1, 0)[None].contiguous()


def _masked(h: Tensor, *, floating: bool) -> Tensor:
    mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(h[None], h.sin()[None], h[None], attn_mask=bias if floating else mask)


Sizes = list[tuple[int, int]]
SMALL: Sizes = [(5, 9), (8, 3), (4, 7), (11, 6), (6, 6), (2, 13), (1, 5), (9, 1), (31, 12), (3, 4), (4, 40)]
IMAGES: Sizes = [(5, 9), (8, 3), (4, 7), (11, 6), (6, 6), (3, 13), (31, 12), (12, 31), (100, 60), (60, 61)]
LENGTHS: Sizes = [(2, 5), (3, 9), (4, 33), (2, 64), (2, 600), (2, 1), (3, 2), (2, 192), (1, 600), (1, 64), (3, 800)]
KERNELS: dict[str, tuple[Callable[[Tensor], Tensor], Sizes]] = {
    "three operands": (lambda h: torch.einsum("nmi,ij,nkj->mk", h, W, h.tanh()), SMALL),
    "every second row": (lambda h: h[:, ::2] @ V, SMALL),  # a matrix where the number of rows is even
    "the first four rows": (lambda h: h[:, :4] @ V, SMALL),
    "transposed batches": (lambda h: h.transpose(0, 1) @ V, SMALL),
    "a matrix before batches": (lambda h: V @ h.mT, SMALL),
    "batches and a vector": (lambda h: h[:, ::2] @ V[0], SMALL),
    "broadcast batches": (lambda h: h[:, None] @ h.mT[None], SMALL),
    "maximum": (lambda h: F.max_pool2d(_image(h), 3, 2, ceil_mode=True), IMAGES),
    "average": (lambda h: F.avg_pool2d(_image(h), 3, 2, 1, ceil_mode=True), IMAGES),
    "adaptive average": (lambda h: F.adaptive_avg_pool2d(_image(h), (3, 2)), IMAGES),
    "reflected": (lambda h: F.pad(_image(h), (2, 1, 1, 2), mode="reflect"), IMAGES),
    "replicated": (lambda h: F.pad(_image(h), (2, 1, 1, 2), mode="replicate"), IMAGES),
    "unfolded": (lambda h: F.unfold(_image(h), 3, padding=1), IMAGES),
    "groups": (lambda h: F.conv2d(_image(h), K, padding=1, groups=3), IMAGES),
    "a group per channel": (lambda h: F.conv2d(_image(h), DEPTHWISE, stride=2, groups=6), IMAGES),
    "attention": (lambda h: F.scaled_dot_product_attention(h[None], h.sin()[None], h[None]), LENGTHS),
    "causal attention": (
        lambda h: F.scaled_dot_product_attention(h[None], h.sin()[None], h[None], is_causal=True),
        LENGTHS,
    ),
    "attention, a mask": (lambda h: _masked(h, floating=False), LENGTHS),
    "attention, a bias": (lambda h: _masked(h, floating=True), LENGTHS),
}
UNSIZED = ["unfolded"]
"""Operations that torch does not run on symbolic sizes."""


def _compare(of: Callable[[Tensor], Tensor], sizes: Sizes) -> None:
    loss = lambda x: of(x @ W).sin().sum()
    planned = fckpt.remat(loss, budget=1.0)
    for size in sizes:
        x, found = torch.randn(*size, 6), []
        for fn in (planned, loss):
            value = fn(x)
            found.append([value, *torch.autograd.grad(value, [W, K, DEPTHWISE], allow_unused=True)])
        assert_equal(*found)


@pytest.mark.parametrize("name", KERNELS)
def test_operations_that_have_other_kernels_for_other_sizes(name: str, compared: list[bool]) -> None:
    _compare(*KERNELS[name])
    assert all(compared)
    assert compared or name in UNSIZED or OLD  # which does not run `x @ w` on three symbolic sizes


class CheapestFirst:
    """Stands for the package `opt_einsum`: two of three operands are contracted first, which depends on sizes."""

    @staticmethod
    def contract_path(equation: str, *operands: Tensor, optimize: Any = None) -> tuple[list[tuple[int, int]], str]:
        terms = equation.partition("->")[0].split(",")
        sizes: dict[str, int] = {}
        for term, x in zip(terms, operands, strict=True):
            sizes.update(zip(term, x.shape, strict=True))
        cost = lambda pair: math.prod(sizes[letter] for letter in sorted({*terms[pair[0]], *terms[pair[1]]}))
        return [min([(0, 1), (1, 2), (0, 2)], key=cost), (0, 1)], ""


def test_an_order_of_contractions_that_depends_on_sizes(compared: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    backend, terms = torch.backends.opt_einsum, "ni,ij,mj->nm"
    monkeypatch.setattr(backend, "is_available", lambda: True)
    monkeypatch.setattr(backend, "get_opt_einsum", lambda: CheapestFirst)
    monkeypatch.setattr(backend.m, "enabled", True)
    orders = {CheapestFirst.contract_path(terms, torch.ones(m, 6), W, torch.ones(n, 6))[0][0] for n, m in SMALL}
    assert orders == {(0, 1), (1, 2)}
    _compare(lambda h: torch.einsum(terms, h[0], W, h[:, 0]), SMALL)
    assert all(compared) and (compared or OLD)
