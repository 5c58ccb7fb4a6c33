"""The plain peak that a plan names is the one that is measured: what autograd and its engine hold, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt

Case = tuple[Callable[..., Tensor], Any, Tensor]


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


def dense_concat(params: Any, x: Tensor) -> Tensor:
    for w in params:
        x = torch.cat([x, torch.relu(x @ w)], 1)
    return x.square().mean()


def dense_list(params: Any, x: Tensor) -> Tensor:
    features = [x]
    for w in params:
        features.append(torch.tanh(torch.cat(features, 1) @ w))
    return torch.cat(features, 1).square().mean()


def recurrent(params: Any, x: Tensor) -> Tensor:
    h, states = x.new_zeros(x.shape[1], 32), []
    for step in x:
        h = torch.tanh(step @ params[0] + h @ params[1])
        states.append(h)
    return torch.stack(states).square().mean()


def gated(params: Any, x: Tensor) -> Tensor:
    h = c = x.new_zeros(x.shape[1], 32)
    for step in x:
        h, c = cell(params, step, h, c)
    return h.square().sum()


def cell(params: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Its variables end with it: those of a long loop are held by plain Python, and not by a captured graph."""
    i, f, g, o = (x @ params[0] + h @ params[1]).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def heads(params: Any, x: Tensor) -> Tensor:
    q, k, v = (x @ params[0]).chunk(3, -1)
    parts = zip(*(t.split(8, -1) for t in (q, k, v)), strict=True)
    attended = [torch.softmax(a @ b.transpose(1, 2), -1) @ c for a, b, c in parts]
    return (x + torch.stack(attended, 2).flatten(2) @ params[1]).square().sum()


def slices_added(params: Any, x: Tensor) -> Tensor:
    """The gradient of `h` comes in four parts, each as large as `h`: autograd adds them up in place."""
    h = x @ params[0]
    return torch.cat([h[:, i * 8 : (i + 1) * 8].sin() for i in range(4)], 1).exp().sum()


def residual_stream(params: Any, x: Tensor) -> Tensor:
    for w in params:
        x = x + torch.tanh(torch.tanh(x @ w) @ w.t()) * 0.5
    return x.sum()


def expanded(params: Any, x: Tensor) -> Tensor:
    """The formula of the square's derivative makes two tensors on the way, in one C++ expression."""
    return torch.cat([params[0][:8].expand(128, 8, 32), params[0][8:].expand(128, 24, 32)], 1).square().sum()


def padded(params: Any, x: Tensor) -> Tensor:
    h = x @ params[0]
    return F.pad(h, (2, 3)).sin().sum() + h.roll(1, 0).cos().sum() + h.flip(0).exp().sum() + h.repeat(2, 2).tan().sum()


