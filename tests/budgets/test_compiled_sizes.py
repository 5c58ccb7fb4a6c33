"""Budgets of functions that torch.compile compiles for symbolic sizes: each size keeps the budget, or is a warning."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fckpt
from fckpt._compile import by_size, compilation
from fckpt._compile.joint import size_of


class Blocks(nn.Module):
    """Blocks with a batch norm, whose statistics must change once in each call."""

    def __init__(self, layers: int = 6, width: int = 32):
        super().__init__()
        block = lambda: (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Softmax(-1))
        self.body = nn.Sequential(nn.BatchNorm1d(width), *[m for _ in range(layers) for m in block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().sum()


@pytest.fixture(autouse=True)
def reset() -> None:
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


def rows(count: int) -> torch.Tensor:
    torch.manual_seed(count)
    return torch.randn(count, 32)


def step(run: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad()
    loss = run(x)
    loss.backward()
    return [loss.detach(), [p.grad.clone() for p in model.parameters()], [b.clone() for b in model.buffers()]]


def peak(run: Callable[..., torch.Tensor], x: torch.Tensor) -> int:
    return fckpt.measure_peak(lambda: run(x).backward()).peak_bytes


def warned(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fckpt.BudgetWarning)
        result = run()
    return result, [str(w.message) for w in caught if w.category is fckpt.BudgetWarning]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("budget", ["2MiB", 0.7])
def test_the_budget_holds_as_the_sizes_grow(model: nn.Module, dynamic: bool | None, budget: Any) -> None:
    plain = copy.deepcopy(model)
    run = torch.compile(model, backend="fckpt", dynamic=dynamic, options={"budget": budget})
    sizes = [192, 256, 224, 800, 64, 800]
    for count in sizes:
        x = rows(count)
        found, messages = warned(lambda x=x: step(run, model, x))
        torch.testing.assert_close(found, step(plain, plain, x))  # Inductor's kernels round differently
        limit = budget * peak(copy.deepcopy(plain), x) if isinstance(budget, float) else 2 * 2**20
        before = copy.deepcopy(model.state_dict())
        assert messages or peak(run, x) <= limit, count
        assert not messages, messages
        model.load_state_dict(before)


def test_a_fraction_holds_as_the_sizes_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peaks are given here: a part does not depend on the sizes, so small sizes exceed a fraction, below 100."""
    measured: list[int] = []

    def compile_fx(module: Any, inputs: Any, config_patches: Any) -> Any:
        partitioner = config_patches["custom_partitioner_fn"]
        partitioner.trains = partitioner.is_least = True
        return module.forward

    def peak_of(function: Any, inputs: Any, held: Any) -> int:
        measured.append(len(inputs[-1]))
        return 1000 + 10 * measured[-1]

    monkeypatch.setattr(compilation, "compile_fx", compile_fx)
    monkeypatch.setattr(compilation, "peak_of", peak_of)
    monkeypatch.setattr(compilation, "plain_peak_of", lambda module, inputs: 40 * size_of(inputs[-1].shape[0]))
    run = torch.compile(lambda x: x.sin().sum(), backend="fckpt", dynamic=True, options={"budget": 0.5})
    train = lambda x: run(x.requires_grad_())
    sizes = (400, 200, 300, 350, 500, 60, 500, 60, 90, 120, 130, 125, 100, 90)
    exceeding = [count for count in sizes if warned(functools.partial(train, rows(count)))[1]]
    assert exceeding == [60, 90]
    # For 350 rows, the function takes 4500 bytes, no more than for 400, which are within the budget for 300 rows.
    assert [*dict.fromkeys(measured)] == [400, 200, 300, 500, 60, 90, 120, 130, 100]


@pytest.mark.slow
def test_sizes_beyond_the_most_that_are_compiled_are_a_warning(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_size, "MOST", 1)
    run = torch.compile(model, backend="fckpt", dynamic=True, options={"budget": "2MiB"})
    sizes = (192, 800, 900, 1000, 1000, 900, 64)
    train = lambda x: run(x).backward()
    found = [warned(functools.partial(train, rows(count)))[1] for count in sizes]
    first, *again = [messages for messages in found if messages]  # PyTorch may have compiled again at a size
    assert not any(found[:2]) and not any(found[4:]) and len(again) < 2
    assert "with the budget 2.00 MiB holds" in first[0] and "compiled for 8 other sizes" in first[0]


def test_a_size_that_no_plan_fits_is_a_warning_at_that_size(model: nn.Module) -> None:
    run = torch.compile(model, backend="fckpt", dynamic=True, options={"budget": "200KiB"})
    with torch.no_grad():
        found = [warned(functools.partial(run, rows(count)))[1] for count in (64, 4000, 64, 4000)]
    assert [len(messages) for messages in found] == [0, 1, 0, 0]
    assert "no backward pass" in found[1][0]
    torch._dynamo.reset()
    run = torch.compile(model, backend="fckpt", dynamic=True, options={"budget": 0.1})
    with torch.no_grad():  # a fraction is one of the peak with a backward pass
        assert not any(warned(functools.partial(run, rows(count)))[1] for count in (64, 4000))


def test_example_inputs_are_freed(model: nn.Module) -> None:
    import weakref

    run = torch.compile(model, backend="fckpt", dynamic=True, options={"budget": 1.0})
    x = rows(64)
    with torch.no_grad():
        run(x)
    known = weakref.ref(x)
    del x
    assert known() is None


def test_a_python_float_that_changes_with_the_sizes() -> None:
    layer = nn.Linear(32, 64)
    scaled = lambda x, scale: (nn.functional.gelu(layer(x)) * scale).sin().square().mean()
    run = torch.compile(scaled, backend="fckpt", options={"budget": "23KiB"})
    found = []
    for count, scale in ((50, 1.0), (57, 1.1), (64, 1.2), (64, 1.3), (57, 1.4)):
        x = rows(count)
        loss, messages = warned(lambda x=x, scale=scale: run(x, scale))
        torch.testing.assert_close(loss, scaled(x, scale))
        found += [messages]
    assert [len(messages) for messages in found] == [0, 0, 1, 0, 0]
    assert "has a Python float among its arguments" in found[2][0]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_that_depends_on_data_is_a_warning() -> None:
    layer = nn.Linear(32, 64)
    chosen = lambda x, mask: layer(x[mask]).tanh().exp().sum()
    run = torch.compile(chosen, backend="fckpt", options={"budget": "1MiB"}, fullgraph=True)
    x, few = rows(64), torch.arange(64) < 8
    loss, messages = warned(lambda: run(x, few))
    torch.testing.assert_close(loss, chosen(x, few))
    assert len(messages) == 1 and "the size of 'getitem' in test_compiled_sizes.py" in messages[0]
    assert not warned(lambda: run(x, ~few))[1]
    torch._dynamo.reset()
    assert not warned(lambda: torch.compile(chosen, backend="fckpt", fullgraph=True)(x, few))[1]  # no budget
