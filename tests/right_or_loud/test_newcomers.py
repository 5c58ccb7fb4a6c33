"""What people do in their first hour: decorate methods, pass modules along, swap parameters, copy models."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import nn

import fckpt

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Has all that a recompute must not do twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.dropout(torch.tanh(self.norm(self.first(x))))))

    @fckpt.remat
    def decorated(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    @fckpt.remat(static_argnums=0)
    def decorated_static(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def block() -> Block:
    torch.manual_seed(0)
    return Block()


CALLS: dict[str, Callable[[Block], Callable[[torch.Tensor], torch.Tensor]]] = {
    "module": fckpt.remat,
    "bound method": lambda b: fckpt.remat(b.forward),
    "lambda": lambda b: fckpt.remat(lambda x: b(x)),
    "decorated method": lambda b: b.decorated,
    "decorated method, static self": lambda b: b.decorated_static,
    "argument": lambda b: lambda x: fckpt.remat(lambda m, x: m(x))(b, x),
    "keyword argument": lambda b: lambda x: fckpt.remat(lambda x, m: m(x))(x, m=b),
    "static argument": lambda b: lambda x: fckpt.remat(lambda m, x: m(x), static_argnums=0)(b, x),
    "in a list of arguments": lambda b: lambda x: fckpt.remat(lambda ms, x: ms[0](x))([b], x),
    "in a partial": lambda b: lambda x: fckpt.remat(lambda x, held: held["m"](x))(x, held={"m": b}),
}


@pytest.mark.parametrize("way", CALLS)
def test_a_module_is_found_however_it_reaches_the_region(way: str) -> None:
    def two_steps(call: Any, b: Block) -> dict[str, Any]:
        torch.manual_seed(1)
        for _ in range(2):
            call(X).square().sum().backward()
        return {"grads": [p.grad for p in b.parameters()], "statistics": list(b.buffers())}

    plain, other = block(), block()
    assert_equal(two_steps(CALLS[way](other), other), two_steps(plain, plain))


def model(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), wrap(Block()), wrap(Block()), nn.Linear(4, 3))


@pytest.mark.parametrize("scale", [1.0, 1.5])
@pytest.mark.parametrize("gradient_of", [fckpt.grad, torch.func.grad], ids=["fckpt", "torch"])
def test_rematerialised_children_see_the_parameters_that_are_passed(gradient_of: Any, scale: float) -> None:
    """The recompute runs after `functional_call` has put the module's own parameters back."""

    def gradient(net: nn.Module) -> Any:
        apply, params, buffers = fckpt.from_module(net)
        torch.manual_seed(1)
        loss = lambda p: apply(p, buffers, X)[0].square().sum()
        return gradient_of(loss)({name: scale * p for name, p in params.items()})

    got = gradient(model(fckpt.remat))
    assert_equal(got, gradient(model(lambda m: m)))
    assert not any(g.requires_grad for g in got.values())


def test_rematerialised_children_under_functional_call_and_backward() -> None:
    def gradient(net: nn.Module) -> Any:
        torch.manual_seed(1)
        params = {name: (1.5 * p).detach().requires_grad_() for name, p in net.named_parameters()}
        torch.func.functional_call(net, params, (X,)).square().sum().backward()
        return {"grads": {name: p.grad for name, p in params.items()}, "buffers": dict(net.named_buffers())}

    assert_equal(gradient(model(fckpt.remat)), gradient(model(lambda m: m)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_rematerialised_and_apart(copied: Any) -> None:
    original = model(fckpt.remat)
    other = copied(original)
    assert repr(other) == repr(original)
    assert list(other.state_dict()) == list(original.state_dict())
    torch.manual_seed(1)
    other(X).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in original.parameters())
    assert int(original[1].norm.num_batches_tracked) == 0


LINEAR = nn.Linear(4, 4)
MAKE: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "a linear layer": lambda: nn.Linear(4, 4),
    "layer normalisation": lambda: nn.LayerNorm(4),
    "batch normalisation": lambda: nn.BatchNorm1d(4),
    "a copy": lambda: copy.deepcopy(LINEAR),
    "a parameter": lambda: nn.Parameter(torch.full((4,), 2.0)).mul,
    "a frozen parameter": lambda: nn.Parameter(torch.full((4,), 2.0), requires_grad=False).mul,
    "a buffer": lambda: nn.Buffer(torch.full((4,), 2.0)).mul,
    "parameters of a computed tensor": lambda: lambda x: nn.Parameter(x * 2) * x,
    "a layer that is differentiated": lambda: (
        lambda x: torch.autograd.grad(
            (layer := nn.Linear(4, 4))(x.sin()).square().sum(), layer.weight, create_graph=True
        )[0]
    ),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.sweep(1)
def test_a_module_or_parameter_that_a_planned_function_makes(name: str) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        made = MAKE[name]()
        return made(LINEAR(x)).square().sum()

    def outcome(fn: Any) -> list[Any]:
        LINEAR.zero_grad()
        torch.manual_seed(0)
        loss = fn(X)
        loss.backward()
        return [loss, LINEAR.weight.grad, LINEAR.bias.grad, torch.get_rng_state()]

    expected = outcome(run)
    for fn in [fckpt.remat(run, budget=1.0)] * 2:
        assert_equal(outcome(fn), expected)


def test_a_parameter_that_a_planned_function_makes_is_one() -> None:
    def run(x: torch.Tensor) -> list[Any]:
        layer, tensor = nn.Linear(4, 4), torch.ones(4)
        own = nn.Parameter(tensor)
        facts = [type(own) is nn.Parameter, own.requires_grad, not isinstance(tensor, nn.Parameter)]
        return [(layer(LINEAR(x)) * own).sum(), *facts, [name for name, _ in layer.named_parameters()]]

    assert fckpt.remat(run, budget=1.0)(X)[1:] == [True, True, True, ["weight", "bias"]]
    assert type(nn.Parameter(torch.ones(2))) is nn.Parameter


@pytest.mark.parametrize("new", [nn.Parameter, torch.Tensor.requires_grad_])
def test_a_new_leaf_that_a_planned_function_returns_is_refused(new: Any) -> None:
    with pytest.raises(fckpt.TraceError, match="returns a parameter that it makes"):
        fckpt.remat(lambda x: (LINEAR(x), new(torch.ones(4))), budget=1.0)(X)


def test_an_internal_error_of_torch_in_a_trace_names_the_line() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = LINEAR(x)
        raise RuntimeError("0 INTERNAL ASSERT FAILED at a line, please report a bug to PyTorch.")
        return hidden

    with pytest.raises(fckpt.TraceError, match=r"test_newcomers.py:\d+.*tensors without data.*please report"):
        fckpt.remat(run, budget=1.0)(X)
