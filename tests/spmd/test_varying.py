"""What the static check takes for alike on all ranks, and what for varying."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fckpt
from fckpt import P

Body = Callable[[torch.Tensor, torch.Tensor], Any]


def written(x: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = x.clone()
    write(x)
    return x


def trained(own: torch.Tensor, all_: torch.Tensor) -> torch.Tensor:
    """Two parameters in one step of an optimizer, of which the first one's gradient is the same on all ranks."""
    parameters = [nn.Parameter(torch.ones_like(x)) for x in (all_, own)]
    for parameter, x in zip(parameters, (all_, own), strict=True):
        parameter.grad = x.clone()
    torch.optim.AdamW(parameters, foreach=True).step()
    return parameters[0].detach()


ALIKE: dict[str, Body] = {
    "zeros like": lambda own, all_: torch.zeros_like(own) + all_,
    "ones of its shape": lambda own, all_: own.new_ones(3) * own.new_full((), 2.0),
    "drawn alike": lambda own, all_: torch.rand_like(own) + torch.bernoulli(own, 0.5),
    "written over": lambda own, all_: written(own, lambda y: y.copy_(all_)),
    "zeroed": lambda own, all_: written(own, lambda y: y.view(-1).zero_()),
    "filled by index": lambda own, all_: written(own, lambda y: y.__setitem__(slice(None), all_)),
    "drawn into": lambda own, all_: torch.empty_like(own).normal_(),
    "out=": lambda own, all_: torch.add(all_, 1, out=torch.empty_like(own)),
    "the gradient of a sum": lambda own, all_: torch.func.grad(lambda x: x.sum())(own),
    "one of a list": lambda own, all_: torch._foreach_mul([all_, own], 2.0)[0],
    "one of a list, in place": lambda own, all_: written(all_, lambda y: torch._foreach_add_([y, own.clone()], 1.0)),
    "lists written over": lambda own, all_: written(own, lambda y: torch._foreach_copy_([y], [all_])),
    "an optimizer": trained,
}
VARYING: dict[str, Body] = {
    "half written over": lambda own, all_: written(own, lambda y: y[:1].zero_()),
    "a row of it": lambda own, all_: written(all_, lambda y: y[0].copy_(own[0])),
    "filled with what varies": lambda own, all_: torch.zeros_like(own).fill_(own.sum()),
    "out= of what varies": lambda own, all_: torch.add(own, 1, out=torch.empty_like(all_)),
    "half of out=": lambda own, all_: written(own, lambda y: torch.add(all_[:1], 1, out=y[:1])),
    "the other of a list": lambda own, all_: torch._foreach_mul([all_, own], 2.0)[1],
    "a list with a list": lambda own, all_: written(all_, lambda y: torch._foreach_add_([y], [own])),
    "drawn around it": lambda own, all_: torch.normal(own, 1.0),
    "drawn with its odds": lambda own, all_: torch.zeros_like(own).bernoulli_(own.sigmoid()),
    "overlapping": lambda own, all_: written(own, lambda y: y[:1].expand(2, 3).select(0, 0).zero_()),
}


def checked(body: Body) -> list[Any]:
    def program() -> Any:
        mesh = fckpt.init_mesh({"data": 2})
        own, all_ = torch.full((2, 3), 1.0 + int(fckpt.axis_index("data"))), torch.ones(2, 3)
        return fckpt.shard_map(body, mesh, in_specs=(P("data"), P()), out_specs=P())(own, all_)

    return fckpt.sim({"data": 2}).run(program)


@pytest.mark.parametrize("name", ALIKE)
def test_what_does_not_read_the_data_of_what_varies_is_alike(name: str):
    first, second = checked(ALIKE[name])
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", VARYING)
def test_what_reads_them_varies(name: str):
    with pytest.raises(fckpt.ArgumentValueError, match="varies over 'data'"):
        checked(VARYING[name])


def numbers(body: Callable[[torch.Tensor, int], Any], spec: P, out: P) -> list[Any]:
    """Maps a function of a number that each rank has of its own."""

    def program() -> Any:
        mesh, own = fckpt.init_mesh({"data": 2}), 1 + int(fckpt.axis_index("data"))
        random.seed(own)
        return fckpt.shard_map(lambda x: body(x, own), mesh, in_specs=spec, out_specs=out)(torch.ones(2)).tolist()

    return fckpt.sim({"data": 2}).run(program)


def test_numbers_of_python_that_differ_vary():
    for body in (lambda x, own: x * own, lambda x, own: torch.full((2,), own), lambda x, own: x + random.random()):
        with pytest.raises(fckpt.ArgumentValueError, match="varies over 'data'"):
            numbers(body, P(), P())
    assert numbers(lambda x, own: x * own, P(), P("data")) == [[1.0, 1.0], [2.0, 2.0]]
    assert numbers(lambda x, own: fckpt.psum(x * own, "data"), P("data"), P()) == [[3.0, 3.0]] * 2
