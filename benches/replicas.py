"""Data parallel training steps of one network, on one of several ranks: PyTorch's ways, and fckpt's.

All start from the same parameters and train with the same SGD. A rank has its part of the batch, and its own statistics
of BatchNorm, which nobody exchanges: a step differentiates, averages the gradients over the ranks, changes the
parameters in place and drops the gradients.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fckpt
from benches import cifar
from benches.models import DenseBlock, DenseLayer, DenseNet, TorchCheckpoint, wrap_blocks
from benches.task import TrainingLoss
from benches.timing import set_up
from fckpt import P

__all__ = [
    "NAIVE",
    "NEEDS_GPUS",
    "Contender",
    "Planned",
    "Replica",
    "Setting",
    "data_parallel",
    "join",
    "plain_plan",
    "planned_step",
    "state_bytes",
    "torch_ways",
]

NAIVE = "naive DDP"
NEEDS_GPUS = "DataParallel"
RATE = 0.1
MOMENTUM = 0.9
DECAY = 1e-4
BLOCKS = 3
BATCHES = 8
"""In an epoch of images that are made up."""


@dataclass(frozen=True)
class Setting:
    """What all processes are told."""

    depth: int
    growth: int
    batch: int
    """Images of all ranks together."""
    device: str
    """"cpu" or "cuda"."""
    threads: int
    """Of each process, on CPU."""
    fraction: float
    """The memory that fckpt gets, of what naive DDP takes."""
    rounds: int
    data: str | None = None
    """The folder of CIFAR-10; None for images that are made up."""
    timeout_seconds: float = 600.0
    search_seconds: float | None = None
    """How long to look for a plan; None leaves it to the solver."""


@dataclass(frozen=True)
class Replica:
    """This rank, and what it trains."""

    rank: int
    ranks: int
    device: torch.device
    mesh: fckpt.Mesh
    loss: TrainingLoss
    """The network as it is before training, with its loss. Contenders copy it."""
    data: cifar.Images
    batch: int
    waiting: dist.ProcessGroup
    """Of all ranks, on their hosts: a GPU that waits for another would be busy with it."""

    @property
    def part(self) -> slice:
        """What this rank has of a batch."""
        size = self.batch // self.ranks
        return slice(self.rank * size, (self.rank + 1) * size)

    @property
    def numbers(self) -> Tensor:
        """The images of the batch on which everything is measured, those of all ranks."""
        return torch.arange(self.batch) % len(self.data)

    def wait(self) -> None:
        """Waits until all ranks have come here."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        dist.barrier(self.waiting)

    def gathered(self, mine: Any) -> list[Any]:
        """Returns what all ranks have."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, mine, group=self.waiting)
        return found

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Returns on all ranks what the first makes."""
        box = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.waiting)
        return box[0]


