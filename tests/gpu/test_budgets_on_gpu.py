"""Budgets on a GPU: the bits of plain PyTorch with deterministic kernels, and the peak by `max_memory_allocated`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torchvision_shim  # noqa: F401  before transformers
import zoo
from helpers import assert_equal
from torch import nn
from torch.nn import functional as F

import fckpt
from fckpt._fuse import trial

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
CUDA = torch.device("cuda")
ROUNDED = 4 * 512
"""Bytes of a loss and its cotangent, which lie beside the region."""


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic kernels: with others, not even two plain steps are bitwise equal."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def step_of(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    """Returns a step from a fixed seed, with the loss, the gradients, the buffers and the generator's state."""

    def step() -> Any:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        torch.manual_seed(3)
        value = loss()
        value.backward()
        found = [value.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
        model.zero_grad(set_to_none=True)
        return [*(t for t in found if t is not None), torch.cuda.get_rng_state()]

    return step


def peak_of(model: nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    def step() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    step()
    return fckpt.measure_peak(step, CUDA).peak_bytes


def least_of(loss: Callable[[], torch.Tensor]) -> int:
    with pytest.raises(fckpt.BudgetError) as caught:
        fckpt.plan(loss, budget=1)
    return caught.value.least_bytes


def check(model: nn.Module, loss: Callable[[], torch.Tensor], *, budget: float = 0.6, **options: Any) -> fckpt.Plan:
    """Asserts that a region has the bits of the plain loss, the plain peak as predicted, and its budget."""
    expected, plain = step_of(model, loss)(), peak_of(model, loss)
    whole = fckpt.plan(loss, budget=1.0)
    assert abs(whole.baseline_peak_bytes - plain) <= 0.02 * plain + ROUNDED, (whole.baseline_peak_bytes, plain)
    limit = max(int(budget * plain), least_of(loss))
    region = fckpt.remat(loss, budget=limit, **options)
    for _ in range(2):
        assert_equal(step_of(model, region)(), expected)
    measured = peak_of(model, region)
    assert measured <= limit + ROUNDED, (measured, limit, plain)
    return region


# ---- models


class Convolutions(nn.Module):
    """Convolutions, batch norms, pooling and dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers = [
            m
            for i in range(4)
            for m in (nn.Conv2d(width if i else 3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        ]
        self.body = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Dropout(0.2), nn.Conv2d(width, width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(32, 64), kind(64, 64, num_layers=2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(torch.tanh(self.first(x)))[0]
        return out.sin().exp().square().mean()


class Perceptron(nn.Module):
    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1)
        return x.square().mean()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Indexed(nn.Module):
    """Embeddings, gathers, scatters and a cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.register_buffer("ids", torch.randint(100, (8, 32)))

    def forward(self) -> torch.Tensor:
        h = self.words(self.ids).sin().exp()
        h = h.gather(1, self.ids[:, :, None].expand(-1, -1, 64) % 32).tanh()
        h = torch.zeros_like(h).scatter_add(1, self.ids[:, :, None].expand(-1, -1, 64) % 32, h).sin()
        h = h.index_add(1, self.ids[0] % 32, h * 0.5)[self.ids[:, 0] % 8]
        return F.cross_entropy(self.out(h.sigmoid()).flatten(0, 1), self.ids.flatten())


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "perceptron": lambda: (Perceptron(), (512, 256)),
    "convolutions": lambda: (Convolutions(), (8, 3, 32, 32)),
    "channels_last": lambda: (Convolutions().to(memory_format=torch.channels_last), (8, 3, 32, 32)),
    "attending": lambda: (Attending(), (8, 64, 64)),
}


def made(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    if name == "indexed":
        model: nn.Module = Indexed().to(CUDA)
        return model, model
    model, shape = MODELS[name]()
    model = model.to(CUDA)
    return model, partial(model, torch.randn(shape, device=CUDA))


@pytest.mark.parametrize("budget", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("name", [*MODELS, "indexed"])
def test_networks(name: str, budget: float) -> None:
    check(*made(name), budget=budget)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks_are_refused(kind: type[nn.RNNBase]) -> None:
    model = Recurrent(kind).to(CUDA)
    x = torch.randn(32, 16, 32, device=CUDA)
    with pytest.raises(fckpt.TraceError, match="packs the weights of recurrent networks"):
        fckpt.remat(model, budget=0.7)(x)
    region = fckpt.remat(model)
    region(x).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    assert_equal(found, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "attending"])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    model, loss = made(name)

    def cast() -> torch.Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return loss()

    check(model, cast)


@pytest.mark.parametrize("name", [name for name in zoo.TEXT if name != "mixtral"])  # whose routing depends on data
def test_language_models(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = zoo.make(name)
    model = model.to(CUDA).train()
    batch = {k: v.to(CUDA).repeat(16, *[1] * (v.dim() - 1)) for k, v in batch.items()}
    check(model, lambda: model(**batch).loss)


@pytest.mark.parametrize("kernels", ["exact", "fused"])
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "attending"])
def test_compiled_kernels(name: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_FASTER", float("inf"))  # other processes may use the GPU
    monkeypatch.setattr(trial, "_NOT_SLOWER", float("inf"))
    monkeypatch.setattr(trial, "_known", {})
    model, loss = made(name)
    expected, plain = step_of(model, loss)(), peak_of(model, loss)
    limit = max(plain * 6 // 10, least_of(loss))
    plan = fckpt.plan(loss, budget=limit, kernels=kernels)
    region = fckpt.remat(loss, plan=plan, kernels=kernels)
    found = step_of(model, region)()
    if kernels == "exact":
        assert_equal(found, expected)
    else:
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-2, atol=1e-4)
    assert peak_of(model, region) <= limit + ROUNDED
    assert plan.fused is not None or (kernels, name) == ("exact", "attending")


@pytest.mark.parametrize("budget", [0.5, 1.0])
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "attending"])
def test_the_backend_of_torch_compile(name: str, budget: float) -> None:
    torch._dynamo.reset()
    model, loss = made(name)
    plain = peak_of(model, loss)
    limit = int(plain * budget)
    compiled = torch.compile(loss, backend="fckpt", options={"budget": limit})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peak = peak_of(model, compiled)
    said = any(issubclass(w.category, fckpt.BudgetWarning) for w in caught)
    assert said or peak <= limit + ROUNDED, (peak, limit)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_a_whole_step(kind: str, clip: float | None) -> None:
    def run(planned: bool) -> list[torch.Tensor]:
        model, loss = made("perceptron")
        x = loss.args[0]
        momentum = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, weight_decay=0.1, **momentum)
        if planned:
            step = fckpt.step(model, optimizer, lambda m, x: m(x), budget=0.9, clip_norm=clip)
            one = lambda: step(x)
        else:

            def one() -> Any:
                optimizer.zero_grad()
                model(x).backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()

        torch.manual_seed(5)
        for _ in range(3):
            one()
        return [p.detach() for p in model.parameters()]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("budget", [None, 0.6, "least"])
