"""Assembly of a `Trace`: from the recorded calls of a function to a graph of the needed operations only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fckpt._trace.in_place import builds_gradient, overwritable
from fckpt._trace.operations import (
    Backward,
    Call,
    Recorded,
    TensorSpec,
    Trace,
    arguments_of,
    indices_of,
    is_expanded,
    is_random,
    plain_cotangents,
    statistics_of,
    tensors_of,
)
from fckpt._trace.recorder import Recorder
from fckpt._trace.updates import CARRIED
from fckpt.graph.graph import Graph, Node, Value

__all__ = ["Assembly", "Interface"]

aten = torch.ops.aten


class Interface(NamedTuple):
    """The inputs and outputs of both passes, as numbers of tensors; see the fields of `Trace` with these names."""

    operands: tuple[int, ...]
    spec: Any
    leaves: tuple[Any, ...]
    outputs: tuple[int, ...]
    flags: tuple[bool, ...]
    cotangents: tuple[int | None, ...]
    gradients: tuple[int | None, ...]
    delivered: tuple[int, ...]
    differentiable: tuple[bool, ...] | None
    regrouped: tuple[int, ...]
    backward: Backward
    out_dims: tuple[int | None, ...]
    grad_dims: tuple[int | None, ...]


class Assembly:
    """Builder of a `Trace` from the calls of a recorder."""

    def __init__(self, recorder: Recorder, interface: Interface, origins: Sequence[str]):
        """Prepares to build a trace.

        Args:
            recorder: the recorder of both passes.
            interface: the inputs and outputs of both passes.
            origins: names for the operands.
        """
        self.interface = interface
        self.recorder = recorder
        self.origins = origins
        assert recorder.boundary is not None
        self.recorded: list[Recorded] = recorder.calls
        self.forward_calls = recorder.boundary
        self.operand = {recorder.values[t]: i for i, t in enumerate(interface.operands)}
        """By version of a storage: the operand that it belongs to."""
        for before, after in recorder.written.items():
            self.operand[after] = self.operand[before]
        written = {old: new for old, new in recorder.written.items() if old not in recorder.updated}
        self.rewritten = {*written, *written.values()}
        """The versions of operands that the function writes over; updates after the backward pass do not count."""
        self.versions: list[tuple[int, int]] = []
        self.empty: dict[int, Recorded] = {}  # by uninitialised tensor that only a write reads: its allocation
        self.values: list[Value] = []
        self.known: dict[int, int] = {}  # by version of a storage in the recorder: the value
        self.calls: list[Call] = []
        self.nodes: list[Node] = []
        self.late: set[int] = set()
        self.node_of: dict[int, int] = {}  # by position among the recorded calls
        self.before: list[int] = []  # by position among the recorded calls: the number of nodes before it

    def trace(self) -> Trace:
        """Builds the trace."""
        interface, recorder = self.interface, self.recorder
        kept = self._needed()
        inputs = self._inputs(kept)
        late = [ct for ct in interface.cotangents if ct is not None]
        cotangents = tuple(self._cotangent(ct) for ct in late)
        self.late.update(cotangents)
        boundary = 0
        self._find_empty(kept)
        for position, recorded in enumerate(self.recorded):
            self.before.append(len(self.nodes))
            if position in kept:
                if not recorded.is_view:
                    self.node_of[position] = len(self.nodes)
                self._add(recorded)
            if position == self.forward_calls - 1:
                boundary = len(self.nodes)
        if not cotangents:
            boundary = self._split()
        outputs, gradients = self._results({*inputs, *cotangents}, None if cotangents else boundary)
        specs = tuple(self._spec(t, value) for t, value in zip(recorder.tensors, recorder.values, strict=True))
        plain = plain_cotangents(specs, interface.outputs, interface.cotangents)
        written = {call.node: arguments_of(call, specs, plain) for call in self.calls}
        nodes = tuple(dataclasses.replace(node, arguments=written[node.id]) for node in self.nodes)
        graph = Graph(nodes, self._lived(), inputs, cotangents, outputs, gradients, boundary)
        return Trace(
            graph,
            tuple(self.calls),
            specs,
            operands=interface.operands,
            constants=tuple(recorder.constants.items()),
            spec=interface.spec,
            leaves=interface.leaves,
            outputs=interface.outputs,
            flags=interface.flags,
            cotangents=interface.cotangents,
            gradients=interface.gradients,
            delivered=interface.delivered,
            differentiable=interface.differentiable,
            regrouped=interface.regrouped,
            versions=tuple(self.versions),
            backward=interface.backward,
            out_dims=interface.out_dims,
            grad_dims=interface.grad_dims,
            regions=tuple((self._inside(calls, returned), policy) for calls, returned, policy in recorder.regions),
        )

    def _results(self, held: set[int], split: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the values that the two passes return, except those that the caller holds.

        If nothing differentiates the call from outside, its results from the node `split` on are made by its second
        half, like gradients.
        """
        values = self.recorder.values
        outputs = {v for t in self.interface.outputs if (v := self.known[values[t]]) not in held}
        gradients = {self.known[values[t]] for t in self.interface.gradients if t is not None}
        if split is not None:
            gradients |= {v for v in outputs if (self.values[v].producer or 0) >= split}
            outputs -= gradients
            gradients.update(self._updated())
        return tuple(sorted(outputs)), tuple(sorted(gradients))

    def _split(self) -> int:
        """Divides a call that nothing differentiates into two halves; returns the boundary between them.

        The second half begins with the first backward pass inside of the function or, if there is none, with the first
        node: schedules may recompute anything in their second half. Nodes with an effect stay in the first half.
        """
        # Memory of donated operands may be written as late as the schedule likes.
        donated = {value for version, value in self.known.items() if version in self.recorder.updated}
        updates = {node.id for node in self.nodes if node.writes and donated.issuperset(node.writes)}
        effects = [node.id for node in self.nodes if node.once or (node.writes and node.id not in updates)]
        inner = [node for position, node in self.node_of.items() if self.recorded[position].differentiates]
        boundary = max(min(inner, default=0), max(effects, default=-1) + 1)
        mine = {node for node in (*inner, *updates) if node >= boundary}
        for node in self.nodes[boundary:]:
            if node.id in mine or not self.late.isdisjoint(node.inputs):
                self.late.update(node.outputs)
                self.nodes[node.id] = dataclasses.replace(node, backward=True)
        return boundary

    def _updated(self) -> list[int]:
        """Returns the values that stay in the memory of donated operands at the end."""
        written = self.recorder.written
        ends = [written[v] for v in self.recorder.updated if written[v] not in written]
        return sorted(self.known[v] for v in ends)

    def nodes_before(self, position: int) -> int:
        """Returns the number of nodes before a recorded call; call `trace` first."""
        return [*self.before, len(self.nodes)][position]

    def _inputs(self, kept: set[int]) -> tuple[int, ...]:
        """Returns the values of operands and constants that operations or results use, in the order of their first use.

        This order makes the graph independent of the order of the arguments, and of unused operands.
        """
        values = self.recorder.values
        given = [*self.interface.operands, *self.recorder.constants]
        names = [*self.origins, *["a constant"] * len(self.recorder.constants)]
        first = {values[t]: (t, name) for t, name in reversed(list(zip(given, names, strict=True)))}
        used: list[int] = []
        for call in (self.recorded[position] for position in sorted(kept)):
            used += [*tensors_of(call), *(t for t, _ in call.replaced)]
        used += [t for t in (*self.interface.outputs, *self.interface.gradients) if t is not None]
        found = dict.fromkeys(version for t in used if (version := values[t]) in first)
        return tuple(self._value(first[version][0], None, first[version][1]) for version in found)

    def _cotangent(self, tensor: int) -> int:
        """Returns the value of a cotangent. An expanded cotangent counts in full, because operations may copy it."""
        value, known = self._value(tensor, None, "a cotangent"), self.recorder.tensors[tensor]
        if is_expanded(known.shape, known.stride()):
            nbytes = known.numel() * known.element_size()
            self.values[value] = dataclasses.replace(self.values[value], nbytes=nbytes)
        return value

    def _lived(self) -> tuple[Value, ...]:
        """Returns the values, each with the last node at which the plain function still holds it (`Value.held_to`)."""
        if not self.nodes:
            return tuple(self.values)
        nodes = [*self.before, len(self.nodes)]
        ended = self.recorder.lifetimes.ended
        last = {v: node.id for node in self.nodes for v in (*node.outputs, *node.inputs)}
        held_to = {
            value: max(nodes[ended.get(version, -1)] - 1, last.get(value, 0)) for version, value in self.known.items()
        }
        return tuple(dataclasses.replace(v, held_to=held_to[v.id]) for v in self.values)

    def _inside(self, calls: range, returned: set[int]) -> frozenset[int]:
        """Returns the nodes of these calls that make none of the returned storages."""
        outer = {self.known[storage] for storage in returned if storage in self.known}
        nodes = (self.node_of[i] for i in calls if i in self.node_of)
        return frozenset(n for n in nodes if outer.isdisjoint(self.nodes[n].outputs))

    def _spec(self, tensor: torch.Tensor, storage: int) -> TensorSpec:
        offset: Any = tensor.storage_offset()  # an int, or symbolic if the sizes are
        return TensorSpec(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            self.recorder.device_of(tensor.device),
            self.known.get(storage, -1),
            offset,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _needed(self) -> set[int]:
        """Returns the calls that results depend on, and those that draw random numbers, change state or can raise."""
        interface, values = self.interface, self.recorder.values
        needed = {*interface.outputs, *(t for t in interface.gradients if t is not None)}
        versions = {values[t] for t in needed}
        kept: set[int] = set()
        for position in range(len(self.recorded) - 1, -1, -1):
            call = self.recorded[position]
            writes = any(values[old] in self.recorder.written for old, _ in call.replaced)
            check = not call.outputs and not call.replaced
            effect = writes or is_random(call.op) or (check and position < self.forward_calls)
            # The target of a write is a view of the next version, which is recorded before the write.
            made = not versions.isdisjoint(values[new] for _, new in call.replaced)
            if effect or made or not needed.isdisjoint(call.outputs):
                kept.add(position)
                read = {
                    *tensors_of(call),
                    *(o for o, _ in call.replaced),
                }
                needed |= read
                versions.update(values[t] for t in read)
        return kept

    def _find_empty(self, kept: set[int]) -> None:
        """Finds allocations of uninitialised memory that a single call then fills: the two calls become one node."""
        recorder = self.recorder
        readers: dict[int, list[int]] = {}
        for position in sorted(kept):
            call = self.recorded[position]
            if not call.is_view:
                sent = tensors_of(call)
                for version in {recorder.values[t] for t in (*sent, *(old for old, _ in call.replaced))}:
                    readers.setdefault(version, []).append(position)
        results = {recorder.values[t] for t in (*self.interface.outputs, *self.interface.gradients) if t is not None}
        for position in sorted(kept):
            call = self.recorded[position]
            if call.op is aten.empty_strided.default and call.outputs[0] is not None:
                version = recorder.values[call.outputs[0]]
                found = [self.recorded[p] for p in readers.get(version, [])]
                writes = [old for reader in found[:1] for old, _ in reader.replaced]
                if len(found) == 1 and call.outputs[0] in writes and version not in results:
                    self.empty[call.outputs[0]] = call

    def _value(self, tensor: int, producer: int | None, origin: str) -> int:
        storage = self.recorder.values[tensor]
        if storage not in self.known:
            known = self.recorder.tensors[tensor]
            self.known[storage] = len(self.values)
            self.values.append(
                Value(
                    id=len(self.values),
                    nbytes=0 if producer is not None and storage in self.operand else known.untyped_storage().nbytes(),
                    producer=producer,
                    origin=origin,
                    names=tuple(self.recorder.names.get(storage, ())),
                    shape=tuple(known.shape),
                    dtype=str(known.dtype).removeprefix("torch."),
                )
            )
        return self.known[storage]

    def _add(self, recorded: Recorded) -> None:
        op, args, kwargs, outputs = recorded.op, recorded.args, recorded.kwargs, recorded.outputs
        if any(t in self.empty for t in outputs):
            return  # added together with the write
        if recorded.is_view:
            self.calls.append(Call(op, args, kwargs, outputs, None))
            return
        recorder, node = self.recorder, len(self.nodes)
        replaced, calls = self._with_memory(recorded.replaced, node)
        versions = [(recorder.values[old], recorder.values[new]) for old, new in recorded.replaced]
        own = {new for _, new in versions}
        statistics = {args[i].tensor for i in statistics_of(op, args)}
        sent = [t for t in (*indices_of(args), *indices_of(tuple(kwargs.values()))) if recorder.values[t] not in own]
        # Only the first run writes the running statistics of a module, and the operation does not read them.
        sent += [old for old, new in replaced if new not in statistics or recorder.values[new] not in self.operand]
        read = tuple(dict.fromkeys(self.known[recorder.values[t]] for t in sent))
        new = self._made(recorded, node)
        self.versions += [(new, self.operand[v]) for _, new in replaced if (v := recorder.values[new]) in self.operand]
        backward = not self.late.isdisjoint(read)
        if backward:
            self.late.update(new)
        writes = tuple(self.known[old] for old, _ in versions if old in recorder.written)
        once = op is CARRIED or self._is_once(sent, len(new), [t for _, t in replaced if t not in statistics])
        overwrites = () if once or len(new) > 1 else self._overwrites(recorded, replaced)
        first = overwrites[:1] if overwrites[:1] == read[:1] else ()
        maker = self.values[first[0]].producer if backward and first else None
        built = maker is not None and builds_gradient(op, self.nodes[maker].op)
        self.nodes.append(
            Node(
                id=node,
                op=str(op),
                inputs=read,
                outputs=new,
                backward=backward,
                random=is_random(op),
                once=once and not backward,
                source=recorded.source,
                module=recorded.module,
                overwrites=overwrites,
                in_place=bool(replaced) and not once and not writes,
                writes=writes,
                accumulates=first if recorded.accumulates or built else (),
            )
        )
        self.calls += [*calls, Call(op, args, kwargs, outputs, node, replaced)]

    def _made(self, recorded: Recorded, node: int) -> tuple[int, ...]:
        """Adds the values that a recorded call makes, and returns them."""
        first = len(self.values)
        for t in (*recorded.outputs, *(new for _, new in recorded.replaced)):
            if t is not None:
                self._value(t, node, str(recorded.op))
        return tuple(range(first, len(self.values)))

    def _is_once(self, sent: Sequence[int], results: int, written: Sequence[int]) -> bool:
        """Whether an operation cannot run again, given the tensors that it reads, and writes besides statistics."""
        values = self.recorder.values
        if not results or any(values[t] in self.rewritten for t in sent):
            return True
        # An operation with several results can run again if it only writes statistics: those are small enough to copy.
        return results > 1 and any(values[t] not in self.operand for t in written)

    def _with_memory(
        self, replaced: tuple[tuple[int, int], ...], node: int
    ) -> tuple[tuple[tuple[int, int], ...], list[Call]]:
        """Returns the pairs of a write with an initialised target, and the calls that allocate the other targets."""
        calls = []
        for old, new in replaced:
            if old in self.empty:
                empty = self.empty[old]
                calls.append(Call(empty.op, empty.args, empty.kwargs, (new,), node))
        return tuple(pair for pair in replaced if pair[0] not in self.empty), calls

    def _overwrites(self, recorded: Recorded, replaced: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        recorder = self.recorder
        if replaced:
            found = [old for old, _ in replaced if recorder.values[old] not in self.operand]
        elif recorded.replaced or len(recorded.outputs) != 1 or recorded.outputs[0] is None:
            return ()
        else:
            positions = overwritable(recorded.op, recorded.args, recorder.tensors, recorder.values, recorded.outputs[0])
            found = [recorded.args[i].tensor for i in positions]
        given = (self.known[recorder.values[t]] for t in found)
        return tuple(dict.fromkeys(v for v in given if self.values[v].producer is not None))
