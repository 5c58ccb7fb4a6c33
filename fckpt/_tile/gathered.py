"""Rewriting of a loss over classes, so that it reads one gathered number per row instead of a number per class.

`nll_loss` reads the element of each row that the target names, and sums. Here these elements are gathered first, which
is possible tile by tile. Then the same kernel sums them, as rows of a single class, in the same order. For ignored rows
an arbitrary element is gathered; they are still ignored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fckpt._tile.stretches import Untileable
from fckpt._tile.surroundings import faking
from fckpt._trace.operations import Call, Ref, TensorSpec, Trace, arguments_of, indices_of
from fckpt.graph.graph import Node, Value

__all__ = ["gathered", "is_gatherable"]

aten = torch.ops.aten

IGNORED = -100


def is_gatherable(call: Call, trace: Trace) -> bool:
    """Whether a call is a sum or mean of losses over the rows of a matrix, without weights of classes."""
    loss = call.op is aten.nll_loss_forward.default and call.args[2] is None and call.args[3] != 0
    return loss and len(trace.tensors[call.args[0].tensor].shape) == 2


def gathered(trace: Trace, index: int) -> Trace:
    """Returns the trace with the loss at node `index` computed from gathered elements.

    Raises:
        Untileable: the node is not such a loss.
    """
    position = next((i for i, call in enumerate(trace.calls) if call.node == index), None)
    if position is None or not is_gatherable(trace.calls[position], trace):
        raise Untileable(f"node {index} is not a loss that can read gathered elements")
    old = trace.calls[position]
    scores, target, _, reduction, ignored = old.args
    maker = _Maker(trace, index)
    mask = maker.make(aten.eq.Scalar, target, ignored)
    valid = maker.make(aten.masked_fill.Scalar, target, mask, 0)
    picked = maker.make(aten.gather.default, scores, 1, maker.view(aten.unsqueeze.default, valid, 1))
    zeros = maker.make(aten.where.Scalar, mask, IGNORED, 0)
    last = Call(old.op, (picked, zeros, None, reduction, IGNORED), {}, old.outputs, index + len(maker.nodes))
    return maker.trace(position, last)


class _Maker:
    """New nodes in place of one node."""

    def __init__(self, trace: Trace, index: int):
        self.old, self.index = trace, index
        self.specs, self.values = list(trace.tensors), list(trace.graph.values)
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self.mode = FakeTensorMode()

    def make(self, op: Any, *args: Any) -> Ref:
        """Adds a node with one result."""
        return self._call(op, args, self.index + len(self.nodes))

    def view(self, op: Any, *args: Any) -> Ref:
        """Adds a view of a result."""
        return self._call(op, args, None)

    def _call(self, op: Any, args: tuple[Any, ...], node: int | None) -> Ref:
        with faking(self.mode):
            fake = op(*[self._fake(a) if isinstance(a, Ref) else a for a in args])
        value = self.specs[args[0].tensor].value
        dtype = str(fake.dtype).removeprefix("torch.")
        if node is not None:
            value = len(self.values)
            nbytes = fake.untyped_storage().nbytes()
            self.values.append(Value(value, nbytes, node, str(op), shape=tuple(fake.shape), dtype=dtype))
        self.specs.append(TensorSpec(tuple(fake.shape), fake.stride(), fake.dtype, fake.device, value))
        made = Ref(len(self.specs) - 1)
        self.calls.append(Call(op, args, {}, (made.tensor,), node))
        if node is not None:
            self._node(self.calls[-1], (value,))
        return made

    def _fake(self, ref: Ref) -> torch.Tensor:
        spec = self.specs[ref.tensor]
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)

    def _node(self, call: Call, outputs: tuple[int, ...]) -> None:
        old = self.old.graph.nodes[self.index]
        inputs = tuple(dict.fromkeys(self.specs[t].value for t in indices_of(call.args)))
        assert call.node is not None
        self.nodes.append(
            Node(
                call.node,
                str(call.op),
                inputs,
                outputs,
                source=old.source,
                module=old.module,
                arguments=arguments_of(call, self.specs, ()),
            )
        )

    def trace(self, position: int, last: Call) -> Trace:
        """Returns the trace with the new nodes, the last of which makes the results of the old node."""
        graph, index = self.old.graph, self.index
        if graph.nodes[index].backward:
            raise Untileable("the loss depends on a cotangent")
        self._node(last, graph.nodes[index].outputs)
        more = len(self.nodes) - 1
        moved = lambda node: node + more if node >= index else node
        later = [dataclasses.replace(n, id=n.id + more) for n in graph.nodes[index + 1 :]]
        values = [
            dataclasses.replace(
                v,
                producer=None if v.producer is None else moved(v.producer),
                held_to=None,
            )
            for v in self.values[: len(graph.values)]
        ]
        made = dataclasses.replace(
            graph,
            nodes=(*graph.nodes[:index], *self.nodes, *later),
            values=(*values, *self.values[len(graph.values) :]),
            boundary=moved(graph.boundary) if index < graph.boundary else graph.boundary,
            plain_order=(),
        )
        shifted = [c if c.node is None else dataclasses.replace(c, node=moved(c.node)) for c in self.old.calls]
        calls = (*shifted[:position], *self.calls, last, *shifted[position + 1 :])
        regions = tuple(
            (frozenset({moved(n) for n in nodes}.union(range(index, index + more) if index in nodes else ())), policy)
            for nodes, policy in self.old.regions
        )
        return dataclasses.replace(self.old, graph=made, calls=calls, tensors=tuple(self.specs), regions=regions)
