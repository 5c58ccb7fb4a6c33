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
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fckpt
from benches.common.timing import set_up
from benches.common.training import SEED, Task, TrainingLoss
from benches.models.convolutional import DenseBlock, DenseLayer, DenseNet
from benches.models.wrapping import TorchCheckpoint
from fckpt import P

NAIVE = "naive DDP"
BLOCKS = 3


@dataclass(frozen=True)
class Rank:
    """This rank, and what it trains."""

    number: int
    mesh: fckpt.Mesh
    task: Task
    """The network before training, which each method copies, and this rank's part of a random batch."""
    waiting: dist.ProcessGroup
    """Of all ranks, on their hosts, so that GPUs are not busy waiting."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.task.inputs.device

    def wait(self) -> None:
        """Waits for all ranks."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        dist.barrier(self.waiting)

    def gathered(self, mine: Any) -> list[Any]:
        """Returns the values of all ranks."""
        found: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(found, mine, group=self.waiting)
        return found

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Returns the first rank's value on all ranks."""
        box = [make() if self.number == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.waiting)
        return box[0]


def join(setting: Namespace) -> Rank:
    """Joins the ranks, and makes the network and the data, for a command line of `benches.multi_gpu`."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    number = local % max(torch.cuda.device_count(), 1)
    device = set_up(f"cuda:{number}" if setting.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(setting.threads)
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=600.0, backend="gloo" if device.type == "cpu" else None)
    waiting = dist.new_group(backend="gloo")
    assert isinstance(waiting, dist.ProcessGroup)
    torch.manual_seed(SEED)
    layers = (setting.depth - 4) // (2 * BLOCKS)
    loss = TrainingLoss(DenseNet(setting.growth, (layers,) * BLOCKS, classes=10, small=True)).to(device)
    batch = torch.randn(setting.batch_size, 3, 32, 32), torch.randint(10, (setting.batch_size,))
    images, labels = (whole.chunk(mesh.size)[dist.get_rank()].to(device) for whole in batch)
    gc.freeze()  # garbage collection then skips what was imported
    return Rank(dist.get_rank(), mesh, Task("DenseNet", "", loss, images, labels), waiting)


# ---- a step --------------------------------------------------------------------------------------


class Method:
    """A way to train.

    Args:
        differentiate: puts the mean gradient over all ranks into the `.grad` of the parameters.
        parameters: the parameters that this rank updates.
        statistics: returns the statistics of BatchNorm.
    """

    def __init__(
        self,
        differentiate: Callable[[], object],
        parameters: Sequence[Tensor],
        statistics: Callable[[], Sequence[Tensor]],
    ) -> None:
        self.differentiate, self.parameters, self.statistics = differentiate, parameters, statistics
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)

    def step(self) -> None:
        """One training step."""
        self.differentiate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Returns the full gradients, without a step."""
        self.differentiate()
        found = [p.grad for p in self.parameters if p.grad is not None]
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

    def __init__(self, inner: DenseLayer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *features: Tensor) -> Tensor:
        narrow = checkpoint(lambda *maps: self.inner.narrow(torch.cat(maps, 1)), *features, use_reentrant=False)
        assert isinstance(narrow, Tensor)
        return self.inner.grow_from(narrow)


def torch_methods(rank: Rank) -> dict[str, Callable[[], Method]]:
    """Returns functions that make the methods, by name."""
    task = rank.task

    def method(wrap: Callable[[Any], nn.Module], distribute: Callable[[nn.Module], Any]) -> Method:
        loss = copy.deepcopy(task.in_blocks(wrap))
        run = distribute(loss)
        return Method(lambda: run(task.inputs, task.labels).backward(), [*loss.parameters()], lambda: [*loss.buffers()])

    known = inspect.signature(DistributedDataParallel).parameters
    # The old name warns in versions of torch that have the new one.
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"

    def replicated(loss: nn.Module) -> nn.Module:
        own_statistics: dict[str, Any] = {option: False}
        return DistributedDataParallel(loss, **own_statistics)

    def sharded(loss: nn.Module) -> Any:
        mesh = init_device_mesh(rank.device.type, (rank.mesh.size,))
        for block in [module for module in loss.modules() if isinstance(module, DenseBlock)]:
            fully_shard(block, mesh=mesh)
        return fully_shard(loss, mesh=mesh)

    return {
        NAIVE: lambda: method(lambda layer: layer, replicated),
        "DDP + layers": lambda: method(TorchCheckpoint, replicated),
        "DDP + bottlenecks": lambda: method(EfficientLayer, replicated),
        "FSDP2 + layers": lambda: method(TorchCheckpoint, sharded),
        "FSDP2 + bottlenecks": lambda: method(EfficientLayer, sharded),
    }


# ---- fckpt ---------------------------------------------------------------------------------------


State = dict[str, Tensor]


def _functional(rank: Rank) -> tuple[Callable[..., Any], State, State]:
    """Returns the loss as a pure function, and copies of the parameters and buffers."""
    loss, params, buffers = fckpt.from_module(rank.task.loss)
    own, statistics = ({name: x.clone() for name, x in tensors.items()} for tensors in (params, buffers))
    return loss, own, statistics


def plain_plan(rank: Rank) -> fckpt.Plan:
    """Returns a plan of this rank that recomputes nothing, from whose graph others are made."""
    loss, params, buffers = _functional(rank)
    differentiated = {name: x.requires_grad_() for name, x in params.items()}
    return fckpt.plan(loss, differentiated, buffers, rank.task.inputs, rank.task.labels, budget=1.0)


def planned_step(rank: Rank, plan: fckpt.Plan) -> Callable[..., Any]:
    """Returns a function of parameters, buffers and this rank's part of a batch, to (gradients, buffers)."""
    loss, _, buffers = _functional(rank)
    gradient = fckpt.grad(fckpt.remat(loss, plan=plan), has_aux=True)

    def averaged(params: State, buffers: State, images: Tensor, labels: Tensor) -> tuple[State, State]:
        gradients, statistics = gradient(params, buffers, images, labels)
        return fckpt.pmean(gradients, "data"), statistics

    # Each rank has its own statistics; counters of batches are equal on all.
    own = {name: P("data") if buffer.ndim else P() for name, buffer in buffers.items()}
    return fckpt.shard_map(averaged, rank.mesh, in_specs=(P(), own, P("data"), P("data")), out_specs=(P(), own))


class Planned(Method):
    """A `planned_step` of fckpt, and an optimizer. Gradients are return values, averaged by a pmean."""

    def __init__(self, rank: Rank, step: Callable[..., Any]) -> None:
        _, self.params, self.buffers = _functional(rank)
        self.task, self.mapped = rank.task, step
        super().__init__(self._differentiate, [*self.params.values()], lambda: [*self.buffers.values()])

    def _differentiate(self) -> None:
        gradients, self.buffers = self.mapped(self.params, self.buffers, self.task.inputs, self.task.labels)
        for name, parameter in self.params.items():
            parameter.grad = gradients[name]
