"""A training step of a network: its sizes and data, its plan, and the bitwise comparison of two steps."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt
from benches.models.wrapping import wrap_blocks
from fckpt._planned.making import make_plan
from fckpt.cost import CostSource, Measured
from fckpt.errors import BudgetError
from fckpt.graph import Graph

SEED = 0
Sizes = Mapping[str, int]
Data = Callable[[Sizes], tuple[Tensor, Tensor]]


# ---- networks and batches ------------------------------------------------------------------------


class TrainingLoss(nn.Module):
    """The mean cross-entropy of a model, as a module of inputs and labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(inputs)
        if labels.ndim == 2:  # a label per token
            logits, labels = logits.flatten(0, 1), labels.flatten()
        return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Task:
    """A network with its loss, and a batch to train it on."""

    name: str
    what: str
    """Its sizes, in words."""
    loss: TrainingLoss
    inputs: Tensor
    labels: Tensor

    def in_blocks(self, wrap: Callable[[nn.Module], nn.Module]) -> TrainingLoss:
        """Returns the loss with every block of the network replaced by `wrap(block)`; parameters are shared."""
        shared: dict[int, Any] = {id(p): p for p in self.loss.parameters()}
        loss = copy.deepcopy(self.loss, shared)
        wrap_blocks(loss, wrap, self.loss.model.block)  # type: ignore[arg-type]
        return loss

    def plan(self, costs: CostSource) -> fckpt.Plan:
        """Traces and prices a step. The plan recomputes nothing; on the meta device nothing is allocated or run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operations whose costs are estimated
            device = "meta" if self.inputs.is_meta else None  # the results are of the meta device's operations
            return fckpt.plan(self.loss, self.inputs, self.labels, budget=1.0, costs=costs, device=device)


@dataclass(frozen=True)
class Network:
    """A network and its data, in several sizes."""

    title: str
    model: Callable[..., nn.Module]
    """Takes those of the sizes that its parameters name, and `positions`, the number of tokens."""
    data: Data
    sizes: Mapping[str, Sizes]
    """By "cuda", "cpu", "quick" and "tiny"; `published_networks` has "paper", "cpu" and "tiny"."""

    def build(self, sizes: Sizes) -> nn.Module:
        """Makes the network."""
        known = {"positions": sizes.get("tokens"), **sizes}
        parameters = inspect.signature(self.model).parameters
        return self.model(**{name: known[name] for name in parameters if known.get(name) is not None})

    def task(self, size: str, device: torch.device, *, seed: int = SEED) -> Task:
        """Makes the network and its batch on `device`, the same for the same seed."""
        torch.manual_seed(seed)
        sizes = self.sizes[size]
        with device:
            loss = TrainingLoss(self.build(sizes))
            inputs, labels = self.data(sizes)
        what = ", ".join(f"{key} {value}" for key, value in sizes.items())
        return Task(self.title, what, loss, inputs, labels)


def sizes_from(text: str) -> Sizes:
    """Reads sizes such as `"batch=64 side=224"`."""
    return {name: int(number) for name, number in (pair.split("=") for pair in text.split())}


def labelled_images(classes: int) -> Data:
    """Returns the `data` of a network that classifies images."""

    def data(sizes: Sizes) -> tuple[Tensor, Tensor]:
        batch, side = sizes["batch"], sizes["side"]
        return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))

    return data


def size_of(device: torch.device, *, quick: bool = False, tiny: bool = False) -> str:
    """Returns the name of the sizes to use: the device's, unless a smaller one is asked for."""
    return "tiny" if tiny else "quick" if quick else "cpu" if device.type == "cpu" else "cuda"


# ---- a step, and its results ---------------------------------------------------------------------


Outcome = dict[str, Tensor | None]
"""The results of a step: "loss", "gradient NAME" and "buffer NAME" of each, and "generator", its state."""


def step_of(loss: nn.Module, task: Task) -> Callable[[], None]:
    """Returns a training step without an optimizer: forward and backward; the gradients are dropped."""

    def step() -> None:
        loss(task.inputs, task.labels).backward()
        # Dropped at once: gradients that outlive the step would not be the step's own memory.
        loss.zero_grad(set_to_none=True)

    return step


def buffers_of(loss: nn.Module) -> list[Tensor]:
    """Returns copies of the buffers."""
    return [buffer.clone() for buffer in loss.buffers()]


def outcome_of(loss: nn.Module, task: Task, buffers: Sequence[Tensor]) -> Outcome:
    """Runs one step from a fixed seed, and from buffers with the values of `buffers`."""
    for buffer, start in zip(loss.buffers(), buffers, strict=True):
        buffer.copy_(start)
    torch.manual_seed(SEED)
    value = loss(task.inputs, task.labels)
    value.backward()
    return taken(loss, value)


def taken(module: nn.Module, loss: Tensor) -> Outcome:
    """Takes the results of a step from a module whose gradients it drops."""
    found: Outcome = {"loss": loss.detach(), "generator": _generator_state(loss.device)}
    found |= {f"gradient {name}": p.grad for name, p in module.named_parameters()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    module.zero_grad(set_to_none=True)
    return found


def _generator_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def unequal(expected: Outcome, actual: Outcome) -> list[str]:
    """Names everything in which two outcomes differ by at least one bit. Parameters are matched by position."""
    if len(expected) != len(actual):
        return ["number of results"]
    pairs = zip(expected.items(), actual.values(), strict=True)
    return [name for (name, one), other in pairs if not _same(one, other)]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


# ---- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A traced and priced step, from which plans are made."""

    graph: Graph
    baseline_peak_bytes: int
    """Predicted peak of the plain step."""
    version: str
    """Of torch."""

    def plan(self, budget: float, solver: str = "auto", seconds: float | None = None) -> fckpt.Plan:
        """Plans for a number of bytes, or for a fraction of the plain peak, within a time limit."""
        return make_plan(self.graph, budget, solver, self.version, seconds)

    def least_bytes(self) -> int:
        """Returns the least budget that is said to be feasible."""
        try:
            return self.plan(1).peak_bytes
        except BudgetError as error:
            return error.least_bytes


def prepare(task: Task) -> Prepared:
    """Traces and prices a step, and measures each operation anew."""
    plain = task.plan(Measured(cache=False))
    return Prepared(plain.graph, plain.baseline_peak_bytes, plain.torch_version)
