"""Mixed precision: autocast casts leaves once, and everything else for each operation. So do plans, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fckpt
from fckpt.errors import GradientWarning

CELL = nn.GRUCell(32, 32)
PARAMS = {name: p.detach().clone() for name, p in CELL.named_parameters()}
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))

HOW: dict[str, dict[str, Any]] = {
    "remat": {},
    "budget": {"budget": 10**8},
    "tight": {"budget": 0.8},
    "policy": {"policy": fckpt.policies.dots_saveable},
}
LOOSE = ["remat", "budget", "policy"]
LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "a leaf": lambda x: x.clone().requires_grad_(),
    "computed": lambda x: x.clone().requires_grad_() * 1,
    "a view": lambda x: x.clone().requires_grad_().view(x.shape),
    "a leaf that is a view": lambda x: x.clone().view(x.shape).requires_grad_(),
    "constant": lambda x: x.clone(),
}


def steps(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Takes all tensors three times."""
    h = torch.zeros_like(x)
    for _ in range(3):
        h = torch.func.functional_call(CELL, params, (x, h))
    return h.sum()


def amp(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, **options):
            return fn(*args)

    return run


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("x", LEAVES)
@pytest.mark.parametrize("params", ["a leaf", "computed", "a leaf that is a view"])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_gradients_add_up_where_plain_ones_do(how: str, x: str, params: str, inside: bool):
    def gradients(wrap: Callable[..., Any]) -> Any:
        p, given = {name: LEAVES[params](value) for name, value in PARAMS.items()}, LEAVES[x](X)
        out = wrap(amp(steps))(p, given) if inside else amp(wrap(steps))(p, given)
        return torch.autograd.grad(out, [t for t in (*p.values(), given) if t.requires_grad])

    assert equal(gradients(lambda fn: fn), gradients(lambda fn: fckpt.remat(fn, **HOW[how])))


@pytest.mark.parametrize("how", LOOSE)
@pytest.mark.parametrize("kind", ["leaves", "computed"])
@pytest.mark.parametrize("transform", ["grad", "per sample", "vjp of vjp"])
def test_under_torch_func(how: str, kind: str, transform: str):
    def gradients(wrap: Callable[..., Any]) -> Any:
        region = wrap(steps)
        loss = region
        if kind == "computed":
            loss = lambda p, x: region({name: value * 1 for name, value in p.items()}, x * 1)
        if transform == "grad":
            found = amp(torch.func.grad(loss, argnums=(0, 1)))(PARAMS, X)
        elif transform == "per sample":
            found = amp(torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0)))(PARAMS, X[:, None])
        else:
            square = lambda p, x: sum(g.square().sum() for g in torch.func.grad(loss)(p, x).values())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", fckpt.BudgetWarning)
                found = amp(torch.func.grad(square, argnums=(0, 1)))(PARAMS, X)
        return [*found[0].values(), found[1]]

    assert equal(gradients(lambda fn: fn), gradients(lambda fn: fckpt.remat(fn, **HOW[how])))


class Attention(nn.Module):
    """Queries, keys and values of one input: what a block of a transformer does with what the block before made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        return x + self.out(found)


@pytest.mark.parametrize("how", LOOSE)
def test_blocks_of_a_transformer(how: str):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Attention() for _ in range(3)))
    x = torch.randn(2, 16, 32)

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        blocks.zero_grad()
        amp(run)(x).square().sum().backward()
        return [p.grad.clone() for p in blocks.parameters() if p.grad is not None]

    expected = step(blocks)
    regions = [fckpt.remat(block, **HOW[how]) for block in blocks]

    def run(x: Tensor) -> Tensor:
        for region in regions:
            x = region(x)
        return x

    assert equal(expected, step(run)) and equal(expected, step(run))


# ---- several regions -------------------------------------------------------------------------------


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 32)


def twice(layer: Callable[[Tensor], Tensor]) -> Tensor:
    return layer(torch.tanh(layer(X))).float().square().sum()


def test_planned_regions_that_share_a_parameter_say_so(layer: nn.Linear):
    region = fckpt.remat(layer, budget=10**8)
    with pytest.warns(
        GradientWarning, match=r"takes .*weight.* and 1 more, and so did an earlier planned call in the same"
    ):
        amp(twice)(region).backward()


@pytest.mark.parametrize("how", LOOSE)
def test_one_region_around_all_uses_is_exact(how: str, layer: nn.Linear):
    gradients = lambda fn: torch.autograd.grad(amp(fn)(layer), [*layer.parameters()])
    assert equal(gradients(twice), gradients(fckpt.remat(twice, **HOW[how])))


@pytest.mark.parametrize("how", LOOSE)
def test_without_a_cache_regions_may_share(how: str, layer: nn.Linear):
    uncached = amp(twice, cache_enabled=False)
    gradients = lambda region: torch.autograd.grad(uncached(region), [*layer.parameters()])
    assert equal(gradients(layer), gradients(fckpt.remat(layer, **HOW[how])))


def test_plain_regions_share_what_autocast_remembers(layer: nn.Linear):
    gradients = lambda region: torch.autograd.grad(amp(twice)(region), [*layer.parameters()])
    assert equal(gradients(layer), gradients(fckpt.remat(layer)))


def test_no_false_alarm(layer: nn.Linear):
    region = fckpt.remat(lambda x: layer(x).float().square().sum(), budget=10**8)
    kept = amp(region)(X)  # never differentiated, and its block is over
    for _ in range(2):
        amp(region)(X).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            region(X).backward()  # one block, and each backward pass is over before the next call
        region(X)
        region(X).backward()  # nobody has the first one
    (amp(region)(X) + amp(region)(X) + kept).backward()  # two blocks
    region(X).backward()
    (region(X) + region(X)).backward()
