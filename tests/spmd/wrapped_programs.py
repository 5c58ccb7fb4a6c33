"""Programs of `test_wrapped_modules`: modules that torch wraps to communicate, and regions around and inside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fckpt


class Block(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6) if norm else nn.Identity()
        self.b, self.drop = nn.Linear(6, 6), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.b(torch.tanh(self.norm(self.a(x))))))


def model(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(norm), Block(norm), nn.Linear(6, 6))


class InARegion(nn.Module):
    """A module that calls another within a region."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return fckpt.remat(lambda x: self.inner(x))(x)


def trained(module: nn.Module) -> list[Tensor]:
    """Three steps: gradients, parameters and buffers after each."""
    torch.manual_seed(7 + dist.get_rank())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found: list[Any] = []
    for i in range(3):
        x = torch.randn(4, 6, requires_grad=i % 2 == 0)
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        found += [t for p in module.parameters() for t in (p.grad, p.detach())] + list(module.buffers())
        found = [t.full_tensor().clone() if hasattr(t, "full_tensor") else t.clone() for t in found]
    return found


def blocks(model: nn.Module, **options: Any) -> nn.Module:
    fckpt.remat_blocks(model, **options)
    return model


REPLICATED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "around": lambda m: fckpt.remat(DDP(m)),
    "inside": lambda m: DDP(fckpt.remat(m)),
    "called in a region": lambda m: InARegion(DDP(m)),
    "blocks inside": lambda m: DDP(blocks(m)),
    "blocks of what is replicated": lambda m: blocks(DDP(m)),
    "a budget inside": lambda m: DDP(fckpt.remat(m, budget=6000)),
    "a policy inside": lambda m: DDP(fckpt.remat(m, policy=fckpt.policies.dots_saveable)),
    "blocks with budgets inside": lambda m: DDP(blocks(m, budget=2**20)),
    "static graph": lambda m: fckpt.remat(DDP(m, static_graph=True)),
}


def replicated() -> dict[Any, bool]:
    """Whether training with DDP and a region equals training with DDP."""
    dist.init_process_group("gloo")
    found = {}
    for norm in (False, True):
        expected = trained(DDP(model(norm)))
        for name, wrap in REPLICATED.items():
            got = trained(wrap(model(norm)))
            found[name, norm] = all(map(torch.equal, got, expected))
    dist.destroy_process_group()
    return found


def _sharded(order: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), model()
    for i in range(2):
        block = whole[i]
        if order == "sharded, then rematerialised":
            fully_shard(block, mesh=mesh)
            whole[i] = fckpt.remat(block)
        elif order == "rematerialised, then sharded":
            whole[i] = fckpt.remat(block)
            fully_shard(whole[i], mesh=mesh)
        elif order == "a part rematerialised, then sharded":
            whole[i].a = fckpt.remat(whole[i].a)  # type: ignore[assignment, arg-type]
            fully_shard(block, mesh=mesh)
        elif order == "planned, then sharded":
            whole[i] = fckpt.remat(block, budget=2**20)
            fully_shard(whole[i], mesh=mesh)
        elif order == "blocks, then sharded":
            if i == 0:
                blocks(whole)
            fully_shard(whole[i], mesh=mesh)
        elif order == "called in a region":
            whole[i] = InARegion(fully_shard(block, mesh=mesh))  # type: ignore[arg-type]
    fully_shard(whole, mesh=mesh)
    if order == "sharded, then blocks":
        blocks(whole)
    return fckpt.remat(whole) if order == "the whole" else whole


ORDERS = [
    "sharded, then rematerialised", "rematerialised, then sharded", "a part rematerialised, then sharded",
    "called in a region", "the whole", "planned, then sharded", "blocks, then sharded", "sharded, then blocks",
]  # fmt: skip


def sharded() -> dict[str, Any]:
    """Whether training with FSDP2 and regions equals training without."""
    dist.init_process_group("gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about CPUs
        expected = trained(_sharded("plain"))
        found: dict[str, Any] = {}
        for order in ORDERS:
            found[order] = all(map(torch.equal, trained(_sharded(order)), expected))
        try:
            fckpt.remat(_sharded("plain"), budget=0.5)
        except fckpt.ArgumentTypeError as error:
            found["refused"] = str(error)
    dist.destroy_process_group()
    return found


def refused_steps() -> dict[str, str]:
    """What a planned step says of modules that communicate beside what they compute."""
    dist.init_process_group("gloo")
    inner, sharded = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    replicated, x = DDP(inner), torch.randn(4, 4)
    torch.distributed.fsdp.fully_shard(sharded)

    def step(model: nn.Module, loss_fn: Callable[[Any, Tensor], Tensor]) -> Any:
        return fckpt.step(model, torch.optim.SGD(model.parameters(), 0.1, foreach=False), loss_fn)

    calls: dict[str, Callable[[], Any]] = {
        "replicated": lambda: step(replicated, lambda model, x: model(x).sum()),
        "sharded": lambda: step(sharded, lambda model, x: model(x).sum()),
        "in the loss": lambda: step(inner, lambda model, x: replicated(x).sum())(x),
        "in a function": lambda: fckpt.remat(lambda x: replicated(x).sum(), budget=1.0)(x),
        "with a budget": lambda: fckpt.remat(replicated, budget=0.5),
        "with a policy": lambda: fckpt.remat(replicated, policy=fckpt.policies.dots_saveable),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except fckpt.FckptError as error:
            found[name] = str(error)
    return found
