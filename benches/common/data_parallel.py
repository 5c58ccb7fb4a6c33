"""Data parallel training steps on one rank, by PyTorch's methods and by fckpt.

All start from the same parameters and train with the same SGD. A rank has its part of the batch and its own statistics
of BatchNorm, which are not exchanged. A step differentiates, averages the gradients over the ranks, updates the
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
from benches.common import cifar
from benches.common.timing import set_up
from benches.common.training import TrainingLoss
from benches.models.convolutional import DenseBlock, DenseLayer, DenseNet
from benches.models.wrapping import TorchCheckpoint, wrap_blocks
from fckpt import P

__all__ = [
    "NAIVE",
    "NEEDS_GPUS",
    "Method",
    "Planned",
    "Rank",
    "Setting",
    "data_parallel",
    "join",
    "plain_plan",
    "planned_step",
    "state_bytes",
    "torch_methods",
]

NAIVE = "naive DDP"
NEEDS_GPUS = "DataParallel"
RATE = 0.1
MOMENTUM = 0.9
DECAY = 1e-4
BLOCKS = 3
BATCHES = 8
"""In an epoch of random images."""


@dataclass(frozen=True)
class Setting:
    """The options of all processes."""

    depth: int
    growth: int
    batch: int
    """Images of all ranks."""
    device: str
    """"cpu" or "cuda"."""
    threads: int
    """Of each process, on CPU."""
    fraction: float
    """The memory of fckpt as a fraction of naive DDP's."""
    rounds: int
    data: str | None = None
    """The folder of CIFAR-10; None for random images."""
    timeout_seconds: float = 600.0
    search_seconds: float | None = None
    """Time limit of the solver; None for its default."""


@dataclass(frozen=True)
class Rank:
    """This rank, and what it trains."""

    number: int
    ranks: int
    device: torch.device
    mesh: fckpt.Mesh
    loss: TrainingLoss
    """The network before training, with its loss. Each method copies it."""
    data: cifar.Images
    batch: int
    waiting: dist.ProcessGroup
    """Of all ranks, on their hosts, so that GPUs are not busy waiting."""

    @property
    def part(self) -> slice:
        """The part of a batch that this rank has."""
        size = self.batch // self.ranks
        return slice(self.number * size, (self.number + 1) * size)

    @property
    def numbers(self) -> Tensor:
        """The numbers of the images, on all ranks, of the batch for measurements."""
        return torch.arange(self.batch) % len(self.data)

    def wait(self) -> None:
        """Waits for all ranks."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        dist.barrier(self.waiting)

    def gathered(self, mine: Any) -> list[Any]:
        """Returns the values of all ranks."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, mine, group=self.waiting)
        return found

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Returns the first rank's value on all ranks."""
        box = [make() if self.number == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.waiting)
        return box[0]


def join(setting: Setting) -> Rank:
    """Joins the ranks, and makes the network and the data."""
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
    gc.freeze()  # garbage collection then skips what was imported
    return Rank(dist.get_rank(), mesh.size, device, mesh, loss, data, setting.batch, waiting)


# ---- a step --------------------------------------------------------------------------------------


class Method:
    """A way to train.

    Args:
        differentiate: function of images and labels that puts the mean gradient over all ranks into the `.grad` of the
            parameters, and returns the loss of this rank.
        parameters: the parameters that this rank updates.
        statistics: returns the statistics of BatchNorm.
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
        """Returns the full gradients, without a step; None for parameters without a gradient on this rank."""
        self.differentiate(images, labels)
        found = [p.grad for p in self.parameters]
        self.optimizer.zero_grad(set_to_none=True)
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def state_bytes(loss: nn.Module) -> int:
    """Returns the bytes of parameters, momentum and buffers, each rounded up to 512 bytes as CUDA allocates."""
    tensors = [*loss.parameters(), *loss.parameters(), *loss.buffers()]
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


# ---- PyTorch's methods ---------------------------------------------------------------------------


class EfficientLayer(nn.Module):
    """A dense layer that recomputes its bottleneck: from the concatenation to the 1x1 convolution.

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


def torch_methods(rank: Rank) -> Iterator[tuple[str, Callable[[], Method]]]:
    """Yields names, and functions that make the methods."""
    yield NAIVE, lambda: _distributed(rank, lambda layer: layer)
    yield "DDP + layers", lambda: _distributed(rank, TorchCheckpoint)
    efficient = lambda layer: EfficientLayer(layer, reentrant=False)
    yield "DDP + bottlenecks", lambda: _distributed(rank, efficient)
    yield "FSDP2 + layers", lambda: _sharded(rank, TorchCheckpoint)
    yield "FSDP2 + bottlenecks", lambda: _sharded(rank, efficient)
    if torch.cuda.device_count() >= rank.ranks >= 2:
        yield NEEDS_GPUS, lambda: data_parallel(rank)


def _copy(rank: Rank, wrap: Callable[[Any], nn.Module]) -> TrainingLoss:
    return wrap_blocks(copy.deepcopy(rank.loss), wrap, kind=DenseLayer)


