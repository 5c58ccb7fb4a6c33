"""Whole training steps on several devices: pure steps with collectives are planned; steps of modules say what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import wrapped_programs
from helpers import assert_equal
from torch import Tensor, nn, optim
from torch.func import grad_and_value

import fckpt

Params = dict[str, Tensor]
DEPTH, WIDTH, ROWS = 4, 32, 64


def loss_of(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0]
    for i in range(DEPTH):
        x = torch.tanh(F.linear(x, params[f"{i}.weight"], params[f"{i}.bias"]))
    return (x - batch[1]).square().mean()


def momentum(params: Params, state: Params, grads: Params) -> tuple[Params, Params]:
    state = {name: 0.9 * m + grads[name] for name, m in state.items()}
    return {name: p - 0.1 * state[name] for name, p in params.items()}, state


def replicated(params: Params, state: Params, batch: tuple[Tensor, Tensor]) -> Any:
    """Every rank has all parameters; the gradients are averaged."""
    grads, loss = grad_and_value(loss_of)(params, batch)
    grads = {name: fckpt.pmean(g, "data") for name, g in grads.items()}
    return fckpt.pmean(loss, "data"), *momentum(params, state, grads)


def sharded(params: Params, state: Params, batch: tuple[Tensor, Tensor]) -> Any:
    """Every rank has a part of each parameter; their gradients are reduced and scattered."""

    def of_parts(parts: Params) -> Tensor:
        return loss_of({name: fckpt.all_gather(p, "data", tiled=True) for name, p in parts.items()}, batch)

    grads, loss = grad_and_value(of_parts)(params)
    return fckpt.pmean(loss, "data"), *momentum(params, state, grads)


def trained(step: Any, *, parts: bool) -> list[Any]:
    """The loss, the parameters and the state after each of three steps."""
    rank, generator = int(fckpt.axis_index("data")), torch.Generator().manual_seed(0)
    shapes = {f"{i}.{name}": s for i in range(DEPTH) for name, s in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))}
    params = {name: torch.randn(shape, generator=generator) / 6 for name, shape in shapes.items()}
    params = {name: p.chunk(2)[rank].clone() if parts else p for name, p in params.items()}
    state = {name: torch.zeros_like(p) for name, p in params.items()}
    batch = tuple(torch.randn(ROWS, WIDTH, generator=generator).chunk(2)[rank].clone() for _ in range(2))
    found = []
    for _ in range(3):
        loss, params, state = step(params, state, batch)
        found.append((loss, {k: p.clone() for k, p in params.items()}, {k: m.clone() for k, m in state.items()}))
    return found


@pytest.mark.parametrize("options", [{"budget": 0.6}, {"budget": 0.7, "donate_argnums": (0, 1)}])
@pytest.mark.parametrize("plain", [replicated, sharded])
def test_pure_steps_that_reduce_gradients_keep_their_bits(plain: Any, options: dict[str, Any]) -> None:
    mesh, planned = fckpt.sim({"data": 2}), fckpt.remat(plain, **options)
    run = lambda step: mesh.run(lambda: trained(step, parts=plain is sharded))
    assert_equal(run(plain), run(planned))
    stats = fckpt.stats(planned)
    assert stats.plans >= 1 and stats.fallbacks == {}


def test_a_step_of_a_module_on_a_mesh_names_the_way() -> None:
    def program() -> str:
        model = nn.Linear(4, 4)
        optimizer = optim.SGD(model.parameters(), lr=0.1, foreach=False)
        train_step = fckpt.step(model, optimizer, lambda model, x: model(x).square().mean())
        with pytest.raises(fckpt.ArgumentValueError) as error:
            train_step(torch.randn(4, 4))
        return str(error.value)

    for said in fckpt.sim({"data": 2}).run(program):
        assert "pmean" in said and "fckpt.remat(train_step, budget=..., donate_argnums=(0, 1))" in said


def test_steps_of_modules_that_communicate_by_themselves_are_refused() -> None:
    (found,) = fckpt.launch(wrapped_programs.refused_steps, 1)
    assert "fckpt.step cannot plan this DistributedDataParallel" in found["replicated"]
    assert "DDP(remat(model, budget=...)), and call backward" in found["replicated"]
    assert "plan its blocks with remat before they are sharded" in found["sharded"]
    for name in ("in the loss", "in a function"):
        assert "calls a DistributedDataParallel module here, which communicates by itself" in found[name], found[name]
