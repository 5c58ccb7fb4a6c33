"""Random programs at random sizes: bits and budgets of each call, whichever way its plan comes about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from sampling import SLOW
from torch import Tensor

import fckpt

WIDTH = 16
Op = Callable[[Tensor, Tensor, Tensor], Tensor]

OPS: dict[str, Op] = {
    "tanh": lambda x, y, w: x.tanh(),
    "exp": lambda x, y, w: x.sin().exp(),
    "gelu": lambda x, y, w: F.gelu(x),
    "linear": lambda x, y, w: (x @ w).relu(),
    "norm": lambda x, y, w: F.layer_norm(x, (WIDTH,)),
    "softmax of columns": lambda x, y, w: x.softmax(0),
    "cumulative": lambda x, y, w: x.cumsum(0) / max(x.shape[0], 1),
    "mixed": lambda x, y, w: (x @ x.mT).softmax(-1) @ x,
    "attention": lambda x, y, w: F.scaled_dot_product_attention(x[None], y[None], y[None])[0],
    "across": lambda x, y, w: (x @ y.mT).tanh() @ y,
    "three factors": lambda x, y, w: torch.einsum("ik,jk,jl->il", x, y, w[: y.shape[1]].new_ones(y.shape[0], WIDTH)),
    "batched": lambda x, y, w: (x[:, None] * y.mean(0)).expand(-1, 3, -1) @ w,
    "halves": lambda x, y, w: torch.cat([x[: x.shape[0] // 2] * 2, x[x.shape[0] // 2 :].sin()]),
    "padded": lambda x, y, w: F.pad(x, (0, 0, 1, 2))[1:-2] * 1.5,
    "shifted": lambda x, y, w: torch.cat([x[1:], x[:1]]),
    "convolved": lambda x, y, w: F.conv1d(x.mT[None], w[:, :, None])[0].mT,
    "dropout": lambda x, y, w: F.dropout(x, 0.3),
    "positions": lambda x, y, w: x + torch.arange(x.shape[0], dtype=x.dtype)[:, None],
    "in place": lambda x, y, w: (x * 1.5).add_(1.0).relu_(),
    "more rows than columns": lambda x, y, w: x.sin() if x.shape[0] > WIDTH else x.cos(),
    "even rows": lambda x, y, w: x * (2.0 if x.shape[0] % 2 == 0 else 0.5),
    "as many rows": lambda x, y, w: x * y if x.shape[0] == y.shape[0] else x - y.mean(),
}
"""Of a matrix whose number of rows changes, another one, and a weight; to a matrix like the first, or with another
dimension in the middle, which is summed up."""
BRANCHES = frozenset({"more rows than columns", "even rows", "as many rows"})


@dataclass(frozen=True)
class Program:
    """A line of operations, each added to what it reads."""

    steps: tuple[tuple[str, bool], ...]
    """The names of the operations, and whether each reads the second matrix in place of the first."""

    def __call__(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        values = [x @ w, y @ w]
        for name, second in self.steps:
            found = OPS[name](values[second], values[1 - second], w)
            values[second] = 0.5 * values[second] + (found.sum(1) if found.ndim == 3 else found)
        return values[0].square().sum() + values[1].sum()


PROGRAMS = st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.booleans()), min_size=5, max_size=12).map(
    lambda steps: Program(tuple(steps))
)
SIZES = st.lists(
    st.one_of(
        st.tuples(st.integers(2, 48), st.integers(2, 48)),
        st.integers(2, 48).map(lambda n: (n, n)),
        st.tuples(st.sampled_from([1, 2, 16, 17, 48]), st.integers(1, 48)),
    ),
    min_size=6,
    max_size=11,
)
"""The numbers of rows of both matrices, call by call."""


def measured_run(fn: Callable[..., Tensor], operands: list[Tensor], number: int) -> tuple[list[Tensor], int]:
    found: list[Tensor] = []

    def step() -> None:
        loss = fn(*operands)
        found.extend([loss.detach(), *torch.autograd.grad(loss, operands)])

    torch.manual_seed(number)
    peak = fckpt.measure_peak(step).peak_bytes
    return [*found, torch.get_rng_state()], peak


@pytest.mark.sweep(6)
@pytest.mark.parametrize("part", range(6))
def test_any_program_at_any_sizes_has_the_bits_of_plain_and_keeps_its_budget(part: int) -> None:
    seen: Counter[str] = Counter()

    @seed(part)
    @settings(
        max_examples=200 if SLOW else 3, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(PROGRAMS, SIZES, st.floats(0.5, 1.0))
    def check(program: Program, sizes: list[tuple[int, int]], share: float) -> None:
        generator = torch.Generator().manual_seed(len(sizes))
        draw = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()
        calls = [[draw(a, WIDTH), draw(b, WIDTH), draw(WIDTH, WIDTH)] for a, b in sizes]
        plain = [measured_run(program, operands, number) for number, operands in enumerate(calls)]
        budget = max(12_000, int(share * max(peak for _, peak in plain)))  # a generator's state takes 5,056 bytes
        planned = fckpt.remat(program, budget=budget)
        for number, (operands, (expected, _)) in enumerate(zip(calls, plain, strict=True)):
            try:
                got, peak = measured_run(planned, operands, number)
            except fckpt.BudgetError:
                with pytest.raises(fckpt.BudgetError):
                    fckpt.plan(program, *operands, budget=budget)
                seen["refused"] += 1
                continue
            assert_equal(got, expected)
            assert peak <= budget, f"{peak} > {budget} at {sizes[number]}"
            seen["kept"] += 1
        stats = fckpt.stats(planned)
        assert not stats.fallbacks
        seen["sized"] += stats.sized
        seen["new"] += stats.programs
        seen["branching"] += any(name in BRANCHES for name, _ in program.steps)

    check()
    print(dict(seen))
    assert seen["kept"] >= 4 * seen["refused"] and seen["branching"]
