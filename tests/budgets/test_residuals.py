"""What a call keeps for backward, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, gradients, leaf
from planned import (
    DOTS,
    EVERYTHING,
    MODELS,
    NOTHING,
    least_bytes_of,
    model,
)
from torch import Tensor

import fckpt
from fckpt import policies


def kept_by(net: Callable[..., Tensor], *args: Any) -> int:
    """Bytes that are held when the forward pass of a later call has ended, its result aside."""
    net(*args).backward()
    out = net(*args)
    nbytes = out.nbytes
    del out
    return fckpt.measure_peak(lambda: net(*args)).retained_bytes - nbytes


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", [EVERYTHING, NOTHING, DOTS], ids=repr)
def test_the_bytes_of_the_intermediates_are_what_the_allocator_holds(name: str, policy: policies.Policy) -> None:
    net, x = model(name)
    planned = fckpt.remat(net, policy=policy)
    rows = fckpt.saved_residuals(planned, x)
    kept = sum(row.nbytes for row in rows if row.kind == "intermediate")
    assert kept_by(planned, x) == kept
    if policy == NOTHING:
        assert kept == 0
    if policy == EVERYTHING:
        assert kept == sum(row.nbytes for row in fckpt.saved_residuals(net, x) if row.kind == "intermediate")
    print(f"{name}, {policy}: {kept} bytes in {len(rows)} rows")


@pytest.mark.parametrize("budget", [0.6, 0.8, 1.0])
def test_under_a_budget_too(budget: float) -> None:
    net, x = model("unet")
    planned = fckpt.remat(net, budget=budget) if budget > 0.7 else fckpt.remat(net, budget=least_bytes_of(net, x))
    rows = fckpt.saved_residuals(planned, x)
    assert kept_by(planned, x) == sum(row.nbytes for row in rows if row.kind == "intermediate")


def named(params: Any, x: Tensor) -> Tensor:
    h = fckpt.checkpoint_name(torch.tanh(x @ params["w"]), "hidden")
    return fckpt.checkpoint_name(torch.exp(h.sin()), "out").sum()


def test_rows_say_where_a_residual_comes_from_and_who_needs_it() -> None:
    params = {"w": torch.randn(4, 5, requires_grad=True)}
    x = torch.randn(3, 4)
    rows = fckpt.saved_residuals(fckpt.remat(named, policy=policies.save_only_these_names("hidden")), params, x)
    (row,) = [row for row in rows if row.kind == "intermediate"]
    assert (row.name, row.shape, row.dtype, row.nbytes) == ("hidden", (3, 5), torch.float32, 60)
    assert row.origin.startswith("tanh at test_residuals.py:")
    assert "(named)" in row.origin
    assert row.reason
    assert {row.origin for row in rows if row.kind == "argument"} >= {"args[1]"}
    assert not [r for r in fckpt.saved_residuals(fckpt.remat(named), params, x) if r.kind == "intermediate"], (
        "a plain region keeps nothing"
    )
    everything = fckpt.saved_residuals(named, params, x)
    assert {row.name for row in everything if row.name} == {"hidden", "out"}


def test_a_value_that_must_not_be_kept_by_name_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    params, x = {"w": torch.randn(4, 5, requires_grad=True)}, torch.randn(3, 4)
    region = fckpt.remat(named, policy=policies.save_anything_except_these_names("hidden"))
    names = [row.name for row in fckpt.saved_residuals(region, params, x)]
    assert "hidden" not in names
    assert "out" in names
    fckpt.print_saved_residuals(region, params, x)
    text = capsys.readouterr().out
    assert "'out'" in text
    assert "intermediate" in text


def test_a_policy_inside_of_another_keeps_what_both_allow() -> None:
    inner = fckpt.remat(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w), policy=DOTS)
    outer = lambda x, w: inner(torch.tanh(x @ w), w).sin().sum()
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)

    def origins(policy: Any) -> list[str]:
        rows = fckpt.saved_residuals(fckpt.remat(outer, policy=policy), x, w)
        return sorted(row.origin.split(" ")[0] for row in rows if row.kind == "intermediate")

    assert origins(NOTHING) == []
    assert origins(DOTS).count("tanh") == 0
    assert origins(EVERYTHING).count("tanh") <= 2  # of the outer function, and what the inner one returns
    params = leaf({"w": w})
    fckpt.remat(outer, policy=EVERYTHING)(x, params["w"]).backward()
    (expected,) = torch.autograd.grad(torch.tanh(torch.tanh(torch.tanh(x @ w) @ w) @ w).sin().sum(), w)
    assert_equal(gradients(params)["w"], expected)