def join(setting: Setting) -> Replica:
    """Makes this process a rank, with the network and the data."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    number = local % max(torch.cuda.device_count(), 1)
    device = set_up(f"cuda:{number}" if setting.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(setting.threads)
    backend = "gloo" if device.type == "cpu" else None
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=setting.timeout_seconds, backend=backend)
    waiting = dist.new_group(backend="gloo")
    assert isinstance(waiting, dist.ProcessGroup)
    torch.manual_seed(0)
    layers = (setting.depth - 4) // (2 * BLOCKS)
    network = DenseNet(setting.growth, (layers,) * BLOCKS, classes=cifar.CLASSES, small=True)
    data = cifar.load(setting.data) if setting.data else cifar.synthetic(BATCHES * setting.batch)
    loss = TrainingLoss(network).to(device)
    gc.freeze()  # what was imported need not be looked through each time that garbage is collected
    return Replica(dist.get_rank(), mesh.size, device, mesh, loss, data, setting.batch, waiting)


# ---- a step --------------------------------------------------------------------------------------


class Contender:
    """A way to train.

    Args:
        differentiate: of images and labels: leaves the mean gradient over all ranks in the `.grad` of the parameters,
            and returns the loss of this rank.
        parameters: those that this rank changes.
        statistics: returns those of BatchNorm.
    """

    def __init__(
        self,
        differentiate: Callable[[Tensor, Tensor], Tensor],
        parameters: Sequence[Tensor],
        statistics: Callable[[], Sequence[Tensor]],
    ) -> None:
        self.differentiate, self.parameters, self.statistics = differentiate, parameters, statistics
        self.optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One training step; returns the loss of this rank."""
        loss = self.differentiate(images, labels)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def gradients(self, images: Tensor, labels: Tensor) -> list[Tensor | None]:
        """Returns the whole gradients, without a step; None where this rank has no part in it."""
        self.differentiate(images, labels)
        found = [p.grad for p in self.parameters]
        self.optimizer.zero_grad(set_to_none=True)
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def state_bytes(loss: nn.Module) -> int:
    """Returns what parameters, their momentum and buffers take, each in the blocks of 512 bytes that CUDA gives out."""
    tensors = [*loss.parameters(), *loss.parameters(), *loss.buffers()]
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


# ---- PyTorch's ways ------------------------------------------------------------------------------


class EfficientLayer(nn.Module):
    """A dense layer that computes its bottleneck again: the concatenation, and what follows up to the convolution.

    G. Pleiss et al., Memory-Efficient Implementation of DenseNets, 2017, https://arxiv.org/abs/1707.06990.
    """

    def __init__(self, inner: DenseLayer, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *features: Tensor) -> Tensor:
        narrow = checkpoint(self._narrow, *features, use_reentrant=self.reentrant)
        assert isinstance(narrow, Tensor)
        return self.inner.grow_from(narrow)

    def _narrow(self, *features: Tensor) -> Tensor:
        return self.inner.narrow(torch.cat(features, 1))


def torch_ways(replica: Replica) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Yields names of contenders, and functions that make them."""
    yield NAIVE, lambda: _distributed(replica, lambda layer: layer)
    yield "DDP + layers", lambda: _distributed(replica, TorchCheckpoint)
    efficient = lambda layer: EfficientLayer(layer, reentrant=False)
    yield "DDP + bottlenecks", lambda: _distributed(replica, efficient)
    yield "FSDP2 + layers", lambda: _sharded(replica, TorchCheckpoint)
    yield "FSDP2 + bottlenecks", lambda: _sharded(replica, efficient)
    if torch.cuda.device_count() >= replica.ranks >= 2:
        yield NEEDS_GPUS, lambda: data_parallel(replica)


def _copy(replica: Replica, wrap: Callable[[Any], nn.Module]) -> TrainingLoss:
    return wrap_blocks(copy.deepcopy(replica.loss), wrap, kind=DenseLayer)


def _of_module(loss: nn.Module, run: Callable[..., Tensor]) -> Contender:
    def differentiate(images: Tensor, labels: Tensor) -> Tensor:
        value = run(images, labels)
        value.backward()
        return value.detach()

    return Contender(differentiate, list(loss.parameters()), lambda: list(loss.buffers()))


def _distributed(replica: Replica, wrap: Callable[[Any], nn.Module]) -> Contender:
    loss = _copy(replica, wrap)
    known = inspect.signature(DistributedDataParallel).parameters
    # The older name warns where there is the newer one.
    own_statistics: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }
    return _of_module(loss, DistributedDataParallel(loss, **own_statistics))


def _sharded(replica: Replica, wrap: Callable[[Any], nn.Module]) -> Contender:
    loss = _copy(replica, wrap)
    mesh = init_device_mesh(replica.device.type, (replica.ranks,))
    for block in [module for module in loss.modules() if isinstance(module, DenseBlock)]:
        fully_shard(block, mesh=mesh)
    fully_shard(loss, mesh=mesh)
    return _of_module(loss, loss)


def data_parallel(replica: Replica) -> Contender:
    """All GPUs driven by the threads of the first rank, with the seed's adversary: the reentrant checkpoint.

    The other ranks wait. The first takes the whole batch, whatever part of it it is given.
    """
    loss = _copy(replica, lambda layer: EfficientLayer(layer, reentrant=True))
    network = DataParallel(loss.model, device_ids=list(range(replica.ranks)) if replica.device.type == "cuda" else None)
    images, labels = replica.data.batch(replica.numbers, replica.device)

    def differentiate(_images: Tensor, _labels: Tensor) -> Tensor:
        if replica.rank:
            return torch.zeros(())
        value = F.cross_entropy(network(images), labels)
        value.backward()
        return value.detach()

    return Contender(differentiate, list(loss.parameters()), lambda: [] if replica.rank else list(loss.buffers()))


# ---- fckpt's -------------------------------------------------------------------------------------


State = dict[str, Tensor]


def _functional(replica: Replica) -> tuple[Callable[..., Any], State, State]:
    """Returns the loss as a pure function, and parameters and buffers of one's own."""
    loss, params, buffers = fckpt.from_module(replica.loss)
    own, statistics = ({name: x.clone() for name, x in tensors.items()} for tensors in (params, buffers))
    return loss, own, statistics


