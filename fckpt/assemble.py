"""From the recorded calls of a function to the graph of what is needed, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fckpt.graph import Graph, Node, Value
from fckpt.in_place import overwritable
from fckpt.operations import Call, Recorded, Ref, TensorSpec, Trace, indices_of, statistics_of

__all__ = ["Assembly"]

aten = torch.ops.aten


class Assembly:
    """From what was recorded to a graph of what is needed."""

    def __init__(self, ends: Any, origins: Sequence[str]):
        self.ends = ends
        self.recorder = recorder = ends.recorder
        self.origins = origins
        assert recorder.boundary is not None
        updates = [Recorded(aten.copy_.default, (Ref(a), Ref(b)), {}, (None,), False, "") for a, b in ends.updates]
        self.recorded = [*recorder.calls[: recorder.boundary], *updates, *recorder.calls[recorder.boundary :]]
        self.forward_calls = recorder.boundary + len(updates)
        self.updated: set[int] = set()  # values that the forward pass changes in place
        self.written: dict[int, int] = {}  # statistics, and a result of the operation that wrote them last
        self.values: list[Value] = []
        self.known: dict[int, int] = {}  # from the recorder's storages to values
        self.calls: list[Call] = []
        self.nodes: list[Node] = []
        self.late: set[int] = set()
        self.node_of: dict[int, int] = {}  # by position in what was recorded

    def trace(self) -> Trace:
        ends, recorder = self.ends, self.recorder
        given = [*ends.operand_numbers, *recorder.constants]
        names = [*self.origins, *["a constant"] * len(recorder.constants)]
        inputs = tuple(dict.fromkeys(self._value(t, None, name) for t, name in zip(given, names, strict=True)))
        self.updated.update(self.known[recorder.values[a]] for a, _ in ends.updates)
        late = [ct for ct in ends.cotangents if ct is not None]
        cotangents = tuple(self._value(ct, None, "a cotangent") for ct in late)
        self.late.update(cotangents)
        boundary = 0
        kept = self._needed()
        for position, recorded in enumerate(self.recorded):
            if position in kept:
                if not recorded.is_view:
                    self.node_of[position] = len(self.nodes)
                self._add(recorded)
            if position == self.forward_calls - 1:
                boundary = len(self.nodes)
        held = {*inputs, *cotangents}
        outputs = dict.fromkeys(v for t in ends.outputs if (v := self.known[recorder.values[t]]) not in held)
        gradients = dict.fromkeys(self.known[recorder.values[t]] for t in ends.gradients if t is not None)
        graph = Graph(
            tuple(self.nodes), tuple(self.values), inputs, cotangents, tuple(outputs), tuple(gradients), boundary
        )
        return Trace(
            graph,
            tuple(self.calls),
            tuple(self._spec(t, value) for t, value in zip(recorder.tensors, recorder.values, strict=True)),
            operands=tuple(ends.operand_numbers),
            constants=tuple(recorder.constants.items()),
            spec=ends.spec,
            leaves=tuple(ends.leaves),
            outputs=ends.outputs,
            flags=ends.flags,
            cotangents=ends.cotangents,
            gradients=ends.gradients,
            regions=tuple((self._inside(calls, returned), policy) for calls, returned, policy in recorder.regions),
        )

    def _inside(self, calls: range, returned: set[int]) -> frozenset[int]:
        """The nodes that were made of these calls and make none of these storages."""
        outer = {self.known[storage] for storage in returned if storage in self.known}
        nodes = (self.node_of[i] for i in calls if i in self.node_of)
        return frozenset(n for n in nodes if outer.isdisjoint(self.nodes[n].outputs))

    def _spec(self, tensor: torch.Tensor, storage: int) -> TensorSpec:
        return TensorSpec(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            self.known.get(storage, -1),
            int(tensor.storage_offset()),
        )

    def _needed(self) -> set[int]:
        """The calls that results depend on, and those that draw random numbers or change state."""
        ends = self.ends
        needed = {*ends.outputs, *(t for t in ends.gradients if t is not None)}
        kept: set[int] = set()
        for position in range(len(self.recorded) - 1, -1, -1):
            call = self.recorded[position]
            effect = _is_random(call.op) or call.op is aten.copy_.default or statistics_of(call)
            if effect or not needed.isdisjoint(call.outputs):
                kept.add(position)
                needed.update(indices_of(call.args))
                needed.update(indices_of(tuple(call.kwargs.values())))
        return kept

    def _value(self, tensor: int, producer: int | None, origin: str) -> int:
        storage = self.recorder.values[tensor]
        if storage not in self.known:
            known = self.recorder.tensors[tensor]
            self.known[storage] = len(self.values)
            self.values.append(
                Value(
                    id=len(self.values),
                    nbytes=known.untyped_storage().nbytes(),
                    producer=producer,
                    origin=origin,
                    names=tuple(self.recorder.names.get(storage, ())),
                    shape=tuple(known.shape),
                    dtype=str(known.dtype).removeprefix("torch."),
                )
            )
        return self.known[storage]

    def _add(self, recorded: Recorded) -> None:
        op, args, kwargs, outputs, is_view, source = recorded
        node = None
        if not is_view:
            node = len(self.nodes)
            sent = [*indices_of(args), *indices_of(tuple(kwargs.values()))]
            read = tuple(dict.fromkeys(self.known[self.recorder.values[t]] for t in sent))
            statistics = [self.known[self.recorder.values[args[i].tensor]] for i in statistics_of(recorded)]
            if not statistics:  # what reads statistics comes after what wrote them, which their values do not say
                read = tuple(dict.fromkeys([*read, *(self.written[v] for v in read if v in self.written)]))
            made = len(self.values)
            for t in outputs:
                if t is not None:
                    self._value(t, node, str(op))
            backward = not self.late.isdisjoint(read)
            new = tuple(range(made, len(self.values)))
            if backward:
                self.late.update(new)
            if new:
                self.written |= dict.fromkeys(statistics, min(new, key=lambda v: self.values[v].nbytes))
            rereads = any(v in self.updated for v in read) and not statistics
            once = op is aten.copy_.default or rereads
            self.nodes.append(
                Node(
                    id=node,
                    op=str(op),
                    inputs=read,
                    outputs=new,
                    backward=backward,
                    random=_is_random(op),
                    once=once and not backward,
                    source=source,
                    overwrites=self._overwrites(recorded, once),
                )
            )
        self.calls.append(Call(op, args, kwargs, outputs, node))

    def _overwrites(self, recorded: Recorded, once: bool) -> tuple[int, ...]:
        if once or len(recorded.outputs) != 1 or recorded.outputs[0] is None:
            return ()
        recorder = self.recorder
        found = overwritable(recorded.op, recorded.args, recorder.tensors, recorder.values, recorded.outputs[0])
        given = (self.known[recorder.values[recorded.args[i].tensor]] for i in found)
        return tuple(dict.fromkeys(v for v in given if self.values[v].producer is not None))


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags
