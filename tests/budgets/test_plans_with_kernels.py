"""Tests of plans, once more with exact kernels: the same bits, and the peak that a plan states.

Here are a few of them; `tests/exact_kernels.py` says how to run all.
"""

from __future__ import annotations

import exact_kernels
import pytest
import test_plans

from fckpt._fuse import trial


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Exact kernels by default: compiled ones, or the stand-in for the compiler."""
    monkeypatch.setattr(trial, "_known", {})
    exact_kernels.use_exact_kernels(monkeypatch, request.param)


# A compiled kernel may have temporaries, and write over other inputs than the stand-in.
@pytest.mark.parametrize("kernels", exact_kernels.MODES, indirect=True)
def test_the_peak_is_the_one_that_the_plan_with_kernels_states(kernels: None) -> None:
    test_plans.test_the_peak_keeps_to_every_budget_and_is_what_was_predicted("mlp")
    assert any(trial._known.values())


@pytest.mark.parametrize("kernels", ["one-by-one"], indirect=True)
@pytest.mark.parametrize("name", ["convolutions", "words"])
def test_all_numbers_are_those_of_the_plain_model(kernels: None, name: str) -> None:
    test_plans.test_under_every_budget_all_numbers_are_those_of_the_plain_model(name)


@pytest.mark.parametrize("kernels", ["one-by-one"], indirect=True)
@pytest.mark.parametrize("policy", [test_plans.NOTHING, test_plans.DOTS], ids=repr)
def test_policies_give_the_numbers_of_the_plain_model(kernels: None, policy: test_plans.policies.Policy) -> None:
    test_plans.test_under_every_policy_all_numbers_are_those_of_the_plain_model("mlp", policy)
