"""What a trace refuses: every refusal names the user's line, or the argument, and a way out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_equal, leaf
from planned import PLANNERS
from torch import Tensor, nn

import fckpt

WAY_OUT = "without policy and budget"
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
planned = PLANNERS["nothing_saveable"]


def line_of(fn: Callable[..., Any], offset: int = 1) -> str:
    return f"{__file__}:{fn.__code__.co_firstlineno + offset}"


# -- courses that depend on data -----------------------------------------------------------------------------


def test_the_reason_against_a_capture_is_told_if_it_is_another_line() -> None:
    def fn(x: Tensor, mask: Tensor) -> Tensor:
        if mask.all():  # a condition on an argument, which a captured function may have
            x = x.sin()
        return x * 2 if torch.rand(1) > 0.5 else x

    with pytest.raises(fckpt.TraceError) as caught:
        planned(fn)(leaf(X), torch.ones(4, dtype=torch.bool))
    assert line_of(fn) in str(caught.value)
    assert f"line {fn.__code__.co_firstlineno + 3}" in str(caught.value)


def test_a_lazy_module_elsewhere_does_not_hide_the_reason() -> None:
    """Its parameters, which have no memory yet, are among the tensors of the process."""
    lazy, stored = nn.LazyLinear(4), list[Tensor]()

    def fn(x: Tensor) -> Tensor:
        stored.append(x.sin())
        return x * x.detach().sum().item()

    with pytest.raises(fckpt.TraceError, match="item"):
        planned(fn)(leaf(X))
    assert torch.nn.parameter.is_lazy(lazy.weight)


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x.sin()
    return x.cos()


def item(x: Tensor) -> Tensor:
    return x * x.detach().sum().item()


def mask(x: Tensor) -> Tensor:
    return x[x > 0].sin()


def positions(x: Tensor) -> Tensor:
    return x * x.nonzero().sum()


def distinct(x: Tensor) -> Tensor:
    return x * x.detach().unique().sum()


def number(x: Tensor) -> Tensor:
    return x * float(x.detach().sum())


def length(x: Tensor) -> Tensor:
    return x * torch.arange(int(x.detach().abs().sum()) + 1).sum()


def array(x: Tensor) -> Tensor:
    return x * float(x.detach().numpy().sum())


def as_array(x: Tensor) -> Tensor:
    return x * float(np.asarray(x.detach())[0, 0])


def as_list(x: Tensor) -> Tensor:
    return x * x.tolist()[0][0]


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(x.detach().abs().long().flatten()[:3] + 1, 0)


def equality(x: Tensor) -> Tensor:
    return x.sin() if torch.equal(x, x) else x.cos()


def address(x: Tensor) -> Tensor:
    return x * (x.data_ptr() % 7)


DATA_DEPENDENT = [
    branch, item, mask, positions, distinct, number, length, array, as_array, as_list, repeated, equality, address,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("fn", DATA_DEPENDENT, ids=lambda fn: fn.__name__)
def test_a_look_at_data_names_the_line_and_the_way_out(fn: Callable[[Tensor], Tensor]) -> None:
    for region in (planned(fn), fckpt.remat(fn, budget=0.9)):
        with pytest.raises(fckpt.TraceError) as caught:
            region(leaf(X))
        assert f"test_refused_traces.py:{fn.__code__.co_firstlineno + 1}" in str(caught.value)
        assert WAY_OUT in str(caught.value)
    with pytest.raises(fckpt.TraceError, match="test_refused_traces"):
        fckpt.plan(fn, leaf(X))


@pytest.mark.parametrize("fn", DATA_DEPENDENT[:6], ids=lambda fn: fn.__name__)
def test_the_way_out_is_one(fn: Callable[[Tensor], Tensor]) -> None:
    x, y = leaf(X), leaf(X)
    fckpt.remat(fn)(x).sum().backward()
    fn(y).sum().backward()
    assert_equal(x.grad, y.grad)


def covariance(x: Tensor) -> Tensor:
    return torch.cov(x.sin())


def signal(x: Tensor) -> Tensor:
    return torch.istft(torch.complex(x, x), 6, window=torch.hann_window(6))


@pytest.mark.parametrize("fn", [covariance, signal], ids=lambda fn: fn.__name__)
def test_torch_may_look_at_data_computed_from_numbers(fn: Callable[[Tensor], Tensor]) -> None:
    region = fckpt.remat(fn, budget=1.0)
    for length in (8, 20, 7, 31, 9):
        x = leaf(torch.randn(4, length))
        assert_equal(torch.autograd.grad(region(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


def of_a_random_one(x: Tensor) -> Tensor:
    return x.sin() if torch.equal(torch.rand(3), torch.ones(3)) else x.cos()


def of_a_written_one(x: Tensor) -> Tensor:
    return x.sin() if torch.equal(torch.zeros(3).add_(1), torch.ones(3)) else x.cos()


@pytest.mark.parametrize("fn", [of_a_random_one, of_a_written_one], ids=lambda fn: fn.__name__)
def test_data_that_a_trace_does_not_know_are_refused(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(fckpt.TraceError, match="looks at the data"):
        fckpt.remat(fn, budget=1.0)(leaf(X))


def test_the_line_is_that_of_a_module_deep_inside() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.sum(1) > 0]

    with pytest.raises(fckpt.TraceError, match=r"test_refused_traces\.py:\d+.*x\[x\.sum\(1\) > 0\]"):
        planned(nn.Sequential(nn.Linear(4, 4), Router()))(X)


def test_a_refused_trace_leaves_nothing_behind() -> None:
    region = planned(branch)
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(fckpt.TraceError):
            region(leaf(X))
    assert torch.equal(torch.get_rng_state(), state)
    assert type(torch.ones(2) + 1) is Tensor
    assert not torch._is_functional_tensor(torch.ones(2))
    torch.manual_seed(3)
    x = leaf(X)
    planned(torch.sin)(x).sum().backward()
    assert_equal(x.grad, X.cos())


# -- random numbers ------------------------------------------------------------------------------------------


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * torch.rand(4)


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x * torch.rand(4)


def sets_state(x: Tensor) -> Tensor:
    torch.set_rng_state(torch.get_rng_state())
    return x.sin()


@pytest.mark.parametrize("fn", [seeds, forks, sets_state], ids=lambda fn: fn.__name__)
def test_a_seed_set_inside_is_refused_with_its_line(fn: Callable[[Tensor], Tensor]) -> None:
    line = rf"test_refused_traces\.py:\d+ \({fn.__name__}\)"
    with pytest.raises(fckpt.TraceError, match=rf"{line}.*sets the random generator"):
        planned(fn)(leaf(X))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sin() * random.random(),
        lambda x: x.sin() * float(np.random.rand()),
        lambda x: (random.seed(3), x.sin())[1],
    ],
    ids=["random.random", "numpy.random", "random.seed"],
)
def test_other_generators_are_refused_and_left_as_they_were(fn: Callable[[Tensor], Tensor]) -> None:
    random.seed(3)  # the state that one of the functions sets
    before = random.getstate(), str(np.random.get_state())
    with pytest.raises(fckpt.TraceError, match=r"Python's or NumPy's|seeds Python's random generator here"):
        planned(fn)(leaf(X))
    assert (random.getstate(), str(np.random.get_state())) == before


def test_a_generator_that_is_passed_or_closed_over_is_drawn_from_and_may_not_be_seeded() -> None:
    def draws(x: Tensor, g: torch.Generator) -> Tensor:
        return (x.sin() * torch.rand(4, generator=g)).sin() * torch.empty(4).normal_(generator=g)

    def run(wrap: Callable[..., Any], closed: bool) -> Any:
        g = torch.Generator().manual_seed(7)
        region = wrap(lambda x: draws(x, g)) if closed else wrap(draws)
        found = []
        for _ in range(3):
            x = leaf(X)
            out = region(x) if closed else region(x, g)
            out.sum().backward()
            found += [out, x.grad]
        return found, g.get_state()

    for closed in (False, True):
        assert_equal(run(planned, closed), run(lambda f: f, closed))
    with pytest.raises(fckpt.TraceError, match="seeds"):
        planned(lambda x, g: x * torch.rand(4, generator=g.manual_seed(3)))(leaf(X), torch.Generator())


# -- arguments and results -----------------------------------------------------------------------------------


def test_an_argument_that_is_written_is_named() -> None:
    for fn in (
        lambda x, y: (y.add_(1), x.sin())[1],
        lambda x, y: (y[0].zero_(), x.sin())[1],
        lambda x, y: (y.t().unsqueeze(0).mul_(2), x.sin())[1],
        lambda x, y: (torch.sin(x.detach(), out=y), x.sin())[1],
    ):
        with pytest.raises(fckpt.MutationError, match=r"kwargs\['y'\]"):
            planned(fn)(leaf(X), y=X.clone())
        y = X.clone()
        with pytest.raises(fckpt.MutationError):
            planned(fn)(leaf(X), y)
        assert_equal(y, X)  # only the stand-in was written


def test_sparse_tensors_and_subclasses_are_refused() -> None:
    class Tagged(Tensor):
        pass

    sparse = torch.eye(3).to_sparse().requires_grad_()
    for tensor in (sparse, X.as_subclass(Tagged).requires_grad_()):
        with pytest.raises(fckpt.TraceError, match=WAY_OUT):
            planned(lambda x: x * 2)(tensor)


def test_state_that_a_plan_cannot_keep_is_refused() -> None:
    class Rebinding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.steps = self.steps + 1
            return (x * self.steps).sin()

    module = Rebinding()
    region = planned(module)
    for count in (1, 2, 3):
        assert torch.equal(region(torch.ones(3, requires_grad=True)), torch.full((3,), float(count)).sin())
        assert torch.equal(module.steps, torch.full((3,), float(count)))
    with pytest.raises(fckpt.TraceError, match="in place that requires grad"):
        planned(nn.Embedding(5, 3, max_norm=1.0))(torch.tensor([1, 2]))


class Doubling(Tensor):
    """A tensor whose `tanh` is doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is torch.tanh else found


