"""Small random functions: reading the state of the CPU's generator takes 5 KB, more than many of their tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fckpt

Loss = Callable[[Tensor], Tensor]


def of_input(net: nn.Module, loss: Loss) -> Loss:
    """Returns a loss with gradients for its input only."""
    net.requires_grad_(False)
    return loss


def dropout() -> Loss:
    net = nn.Sequential(
        nn.Linear(12, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 8)
    )
    return of_input(net, lambda x: net(x).square().mean())


def noise() -> Loss:
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 8))
    return of_input(net, lambda x: (net(x + torch.randn_like(x)).exp() * torch.rand(len(x), 1)).square().mean())


def masks() -> Loss:
    """Masks that are drawn in place, into memory that is allocated before."""
    net = nn.Linear(12, 32)
    kept = lambda x: torch.empty(len(x), 32).bernoulli_(0.5)
    return of_input(net, lambda x: (torch.tanh(net(x)) * kept(x)).exp().sin().square().mean())


def channels() -> Loss:
    net = nn.Sequential(nn.Conv1d(12, 16, 1), nn.Dropout1d(0.4), nn.Tanh(), nn.Conv1d(16, 8, 1))
    return of_input(net, lambda x: net(x[..., None].expand(-1, -1, 5)).square().mean())


def slopes() -> Loss:
    net = nn.Sequential(nn.Linear(12, 32), nn.RReLU(), nn.Linear(32, 8))
    return of_input(net, lambda x: net(x).exp().sin().square().mean())


def attention() -> Loss:
    net = nn.Linear(12, 48)

    def loss(x: Tensor) -> Tensor:
        q, k, v = net(x)[None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).square().mean()

    return of_input(net, loss)


FUNCTIONS = {fn.__name__: fn for fn in (dropout, noise, masks, channels, slopes, attention)}


@contextlib.contextmanager
def another_thread() -> Iterator[None]:
    """Another thread lives, which might draw from the generator."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def differentiated(fn: Loss, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    return [*torch.autograd.grad(fn(x), [x]), torch.get_rng_state()]


def peak(fn: Loss, x: Tensor) -> int:
    return fckpt.measure_peak(lambda: torch.autograd.grad(fn(x), [x])).peak_bytes


@pytest.mark.parametrize("rows", [3, 16, 60])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_states_count_where_random_numbers_are_drawn_again(name: str, rows: int) -> None:
    loss, x = FUNCTIONS[name](), torch.randn(rows, 12, requires_grad=True)
    expected, plain = differentiated(loss, x), peak(loss, x)
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        with contextlib.suppress(fckpt.BudgetError):
            plan = fckpt.plan(loss, x, budget=share)
            assert abs(plan.baseline_peak_bytes - plain) <= 64
            planned = fckpt.remat(loss, plan=plan)
            found = differentiated(planned, x)
            assert all(map(torch.equal, found, expected))
            measured = peak(planned, x)
            print(f"{share}: plan {plan.peak_bytes}, measured {measured}, plain {plain}")
            assert abs(measured - plan.peak_bytes) <= 64
            assert measured <= share * plain + 64


def test_plans_of_small_functions_draw_again() -> None:
    """Otherwise the test above would test nothing."""
    loss, x = dropout(), torch.randn(60, 12, requires_grad=True)
    plan = fckpt.plan(loss, x, budget=0.7)
    assert plan.graph.replaying_nbytes > 0
    runs = [node for half in plan.schedule.computed for node in half]
    assert any(runs.count(node.id) > 1 for node in plan.graph.nodes if node.random)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_budgets_hold_while_another_thread_lives(name: str) -> None:
    loss, x = FUNCTIONS[name](), torch.randn(40, 12, requires_grad=True)
    expected, plain = differentiated(loss, x), peak(loss, x)
    for share in (0.9, 0.8, 0.7):
        with another_thread(), contextlib.suppress(fckpt.BudgetError):
            planned = fckpt.remat(loss, budget=share)
            assert all(map(torch.equal, differentiated(planned, x), expected))
            assert peak(planned, x) <= share * plain


def layers() -> Loss:
    """So small that reading a state takes more than all activations."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Sigmoid()) for _ in range(6)])
    return of_input(net, lambda x: net(x.repeat(1, 2)[:, :8]).square().mean())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [dropout, layers])
def test_the_least_budget_that_an_error_names_is_one(make: Callable[[], Loss]) -> None:
    loss, x = make(), torch.randn(8, 12, requires_grad=True)
    plain = fckpt.plan(loss, x).baseline_peak_bytes
    with pytest.raises(fckpt.BudgetError) as caught:
        fckpt.plan(loss, x, budget=100)
    assert "needs while it runs" in str(caught.value)
    least = caught.value.least_bytes
    assert least < plain
    for budget in (least, (least + plain) // 2, plain):
        planned = fckpt.remat(loss, plan=fckpt.plan(loss, x, budget=budget))
        assert all(map(torch.equal, differentiated(planned, x), differentiated(loss, x)))
        assert peak(planned, x) <= budget


@pytest.mark.parametrize("name", ["exponential_", "cauchy_", "log_normal_", "geometric_"])
def test_own_generators(name: str) -> None:
    """Torch's Python functions for these operations, which run on tensors without data, refuse a generator."""
    generator, x = torch.Generator(), torch.randn(64, 64, requires_grad=True)
    rest = (0.5,) if name == "geometric_" else ()
    draw = lambda: getattr(torch.empty(64, 64), name)(*rest, generator=generator)
    loss = lambda x: torch.sigmoid(torch.sigmoid(x) * draw()).sum()
    results = []
    for fn in (loss, fckpt.remat(loss, budget=0.9)):
        generator.manual_seed(5)
        results.append([*torch.autograd.grad(fn(x), [x]), generator.get_state()])
    assert all(map(torch.equal, *results))