def test_a_region_in_a_cuda_graph(budget: float | str | None) -> None:
    model, loss = made("perceptron")
    parameters = [*model.parameters()]
    region = fckpt.remat(loss, budget=least_of(loss) if budget == "least" else budget)

    def run(fn: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        fn().backward()
        return [p.grad for p in parameters if p.grad is not None]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(region)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        captured = run(region)
    for seed in (1, 2):
        torch.manual_seed(seed)
        graph.replay()
        found = [g.clone() for g in captured]
        torch.manual_seed(seed)
        assert_equal(found, run(loss))


@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_both_halves_as_cuda_graphs(name: str) -> None:
    model, loss = made(name)
    step = step_of(model, loss)
    expected = step()
    assert_equal(step(), expected)  # BatchNorm's buffers stay the same tensors
    whole = fckpt.plan(loss, budget=1.0).baseline_peak_bytes
    budget = whole + (64 << 20)  # gradients and workspaces beside the plan
    region = fckpt.remat(loss, budget=budget, cuda_graphs=True)
    planned = step_of(model, region)
    for _ in range(6):
        assert_equal(planned(), expected)
    assert fckpt.stats(region).replayed == 3
    assert fckpt.measure_peak(planned, CUDA).peak_bytes <= budget


def test_cuda_graphs_of_new_batches() -> None:
    torch.manual_seed(0)
    model = Perceptron().to(CUDA)
    plain = lambda x: model(x).square().mean()
    region = fckpt.remat(plain, budget="128MiB", cuda_graphs=True)
    for _ in range(6):
        x = torch.randn(64, 256, device=CUDA)
        found = [torch.autograd.grad(fn(x), [*model.parameters()]) for fn in (region, plain)]
        assert_equal(*found)
    assert fckpt.stats(region).replayed == 3


@pytest.mark.parametrize("how", ["vmap", "remat", "hessian"])
def test_transforms(how: str) -> None:
    torch.manual_seed(0)
    w = torch.randn(16, 16, device=CUDA)
    xs = torch.randn(5, 8, 16, device=CUDA)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.dropout((x @ w).tanh(), 0.0).exp().square().mean()

    run = {
        "vmap": lambda fn: torch.func.vmap(torch.func.grad(fn), in_dims=(None, 0))(w, xs),
        "remat": lambda fn: torch.func.grad(fn)(w, xs[0]),
        "hessian": lambda fn: torch.func.grad(lambda w: torch.func.grad(fn)(w, xs[0]).sin().sum())(w),
    }[how]
    for options in ({}, {"budget": 0.7}):
        assert_equal(run(fckpt.remat(loss, **options)), run(loss))


def test_other_streams() -> None:
    model, loss = made("perceptron")
    expected = step_of(model, loss)()
    region = fckpt.remat(loss, budget=0.7)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step_of(model, region)()
    torch.cuda.synchronize()
    assert_equal(found, expected)


def test_mixed_devices() -> None:
    """A function with a part on the CPU."""
    w = torch.randn(64, 64, device=CUDA, requires_grad=True)
    v = torch.randn(64, 64, requires_grad=True)

    def fn() -> torch.Tensor:
        h = (w @ w).sin().exp()
        return ((h.cpu() @ v).sin().exp().to(CUDA) * h).mean()

    def run(fn: Callable[[], torch.Tensor]) -> Any:
        return torch.autograd.grad(fn(), [w, v])

    assert_equal(run(fckpt.remat(fn, budget=0.8)), run(fn))
