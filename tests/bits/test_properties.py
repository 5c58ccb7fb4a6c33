"""Random programs, regions and transform stacks: a rematerialised program is the plain program.

`FCKPT_PROFILE=slow pytest tests/bits/test_properties.py` runs many more examples, new ones every time.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, event, given, reject, settings
from programs import RANDOM_OPS, Experiment, experiments, plain
from torch import Tensor

import fckpt

Results = tuple[list[Tensor], Tensor]
pytestmark = pytest.mark.filterwarnings(  # said by plain PyTorch where vmap has no rule of its own
    "ignore:There is a performance drop:UserWarning"
)

PROFILES = {
    "default": settings(max_examples=60, derandomize=True),
    "ci": settings(max_examples=100, derandomize=True, print_blob=True),
    "slow": settings(max_examples=5_000, print_blob=True),
}
PROFILE = settings(
    PROFILES[os.environ.get("FCKPT_PROFILE", "ci" if "CI" in os.environ else "default")],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Tally(Counter[str]):
    """What kinds of examples a test has seen: a property that only saw trivial ones would prove little."""

    def plainly(self, experiment: Experiment, aliases: bool | None = None) -> Results:
        """What plain PyTorch makes of an experiment; what it refuses under a transform is no example."""
        try:
            results = experiment.run(plain, aliases)
        except RuntimeError as error:
            self["refused"] += 1
            event(f"refused: {str(error)[:60]}")
            reject()
        return results

    def count(self, experiment: Experiment, results: Results) -> None:
        """Counts an experiment that was compared."""
        self["compared"] += 1
        self["nested"] += experiment.program.depth() > 1
        self["stacked"] += len(experiment.stack) > 1
        self["vmapped"] += any(name == "vmap" for name, _ in experiment.stack)
        self["random"] += any(step.op in RANDOM_OPS for step in experiment.program.steps)
        self["long"] += len(experiment.program.steps) >= 10
        self["closures"] += experiment.program.closes_over()
        self["informative"] += any(bool((x.isfinite() & (x != 0)).any()) for x in results[0])

    def assert_spread(self, *kinds: str) -> None:
        """Of all examples few were thrown away, and at least a tenth is of each kind."""
        assert self["compared"] >= 0.8 * PROFILE.max_examples
        assert self["informative"] >= 0.7 * self["compared"]  # high derivatives of short programs are zero
        for kind in ("nested", "stacked", "vmapped", "random", "long", *kinds):
            assert self[kind] >= 0.1 * self["compared"], f"{kind}: {self[kind]} of {self['compared']}"


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, where NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def assert_bitwise(expected: Results, got: Results) -> None:
    assert len(expected[0]) == len(got[0])
    for a, b in zip(expected[0], got[0], strict=True):
        assert same(a, b), f"off by {(a - b).abs().max():.2g}"
    assert torch.equal(expected[1], got[1]), "the generator ends elsewhere"


def test_values_and_gradients_are_bitwise_those_of_the_plain_program() -> None:
    tally = Tally()

    @PROFILE
    @given(experiments(orders=(1, 1, 1, 0)))
    def check(experiment: Experiment) -> None:
        expected = tally.plainly(experiment)
        tally.count(experiment, expected)
        assert_bitwise(expected, experiment.run(fckpt.remat))

    check()
    tally.assert_spread()


def test_gradients_reach_what_a_region_closes_over() -> None:
    tally = Tally()

    @PROFILE
    @given(experiments(orders=(1,), closures=True))
    def check(experiment: Experiment) -> None:
        expected = tally.plainly(experiment)
        tally.count(experiment, expected)
        assert_bitwise(expected, experiment.run(fckpt.remat))

    check()
    tally.assert_spread("closures")


def test_higher_orders_are_bitwise_equal_where_sums_do_not_round() -> None:
    """A region sums the contributions of its forward and of its backward apart, plain autograd as they come.

    So from the second order on, equality to the last bit takes programs whose sums are exact in any order.
    """
    tally = Tally()

    @PROFILE
    @given(experiments(orders=(2, 3), exact=True))
    def check(experiment: Experiment) -> None:
        expected = tally.plainly(experiment)
        reordered = tally.plainly(experiment, aliases=False)
        if not all(map(same, expected[0], reordered[0])):
            tally["rounds"] += 1
            reject()
        tally.count(experiment, expected)
        assert_bitwise(expected, experiment.run(fckpt.remat))

    check()
    tally.assert_spread()


def test_higher_orders_agree_to_rounding() -> None:
    tally = Tally()

    @PROFILE
    @given(experiments(orders=(2, 3, 4)))
    def check(experiment: Experiment) -> None:
        expected = tally.plainly(experiment)
        reordered = tally.plainly(experiment, aliases=False)
        tally.count(experiment, expected)
        try:
            got = experiment.run(fckpt.remat)
        except NotImplementedError:  # no forward mode of an operation's backward (silu), in torch 2.13
            reject()
        # Sums in another order: rounding of numbers around one, or more where plain PyTorch is unsteady too.
        rounding = 1e-5 if any(step.op == "float32" for step in experiment.program.steps) else 1e-9
        for a, b, c in zip(expected[0], got[0], reordered[0], strict=True):
            allowed = rounding * max(1.0, largest(a)) + 1e3 * largest(a - c)
            assert same(a.isfinite(), b.isfinite())
            assert largest(a - b) <= allowed
        assert torch.equal(expected[1], got[1]), "the generator ends elsewhere"

    check()
    tally.assert_spread()


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude in `tensor`."""
    return float(tensor.detach().abs().nan_to_num(0, posinf=0).max())
