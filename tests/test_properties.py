"""Random programs, regions and transform stacks: a rematerialised program is the plain program.

`FCKPT_PROFILE=slow pytest tests/test_properties.py` runs many more examples, new ones every time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, event, given, reject, settings
from programs import RANDOM_OPS, Experiment, experiments, plain
from torch import Tensor

import fckpt

PROFILES = {
    "default": settings(max_examples=60, derandomize=True),
    "ci": settings(max_examples=200, derandomize=True, print_blob=True),
    "slow": settings(max_examples=5_000, print_blob=True),
}
PROFILE = settings(
    PROFILES[os.environ.get("FCKPT_PROFILE", "ci" if "CI" in os.environ else "default")],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    """Thread hand-over costs ten times the work on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_plainly(experiment: Experiment, tally: Counter[str]) -> tuple[list[Tensor], Tensor]:
    """What plain PyTorch makes of it; what it refuses is no example."""
    try:
        return experiment.run(plain)
    except Exception as error:  # whatever plain PyTorch refuses under a transform
        tally["refused"] += 1
        event(f"refused: {str(error)[:60]}")
        reject()


def count(experiment: Experiment, tally: Counter[str]) -> None:
    steps = experiment.program.steps
    tally["all"] += 1
    tally["nested"] += experiment.program.depth() > 1
    tally["transformed"] += bool(experiment.stack)
    tally["deeply transformed"] += len(experiment.stack) > 1
    tally["second order"] += experiment.order() > 1
    tally["random"] += any(step.op in RANDOM_OPS for step in steps)
    tally["long"] += len(steps) > 10


def assert_well_spread(tally: Counter[str], floor: dict[str, float]) -> None:
    """The examples were not all the same trivial kind, and few were thrown away."""
    assert tally["all"] >= 50
    assert tally["refused"] <= 0.1 * tally["all"]
    for kind, share in floor.items():
        assert tally[kind] >= share * tally["all"], f"{kind}: {tally[kind]} of {tally['all']}"


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