class Doubling(torch.autograd.Function):
    """An operation whose own derivative ends with an addition, which autograd does not do in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad + 2 * ctx.saved_tensors[0] * grad


def own_formula(params: Any, x: Tensor) -> Tensor:
    h = x @ params[0]
    for _ in range(3):
        h = h + Doubling.apply(h) * 0.1
    return h.sum()


class DenseNet(nn.Module):
    """Concatenated features with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        widths = range(12, 12 + 6 * 8, 8)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.convolutions = nn.ModuleList(nn.Conv2d(width, 8, 3, padding=1, bias=False) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = torch.cat([x, convolution(F.relu(norm(x)))], 1)
        return x.mean((2, 3)).square().sum()


class ResNet(nn.Module):
    """Two residual blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(12, 12, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(4))
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            first, second = self.convolutions[i], self.convolutions[i + 1]
            x = F.relu(self.norms[i + 1](second(F.relu(self.norms[i](first(x))))) + x)
        return F.cross_entropy(self.out(x.mean((2, 3))), torch.zeros(x.shape[0], dtype=torch.long))


class Layer(nn.TransformerEncoderLayer):
    """PyTorch's transformer layer, with a loss."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).square().sum()


def closed(net: nn.Module, x: Tensor) -> Case:
    """A module that the function closes over, and its parameters."""
    return lambda _, x: net(x), list(net.parameters()), x


class Tied(nn.Module):
    """A language model whose last layer has the weight of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.out = nn.Embedding(900, 64), nn.Linear(64, 64), nn.Linear(64, 900, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.hidden(self.embedding(x)).relu()), x)


class Cells(nn.Module):
    """A loop over the cells of a recurrent network."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x:
            state = self.cell(step, state)
        return (state[0] if isinstance(state, tuple) else state).square().mean()


def used_twice(net: nn.Module, x: Tensor) -> Case:
    """A module that runs twice. Autograd adds the two gradients of each weight."""
    return lambda _, x: (net(x) * net(x.flip(0))).mean(), list(net.parameters()), x


CASES: dict[str, Callable[[], Case]] = {
    "dense, concatenated": lambda: (dense_concat, weights(*((16 * i, 16) for i in range(1, 9))), torch.randn(256, 16)),
    "dense, a list": lambda: (dense_list, weights(*((16 * i, 16) for i in range(1, 9))), torch.randn(256, 16)),
    "recurrent": lambda: (recurrent, weights((16, 32), (32, 32)), torch.randn(12, 64, 16)),
    "gated": lambda: (gated, weights((16, 128), (32, 128)), torch.randn(8, 64, 16)),
    "heads": lambda: (heads, weights((32, 96), (32, 32)), torch.randn(4, 32, 32)),
    "slices": lambda: (slices_added, weights((32, 32)), torch.randn(256, 32)),
    "residual stream": lambda: (residual_stream, weights((32, 64), (32, 64), (32, 64)), torch.randn(64, 32)),
    "expanded": lambda: (expanded, weights((32, 32)), torch.randn(1)),
    "padded": lambda: (padded, weights((32, 32)), torch.randn(256, 32)),
    "own formula": lambda: (own_formula, weights((32, 32)), torch.randn(256, 32)),
    "DenseNet": lambda: closed(DenseNet(), torch.randn(4, 12, 16, 16)),
    "ResNet": lambda: closed(ResNet(), torch.randn(4, 12, 16, 16)),
    "linear layers, twice": lambda: used_twice(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(8, 64)
    ),
    "linear layers of matrices, twice": lambda: used_twice(nn.Linear(64, 256, bias=False), torch.randn(2, 8, 64)),
    "convolutions, twice": lambda: used_twice(nn.Conv2d(32, 64, 3), torch.randn(2, 32, 8, 8)),
    "matrices, twice": lambda: (lambda w, x: ((x @ w[0]).relu() @ w[0] + x @ w[0]).mean(), weights((64, 64)),
                                torch.randn(8, 64)),
    "tied weights": lambda: closed(Tied(), torch.randint(0, 900, (32,))),
    "RNN cells": lambda: closed(Cells(nn.RNNCell(64, 64)), torch.randn(5, 8, 64)),
    "LSTM cells": lambda: closed(Cells(nn.LSTMCell(64, 64)), torch.randn(5, 8, 64)),
    "transformer": lambda: (
        closed(Layer(32, 4, 64, dropout=0.1, batch_first=True), torch.randn(4, 24, 32))
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")  # Dynamo looks at it for an autograd.Function
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_the_plain_peak_is_the_measured_one(name: str) -> None:
    fn, params, x = CASES[name]()
    leaves = params

    def run() -> None:
        fn(params, x).backward()

    run()
    for leaf in leaves:
        leaf.grad = None
    measured = fckpt.measure_peak(run).peak_bytes
    predicted = fckpt.plan(fn, params, x).baseline_peak_bytes
    print(f"{name}: {predicted} of {measured} bytes")
    assert abs(predicted - measured) <= 64  # the few bytes of a scalar on its way


def test_a_share_of_the_plain_peak_is_one_of_what_is_measured() -> None:
    fn, params, x = CASES["dense, concatenated"]()
    plan = fckpt.plan(fn, params, x, budget=0.7)
    fn(params, x).backward()
    for leaf in params:
        leaf.grad = None
    assert plan.budget_bytes == int(0.7 * fckpt.measure_peak(lambda: fn(params, x).backward()).peak_bytes)


def test_the_trace_keeps_nothing_alive_and_mixes_nothing_up() -> None:
    """Addresses and ids of what died are used again, by tensors that are something else."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(50):
            x = torch.tanh(x @ w)
            x.detach().sin().cos().view(-1)[3:].exp()  # dies at once
            x = x + x.view(-1)[:32].clone().square()[None]
        return x.sum()

    w, x = weights((32, 32))[0], torch.randn(16, 32)
    fn(w, x).backward()
    assert w.grad is not None
    expected, again = w.grad, w.detach().clone().requires_grad_()
    fckpt.remat(fn, budget=0.6)(again, x).backward()
    assert again.grad is not None and torch.equal(again.grad, expected)


def test_forward_mode_inside_holds_no_zeros() -> None:
    """The tangents of constants have no memory in a plain call."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.func.jvp(lambda a: torch.tanh(a @ w).sin(), (x,), (x * 2,))[1]
        return x.sum()

    x, w = weights((64, 64), (64, 64))
    measured = fckpt.measure_peak(lambda: fn(x, w).backward()).peak_bytes
    plan = fckpt.plan(fn, x, w, budget=0.5)
    assert abs(plan.baseline_peak_bytes - measured) <= 64
    x.grad = w.grad = None
    region = fckpt.remat(fn, budget=0.5)
    region(x, w)
    assert fckpt.measure_peak(lambda: region(x, w).backward()).peak_bytes <= 0.5 * measured


class Mixed(nn.Module):
    """Under autocast: its parameters are read several times, without gradients, and in layers that do not save them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 512), nn.LayerNorm(512)
        self.again, self.last = nn.Parameter(torch.randn(512, 512) / 20), nn.Linear(512, 96)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(x)))
        for _ in range(3):
            x = torch.tanh(x @ self.again)
        with torch.no_grad():
            same = self.last(x)
        return (self.last(x) - same * 0.5).float()


def mixed_step(fn: Callable[[Tensor], Tensor], x: Tensor, inside: bool, around: bool = True) -> None:
    """Runs both passes, the backward one inside of a block of autocast or, as PyTorch recommends, after it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        loss = fn(x)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()


@pytest.mark.parametrize("around", [True, False], ids=["autocast around the call", "none around"])
@pytest.mark.parametrize("own", [False, True], ids=["none inside", "autocast inside"])
@pytest.mark.parametrize("takes", [False, True], ids=["constant input", "input with gradient"])
def test_casts_that_autocast_caches_end_with_its_block(around: bool, own: bool, takes: bool) -> None:
    model, x = Mixed(), torch.randn(16, 64, requires_grad=takes)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=own or around):
            y = model(x)
        return y.square().mean()

    mixed_step(fn, x, False, around)
    model.zero_grad()
    x.grad = None
    measured = fckpt.measure_peak(lambda: mixed_step(fn, x, False, around)).peak_bytes
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        predicted = fckpt.plan(fn, x).baseline_peak_bytes
    assert abs(predicted - measured) <= 0.01 * measured


@pytest.mark.parametrize("inside", [False, True], ids=["backward after the block", "backward inside"])
def test_a_share_is_kept_wherever_the_block_of_autocast_ends(inside: bool) -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8))), torch.randn(256, 128)
    fn = lambda x: model(x).float().square().mean()
    mixed_step(fn, x, inside)
    model.zero_grad()
    measured = fckpt.measure_peak(lambda: mixed_step(fn, x, inside)).peak_bytes
    region = fckpt.remat(fn, budget=0.8)
    for _ in range(2):  # the first backward pass shows where the block ends
        mixed_step(region, x, inside)
    model.zero_grad()
    assert fckpt.measure_peak(lambda: mixed_step(region, x, inside)).peak_bytes <= 0.8 * measured
    plans = region._fckpt_region.planner.plans.values()  # type: ignore[attr-defined]  # set by remat
    assert abs([*plans][-1].baseline_peak_bytes - measured) <= 0.01 * measured


