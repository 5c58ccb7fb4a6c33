"""`estimate`: the memory of a whole training step: parameters, gradients, the optimizer's state and activations."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fckpt import _tree as tree
from fckpt._inspect import Looked
from fckpt._planned.optimizers import bytes_of_updates
from fckpt._planned.plan import Budget, Plan
from fckpt._trace.allocations import rounded
from fckpt._units import format_bytes
from fckpt.cost.analytic import Analytic
from fckpt.cost.calls import CostSource
from fckpt.errors import ArgumentTypeError
from fckpt.report.table import aligned

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, repr=False)
class Estimate:
    """The memory of a training step, in bytes, as the allocator of the device rounds it.

    `print(estimate)` shows a table, and a notebook shows it with the memory of forward and backward over time.
    """

    parameters_bytes: int
    buffers_bytes: int
    batch_bytes: int
    optimizer_bytes: int
    """The state of the optimizer after its first step."""
    gradients_bytes: int
    activations_bytes: int
    """How much forward and backward hold at once beyond the bytes of all gradients: residuals, temporaries, outputs.

    Gradients take the place of residuals in the course of backward, so there may be more residuals than this;
    `plan.residuals` lists them.
    """
    update_bytes: int
    """The temporaries of the optimizer's step."""
    plan: Plan
    """The plan of forward and backward; without a budget, it recomputes nothing."""
    device_bytes: int | None = None
    """The memory of the device, as its profile says; None if the costs come from no profile."""

    @property
    def held_bytes(self) -> int:
        """What is held between two steps: parameters, buffers, batch and the optimizer's state."""
        return self.parameters_bytes + self.buffers_bytes + self.batch_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """The most bytes that are held at once in a step after the first one: in backward, or in the update."""
        return self.held_bytes + self.gradients_bytes + max(self.activations_bytes, self.update_bytes)

    def __str__(self) -> str:
        """Returns a table of the parts."""
        parts = [
            ("parameters", self.parameters_bytes),
            ("buffers", self.buffers_bytes),
            ("batch", self.batch_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("gradients", self.gradients_bytes),
            ("activations, beyond gradients", self.activations_bytes),
            ("update (not at the same time)", self.update_bytes),
            ("most at once", self.total_bytes),
        ]
        if self.device_bytes is not None:
            parts.append(("memory of the device", self.device_bytes))
        rows = [(name, format_bytes(nbytes), f"{nbytes / max(1, self.total_bytes):.1%}") for name, nbytes in parts]
        return "\n".join(aligned([("memory of a step", "", ""), *rows]))

    def __repr__(self) -> str:
        return f"<Estimate: {format_bytes(self.total_bytes)} at once, {format_bytes(self.held_bytes)} between steps>"

    def _repr_html_(self) -> str:
        """Returns the table and the picture of the plan, which notebooks show."""
        return f"<pre>{html.escape(str(self))}</pre>{self.plan.svg()}"


def estimate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    *,
    budget: Budget | None = None,
    device: torch.device | str | None = None,
    costs: CostSource | str | None = None,
    solver: str = "auto",
) -> Estimate:
    """Estimates the memory of a training step without running it: forward, backward, and the optimizer's update.

    The step is this loop's: `loss_fn(model, batch).backward()`, `optimizer.step()`, `optimizer.zero_grad()`. (A step of
    `fckpt.step` needs less, because the gradients are never all alive.) The model and the batch may be on the device
    `meta`. The optimizer's own code runs on tensors without memory, to find its state and its temporaries.

    Args:
        model: the module to train.
        optimizer: an optimizer of the model's parameters; None to leave it out.
        loss_fn: maps the model and a batch to a loss, a tensor with one element.
        batch: a pytree of tensors.
        budget: the budget of forward and backward, as for `remat`. Without one, nothing is recomputed.
        device: the device to estimate for, see `plan`.
        costs: the source of times and temporary memory, or the name of a profile (`"H100"`), see `plan`.
        solver: see `fckpt.solve.names()`.

    Raises:
        ArgumentTypeError: `model` is not a module, `optimizer` not an optimizer, or the step of the optimizer cannot
            run without data.
        BudgetError: no plan fits the budget.
        TraceError: the loss function cannot be traced.

    Example:
        >>> import torch, fckpt
        >>> model = torch.nn.Linear(100, 10)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> loss_fn = lambda model, batch: model(batch).square().mean()
        >>> found = fckpt.estimate(model, optimizer, loss_fn, torch.randn(32, 100))
        >>> found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes
        (4040, 4040, 8088)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be an nn.Module, not {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    if not callable(loss_fn):
        raise ArgumentTypeError(f"loss_fn must be a function of the model and a batch, not {type(loss_fn).__name__}.")
    looked = Looked(functools.partial(loss_fn, model), (batch,), {}, costs, device=device)
    plan = looked.plan(None, budget, solver)
    profile = looked.costs.profile if isinstance(looked.costs, Analytic) else None
    grain = 1 if profile is None else profile.allocation_granularity
    size = functools.partial(_nbytes, grain=grain)
    gradients = sum(plan.graph.values[v].nbytes for v in dict.fromkeys(plan.graph.gradients))
    kind = next((t.device.type for t in looked.trace.tensors if t.device.type != "cpu"), "cpu")
    state, update = (0, 0) if optimizer is None else bytes_of_updates(optimizer, kind, grain)
    return Estimate(
        parameters_bytes=size(model.parameters()),
        buffers_bytes=size(model.buffers()),
        batch_bytes=size(t for t in tree.leaves(batch) if isinstance(t, torch.Tensor)),
        optimizer_bytes=state,
        gradients_bytes=gradients,
        activations_bytes=plan.peak_bytes - gradients,
        update_bytes=update,
        plan=plan,
        device_bytes=None if profile is None else profile.memory_nbytes,
    )


def _nbytes(tensors: Iterable[torch.Tensor], grain: int) -> int:
    """Returns the bytes of the storages of tensors, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(rounded(nbytes, grain) for nbytes in storages.values())
