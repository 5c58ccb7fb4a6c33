"""The option `cuda_graphs`: recordings of both halves of a plan.

No CPU has CUDA graphs. Here an interpreter takes their place: it records the operations of a function and runs them
again on the same tensors, so that operands, outputs and gradients are handled as on a GPU. `tests/gpu` has the graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from helpers import assert_equal
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fckpt
from fckpt._planned import cuda_graphs
from fckpt._region import planner_of


class _Recorder(TorchDispatchMode):
    """Records operations. What they write while they are recorded is undone: a CUDA graph records without running."""

    fckpt_looks_on = True
    made: ClassVar[set[int]] = set()
    """The addresses of tensors that the recordings of both halves have made."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or "batch_norm" in func.name():  # whose schema does not say that it writes
            storages = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.before += [(one, one.clone()) for one in storages if one.data_ptr() not in self.made]
        result = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = {t.untyped_storage().data_ptr() for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        self.made.update(made - given)
        if self.keeps:
            self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        for storage, then in reversed(self.before):
            storage.copy_(then)
        self.before.clear()

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    cuda_graphs._fill(old, new)


class _OnCPU:
    """Takes the place of `_Recording`."""

    number, keeps = 0, True

    def __init__(self, fn: Callable[[], Any], pool: Any, generators: Sequence[torch.Generator]):
        recorder, state = _Recorder(keeps=self.keeps), torch.get_rng_state()
        with recorder:
            self.result = fn()
        recorder.undo()
        torch.set_rng_state(state)
        self.replay = recorder.replay
        type(self).number += self.keeps


def _peak_of_a_recording(record: Callable[[], Any], device: torch.device) -> Any:
    """Returns the peak of a recording that keeps no intermediates, which lie in one pool on a GPU; and records."""
    _OnCPU.keeps = False
    peak = fckpt.measure_peak(record)
    _OnCPU.keeps = True
    _Recorder.made.clear()
    record()
    _Recorder.made.clear()
    return peak


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_graphs, "_Recording", _OnCPU)
    monkeypatch.setattr(cuda_graphs, "_KIND", "cpu")
    monkeypatch.setattr(cuda_graphs, "_stream", lambda device: 0)
    monkeypatch.setattr(cuda_graphs, "_is_recording", lambda: False)
    monkeypatch.setattr(cuda_graphs, "_free_workspaces", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda_graphs, "measure_peak", _peak_of_a_recording)
    monkeypatch.setattr(_OnCPU, "number", 0)
    yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.body(x).sin(), y)


