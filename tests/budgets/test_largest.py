"""`fckpt.largest`: the largest size that fits a budget, found without running the function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fckpt

H100 = fckpt.cost.Analytic(fckpt.cost.profiles["H100"])
NET = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU())])


def loss(x: Tensor) -> Tensor:
    return NET(x).square().sum()


@pytest.mark.parametrize("budget", ["300KiB", "2MiB", 777_777])
def test_the_largest_batch_fits_and_the_next_one_does_not(budget: int | str) -> None:
    rows = fckpt.largest(loss, lambda n: torch.empty(n, 32), budget=budget, costs=H100)
    assert fckpt.plan(loss, torch.empty(rows, 32), budget=budget, costs=H100).peak_bytes > 0
    with pytest.raises(fckpt.BudgetError):
        fckpt.plan(loss, torch.empty(rows + 1, 32), budget=budget, costs=H100)


def test_the_function_does_not_run_and_few_sizes_are_traced() -> None:
    sizes: list[int] = []

    def args(n: int) -> tuple[Tensor, ...]:
        sizes.append(n)
        return (torch.empty(n, 4096, device="meta"),)

    with torch.device("meta"):
        net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(4096, 4096), nn.Tanh())])
    rows = fckpt.largest(lambda x: net(x).square().sum(), args, budget="80GiB", costs=H100)
    assert rows > 1_000_000
    assert len(sizes) <= 16


def test_the_edge_of_an_image_whose_peak_grows_with_its_square() -> None:
    net = nn.Sequential(*[m for _ in range(3) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())])
    fn = lambda x: net(x).square().sum()
    make = lambda n: torch.empty(1, 3, n, n)
    edge = fckpt.largest(fn, make, budget="1MiB", costs=H100)
    assert 60 < edge < 400
    with pytest.raises(fckpt.BudgetError):
        fckpt.plan(fn, make(edge + 1), budget="1MiB", costs=H100)


def test_sizes_are_limited_by_least_and_most() -> None:
    make = lambda n: torch.empty(n, 32)
    assert fckpt.largest(loss, make, budget="1GiB", most=17, costs=H100) == 17
    assert fckpt.largest(loss, make, budget="300KiB", least=8, most=9, costs=H100) == 9
    with pytest.raises(fckpt.BudgetError, match="no plan fits"):
        fckpt.largest(loss, make, budget="300KiB", least=10_000, costs=H100)


def test_a_large_limit_does_not_make_large_arguments() -> None:
    sizes: list[int] = []
    rows = fckpt.largest(loss, lambda n: sizes.append(n) or torch.empty(n, 32), budget="300KiB", most=10**9, costs=H100)
    assert max(sizes) <= 16 * rows


def test_a_peak_that_does_not_grow_has_no_largest_size() -> None:
    w = torch.ones(8, 8, requires_grad=True)
    fixed = lambda n: (torch.ones(8, 8) * (n > 0),)
    with pytest.raises(fckpt.ArgumentValueError, match="pass most="):
        fckpt.largest(lambda x: (x @ w).sin().sum(), fixed, budget="1MiB", costs=H100)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": 0.5}, "a fraction of the plain peak grows with the size"),
        ({"budget": "1MiB", "most": 0}, "most must be at least 1"),
        ({"budget": "1MiB", "least": 5, "most": 4}, "most=4 is smaller than least=5"),
        ({"budget": "1MiB", "solver": "none"}, "none"),
    ],
)
def test_what_is_no_search_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fckpt.FckptError, match=said):
        fckpt.largest(loss, lambda n: torch.empty(n, 32), costs=H100, **given)


def test_a_peak_that_stops_growing_is_an_error_before_the_arguments_are_too_large() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    most: list[int] = []

    def make_args(size: int) -> tuple[torch.Tensor]:
        most[:] = [max(size, *most)] if most else [size]
        return (torch.empty(size, 64),)

    with pytest.raises(fckpt.ArgumentValueError, match="pass most="):
        fckpt.largest(lambda x: (x[:10] @ w).tanh().sum(), make_args, budget="4MiB")
    assert most[0] <= 2**20