def _of_module(loss: nn.Module, run: Callable[..., Tensor]) -> Method:
    def differentiate(images: Tensor, labels: Tensor) -> Tensor:
        value = run(images, labels)
        value.backward()
        return value.detach()

    return Method(differentiate, list(loss.parameters()), lambda: list(loss.buffers()))


def _distributed(rank: Rank, wrap: Callable[[Any], nn.Module]) -> Method:
    loss = _copy(rank, wrap)
    known = inspect.signature(DistributedDataParallel).parameters
    # The old name warns in versions of torch that have the new one.
    own_statistics: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }
    return _of_module(loss, DistributedDataParallel(loss, **own_statistics))


def _sharded(rank: Rank, wrap: Callable[[Any], nn.Module]) -> Method:
    loss = _copy(rank, wrap)
    mesh = init_device_mesh(rank.device.type, (rank.ranks,))
    for block in [module for module in loss.modules() if isinstance(module, DenseBlock)]:
        fully_shard(block, mesh=mesh)
    fully_shard(loss, mesh=mesh)
    return _of_module(loss, loss)


def data_parallel(rank: Rank) -> Method:
    """DataParallel on the first rank, with the reentrant checkpoint, as in pytorch-checkpoint.

    Its threads run all GPUs, and it always takes the whole batch. The other ranks wait.
    """
    loss = _copy(rank, lambda layer: EfficientLayer(layer, reentrant=True))
    network = DataParallel(loss.model, device_ids=list(range(rank.ranks)) if rank.device.type == "cuda" else None)
    images, labels = rank.data.batch(rank.numbers, rank.device)

    def differentiate(_images: Tensor, _labels: Tensor) -> Tensor:
        if rank.number:
            return torch.zeros(())
        value = F.cross_entropy(network(images), labels)
        value.backward()
        return value.detach()

    return Method(differentiate, list(loss.parameters()), lambda: [] if rank.number else list(loss.buffers()))


# ---- fckpt ---------------------------------------------------------------------------------------


State = dict[str, Tensor]


def _functional(rank: Rank) -> tuple[Callable[..., Any], State, State]:
    """Returns the loss as a pure function, and copies of the parameters and buffers."""
    loss, params, buffers = fckpt.from_module(rank.loss)
    own, statistics = ({name: x.clone() for name, x in tensors.items()} for tensors in (params, buffers))
    return loss, own, statistics


def plain_plan(rank: Rank) -> fckpt.Plan:
    """Returns a plan of this rank that recomputes nothing, from whose graph others are made."""
    loss, params, buffers = _functional(rank)
    batch = rank.data.batch(rank.numbers[rank.part], rank.device)
    return fckpt.plan(loss, {name: x.requires_grad_() for name, x in params.items()}, buffers, *batch, budget=1.0)


def planned_step(rank: Rank, plan: fckpt.Plan) -> Callable[..., Any]:
    """Returns a function of parameters, buffers and this rank's part of a batch, to (gradients, loss, buffers)."""
    loss, _, buffers = _functional(rank)
    gradient = fckpt.grad_and_value(fckpt.remat(loss, plan=plan), has_aux=True)

    def averaged(params: State, buffers: State, images: Tensor, labels: Tensor) -> tuple[State, Tensor, State]:
        gradients, (value, statistics) = gradient(params, buffers, images, labels)
        return fckpt.pmean(gradients, "data"), value[None], statistics

    # Each rank has its own statistics; counters of batches are equal on all.
    own = {name: P("data") if buffer.ndim else P() for name, buffer in buffers.items()}
    data = P("data")
    return fckpt.shard_map(averaged, rank.mesh, in_specs=(P(), own, data, data), out_specs=(P(), data, own))


class Planned(Method):
    """A `planned_step` of fckpt, and an optimizer. Gradients are return values, averaged by a pmean."""

    def __init__(self, rank: Rank, step: Callable[..., Any]) -> None:
        _, self.params, self.buffers = _functional(rank)
        self.mapped = step
        super().__init__(self._differentiate, list(self.params.values()), lambda: list(self.buffers.values()))

    def _differentiate(self, images: Tensor, labels: Tensor) -> Tensor:
        gradients, value, self.buffers = self.mapped(self.params, self.buffers, images, labels)
        for name, parameter in self.params.items():
            parameter.grad = gradients[name]
        return value[0]

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of parameters and buffers by their names in the module, and the optimizer's state."""
        model = {**self.params, **self.buffers}
        return {
            "model": {name.removeprefix("model."): tensor.clone() for name, tensor in model.items()},
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`.

        Raises:
            ValueError: it belongs to another network.
        """
        mine = {name.removeprefix("model."): tensor for name, tensor in {**self.params, **self.buffers}.items()}
        shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (mine, state["model"])]
        if shapes[0] != shapes[1]:
            raise ValueError("what was saved is another network's: depth and growth must be the same")
        for name, tensor in mine.items():
            tensor.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
