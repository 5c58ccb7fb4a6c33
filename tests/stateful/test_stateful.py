"""Random programs with state, changed between calls: a planned call is the plain call or an `FckptError`.

`FCKPT_PROFILE=slow pytest tests/stateful` runs 20,000 examples, new ones every time.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from judge import judge
from recipes import REFUSED, Recipe, recipes, scenario, tally

import fckpt

PROFILES = {
    "default": settings(max_examples=25, derandomize=True),
    "ci": settings(max_examples=25, derandomize=True, print_blob=True),
    "slow": settings(max_examples=20_000, print_blob=True),
}
NAME = os.environ.get("FCKPT_PROFILE", "ci" if "CI" in os.environ else "default")
PROFILE = settings(
    PROFILES[NAME],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def judged(recipe: Recipe) -> Any:
    """Runs a recipe; a policy stands in for the budget where it says so."""
    if recipe.region == "policy":
        return judge(scenario(recipe), budget=None, policy=fckpt.policies.dots_saveable)
    return judge(scenario(recipe), budget=recipe.budget)


def test_nothing_is_silent() -> None:
    counts: Counter[str] = Counter()

    @PROFILE
    @given(recipes(5, 4) if NAME == "slow" else recipes(3, 2))
    def check(recipe: Recipe) -> None:
        verdict = judged(recipe)
        event(verdict.outcome)
        tally(recipe, verdict.outcome, counts)
        counts["refused without need"] += bool(verdict.error) and not any(p.name in REFUSED for p in recipe.parts)
        counts["over, and said"] += bool(verdict.over)

    check()
    print(dict(counts))
    assert counts["equal"] >= 0.6 * counts["examples"], counts
    for kind in ("reads places", "remembers"):
        assert counts[kind] >= 0.1 * counts["examples"], f"{kind}: {counts}"
