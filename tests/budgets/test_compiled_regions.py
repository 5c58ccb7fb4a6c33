"""Regions with a budget or a policy inside of functions that torch.compile compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import CLOSE, QUIET, Perceptron, made, peak_of, step
from helpers import assert_equal, seeded

import fckpt
from fckpt.policies import dots_saveable

pytestmark = QUIET


@pytest.fixture(autouse=True)
def reset() -> None:
    torch._dynamo.reset()


def test_a_region_with_a_budget_is_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import fckpt._compile.compilation as backend

    parts: list[Any] = []
    monkeypatch.setattr(backend, "compile_fx", lambda module, *_, **__: (parts.append(module), module.forward)[1])
    model, x = made(lambda: Perceptron(dropout=0.0))
    expected = step(model, model, x)
    region = fckpt.remat(model, policy=dots_saveable)
    compiled = torch.compile(lambda x: region(x) * 2)
    assert_equal(step(lambda x: compiled(x) / 2, model, x), expected)
    assert len(parts) == 1


@pytest.mark.parametrize(
    ("around", "patches"),
    [
        ({"options": {"fallback_random": True}}, {"fallback_random": True}),
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True, "coordinate_descent_tuning": True}),
        ({"backend": "fckpt", "options": {"budget": 0.9, "fallback_random": True}}, {"fallback_random": True}),
        ({"backend": "fckpt", "mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True}),
    ],
)
def test_a_region_is_compiled_with_the_options_of_the_compiler_around_it(
    monkeypatch: pytest.MonkeyPatch, around: dict[str, Any], patches: dict[str, Any]
) -> None:
    import fckpt._compile.compilation as backend

    found: list[dict[str, Any]] = []
    monkeypatch.setattr(
        backend,
        "compile_fx",
        lambda module, *_, config_patches, **__: (found.append(config_patches), module.forward)[1],
    )
    model, x = made(lambda: Perceptron(dropout=0.0))
    region = fckpt.remat(model, policy=dots_saveable)
    torch.compile(region, **around)(x)
    torch.compile(region)(x)  # without them again
    assert found[0].items() >= patches.items()
    assert not found[-1].keys() & patches.keys()


@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": dots_saveable}], ids=str)
def test_random_numbers_of_pytorch_in_a_compiled_region(options: dict[str, Any]) -> None:
    """The generator ends where it ends without a compiler: the backward half draws nothing."""
    model, x = made(lambda: Perceptron(layers=2))
    expected = [*seeded(lambda: step(model, model, x)), torch.rand(3)]
    compiled = torch.compile(fckpt.remat(model, **options), options={"fallback_random": True})
    found = [*seeded(lambda: step(compiled, model, x)), torch.rand(3)]
    torch.testing.assert_close(found, expected)


def test_a_region_with_a_budget_runs_by_its_plan_under_other_compilers() -> None:
    model, x = made(Perceptron)
    expected = seeded(lambda: step(model, model, x))
    region = fckpt.remat(model, budget=0.7)
    assert_equal(seeded(lambda: step(torch.compile(region, backend="aot_eager"), model, x)), expected)
    assert fckpt.stats(region).programs == 1
    assert not fckpt.stats(region).fallbacks


def test_a_region_with_a_budget_and_fullgraph_is_an_error() -> None:
    model, x = made(Perceptron)
    region = fckpt.remat(model, budget=0.7)
    with pytest.raises(Exception, match=r"the graph breaks. With fullgraph=True, put the budget on the whole"):
        torch.compile(region, fullgraph=True)(x)


@pytest.mark.slow
def test_torch_compile_around_a_budget() -> None:
    model, x = made(lambda: Perceptron(layers=3, dropout=0.0))
    expected = step(model, model, x)
    limit = peak_of(model, x, model) * 0.7
    run = torch.compile(fckpt.remat(model, budget=0.7))
    torch.testing.assert_close(step(run, model, x), expected, **CLOSE)
    assert peak_of(run, x, model) <= limit
