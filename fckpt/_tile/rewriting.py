"""Rewriting of a trace: the operations of a stretch run tile by tile.

A stretch is a set of nodes, each with a way to cut it. Every node becomes one node per tile. A tensor made outside of
the stretch is read by slices, which are views. A tensor made inside exists as tiles, which are separate storages. If
another operation reads such a tensor whole, or the function returns it, its tiles are put together: written one by one
into one allocation, or concatenated if they are small. Sums over the rows (gradients of weights, for example) are
accumulated.

Nodes of a stretch run tile by tile in *phases*: a phase ends where an operation needs a result of the phase whole, and
at the end of the forward pass. Within a phase the first tile passes through all operations, then the second, and so on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fckpt._tile.gathered import gathered
from fckpt._tile.slices import Read, Slices
from fckpt._tile.stretches import Gathered, Step, Stretch, Untileable
from fckpt._tile.surroundings import faking
from fckpt._tile.views import view_arguments
from fckpt._tile.ways import SUM
from fckpt._trace.in_place import overwritable
from fckpt._trace.operations import Call, Ref, TensorSpec, Trace, arguments_of, is_dense, tensors_of
from fckpt.errors import ArgumentValueError
from fckpt.graph.graph import Graph, Node, Value

__all__ = ["INTO", "Rewriting", "rewritten", "tiled"]

aten = torch.ops.aten

INTO = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}
"""By product of matrices: the operation that adds the product to an existing sum."""
SMALL = 4
"""A result is concatenated if it is this many times smaller than the largest tile, otherwise written tile by tile."""


def rewritten(trace: Trace, steps: Sequence[Step]) -> Trace:
    """Returns a trace after several steps, each of which names nodes of the trace that the one before it made.

    Raises:
        Untileable: a step is impossible.
    """
    for step in steps:
        trace = gathered(trace, step.node) if isinstance(step, Gathered) else tiled(trace, step)
    return trace


def tiled(trace: Trace, stretch: Stretch) -> Trace:
    """Returns a trace that computes the same results, with the operations of a stretch cut into tiles.

    Args:
        trace: a trace.
        stretch: nodes of the graph of the trace, and how to cut them.

    Raises:
        Untileable: the stretch cannot be cut in this way.
    """
    return Rewriting(Slices(trace, stretch)).trace()


class Rewriting:
    """The trace under construction."""

    def __init__(self, slices: Slices):
        self.slices = slices
        self.old = slices.trace
        self.tiles = len(slices.bounds) - 1
        self.specs = [dataclasses.replace(spec, value=-1) for spec in self.old.tensors]
        """By tensor; the values are those of the new graph, -1 if it does not have the value, or not yet."""
        self.members: dict[int, list[int]] = {}
        for tensor, spec in enumerate(self.old.tensors):
            self.members.setdefault(spec.value, []).append(tensor)
        self.owned: set[int] = set()
        """The values that only one tile of one operation makes."""
        self.calls = [call for call in self.old.calls if call.node is None]
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.known: dict[int, int] = {}
        """By value of the old graph: the same value in the new one."""
        self.moved: dict[int, list[int]] = {}
        """By node of the old graph: the nodes that do its work."""
        self.fakes: dict[int, torch.Tensor] = {}
        self.views: dict[tuple[int, int | None, int], int] = {}
        """By tensor, dimension and tile: the tensor of the tile."""
        self.parts: dict[int, list[int]] = {t: [] for t in slices.made}
        """By result of the stretch: its tiles."""
        self.sent: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {n: [] for n in slices.ways}
        """By node of the stretch: the arguments of each tile."""
        self.sums: dict[int, int] = {}
        """By sum: the tensor that holds it so far."""
        self.mode = FakeTensorMode()
        graph = self.old.graph
        self.by_node: dict[int, list[Call]] = {}
        for call in self.old.calls:
            if call.node is not None:
                self.by_node.setdefault(call.node, []).append(call)
        self.whole = self._whole()
        self.largest = max((graph.values[v].nbytes for v in slices.values), default=0) // self.tiles

    def _whole(self) -> list[int]:
        """Returns the results of the stretch that must exist whole."""
        slices, old = self.slices, self.old
        ours = slices.values
        read = {v for n in old.graph.nodes if n.id not in slices.ways for v in n.inputs}
        read.update(self._value_of(r.tensor) for node in slices.ways for r in slices.reads[node] if r.base is None)
        read.update((*old.graph.outputs, *old.graph.gradients))
        read.update(self._value_of(t) for t in (*old.outputs, *(g for g in old.gradients if g is not None)))
        return [t for v, t in ours.items() if v in read]

    @property
    def removed(self) -> list[int]:
        """The results of the stretch of which only tiles exist in the end."""
        return [t for t, dim in self.slices.made.items() if dim != SUM and t not in self.whole]

    def _value_of(self, tensor: int) -> int:
        return self.old.tensors[tensor].value

    # -- the trace

    def trace(self) -> Trace:
        old = self.old
        for value in (*old.graph.inputs, *old.graph.cotangents):
            self._keep(value, None)
        with faking(self.mode):
            boundary = self._emit_all()
        try:
            graph = self._graph(boundary)
            graph.check_ends()
        except ArgumentValueError as error:
            raise Untileable(f"the order of its operations cannot change: {error}") from error
        regions = [
            (frozenset(n for i in nodes for n in self.moved.get(i, ())), policy) for nodes, policy in old.regions
        ]
        self.trace_made = dataclasses.replace(
            old, graph=graph, calls=tuple(self.calls), tensors=tuple(self.specs), regions=tuple(regions)
        )
        return self.trace_made

    def _graph(self, boundary: int) -> Graph:
        """Returns the new graph. `Value.held_to` of the old graph does not apply to it."""
        old, new = self.old.graph, self.known
        return Graph(
            tuple(self.nodes),
            tuple(self.values),
            inputs=tuple(new[v] for v in old.inputs),
            cotangents=tuple(new[v] for v in old.cotangents),
            outputs=tuple(sorted(new[v] for v in old.outputs)),
            gradients=tuple(sorted(new[v] for v in old.gradients)),
            boundary=boundary,
        )

    # -- the order

    def _emit_all(self) -> int:
        """Emits all nodes in an order that keeps each phase together; returns the new boundary."""
        graph, phase = self.old.graph, self._phases()
        members: dict[int, list[int]] = {}
        for node, number in phase.items():
            members.setdefault(number, []).append(node)
        unit = {n: -1 - phase[n] if n in phase else n for n in range(len(graph.nodes))}
        needs: dict[int, set[int]] = {}
        for node in graph.nodes:
            made_by = {unit[p] for v in node.inputs if (p := graph.values[v].producer) is not None}
            needs.setdefault(unit[node.id], set()).update(made_by - {unit[node.id]})
        done: set[int] = set()
        order: list[int] = []
        boundary = 0
        for i in range(len(graph.nodes) + 1):
            if i == graph.boundary:
                for u in order:
                    self._emit_unit(u, members)
                boundary, order = len(self.nodes), []
            if i < len(graph.nodes):
                _visit(unit[i], needs, done, order)
        for u in order:
            self._emit_unit(u, members)
        random = [n.id for n in self.old.graph.nodes if n.random]
        if [self.moved[n] for n in random] != sorted(self.moved[n] for n in random):
            raise Untileable("random operations would change places")
        return boundary

    def _emit_unit(self, unit: int, members: dict[int, list[int]]) -> None:
        if unit >= 0:
            self._copy(unit)
        else:
            self._phase(members[-1 - unit])

    def _phases(self) -> dict[int, int]:
        """Returns the phase of each node of the stretch."""
        slices, graph = self.slices, self.old.graph
        level: list[int] = []  # by node: the phase, or for others the first phase that may follow
        most = 0
        for node in graph.nodes:
            least = most if node.id >= graph.boundary else 0
            if node.id == graph.boundary:
                most = least = max(level, default=0) + 1
            tiles = {self._value_of(r.tensor) for r in slices.reads.get(node.id, ()) if r.base is not None}
            whole = {self._value_of(r.tensor) for r in slices.reads.get(node.id, ()) if r.base is None}
            for v in node.inputs:
                producer = graph.values[v].producer
                if producer is not None:
                    ends = producer in slices.ways and (node.id not in slices.ways or v in whole or v not in tiles)
                    least = max(least, level[producer] + ends)
            level.append(least)
        numbers = {n: level[n] for n in sorted(slices.ways)}
        compact = {p: i for i, p in enumerate(sorted(set(numbers.values())))}
        return {n: compact[p] for n, p in numbers.items()}

    def _phase(self, nodes: list[int]) -> None:
        for tile in range(self.tiles):
            for node in nodes:
                self._tile(node, tile)
        for node in nodes:
            for t in self.slices.calls[node].outputs:
                if t in self.whole and self.slices.made[t] != SUM and not self._is_written(t):
                    self._concatenate(node, t)

    # -- nodes

    def _copy(self, index: int) -> None:
        """Emits a node outside of the stretch as it is."""
        node, new = self.old.graph.nodes[index], len(self.nodes)
        for value in node.outputs:
            self._keep(value, new)
        moved = {
            field: tuple(self.known[v] for v in getattr(node, field))
            for field in ("inputs", "outputs", "overwrites", "writes", "accumulates")
        }
        self.nodes.append(dataclasses.replace(node, id=new, **moved))
        self.moved[index] = [new]
        self.calls += [dataclasses.replace(call, node=new) for call in self.by_node[index]]

    def _keep(self, value: int, producer: int | None) -> int:
        number = self.known[value] = len(self.values)
        for tensor in self.members[value]:
            self.specs[tensor] = dataclasses.replace(self.specs[tensor], value=number)
        self.values.append(
            dataclasses.replace(self.old.graph.values[value], id=number, producer=producer, held_to=None)
        )
        return number

    def _tile(self, index: int, tile: int) -> None:
        """Emits one tile of a node of the stretch."""
        slices = self.slices
        call, way = slices.calls[index], slices.ways[index]
        sent = iter([self._read(read, tile) for read in slices.reads[index]])
        args = _replaced(call.args, sent)
        kwargs = {k: _replaced(v, sent) for k, v in call.kwargs.items()}
        if way.sizes is not None:
            position, entry = way.sizes
            sizes = list(args[position])
            first, end = slices.slice_of(call.outputs[0], way.makes[0], tile)  # type: ignore[arg-type]  # a call of a node has a result
            sizes[entry] = end - first
            args = (*args[:position], sizes, *args[position + 1 :])
        self.sent[index].append((args, kwargs))
        outputs = [t for t in call.outputs if t is not None]
        if tile and call.op in INTO and way.makes == (SUM,):
            self._accumulate(index, outputs[0], INTO[call.op], args, tile)
            return
        made = self._add(index, call.op, args, kwargs)
        for t, new in zip(outputs, made, strict=True):
            if slices.made[t] != SUM:
                self.parts[t].append(new)
                if t in self.whole and self._is_written(t):
                    self._write(index, t, new, tile)
            elif not tile:
                self.sums[t] = new
                self._check_layout(t, new)
            else:
                self._accumulate(index, t, aten.add_.Tensor, (Ref(new),), tile)

    def _add(self, index: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Emits a call with new results; returns their numbers."""
        try:
            result = op(*self._faked(args), **{k: self._faked(v) for k, v in kwargs.items()})
        except Exception as error:
            raise Untileable(f"{op} does not run on tiles: {error}") from error
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        node = len(self.nodes)
        outputs = [t for t in self.slices.calls[index].outputs if t is not None]
        names = [self.old.graph.values[self._value_of(t)].names for t in outputs]
        values = [self._new_value(fake, node, str(op), given) for fake, given in zip(results, names, strict=True)]
        numbers = [self._new(fake, value) for fake, value in zip(results, values, strict=True)]
        call = Call(op, args, kwargs, tuple(numbers), node)
        over: tuple[int, ...] = ()
        if len(numbers) == 1:
            used = [*tensors_of(call), *numbers]
            fakes: Any = {t: self._fake(t) for t in used}
            storages: Any = {t: self.specs[t].value for t in used}
            found = [args[p].tensor for p in overwritable(op, args, fakes, storages, numbers[0])]
            over = tuple(dict.fromkeys(v for t in found if (v := storages[t]) in self.owned))
        self._node(index, call, over)
        return numbers

    def _node(
        self,
        index: int,
        call: Call,
        overwrites: tuple[int, ...],
        *,
        in_place: bool = False,
        before: Sequence[Call] = (),
    ) -> None:
        """Emits the node of a call that does a part of the work of node `index`."""
        old, id = self.old.graph.nodes[index], len(self.nodes)
        made = [new for _, new in call.replaced]
        made += [t for c in (*before, call) for t in c.outputs if t is not None]
        outputs = tuple(dict.fromkeys(self.specs[t].value for t in made))
        sent = [*tensors_of(call), *(t for t, _ in call.replaced)]
        inputs = tuple(v for v in dict.fromkeys(self.specs[t].value for t in sent) if v not in outputs)
        node = Node(
            id=id,
            op=str(call.op),
            inputs=inputs,
            outputs=outputs,
            backward=old.backward,
            seconds=old.seconds / self.tiles,  # until it is priced
            temporary_nbytes=old.temporary_nbytes // self.tiles,
            source=old.source,
            module=old.module,
            overwrites=overwrites,
            in_place=in_place,
            arguments=arguments_of(call, self.specs, ()),
        )
        self.nodes.append(node)
        self.moved.setdefault(index, []).append(id)
        self.calls += [*before, call]

    # -- results

    def _is_written(self, t: int) -> bool:
        """Whether a result is written tile by tile into one allocation."""
        return self.old.graph.values[self._value_of(t)].nbytes * SMALL > self.largest

    def _write(self, index: int, t: int, part: int, tile: int) -> None:
        """Emits the copy of a tile into the allocation of the whole result."""
        spec, node = self.specs[t], len(self.nodes)
        whole = self.old.graph.values[self._value_of(t)].nbytes == spec.nbytes
        if not whole or not is_dense(spec.shape, spec.stride) or spec.offset:
            raise Untileable("a result has gaps")
        over = (self.specs[self.sums[t]].value,) if tile else ()
        new = self._version(t, node, tile)
        first, end = self.slices.slice_of(t, self.slices.made[t], tile)
        place = self._slice(new, self.slices.made[t], first, end)
        before: list[Call] = []
        replaced = ((self.sums[t], new),) if tile else ()
        if not tile:
            layout = {"dtype": spec.dtype, "device": spec.device}
            before = [Call(aten.empty_strided.default, (list(spec.shape), list(spec.stride)), layout, (new,), node)]
        call = Call(aten.copy_.default, (Ref(place), Ref(part)), {}, (None,), node, replaced)
        self.sums[t] = new
        self._node(index, call, over, in_place=bool(tile), before=before)

    def _concatenate(self, index: int, t: int) -> None:
        spec, parts = self.specs[t], self.parts[t]
        fake = aten.cat.default([self._fake(p) for p in parts], self.slices.made[t])
        if (tuple(fake.shape), fake.stride(), spec.offset) != (spec.shape, spec.stride, 0):
            raise Untileable("a result has another layout than its tiles put together")
        node = len(self.nodes)
        self._keep(self._value_of(t), node)
        call = Call(aten.cat.default, ([Ref(p) for p in parts], self.slices.made[t]), {}, (t,), node)
        self._node(index, call, ())

    def _check_layout(self, t: int, first: int) -> None:
        spec, made = self.specs[t], self.specs[first]
        if (spec.shape, spec.stride, spec.dtype, spec.offset) != (made.shape, made.stride, made.dtype, made.offset):
            raise Untileable("a sum has another layout than its parts")

    def _accumulate(self, index: int, t: int, op: Any, args: tuple[Any, ...], tile: int) -> None:
        """Emits an operation that adds the part of a tile to a sum, in place."""
        node, old = len(self.nodes), self.sums[t]
        over = (self.specs[old].value,)
        new = self._version(t, node, tile)
        call = Call(op, (Ref(new), *args), {}, (None,), node, ((old, new),))
        self._node(index, call, over, in_place=True)
        self.sums[t] = new

    def _version(self, t: int, node: int, tile: int) -> int:
        """Returns the tensor for a result up to a tile: the result itself for the last tile."""
        value = self._value_of(t)
        if tile == self.tiles - 1:
            self._keep(value, node)
            return t
        known, number = self.old.graph.values[value], len(self.values)
        self.values.append(dataclasses.replace(known, id=number, producer=node, names=(), decision="", held_to=None))
        return self._number(dataclasses.replace(self.specs[t], value=number))

    # -- tensors

    def _read(self, read: Read, tile: int) -> int:
        if read.dim is None:
            return read.tensor
        key = (read.tensor, read.dim, tile)
        if key not in self.views:
            if read.base is None:
                self.views[key] = self._slice(read.tensor, read.dim, *self.slices.slice_of(read.tensor, read.dim, tile))
            else:
                self.views[key] = self._view(read, tile)
        return self.views[key]

    def _view(self, read: Read, tile: int) -> int:
        """Emits the calls that make the view of a tile of a result, if they do not exist yet; returns its number."""
        assert read.base is not None
        number = self.parts[read.base][tile]
        chain = self.slices.views.chain(read.tensor)
        for step, then in itertools.zip_longest(chain, chain[1:]):
            made = read.tensor if then is None else then.args[0].tensor
            dim = self.slices.views.rows_in(made, self.slices.made)
            assert dim is not None
            key = (made, None, tile)
            if key not in self.views:
                first, end = self.slices.slice_of(made, dim, tile)
                rest = view_arguments(step, dim, end - first)
                self.views[key] = self._add_view(step, (Ref(number), *rest), made, self.specs[number].value)
            number = self.views[key]
        return number

    def _add_view(self, step: Call, args: tuple[Any, ...], made: int, value: int) -> int:
        try:
            result = step.op(*self._faked(args), **step.kwargs)
        except Exception as error:
            raise Untileable(f"{step.op} does not run on tiles: {error}") from error
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        outputs = tuple(self._new(fake, value) for fake in results)
        self.calls.append(Call(step.op, args, step.kwargs, outputs, None))
        return outputs[step.outputs.index(made)]

    def _slice(self, tensor: int, dim: int, first: int, end: int) -> int:
        """Emits a view of rows of a tensor."""
        spec = self.specs[tensor]
        shape = (*spec.shape[:dim], end - first, *spec.shape[dim + 1 :])
        made = dataclasses.replace(spec, shape=shape, offset=spec.offset + first * spec.stride[dim])
        number = self._number(made)
        self.calls.append(Call(aten.slice.Tensor, (Ref(tensor), dim, first, end), {}, (number,), None))
        return number

    def _number(self, spec: TensorSpec) -> int:
        self.specs.append(spec)
        return len(self.specs) - 1

    def _new(self, fake: Any, value: int) -> int:
        """Returns the number of a new tensor with the layout of `fake`."""
        offset = int(fake.storage_offset())
        number = self._number(TensorSpec(tuple(fake.shape), fake.stride(), fake.dtype, fake.device, value, offset))
        self.fakes[number] = fake
        return number

    def _new_value(self, fake: Any, node: int, origin: str, names: tuple[str, ...]) -> int:
        number, dtype = len(self.values), str(fake.dtype).removeprefix("torch.")
        nbytes = fake.untyped_storage().nbytes()
        self.owned.add(number)
        self.values.append(Value(number, nbytes, node, origin, names, shape=tuple(fake.shape), dtype=dtype))
        return number

    def _fake(self, tensor: int) -> torch.Tensor:
        found = self.fakes.get(tensor)
        if found is None:
            spec = self.specs[tensor]
            found = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            self.fakes[tensor] = found
        return found

    def _faked(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._fake(value.tensor)
        return type(value)(map(self._faked, value)) if isinstance(value, (list, tuple)) else value


def _visit(start: int, needs: dict[int, set[int]], done: set[int], order: list[int]) -> None:
    """Appends a unit to the order, after everything that it needs."""
    stack, entered = [start], set[int]()
    while stack:
        unit = stack[-1]
        todo = sorted(needs[unit] - done)
        if unit in done or not todo:
            stack.pop()
            if unit not in done:
                done.add(unit)
                order.append(unit)
        elif any(u in entered for u in todo):
            raise Untileable("its phases depend on each other")
        else:
            entered.add(unit)
            stack += reversed(todo)


def _replaced(value: Any, numbers: Any) -> Any:
    """Returns an argument with its tensors replaced, in order, by those with the next numbers."""
    if isinstance(value, Ref):
        return Ref(next(numbers))
    return type(value)([_replaced(v, numbers) for v in value]) if isinstance(value, (list, tuple)) else value


def _renumbered(value: Any, old: int, new: int) -> Any:
    if isinstance(value, Ref):
        return Ref(new) if value.tensor == old else value
    return type(value)([_renumbered(v, old, new) for v in value]) if isinstance(value, (list, tuple)) else value