def plain_plan(replica: Replica) -> fckpt.Plan:
    """Returns a plan of this rank that recomputes nothing: what others are made of."""
    loss, params, buffers = _functional(replica)
    batch = replica.data.batch(replica.numbers[replica.part], replica.device)
    return fckpt.plan(loss, {name: x.requires_grad_() for name, x in params.items()}, buffers, *batch, budget=1.0)


def planned_step(replica: Replica, plan: fckpt.Plan) -> Callable[..., Any]:
    """Returns what every rank calls: from parameters, buffers and its part of a batch to (gradients, loss, buffers)."""
    loss, _, buffers = _functional(replica)
    gradient = fckpt.grad_and_value(fckpt.remat(loss, plan=plan), has_aux=True)

    def averaged(params: State, buffers: State, images: Tensor, labels: Tensor) -> tuple[State, Tensor, State]:
        gradients, (value, statistics) = gradient(params, buffers, images, labels)
        return fckpt.pmean(gradients, "data"), value[None], statistics

    # Statistics are each rank's own; counters of batches are the same on all.
    own = {name: P("data") if buffer.ndim else P() for name, buffer in buffers.items()}
    data = P("data")
    return fckpt.shard_map(averaged, replica.mesh, in_specs=(P(), own, data, data), out_specs=(P(), data, own))


class Planned(Contender):
    """fckpt's way: a `planned_step`, and an optimizer outside of it. Gradients are values, averaged by a pmean."""

    def __init__(self, replica: Replica, step: Callable[..., Any]) -> None:
        _, self.params, self.buffers = _functional(replica)
        self.mapped = step
        super().__init__(self._differentiate, list(self.params.values()), lambda: list(self.buffers.values()))

    def _differentiate(self, images: Tensor, labels: Tensor) -> Tensor:
        gradients, value, self.buffers = self.mapped(self.params, self.buffers, images, labels)
        for name, parameter in self.params.items():
            parameter.grad = gradients[name]
        return value[0]

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of parameters and buffers by the names of the module, and the optimizer's state."""
        model = {**self.params, **self.buffers}
        return {
            "model": {name.removeprefix("model."): tensor.clone() for name, tensor in model.items()},
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned.

        Raises:
            ValueError: it is another network's.
        """
        mine = {name.removeprefix("model."): tensor for name, tensor in {**self.params, **self.buffers}.items()}
        shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (mine, state["model"])]
        if shapes[0] != shapes[1]:
            raise ValueError("what was saved is another network's: depth and growth must be the same")
        for name, tensor in mine.items():
            tensor.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
