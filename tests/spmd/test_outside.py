"""Transforms around mapped functions: the whole function's derivatives on every rank, and a check without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import spmd_programs
import torch
from helpers import leaf
from torch import Tensor, nn

import fckpt
from fckpt import P

F64 = torch.float64
X = (torch.arange(8, dtype=F64) / 7).reshape(4, 2)
W = torch.tensor([[0.3, -0.2], [0.1, 0.5]], dtype=F64)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
"""Sums over ranks come in another order when all ranks are one tensor."""

Loss = Callable[[Tensor], Tensor]


def backward(f: Loss) -> Any:
    w = leaf(W)
    f(w).backward()
    return w.grad


def backward_twice(f: Loss) -> Any:
    w = leaf(W)
    return torch.autograd.grad(torch.autograd.grad(f(w), w, create_graph=True)[0].square().sum(), w)[0]


TRANSFORMS: dict[str, Callable[[Loss], Any]] = {
    "backward": backward,
    "backward twice": backward_twice,
    "fckpt.grad": lambda f: fckpt.grad(f)(W),
    "grad": lambda f: torch.func.grad(f)(W),
    "vjp": lambda f: torch.func.vjp(f, W)[1](torch.tensor(2.0, dtype=F64))[0],
    "jvp": lambda f: torch.func.jvp(f, (W,), (torch.ones_like(W),))[1],
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([W, 2 * W])),
    "hessian": lambda f: torch.func.hessian(f)(W),
    "jacfwd": lambda f: torch.func.jacfwd(f)(W),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([W, 2 * W])),
    "grad of vmap": lambda f: torch.func.grad(lambda w: torch.func.vmap(f)(w).sum())(torch.stack([W, 2 * W])),
}
REGIONS: dict[str, Callable[[Loss], Loss]] = {
    "plain": lambda f: f,
    "remat": lambda f: fckpt.remat(f),
    "budget": lambda f: fckpt.remat(f, budget=1.0),
    "policy": lambda f: fckpt.remat(f, policy=fckpt.policies.dots_saveable),
}
BODIES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], P, Callable[[Tensor], Tensor]]] = {
    "psum": (lambda w, x: fckpt.psum(spmd_programs.total(w, x), "a"), P(), lambda y: y),
    "invariant": (
        lambda w, x: fckpt.psum(spmd_programs.total(fckpt.pvary(w, "a"), x), "a", out="invariant"),
        P(),
        lambda y: y,
    ),
    "pmean": (lambda w, x: 2 * fckpt.pmean(spmd_programs.total(w, x), "a"), P(), lambda y: y),
    "parts": (lambda w, x: spmd_programs.rows(w, x), P("a"), lambda y: y.sum()),
}
"""By name: a function of local parts, how its result lies, and a loss of that."""


def whole(w: Tensor) -> Tensor:
    return spmd_programs.total(w, X)


@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")  # second derivatives are not planned
@pytest.mark.parametrize("region", REGIONS)
def test_every_transform_around_a_mapped_function(region: str):
    def program() -> dict[str, Any]:
        mesh = fckpt.init_mesh({"a": 2})
        part = X.chunk(2)[int(fckpt.axis_index("a"))]
        found = {}
        for name, transform in TRANSFORMS.items():
            step = fckpt.shard_map(BODIES["psum"][0], mesh, in_specs=(P(), P("a")), out_specs=P())
            found[name] = transform(REGIONS[region](lambda w, step=step: step(w, part))).detach()
        return found

    for found in fckpt.sim({"a": 2}).run(program):
        for name, transform in TRANSFORMS.items():
            torch.testing.assert_close(
                found[name], transform(whole).detach(), **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("check", ["static", "off"])
@pytest.mark.parametrize("body", BODIES)
def test_gradients_of_a_replicated_argument_are_summed(body: str, check: str):
    fn, spec, total = BODIES[body]

    def program() -> list[Any]:
        mesh = fckpt.init_mesh({"a": 2, "b": 2})
        part = X.chunk(2)[int(fckpt.axis_index("a"))]
        step = fckpt.shard_map(fn, mesh, in_specs=(P(), P("a")), out_specs=spec, check=check)
        if spec != P():  # a result that is the same along "b" counts once
            return [backward(lambda w: total(step(w, part)))]
        return [backward(lambda w: step(w, part)), fckpt.grad(lambda w: step(w, part))(W)]

    for found in fckpt.sim({"a": 2, "b": 2}).run(program):
        for gradient in found:
            torch.testing.assert_close(gradient, backward(whole), **CLOSE)


def test_gradients_taken_inside_are_those_of_a_rank():
    def program() -> Tensor:
        mesh = fckpt.init_mesh({"a": 2})
        step = fckpt.shard_map(fckpt.grad(spmd_programs.total), mesh, in_specs=(P(), P("a")), out_specs=P("a"))
        return step(leaf(W), X.chunk(2)[int(fckpt.axis_index("a"))])

    for rank, found in enumerate(fckpt.sim({"a": 2}).run(program)):
        torch.testing.assert_close(found.detach(), fckpt.grad(spmd_programs.total)(W, X.chunk(2)[rank]), **CLOSE)


def test_the_check_leaves_no_trace():
    def program() -> list[Any]:
        mesh = fckpt.init_mesh({"a": 2})
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).double()
        step = fckpt.shard_map(lambda x: fckpt.pmean(net(x).sum(), "a"), mesh, in_specs=(P("a"),), out_specs=P())
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            step(X[:2])
        step(X[2:])
        return [net[1].num_batches_tracked.item(), {type(t) for t in held} <= {Tensor, nn.Parameter}]

    assert fckpt.sim({"a": 2}).run(program) == [[2, True]] * 2


def test_outside_in_processes():
    found = fckpt.launch(spmd_programs.outside, 2)
    for mine, theirs in zip(found, fckpt.sim({"a": 2}).run(spmd_programs.outside), strict=True):
        for name, gradient in theirs.items():
            assert torch.equal(mine[name], gradient), name
            torch.testing.assert_close(gradient, backward(lambda w: spmd_programs.total(w, X)), **CLOSE)


def test_what_is_closed_over_varies_where_ranks_differ():
    """A part that a function closes over is no parameter that all ranks have; equal tensors are."""

    def program(seed: int, total: Callable[[Tensor], Tensor]) -> Tensor:
        mesh = fckpt.init_mesh({"a": 2, "b": 2})
        mine = X + seed * int(fckpt.axis_index("a"))
        return fckpt.shard_map(lambda w: total((mine @ w).sum()), mesh, in_specs=(P(),), out_specs=P())(W)

    mesh = fckpt.sim({"a": 2, "b": 2})
    assert len(mesh.run(lambda: program(0, lambda y: y))) == 4
    assert len(mesh.run(lambda: program(1, lambda y: fckpt.psum(y, "a")))) == 4
    with pytest.raises(fckpt.ArgumentValueError, match=r"varies over 'a'") as caught:
        mesh.run(lambda: program(1, lambda y: y))
    assert "'b'" not in str(caught.value)


def test_buffers_of_a_batch():
    def program() -> Any:
        mesh = fckpt.init_mesh({"a": 2})
        apply, params, buffers = fckpt.from_module(nn.BatchNorm1d(2).double())
        specs = (P(), P(), P("a"))
        step = fckpt.shard_map(lambda p, b, x: apply(p, b, x)[1], mesh, in_specs=specs, out_specs=P())
        return step(params, buffers, X.chunk(2)[int(fckpt.axis_index("a"))])

    with pytest.raises(fckpt.ArgumentValueError, match=r"running_mean.* varies over 'a'"):
        fckpt.sim({"a": 2}).run(program)


def closed_over(body: Callable[[nn.Module, Tensor], Tensor], backward: bool = True) -> list[Any]:
    """The gradients of a linear layer that a mapped function closes over."""

    def program() -> Any:
        mesh = fckpt.init_mesh({"a": 2})
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        step = fckpt.shard_map(lambda x: body(model, x), mesh, in_specs=(P("a"),), out_specs=P())
        out = step(fckpt.shard(torch.tensor([[1.0], [2.0]]), P("a")))
        if backward:
            out.backward()
        return None if model.weight.grad is None else model.weight.grad.item()

    return fckpt.sim({"a": 2}).run(program)


def let_in(model: nn.Module, x: Tensor) -> Tensor:
    parameters = {name: fckpt.pvary(p, "a") for name, p in model.named_parameters()}
    return fckpt.psum(torch.func.functional_call(model, parameters, (x,)).sum(), "a")


def differentiated_within(model: nn.Module, x: Tensor) -> Tensor:
    loss = fckpt.psum(model(x).sum(), "a", out="invariant")
    loss.backward()
    return loss


def test_parameters_that_are_closed_over_are_told():
    with pytest.warns(
        fckpt.MeshWarning, match=r"reaches float32\[1, 1\], which the mapped function closes over.* as an argument"
    ):
        assert closed_over(lambda model, x: fckpt.psum(model(x).sum(), "a")) == [1.0, 2.0]
    with pytest.warns(fckpt.MeshWarning, match="closes over"):
        closed_over(lambda model, x: fckpt.psum(fckpt.remat(model)(x).sum(), "a"))
    # no warning, which would be an error in the tests
    assert closed_over(lambda model, x: fckpt.psum(model(x).sum(), "a"), backward=False) == [None, None]
    assert closed_over(let_in) == [3.0, 3.0]
    assert closed_over(differentiated_within, backward=False) == [1.0, 2.0]
    assert closed_over(lambda model, x: fckpt.psum(model(x).sum().detach(), "a"), backward=False) == [None, None]
