"""Hooks, flags and parameters that a forward changes: they change once, or the call is refused and changes nothing."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fckpt


class Always:
    """Stands for a mask of ones that has no data."""

    def all(self) -> bool:
        return True


class Initialised(nn.Module):
    """Registers a hook at its first call, under a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock, self.ready = nn.Linear(4, 4), threading.Lock(), False

    def forward(self, x: Tensor, mask: Tensor | Always) -> Tensor:
        if not self.ready:
            with self.lock:
                self.linear.register_forward_hook(lambda module, args, out: out * 2)
                self.ready = True
        return torch.tanh(self.linear(x)).sin() if mask.all() else self.linear(x)


def test_a_hook_that_the_first_call_registers_is_registered_once() -> None:
    grads, x, mask = [], torch.ones(2, 4), torch.ones(3, dtype=torch.bool)
    for wrap in (lambda module: module, fckpt.remat):
        torch.manual_seed(0)
        module = Initialised()
        run = wrap(module)
        for _ in range(3):
            run(x, mask).sum().backward()
        grads.append(module.linear.weight.grad)
        assert len(module.linear._forward_hooks) == 1
    assert torch.equal(*grads)


@pytest.mark.parametrize("early", [False, True])
def test_a_call_that_is_refused_has_changed_nothing(early: bool) -> None:
    """The caller may run the function plainly after the error, whether it came early or late."""

    class Counting(Initialised):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, list[int]()

        def forward(self, x: Tensor, mask: Tensor | Always) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            if early:
                super().forward(x, mask)
            return super().forward(x, Always())

    module = Counting()
    run = fckpt.remat(module, budget=1.0)
    with pytest.raises(fckpt.TraceError):
        run(torch.ones(2, 4), torch.ones(3, dtype=torch.bool))
    assert (module.calls, module.seen, module.ready, len(module.linear._forward_hooks)) == (0, [], False, 0)


@pytest.mark.parametrize("pre", [False, True])
def test_hooks_that_come_and_go_between_forward_and_backward(pre: bool) -> None:
    def double(module: nn.Module, given: Any, out: Any = None) -> Any:
        return given[0] * 2 if out is None else out * 2

    def register(module: nn.Module) -> Any:
        return module.register_forward_pre_hook(double) if pre else module.register_forward_hook(double)

    grads = []
    for wrap in (lambda module: module, fckpt.remat):
        torch.manual_seed(0)
        inner = nn.Linear(4, 4)
        module = wrap(nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 4)))
        handle = None
        for turn in range(3):
            out = module(torch.ones(2, 4)).exp().sum()
            if turn == 1 and handle is not None:
                handle.remove()
            else:
                handle = register(inner)
            out.backward()
        grads.append(inner.weight.grad)
        assert len(inner._forward_hooks) + len(inner._forward_pre_hooks) == 1
    assert torch.equal(*grads)


class Momentum(nn.Module):
    """Follows a network by a frozen copy, as MoCo and BYOL do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(4, 4)
        self.slow = copy.deepcopy(self.network).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.network.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return (torch.tanh(self.network(x)).sin() - self.slow(x)).square().sum()


def test_a_parameter_that_the_forward_writes_is_written_once_or_refused() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(fckpt.MutationError, match="changed the parameter `weight`"):
        fckpt.remat(Momentum())(x)
    slow = []
    for options in (None, {"budget": 1.0}):
        torch.manual_seed(0)
        network = Momentum()
        run = network if options is None else fckpt.remat(network, **options)
        for _ in range(3):
            run(x).backward()
        slow.append([p.clone() for p in network.slow.parameters()])
    assert all(map(torch.equal, *slow))


def test_an_embedding_with_a_largest_norm_scales_its_weight() -> None:
    rows, ids = [], torch.tensor([1, 3, 3])
    for wrap in (lambda fn: fn, fckpt.remat):
        torch.manual_seed(0)
        table = nn.Embedding(5, 4, max_norm=0.5)
        wrap(lambda: table(ids).sin().exp().sum())().backward()
        rows.append((table.weight.detach().clone(), table.weight.grad))
    assert all(map(torch.equal, *rows))


def of_argument(x: Tensor, layer: nn.Module) -> None:
    x.register_hook(lambda grad: grad * 2)


def of_parameter(x: Tensor, layer: Any) -> None:
    layer.weight.register_hook(lambda grad: grad * 2)


def after_accumulation(x: Tensor, layer: Any) -> None:
    def double(parameter: Any) -> None:
        parameter.grad.mul_(2)

    layer.weight.register_post_accumulate_grad_hook(double)


def of_node(x: Tensor, layer: nn.Module) -> None:
    node: Any = x.grad_fn
    node.register_prehook(lambda grads: (grads[0] * 2,))


def of_accumulation(x: Tensor, layer: Any) -> None:
    torch.autograd.graph.get_gradient_edge(layer.weight).node.register_prehook(lambda grads: (grads[0] * 2,))


def of_module(x: Tensor, layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, out: out * 2)


def of_module_backward(x: Tensor, layer: nn.Module) -> None:
    layer.register_full_backward_hook(lambda module, grads, out: (grads[0] * 2,))


class Registering(nn.Module):
    def __init__(self, register: Any, differentiates: bool = False) -> None:
        super().__init__()
        self.layer, self.register, self.differentiates = nn.Linear(4, 4), register, differentiates

    def forward(self, x: Tensor) -> Tensor:
        self.register(x, self.layer)
        h = torch.tanh(self.layer(x)).sin()
        return h * torch.func.grad(lambda y: y.sin().sum())(h) if self.differentiates else h


REGISTERING = [
    of_argument, of_parameter, after_accumulation, of_node, of_accumulation, of_module, of_module_backward,
]  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("differentiates", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("register", REGISTERING)
def test_hooks_that_a_call_registers_are_registered_once(register: Any, nested: bool, differentiates: bool) -> None:
    """Also if the call is restarted, because it differentiates inside for the first time."""
    if register is of_module_backward and differentiates:
        with pytest.raises(fckpt.MutationError, match="registers a backward hook on a module"):
            fckpt.remat(Registering(register, differentiates))(torch.ones(2, 4)).sum().backward()
        return
    found = []
    for wrap in (lambda module: module, fckpt.remat):
        torch.manual_seed(0)
        module = Registering(register, differentiates)
        run = wrap(module)
        run = wrap(lambda x, run=run: run(x) * 2) if nested else run
        grads: list[Any] = []
        for _ in range(3):
            x = torch.ones(2, 4, requires_grad=True)
            run(x * 1).sum().backward()
            grads += [
                x.grad,
                *[parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None],
            ]
        hooks = [len(module.layer._forward_hooks), len(module.layer.weight._backward_hooks or ())]
        found.append((grads, hooks))
    (plain, then), (ours, now) = found
    assert then == now
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("transform", ["grad", "vmap of grad"])
def test_hooks_under_a_transform_run_once(transform: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        w.register_hook(lambda grad: grad * 3)
        h = torch.tanh(x @ w)
        h.register_hook(lambda grad: grad * 2)
        return h.sin().sum()

    def gradients(f: Any, x: Tensor, w: Tensor) -> Any:
        loss = lambda x, w: f(x * 1, w)
        take = torch.func.grad(loss, argnums=(0, 1))
        return torch.func.vmap(take, in_dims=(0, None))(x, w) if transform == "vmap of grad" else take(x, w)

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    assert all(map(torch.equal, gradients(fckpt.remat(fn), x, w), gradients(fn, x, w)))