def test_plans_leave_what_autocast_caches() -> None:
    """Other code in the same block shares the casts."""
    model, x = nn.Linear(64, 64), torch.randn(16, 64)
    with torch.autocast("cpu", torch.bfloat16):
        before: Any = model(x).grad_fn
        fckpt.plan(lambda x: model(x).float().square().mean(), x, budget=1.0)
        after: Any = model(x).grad_fn
    casts = [node.next_functions[-1][0].next_functions[0][0] for node in (before, after)]
    assert casts[0] is casts[1] and "ToCopy" in casts[0].name()


NUMBERS = [float(i % 7) for i in range(500)]


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(torch.float32, 1.0), (torch.bfloat16, 0.6), (torch.complex64, 0.75), (torch.int64, 0.6)],
    ids=str,
)
def test_tensors_of_python_numbers_take_memory_while_the_function_holds_them(dtype: torch.dtype, share: float) -> None:
    """A plan does not hold them between calls, and reckons with them in each."""

    def fn(x: Tensor) -> Tensor:
        first = torch.tensor(NUMBERS, dtype=dtype)
        y = (x * first).abs().float().sin()
        return (y * torch.tensor(NUMBERS[::-1]) + torch.tensor(0.5)).cos().sum()

    x = torch.randn(500, requires_grad=True)
    plain = fckpt.measure_peak(lambda: torch.autograd.grad(fn(x), x)).peak_bytes
    plan = fckpt.plan(fn, x, budget=share)
    assert plan.baseline_peak_bytes == pytest.approx(plain, rel=0.01)
    planned = fckpt.remat(fn, budget=share)
    wanted = torch.autograd.grad(fn(x), x)[0]
    for _ in range(3):
        found = []
        peak = fckpt.measure_peak(lambda: found.extend(torch.autograd.grad(planned(x), x))).peak_bytes
        assert peak <= share * plan.baseline_peak_bytes + 64
        assert torch.equal(found[0], wanted)


def test_tensors_of_python_numbers_may_be_written_and_returned() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        written, returned = torch.tensor(NUMBERS), torch.tensor(NUMBERS)
        written.mul_(2).add_(x.detach())
        return (x * written).sum(), returned

    x = torch.randn(500, requires_grad=True)
    planned = fckpt.remat(fn, budget=1.0)
    for _ in range(2):
        loss, numbers = planned(x)
        assert torch.equal(loss, fn(x)[0]) and torch.equal(numbers, torch.tensor(NUMBERS))
        numbers.zero_()  # each call returns another tensor
        assert torch.equal(torch.autograd.grad(loss, x)[0], torch.tensor(NUMBERS) * 2 + x.detach())