def train(loss_of: Callable[[nn.Module], Callable[..., torch.Tensor]], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Trains a network with batches of these sizes; returns all losses, parameters, buffers and random numbers."""
    torch.manual_seed(0)
    net = Net()
    loss = loss_of(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for size in sizes:
        value = loss(torch.randn(size, 16), torch.randn(size, 16))
        value.backward()
        found.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *net.parameters(), *net.buffers(), torch.get_rng_state()]


def planned(regions: list[Any], **options: Any) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    def of(net: nn.Module) -> Callable[..., torch.Tensor]:
        regions.append(fckpt.remat(lambda x, y: net(x, y), cuda_graphs=True, **options))
        return regions[-1]

    return of


@pytest.mark.parametrize("sizes", [(32,) * 8, (32,) * 5 + (7,) + (32,) * 3, (32, 8) * 5, (32,) * 5 + (8,) * 6], ids=str)
def test_training_has_the_bits_of_plain(sizes: tuple[int, ...]) -> None:
    regions: list[Any] = []
    found = train(planned(regions, budget="1MiB"), sizes)
    assert_equal(found, train(lambda net: net, sizes))
    # A size is recorded in the third call in a row after its first one, whose backward pass was not known before.
    assert fckpt.stats(regions[0]).replayed == {8: 5, 9: 5, 10: 0, 11: 5}[len(sizes)]


def test_outputs_and_gradients_are_the_callers() -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 8, requires_grad=True)
    plain = lambda x: (x @ w).tanh().square().sum(1)
    region = fckpt.remat(plain, budget="1MiB", cuda_graphs=True)
    outputs, grads, expected = [], [], []
    for _ in range(6):
        x = torch.randn(4, 8)
        out = region(x)
        (grad,) = torch.autograd.grad(out.sum(), w)
        outputs.append(out)
        grads.append(grad)
        out = plain(x)
        expected += [out, torch.autograd.grad(out.sum(), w)[0]]
    assert_equal([t for pair in zip(outputs, grads, strict=True) for t in pair], expected)
    assert fckpt.stats(region).replayed == 3


def test_gradients_accumulate() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    xs = [torch.randn(4, 8) for _ in range(7)]

    def run(fn: Callable[..., torch.Tensor]) -> list[Any]:
        net.zero_grad()
        for x in xs:
            fn(x).backward()
        return [p.grad for p in net.parameters()]

    plain = lambda x: net(x).sin().square().sum()
    region = fckpt.remat(plain, budget="1MiB", cuda_graphs=True)
    assert_equal(run(region), run(plain))
    assert fckpt.stats(region).replayed == 4


def test_a_second_forward_before_the_backward_runs_without_graphs() -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 8, requires_grad=True)
    plain = lambda x: (x @ w).tanh().square().sum()
    region = fckpt.remat(plain, budget="1MiB", cuda_graphs=True)
    for _ in range(4):
        region(torch.randn(4, 8)).backward()
    w.grad = None
    a, b = torch.randn(4, 8), torch.randn(4, 8)
    first, second = region(a), region(b)
    found = [torch.autograd.grad(second, w)[0], torch.autograd.grad(first, w)[0]]
    assert_equal(found, [torch.autograd.grad(plain(b), w)[0], torch.autograd.grad(plain(a), w)[0]])
    assert fckpt.stats(region).replayed == 2  # the call that was recorded, and `first`
    region(a)  # its residuals are dropped with its result
    assert_equal(torch.autograd.grad(region(b), w)[0], found[0])
    assert fckpt.stats(region).replayed == 4


def test_backward_passes_that_were_not_recorded() -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)
    plain = lambda x: (x @ w).tanh().square().sum(1)

    def passes(fn: Callable[..., torch.Tensor]) -> list[Any]:
        out = fn(x)
        again = [torch.autograd.grad(out.sum(), w, retain_graph=True)[0] for _ in range(2)]
        weighted = torch.autograd.grad(out, w, torch.arange(4.0))[0]
        rows = torch.autograd.grad(fn(x), w, torch.eye(4), is_grads_batched=True)[0]
        first = torch.autograd.grad(fn(x).sum(), w, create_graph=True)[0].detach()
        return [*again, weighted, rows, first]

    regions = [fckpt.remat(plain, budget="1MiB", cuda_graphs=graphs) for graphs in (True, False)]
    for region in regions:
        for _ in range(5):
            region(x).sum().backward()
    found, expected = map(passes, regions)
    assert_equal(found, expected)
    stats = [fckpt.stats(region) for region in regions]
    assert stats[0].replayed == 5
    assert stats[0].fallbacks == stats[1].fallbacks


def test_parameters_that_move_are_recorded_again() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    region = fckpt.remat(lambda x: net(x).sin().sum(), budget="1MiB", cuda_graphs=True)
    for round_ in range(2):
        for p in net.parameters():
            p.data = torch.randn_like(p)
        for _ in range(6):
            net.zero_grad()
            x = torch.randn(4, 8)
            region(x).backward()
            found = [p.grad for p in net.parameters()]
            net.zero_grad()
            net(x).sin().sum().backward()
            assert_equal(found, [p.grad for p in net.parameters()])
        assert _OnCPU.number == 2 * (round_ + 1)


def test_without_gradients_there_is_one_recording() -> None:
    w = torch.randn(8, 8)
    region = fckpt.remat(lambda x: (x @ w).tanh() @ w, budget="1MiB", cuda_graphs=True)
    for _ in range(6):
        x = torch.randn(4, 8)
        assert_equal(region(x), (x @ w).tanh() @ w)
    assert (_OnCPU.number, fckpt.stats(region).replayed) == (1, 4)


def test_an_expanded_argument() -> None:
    w = torch.randn(8, 8, requires_grad=True)
    region = fckpt.remat(lambda x: (x * w).sin().sum(), budget="1MiB", cuda_graphs=True)
    for _ in range(6):
        x = torch.randn(8, 1).expand(8, 8)
        assert_equal(torch.autograd.grad(region(x), w), torch.autograd.grad((x * w).sin().sum(), w))
    assert fckpt.stats(region).replayed == 3


def test_results_that_share_memory() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def fn(w: torch.Tensor) -> Any:
        y = (x @ w).sin()
        return y, y[0], w.t(), x

    region = fckpt.remat(fn, budget="1MiB", cuda_graphs=True)
    for _ in range(6):
        found, expected = region(w), fn(w)
        assert_equal(found, expected)
        assert found[1]._base is found[0]._base or found[1]._base is found[0]
        assert found[2].data_ptr() == w.data_ptr()
        assert found[3] is x
        assert_equal(torch.autograd.grad(found[1].sum(), w), torch.autograd.grad(expected[1].sum(), w))
    assert fckpt.stats(region).replayed


# ---- budgets


def deep(width: int = 256) -> Callable[[torch.Tensor], torch.Tensor]:
    w = torch.randn(4, 4, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = (x @ w).tanh()
        return x.square().sum()

    return loss


def test_the_budget_is_for_recordings_and_copies() -> None:
    torch.manual_seed(0)
    plain = deep()
    x = torch.randn(1000, 4, requires_grad=True)  # the copies of it and of its gradient are two of nine saved tensors
    peak = fckpt.plan(plain, x, budget=1.0).baseline_peak_bytes
    budget = int(0.9 * peak)
    region = fckpt.remat(plain, budget=budget, cuda_graphs=True)
    for _ in range(5):
        x = torch.randn(1000, 4, requires_grad=True)
        assert_equal(torch.autograd.grad(region(x), x), torch.autograd.grad(plain(x), x))
    graphs = planner_of(region).graphs
    assert graphs._halves is not None and graphs._halves.nbytes <= budget
    assert fckpt.stats(region).replayed == 2


def test_a_budget_without_room_for_copies_is_an_error() -> None:
    torch.manual_seed(0)
    plain = deep()
    x = torch.randn(1000, 4)
    with pytest.raises(fckpt.BudgetError) as caught:
        fckpt.plan(plain, x, budget=1)
    least = caught.value.least_bytes
    region = fckpt.remat(plain, budget=least, cuda_graphs=True)
    for _ in range(3):
        region(torch.randn(1000, 4)).backward()
    with pytest.raises(fckpt.BudgetError, match="cuda_graphs=True: beside its plan") as caught:
        region(torch.randn(1000, 4))
    measured = 2 * 5056  # what a matrix product of oneDNN keeps
    enough = fckpt.remat(plain, budget=caught.value.least_bytes + measured, cuda_graphs=True)
    for _ in range(4):
        enough(torch.randn(1000, 4)).backward()
    assert fckpt.stats(enough).replayed == 1


# ---- refusals


def test_a_cpu_has_no_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_KIND", "cuda")
    region = fckpt.remat(lambda x: x.sin().sum(), budget="1MiB", cuda_graphs=True)
    with pytest.raises(fckpt.ArgumentValueError, match="computes on cpu, and must be on one CUDA device"):
        region(torch.randn(4, requires_grad=True))


def test_a_buffer_that_is_another_one_in_each_call_is_refused() -> None:
    net = nn.BatchNorm1d(8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return net(x).sin().sum()

    region, kept = fckpt.remat(loss, budget="1MiB", cuda_graphs=True), []
    with pytest.raises(fckpt.ArgumentValueError, match=r"writes to .* another tensor in each call"):
        for _ in range(4):
            kept.append(net.running_mean)
            net.running_mean = torch.zeros(8)
            region(torch.randn(4, 8, requires_grad=True)).backward()


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(fckpt.ArgumentValueError, match="needs a plan"):
        fckpt.remat(torch.sin, cuda_graphs=True)
    with pytest.raises(fckpt.ArgumentValueError, match="donated arguments or tiles"):
        fckpt.remat(torch.sin, budget=0.5, tile=True, cuda_graphs=True)
    with pytest.raises(fckpt.ArgumentValueError, match="donated arguments or tiles"):
        fckpt.remat(torch.sin, budget=0.5, donate_argnums=0, cuda_graphs=True)
