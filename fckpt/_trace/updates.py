"""What follows on the backward pass in a training step: sums over microbatches, clipping, and updates of parameters.

Each is recorded after the backward pass, as the plain step runs it, with all gradients held to the end. Then
`with_early_updates` moves every such operation to the first place in program order at which it may run: directly after
its gradient, in most cases. `Graph.plain_order` keeps the order of the plain step.

An update is one opaque operation: the optimizer's own code for a single parameter (`_planned/optimizers.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fckpt._trace.operations import Trace, is_dense
from fckpt.graph.graph import Graph

__all__ = ["CARRIED", "UPDATE", "Ending", "Runs", "running", "runs", "update", "with_early_updates"]


class Runs(Protocol):
    """What the operations of this file do in a call: the optimizer, and the gradients so far."""

    def update(self, number: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Updates the parameter with this number in the optimizer, in place."""
        ...

    def cost(self, number: int) -> Any:
        """Returns the `OpCost` of the update of the parameter with this number."""
        ...

    def first_nbytes(self, number: int) -> int:
        """Returns the temporary bytes of the next update of this parameter, which may be its first one."""
        ...

    def taken(self) -> list[torch.Tensor]:
        """Returns the sums that earlier microbatches left, the loss last, and forgets them."""
        ...


class _Active(threading.local):
    runs: Runs | None = None


_active = _Active()


@contextlib.contextmanager
def running(runs: Runs) -> Iterator[None]:
    """Makes the operations of this file use `runs` within the body."""
    before, _active.runs = _active.runs, runs
    try:
        yield
    finally:
        _active.runs = before


def runs() -> Runs:
    """Returns what the operations of this file use in this thread."""
    assert _active.runs is not None
    return _active.runs


_library = torch.library.Library("fckpt_step", "DEF")
"""The operations are registered while this object lives."""
_library.define("update(Tensor(a!) parameter, Tensor gradient, Tensor[] after, int number) -> ()")
_library.define("carried(Tensor[] like, ScalarType loss) -> Tensor[]")


def update(parameter: torch.Tensor, gradient: torch.Tensor, after: Sequence[torch.Tensor], number: int) -> None:
    """What `UPDATE` runs. A lowered program calls it directly, because dispatching to Python takes as long again."""
    runs().update(number, parameter, gradient)


def _carried(like: Sequence[torch.Tensor], loss: torch.dtype) -> list[torch.Tensor]:
    return runs().taken()


def _carried_layouts(like: Sequence[torch.Tensor], loss: torch.dtype) -> list[torch.Tensor]:
    sums = [torch.empty_strided(t.shape, _gradient_strides(t), dtype=t.dtype, device=t.device) for t in like]
    return [*sums, torch.empty((), dtype=loss, device=like[0].device)]


def _gradient_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    own = tuple(tensor.stride())
    return own if is_dense(tensor.shape, own) else tuple(torch.empty(tensor.shape, device="meta").stride())


def _held(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(0, device=values[0].device)


_library.define("held(Tensor[] values) -> Tensor")
_library.impl("held", _held, "CompositeExplicitAutograd")
torch.library.register_fake("fckpt_step::held", _held, lib=_library)
_library.impl("update", update, "CompositeExplicitAutograd")
_library.impl("carried", _carried, "CompositeExplicitAutograd")
torch.library.register_fake("fckpt_step::update", lambda *_: None, lib=_library)
torch.library.register_fake("fckpt_step::carried", _carried_layouts, lib=_library)

UPDATE = torch.ops.fckpt_step.update.default
"""Runs an optimizer's own code for one parameter: the parameter is `number` in the optimizer. `after` is only read."""
CARRIED = torch.ops.fckpt_step.carried.default
"""Returns the sums of the gradients of earlier microbatches, laid out like gradients of `like`, and of the losses."""

HELD = torch.ops.fckpt_step.held.default
"""Reads tensors, and returns an empty one."""


@dataclass(frozen=True)
class Ending:
    """What follows on the backward pass of one microbatch."""

    numbers: tuple[tuple[int, int], ...]
    """Pairs of an operand and its number in the optimizer: the parameters of the optimizer."""
    updates: bool
    """Whether the parameters are updated; otherwise the sums of the gradients are the results."""
    carried: tuple[int, ...] = ()
    """The numbers of the parameters for which earlier microbatches left a gradient."""
    loss: torch.dtype | None = None
    """The dtype of the loss of earlier microbatches; None if this is the first one."""
    clip_norm: float | None = None
    clip_value: float | None = None
    layout: Any = None
    """Everything else on which the memory of an update depends."""
    first: bool = False
    """Whether the optimizer makes a part of its state in these updates, which takes more memory."""

    def begun(self, operands: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Records, before the forward pass, that the sums of earlier microbatches are held.

        Args:
            operands: the operands of the trace.

        Returns:
            The sums of the gradients by number of the parameter, and that of the losses under -1.
        """
        if self.loss is None:
            return {}
        place = {number: operand for operand, number in self.numbers}
        with torch.no_grad():
            found = CARRIED([operands[place[number]] for number in self.carried], self.loss)
        return dict(zip([*self.carried, -1], found, strict=True))

    def finished(
        self,
        operands: Sequence[torch.Tensor],
        gradients: list[torch.Tensor | None],
        cotangent: torch.Tensor,
        carried: dict[int, torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Records what follows on the backward pass.

        Args:
            operands: the operands of the trace.
            gradients: by operand: its gradient, if it has one.
            cotangent: the cotangent of the loss.
            carried: the result of `begun`, which is emptied.

        Returns:
            By operand: the updated parameter, or the sum of its gradients; None for other operands.
        """
        total = [carried.pop(-1)] if carried else []
        found: dict[int, torch.Tensor] = {}
        for operand, number in self.numbers:
            gradient, before = gradients[operand], carried.pop(number, None)
            if before is not None:
                found[operand] = before if gradient is None else before.add_(gradient)
            elif gradient is not None:
                found[operand] = gradient
            del gradient, before
        if self.updates:
            if self.clip_norm is not None and found:
                _clip(list(found.values()), self.clip_norm)
            if self.clip_value is not None:  # as `torch.nn.utils.clip_grad_value_`
                for operand in found:
                    found[operand].clamp_(min=-self.clip_value, max=self.clip_value)
            for operand, number in self.numbers:
                if operand in found:
                    UPDATE(operands[operand], found[operand], [cotangent, *total], number)
                    found[operand] = operands[operand]
        elif total and found:  # the sum of the losses is held to the end
            other = next((i for i in range(len(operands)) if i not in found), None)
            if other is not None:
                found[other] = HELD([*total, *found.values()])
        return [found.get(i) for i in range(len(operands))]


def _clip(gradients: Sequence[torch.Tensor], most: float) -> None:
    """Scales gradients in place, with the bits of `torch.nn.utils.clip_grad_norm_`.

    On CUDA that computes the norms by a kernel for lists of tensors, whose sums round otherwise.
    """
    if all(g.device.type == "cpu" for g in gradients):
        total = torch.nn.utils.get_total_norm(gradients, 2.0, False, False)
    else:
        norms = [torch._foreach_norm([g], 2.0)[0] for g in gradients]
        total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), 2.0)
    factor = torch.clamp(most / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))


