"""Random programs by plans: the numbers of the plain program, and a peak that is what was predicted and allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from programs import BINARY, MIXING, UNARY, Experiment, Turns, Wrap, apply, experiments, plain
from torch import Tensor

import fckpt
from fckpt import policies

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # plain PyTorch, under vmap
    pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning"),  # under jvp, say, which no plan covers
    pytest.mark.filterwarnings("ignore:the policy .* saves nothing"),  # in a program without products, say
]
PROFILE = settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def every_third(node: policies.PolicyNode) -> bool:
    return sum(map(ord, node.op)) % 3 == 0


PREFERRED = policies.as_policy(every_third) | policies.dots_saveable
PLANNERS: dict[str, Wrap] = {
    "plain": lambda fn: fckpt.remat(fn),
    "everything": lambda fn: fckpt.remat(fn, policy=policies.everything_saveable),
    "nothing": lambda fn: fckpt.remat(fn, policy=policies.nothing_saveable),
    "dots": lambda fn: fckpt.remat(fn, policy=policies.dots_saveable),
    # Not a budget of 1.0: a forced recompute of a small dropout needs the state of a generator, which is 5 kB.
    "preferred": lambda fn: fckpt.remat(fn, policy=PREFERRED, budget="1MiB"),
}

Results = tuple[list[Tensor], Tensor]


def plainly(experiment: Experiment) -> Results:
    """What plain PyTorch makes of an experiment; what it refuses is no example."""
    try:
        return experiment.run(plain)
    except RuntimeError:
        reject()


def assert_bitwise(expected: Results, got: Results) -> None:
    assert len(expected[0]) == len(got[0])
    for a, b in zip(expected[0], got[0], strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bool(((a == b) | (a.isnan() & b.isnan())).all()), f"off by {(a - b).abs().max():.2g}"
    assert torch.equal(expected[1], got[1]), "the generator ends elsewhere"


@dataclass(frozen=True)
class Whole(Experiment):
    """An experiment whose program is one region, the ones inside inlined."""

    def run(self, wrap: Wrap = plain, aliases: bool | None = None) -> Results:
        outer = self

        class Program:
            parameters = outer.program.parameters

            def function(self, _: Wrap, aliases: bool = False) -> Callable[..., Any]:
                return wrap(outer.program.function(plain, aliases))

        return Experiment(Program(), self.stack, self.backward).run(plain, aliases)  # type: ignore[arg-type]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "plain"])
def test_a_program_that_is_planned_as_a_whole_is_bitwise_the_plain_program(planner: str) -> None:
    seen: Counter[str] = Counter()

    @PROFILE
    @given(experiments(orders=(1, 1, 1, 0)))
    def check(experiment: Experiment) -> None:
        whole = Whole(experiment.program, experiment.stack, experiment.backward)
        expected = plainly(whole)
        assert_bitwise(expected, whole.run(PLANNERS[planner]))
        seen["compared"] += 1
        seen["stacked"] += bool(experiment.stack)

    check()
    assert seen["compared"] >= 0.8 * PROFILE.max_examples
    assert seen["stacked"] >= 0.2 * seen["compared"]


def test_programs_with_regions_of_all_kinds_within_regions_are_exact() -> None:
    """On small integers, so that no order of summation shows."""
    seen: Counter[str] = Counter()

    @PROFILE
    @given(experiments(orders=(1, 1, 2), exact=True, closures=True), st.permutations(sorted(PLANNERS)))
    def check(experiment: Experiment, order: list[str]) -> None:
        expected = plainly(experiment)
        assert_bitwise(expected, experiment.run(Turns(tuple(PLANNERS[name] for name in order))))
        seen["compared"] += 1
        seen["nested"] += experiment.program.depth() > 1
        seen["closures"] += experiment.program.closes_over()

    check()
    assert seen["compared"] >= 0.8 * PROFILE.max_examples
    assert seen["nested"] >= 0.1 * seen["compared"]
    assert seen["closures"] >= 0.1 * seen["compared"]


# -- peaks ---------------------------------------------------------------------------------------------------

SIZE = 64
ELEMENTWISE = sorted({
    "sin", "tanh", "gelu", "silu", "softplus", "relu", "abs", "square", "scale", "reciprocal", "layer_norm", "softmax",
    "log_softmax", "cumsum", "triu", "flip", "roll", "transpose", "inplace_relu", "inplace_slice",
    "detached", "no_grad", "dropout", "add", "sub", "mul", "div", "maximum", "where", "inplace_add", "matmul",
})  # fmt: skip
"""Ops from matrices to a matrix of the same shape."""
OPS = UNARY | BINARY | MIXING


@dataclass(frozen=True)
class Straight:
    """A straight line of ops on matrices of one shape, to the sum of all that nobody reads."""

    steps: tuple[tuple[str, int, int, int], ...]

    def __call__(self, *values: Tensor) -> Tensor:
        found = list(values)
        read: set[int] = set()
        for name, first, second, k in self.steps:
            a, b = (len(found) - 1 - i % len(found) for i in (first, second))
            own = [a] if name in UNARY else [a, b]
            read.update(own)
            found.append(OPS[name](*[found[i] for i in own], k))
        return torch.stack([found[i].sum() for i in range(len(found)) if i not in read]).sum()


STRAIGHT = st.lists(
    st.tuples(st.sampled_from(ELEMENTWISE), st.integers(0, 5), st.integers(0, 9), st.integers(0, 3)),
    min_size=6,
    max_size=24,
).map(lambda steps: Straight(tuple(steps)))


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


def run(fn: Callable[..., Tensor], values: list[Tensor]) -> Results:
    torch.manual_seed(0)
    loss = fn(*values)
    for value in values:
        value.grad = None
    loss.backward()
    return [loss, *[torch.zeros(1) if v.grad is None else v.grad for v in values]], torch.get_rng_state()


def test_every_program_keeps_to_its_budget_and_to_the_prediction() -> None:
    seen: Counter[str] = Counter()

    @settings(PROFILE, max_examples=12)
    @given(STRAIGHT, st.floats(0, 1))
    def check(program: Straight, share: float) -> None:
        values = operands()
        if not program(*values).requires_grad:
            reject()
        expected = run(program, values)
        most = fckpt.plan(program, *values).peak_bytes
        try:
            fckpt.plan(program, *values, budget=1)
        except fckpt.BudgetError as error:
            least = error.least_bytes
        budget = int(least + share * (most - least))
        plan = fckpt.plan(program, *values, budget=budget)
        region = fckpt.remat(program, plan=plan)
        assert_bitwise(expected, run(region, values))
        for value in values:
            value.grad = None
        peak = fckpt.measure_peak(lambda: region(*values).backward()).peak_bytes
        assert peak <= budget, f"{peak} > {budget}; predicted {plan.peak_bytes}"
        assert abs(peak - plan.peak_bytes) <= 0.02 * peak, f"{peak}, predicted {plan.peak_bytes}"
        seen["compared"] += 1
        seen["exact"] += peak == plan.peak_bytes
        seen["tight"] += budget < most
        seen["recomputing"] += plan.overhead > 0

    check()
    print(dict(seen))
    assert seen["exact"] >= 0.9 * seen["compared"]
    assert seen["recomputing"] >= 0.3 * seen["compared"]


def test_the_operations_of_random_programs_keep_their_shape() -> None:
    x = torch.randn(SIZE, SIZE, dtype=torch.float64)
    for name in ELEMENTWISE:
        for k in range(4):
            assert OPS[name](*[x] * (1 if name in UNARY else 2), k).shape == x.shape, name
    assert apply("sin", [x], 0)[0].numel() == 128
