"""The plain peak of a plan, which counts what the frames of the plain function hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from helpers import TORCH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fckpt

ROWS = 5_000
"""So many that scalars beside the tensors are less than the tolerance."""


def variables(x: Tensor) -> Tensor:
    a = x + 1
    b = a + 2
    c = b + 3
    return c.sum()


def assigned_again(x: Tensor) -> Tensor:
    for number in range(4):
        x = x + number
    y = x
    return (y + 1).sum()


def deleted(x: Tensor) -> Tensor:
    a = x + 1
    b = a + 2
    del a
    c = b + 3
    return c.sum()


def inner(x: Tensor) -> Tensor:
    a = x + 1
    b = a + 2
    return b + 3


def of_inner_functions(x: Tensor) -> Tensor:
    return inner(inner(x)).sum()


def in_containers(x: Tensor) -> Tensor:
    known = {"first": x + 1}
    pair = (known["first"] + 2, [known["first"] + 3])
    last = pair[0].mean() + pair[1][0]
    return last.sum()


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


def in_objects(x: Tensor) -> Tensor:
    output = Output(x + 1, x + 2)
    last = output.logits + output.hidden.mean()
    return (last + 3).sum()


def saved(x: Tensor) -> Tensor:
    a = x.exp()
    b = a.sin()
    c = b + a.mean()
    return (c * 2).sum()


def overwritten(x: Tensor) -> Tensor:
    a = x + 1
    a.add_(2)
    b = a + 3
    return b.sum()


def names_in_checkpoints(x: Tensor) -> Tensor:
    """A block that is checkpointed has variables of the same names."""

    def block(x: Tensor) -> Tensor:
        a = x.sum() * 2
        b = a * 3
        return b * 4

    a = x * 2
    b = a * 3
    del a
    c = b * 4
    del b
    d = c * 5
    del c
    out: Tensor = checkpoint(block, d, use_reentrant=False, preserve_rng_state=False)
    return out


class Adding:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def add(self, other: Tensor) -> Tensor:
        return other + self.x


def in_callables(x: Tensor) -> Tensor:
    """Arguments of a `partial`, the object of a method, defaults, and what a function inside of another refers to."""
    given, method = partial(torch.add, x + 1), Adding(x + 2).add

    def with_default(other: Tensor, default: Tensor = x + 3) -> Tensor:
        return other + default

    closure = adding(x + 4)
    last = closure(with_default(method(given(x))))
    return (last + 5).sum()


def of_callables_that_are_gone(x: Tensor) -> Tensor:
    add = adding(x + 1)
    last = add(x + 2)
    add = adding(last)
    last = add(last + 3)
    del add
    more = last + 4
    return (more + 5).sum()


def parts_of(x: Tensor) -> Iterator[Tensor]:
    first = x + 1
    yield first + 2
    second = first + 3
    yield second + 4


def of_suspended_generators(x: Tensor) -> Tensor:
    parts = parts_of(x)
    first = next(parts)
    last = first + 5
    last = last + next(parts)
    more = last + 6
    return (more + 7).sum()


def of_exhausted_generators(x: Tensor) -> Tensor:
    total = x
    parts = parts_of(x)
    for part in parts:
        total = total + part
    more = total + 5
    more = more + 6
    return (more + 7).sum()


def steps_of(x: Tensor) -> Tensor:
    a = x + 1
    b = a + 2
    del a
    b = b.exp()
    c = b + 3
    return c * 2


class Formula(torch.autograd.Function):
    """Its backward has variables, and calls a function that has some."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        a = x.cos()
        b = steps_of(a) * grad
        c = b + a
        del b
        d = c * grad
        e = d.exp().clamp(max=2)
        a = a + e
        f = a * 3
        return f + 1


def of_formulas(x: Tensor) -> Tensor:
    for _ in range(2):
        x = Formula.apply(x)
    return x.sum()


class WithVariables(Formula):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a = x.sin()
        b = steps_of(a) + a
        c = b * 2
        return c + 1


def of_formulas_with_variables(x: Tensor) -> Tensor:
    return WithVariables.apply(WithVariables.apply(x)).sum()


def of_formulas_in_checkpoints(x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return Formula.apply(x).sin()

    out: Tensor = checkpoint(block, x * 2, use_reentrant=False, preserve_rng_state=False)
    return out.sum()


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x = x + 2
        return x + 3


class Arguments(nn.Module):
    """Modules whose calls hold their arguments until they return."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


FUNCTIONS = [
    variables, assigned_again, deleted, of_inner_functions, in_containers, in_objects, saved, overwritten, Arguments(),
    names_in_checkpoints, in_callables, of_callables_that_are_gone, of_suspended_generators, of_exhausted_generators,
    of_formulas, of_formulas_in_checkpoints,
]  # fmt: skip
if TORCH >= (2, 12):  # in torch 2.11, Dynamo makes the results of all calls in `forward` outputs
    FUNCTIONS.append(of_formulas_with_variables)


def assert_peak_is_known(fn: Callable[..., Tensor]) -> None:
    x = torch.randn(ROWS, requires_grad=True)
    step = lambda: torch.autograd.grad(fn(x), x)
    step()
    plain = fckpt.measure_peak(step).peak_bytes
    assert fckpt.plan(fn, x).baseline_peak_bytes == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: getattr(fn, "__name__", type(fn).__name__))
def test_the_plain_peak_counts_what_frames_hold(fn: Callable[..., Tensor], frozen: None) -> None:
    assert_peak_is_known(fn)


@pytest.mark.parametrize("options", [{}, {"solver": "greedy"}])
def test_a_plan_itself_holds_no_variables(options: dict[str, Any]) -> None:
    x = torch.randn(ROWS, requires_grad=True)
    plan = fckpt.plan(variables, x, budget=0.7, **options)
    assert plan.peak_bytes <= 0.7 * plan.baseline_peak_bytes and plan.overhead == 0.0


Step = tuple[str, int, int, int]
KINDS = ("add", "exp", "mul", "inner", "call", "list", "partial", "function", "delete")
STEPS = st.tuples(st.sampled_from(KINDS), *[st.integers(0, 3)] * 3)


def adding(held: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda other: other + held


def program(steps: list[Step], x: Tensor) -> Tensor:
    """Runs steps on four variables."""
    a = b = c = d = x
    total, kept = torch.zeros(()), list[Any]()
    for kind, source, other, target in steps:
        one, two = (a, b, c, d)[source], (a, b, c, d)[other]
        if kind == "add":
            new = one + 1
        elif kind == "exp":
            new = one.tanh()
        elif kind == "mul":
            new = one * two
        elif kind == "inner":
            new = inner(one)
        elif kind == "call":
            new = MODULE(MODULE(one))
        elif kind == "list":
            new = one + 2
            kept.append(new)
        elif kind == "partial":
            kept.append(partial(torch.add, one))
            new = kept[-1](two)
        elif kind == "function":
            kept.append(adding(one))
            new = kept[-1](two)
        else:
            new = x
        del one, two
        total = total + new.sum()  # Dynamo leaves out what is not used
        if target == 0:
            a = new
        elif target == 1:
            b = new
        elif target == 2:
            c = new
        else:
            d = new
    last = a + b + c + d
    return total + last.sum()


MODULE = Inner()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, min_size=1, max_size=10))
def test_the_plain_peak_of_random_programs_is_known(frozen: None, steps: list[Step]) -> None:
    assert_peak_is_known(partial(program, steps))