class Passing(Tensor):
    """A tensor of another class, which treats it like any tensor."""


def test_subclasses_made_inside() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    passing = lambda x: torch.tanh(x.as_subclass(Passing) @ x)
    result = fckpt.remat(passing, budget=1.0)(x)
    assert type(result) is Passing and torch.equal(result, passing(x))
    with pytest.raises(fckpt.TraceError, match="defines __torch_function__"):
        fckpt.remat(lambda x: torch.tanh(x.as_subclass(Doubling) @ x), budget=1.0)(x)


def test_operations_that_return_numbers() -> None:
    x, mask = torch.randn(4, 6, 16), torch.ones(4, 6, dtype=torch.bool)
    aligned = lambda x, w: torch._nested_tensor_from_mask_left_aligned(x, mask) * (x * w).sum()
    with pytest.raises(fckpt.TraceError, match="looks at the data"):
        fckpt.remat(aligned, budget=1.0)(x, torch.ones(16, requires_grad=True))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": fckpt.policies.nothing_saveable}], ids=str)
def test_quantized_tensors_are_refused(options: dict[str, Any]) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor((x @ w).detach(), 0.1, 0, torch.qint8).dequantize() * w

    with pytest.raises(fckpt.TraceError, match="makes a quantized tensor"):
        fckpt.remat(fn, **options)(torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
