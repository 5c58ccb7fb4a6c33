"""Random programs with state, changed between calls: a planned call is the plain call or an `FckptError`.

`FCKPT_PROFILE=slow pytest -n 2 tests/stateful` runs 20,000 examples in 40 parts, new ones every time; the programs of
every fourth part are larger.
"""

from __future__ import annotations

import gc
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
    "slow": settings(max_examples=500, print_blob=True),
}
NAME = os.environ.get("FCKPT_PROFILE", "ci" if "CI" in os.environ else "default")
PROFILE = settings(
    PROFILES[NAME],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
PARTS = 40 if NAME == "slow" else 1
"""The runs of so many examples each: several processes share the slow profile."""
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def judged(recipe: Recipe) -> Any:
    """Runs a recipe; a policy stands in for the budget where it says so."""
    if recipe.region == "policy":
        return judge(scenario(recipe), budget=None, policy=fckpt.policies.dots_saveable)
    return judge(scenario(recipe), budget=recipe.budget)


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_silent(part: int) -> None:
    counts: Counter[str] = Counter()

    @PROFILE
    @given(recipes(5, 4) if part % 4 == 3 else recipes(3, 2))
    def check(recipe: Recipe) -> None:
        if counts["examples"] % 25 == 0:  # the collections before measured peaks look only at what is new
            gc.unfreeze()
            gc.collect()
            gc.freeze()
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
