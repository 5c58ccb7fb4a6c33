"""What a plan says about the best plan, and how long one is looked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fckpt
from fckpt.cost import Analytic, profile_of

COSTS = Analytic(profile_of("A100"))


def deep(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(12):
        x = torch.tanh(x @ w)
    return x.sum()


def planned(budget: float | None = None, **options: Any) -> fckpt.Plan:
    w, x = torch.randn(16, 16, requires_grad=True), torch.randn(1024, 16)
    return fckpt.plan(deep, w, x, budget=budget, costs=COSTS, **options)


@pytest.mark.parametrize("budget", [0.9, 0.6, 0.4])
@pytest.mark.parametrize("solver", ["auto", "greedy", "rotor"])
def test_every_plan_knows_how_good_it_is(solver: str, budget: float) -> None:
    plan = planned(budget, solver=solver)
    assert 0 < plan.lower_bound <= plan.overhead + 1e-9
    assert plan.gap == pytest.approx(plan.overhead - plan.lower_bound, abs=2e-7)
    assert plan.least_peak_bytes <= plan.peak_bytes
    said = "which is the least" if plan.gap == 0 else "points above the least"
    assert said in str(plan)
    assert "the least" in repr(plan)  # known by now


def test_saving_everything_is_optimal() -> None:
    plan = planned(1.0)
    assert "the least" not in repr(plan)  # which does not compute a bound
    assert plan.lower_bound == plan.gap == plan.overhead == 0
    assert "which is the least" in str(plan)


def test_a_plan_of_a_policy_is_compared_within_its_own_peak() -> None:
    plan = planned(policy=fckpt.policies.nothing_saveable)
    assert plan.budget_bytes is None
    assert plan.lower_bound <= plan.overhead


def test_a_plan_from_a_file_has_the_same_bound(tmp_path) -> None:
    plan = planned(0.5)
    plan.save(tmp_path / "step.plan.json")
    assert fckpt.Plan.load(tmp_path / "step.plan.json").bound == plan.bound


def test_a_time_limit_is_for_those_who_search() -> None:
    budget = planned(0.5).budget_bytes
    assert budget is not None
    assert planned(0.5, time_limit=0.2).peak_bytes <= budget
    with pytest.raises(fckpt.ArgumentValueError, match="'greedy' takes no time limit; 'auto' does"):
        planned(0.5, solver="greedy", time_limit=1.0)
    for limit in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(fckpt.ArgumentValueError, match="a time limit is a number of seconds above 0, not"):
            planned(0.5, time_limit=limit)
