"""`Plan.at`: the plan of the same function at other sizes."""

from __future__ import annotations

import pytest
import torch

import fckpt

W = torch.randn(24, 24, requires_grad=True)


def loss(x, w=W, *, scale=1.0):
    for _ in range(12):
        x = torch.tanh(x @ w) * scale
    return x.square().sum()


def test_other_sizes_fit_the_same_budget_and_run() -> None:
    plan = fckpt.plan(loss, torch.randn(64, 24), budget=0.5)
    for rows in (16, 64, 80):
        x = torch.randn(rows, 24)
        other = plan.at(x)
        assert other.budget_bytes == plan.budget_bytes
        assert other.peak_bytes <= plan.budget_bytes
        (expected,) = torch.autograd.grad(loss(x), W)
        run = fckpt.remat(loss, plan=other)
        measured = fckpt.measure_peak(lambda run=run, x=x: torch.autograd.grad(run(x), W))
        assert torch.equal(torch.autograd.grad(run(x), W)[0], expected)
        assert measured.peak_bytes <= plan.budget_bytes
    assert plan.at(torch.randn(16, 24)).overhead == 0 < plan.overhead <= plan.at(torch.randn(80, 24)).overhead


def test_nothing_is_solved_where_the_adapted_schedule_fits(monkeypatch) -> None:
    plan = fckpt.plan(loss, torch.randn(64, 24), budget=0.5)
    monkeypatch.setattr("fckpt._inspect.make_plan", lambda *args: pytest.fail("solved"))
    assert plan.at(torch.randn(72, 24)).at(torch.randn(60, 24), scale=2.0).peak_bytes <= plan.budget_bytes


def test_plain_plans_and_policies_stay_what_they_are() -> None:
    plain = fckpt.plan(loss, torch.randn(64, 24)).at(torch.randn(128, 24))
    assert plain.overhead == 0
    assert plain.peak_bytes == fckpt.plan(loss, torch.randn(128, 24)).peak_bytes
    policy = fckpt.plan(loss, torch.randn(64, 24), policy=fckpt.policies.dots_saveable).at(torch.randn(128, 24))
    assert policy.solver == "policy"
    named = fckpt.plan(loss, torch.randn(64, 24), budget=0.6, solver="greedy").at(torch.randn(65, 24))
    assert named.solver == "greedy"


def test_sizes_that_cannot_be_planned_are_errors() -> None:
    plan = fckpt.plan(loss, torch.randn(64, 24), budget=0.5)
    with pytest.raises(fckpt.BudgetError) as error:
        plan.at(torch.randn(4096, 24))
    assert error.value.least_bytes > plan.budget_bytes
    with pytest.raises(fckpt.PlanError, match="read from a file"):
        fckpt.Plan.from_json(plan.to_json()).at(torch.randn(8, 24))

    def branches(x):
        return (x.sin() if len(x) < 10 else x.cos()).sum() + W.sum()

    x = torch.randn(4, 4, requires_grad=True)
    small = fckpt.plan(branches, x, budget=1.0)
    with pytest.raises(fckpt.PlanError, match=r"operation 0 is aten\.sin\.default in the plan, and aten\.cos"):
        small.at(torch.randn(10, 4, requires_grad=True))


def test_another_size_on_a_device_that_is_not_here() -> None:
    with torch.device("meta"):
        sizes = [torch.empty(n, 24, device="meta") for n in (64, 1000)]
    plan = fckpt.plan(loss, sizes[0], budget="2MiB", device="cuda", costs="H100")
    assert 2**20 < plan.at(sizes[1]).peak_bytes <= 2**21
