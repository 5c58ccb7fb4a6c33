"""Branches that only raise an error: the check is an operation of the plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import leaf
from torch import Tensor, nn

import fckpt


def by_raise(x: Tensor) -> Tensor:
    h = torch.tanh(x).sin()
    if h.abs().max() > 0.8:
        raise ValueError(f"too large: {h.shape}")
    return h.exp().sum()


def by_else(x: Tensor) -> Tensor:
    h = torch.tanh(x).sin()
    if (h.abs() < 0.8).all():
        return h.exp().sum()
    raise ValueError("too large")


def by_both(x: Tensor) -> Tensor:
    """Of the input, and in a `with` block."""
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    with torch.no_grad():
        if x.abs().max() > 3:
            raise ValueError("too large")
    return torch.tanh(x).sin().exp().sum()


@pytest.mark.parametrize("fn", [by_raise, by_else, by_both])
def test_a_check_is_an_operation_of_the_plan(fn: Callable[[Tensor], Tensor]) -> None:
    planned = fckpt.remat(fn, budget=1.0)
    for factor in (1.0, 0.5, 100.0, 1.0):
        x = leaf(torch.linspace(-1, 1, 8) * factor)
        if factor > 1:
            with pytest.raises(ValueError, match="too large"):
                fn(x)
            with pytest.raises(RuntimeError, match=r"a check failed: `if .* \(test_checks"):
                planned(x)
        else:
            assert torch.equal(torch.autograd.grad(planned(x), x)[0], torch.autograd.grad(fn(x), x)[0])
    assert fckpt.stats(planned).captures == 1


def caught(x: Tensor) -> Tensor:
    h = torch.tanh(x).sin()
    try:
        if (h > 0.5).any():
            raise ValueError
    except ValueError:
        return h.cos().sum()
    return h.exp().sum()


def written_before(x: Tensor) -> Tensor:
    h, seen = torch.tanh(x).sin(), [1.0]
    if (h > 0.5).any():
        seen[0] = 2.0
    return h.exp().sum() * seen[0]


@pytest.mark.parametrize("fn", [caught, written_before])
def test_a_branch_that_does_more_than_raise_is_no_check(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(fckpt.TraceError, match="looks at the data"):
        fckpt.remat(fn, budget=1.0)(leaf(torch.randn(8)))


def test_distributions_validate_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    # `torch.compile` turns the validation off for the rest of the process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    linear = nn.Linear(6, 12)

    def policy(x: Tensor) -> Tensor:
        mean, scale = linear(x).chunk(2, -1)
        actions = torch.distributions.Independent(torch.distributions.Normal(mean, scale.exp()), 1)
        return actions.log_prob(actions.rsample()).sum()

    planned = fckpt.remat(policy, budget=1.0)
    for seed in range(3):
        grads = []
        for fn in (policy, planned):
            torch.manual_seed(seed)
            grads.append(torch.autograd.grad(fn(torch.randn(3, 6)), list(linear.parameters())))
        assert all(map(torch.equal, *grads))
    with torch.no_grad():
        linear.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="a check failed"):
        planned(torch.randn(3, 6))
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    assert planned(torch.randn(3, 6)).isnan()
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    kl = lambda x: torch.distributions.kl_divergence(
        torch.distributions.Normal(linear(x), 1.0), torch.distributions.Normal(0.0, 1.0)
    ).sum()
    with pytest.raises(fckpt.TraceError, match="validate_args=False"):
        fckpt.remat(kl, budget=1.0)(torch.randn(3, 6))


def ppo(net: nn.Module, x: Tensor, chosen: Tensor) -> Tensor:
    """The loss of a policy gradient, with an entropy bonus."""
    policy = torch.distributions.Categorical(logits=net(x))
    return -(policy.log_prob(chosen) + 0.01 * policy.entropy()).mean()


def of_bernoulli(net: nn.Module, x: Tensor, chosen: Tensor) -> Tensor:
    return torch.distributions.Bernoulli(logits=net(x)).entropy().mean() + chosen.sum()


@pytest.mark.parametrize("fn", [ppo, of_bernoulli])
def test_distributions_with_lazy_properties(fn: Callable[..., Tensor]) -> None:
    net, chosen = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randint(0, 4, (64,))
    planned, x = fckpt.remat(fn, budget=1.0), torch.randn(64, 8)
    for _ in range(2):
        found = torch.autograd.grad(planned(net, x, chosen), [*net.parameters()])
        assert all(map(torch.equal, found, torch.autograd.grad(fn(net, x, chosen), [*net.parameters()])))
    assert fckpt.stats(planned).captures == 1


def likelihood(x: Tensor) -> Tensor:
    return nn.functional.gaussian_nll_loss(torch.tanh(x), torch.ones(8), x)


def test_a_check_in_a_loss_of_torch() -> None:
    planned = fckpt.remat(likelihood, budget=1.0)
    x = leaf(torch.linspace(0.5, 1, 8))
    assert torch.equal(torch.autograd.grad(planned(x), x)[0], torch.autograd.grad(likelihood(x), x)[0])
    with pytest.raises(RuntimeError, match="a check failed"):
        planned(leaf(torch.linspace(-1, 1, 8)))