def with_early_updates(trace: Trace, first: int) -> Trace:
    """Returns a trace in whose program order nodes `first`, `first + 1`, ... run as early as they may.

    A node that writes over a value, or may do so, waits for all others that read the value.
    """
    graph = trace.graph
    prompt = _prompt(graph, first)
    order = _early_order(graph, first)
    new = {old: i for i, old in enumerate(order)}
    plain = [*[i for i in order if i < first or i in prompt], *[i for i in range(first, len(order)) if i not in prompt]]
    place = {index: i for i, index in enumerate(plain)}
    nodes = [dataclasses.replace(graph.nodes[old], id=i) for i, old in enumerate(order)]
    values = []
    for value in graph.values:
        held = value.held_to
        readers = graph.consumers[value.id]
        if not prompt.isdisjoint(readers) and all(n < first or n in prompt for n in readers):
            held = max(readers, key=place.__getitem__)  # autograd's engine adds a gradient to `.grad` at once
        ends = {"producer": value.producer, "held_to": held}
        values.append(dataclasses.replace(value, **{k: None if v is None else new[v] for k, v in ends.items()}))
    moved = dataclasses.replace(
        graph, nodes=tuple(nodes), values=tuple(values), plain_order=tuple(new[i] for i in plain)
    )
    return dataclasses.replace(
        trace,
        graph=moved,
        calls=tuple(dataclasses.replace(c, node=None if c.node is None else new[c.node]) for c in trace.calls),
        regions=tuple((frozenset(new[n] for n in inside), policy) for inside, policy in trace.regions),
    )


def _prompt(graph: Graph, first: int) -> set[int]:
    """Returns the nodes that add a gradient to the sum of earlier ones; autograd's engine does so at once."""
    held = {v for node in graph.nodes if node.op == str(CARRIED) for v in node.outputs}
    return {n.id for n in graph.nodes[first:] if not held.isdisjoint(n.inputs) and n.op == "aten.add_.Tensor"}


def _early_order(graph: Graph, first: int) -> list[int]:
    """Returns the nodes in an order in which nodes `first`, `first + 1`, ... come as early as they may."""
    before: dict[int, set[int]] = {}
    for node in graph.nodes[first:]:
        needed = {graph.values[v].producer for v in node.inputs}
        for value in {*node.writes, *(node.overwrites if node.in_place else ())}:
            needed.update(n for n in graph.consumers[value] if n < node.id)
        before[node.id] = {n for n in needed if n is not None and n >= graph.boundary}
    after: dict[int, list[int]] = {}
    for index, needed_nodes in before.items():
        for needed_node in needed_nodes:
            after.setdefault(needed_node, []).append(index)
    order = list(range(graph.boundary))
    ready = [index for index, needed_nodes in before.items() if not needed_nodes]

    def run(index: int) -> None:
        order.append(index)
        for other in after.get(index, ()):
            before[other].discard(index)
            if not before[other]:
                heapq.heappush(ready, other)

    for index in range(graph.boundary, first):
        while ready:
            run(heapq.heappop(ready))
        run(index)
    while ready:
        run(heapq.heappop(ready))
    return order
