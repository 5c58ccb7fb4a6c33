"""The computation graph of one training step: operations (nodes) and the storages that they read and make (values).

A `Value` is a storage: one block of the allocator. Views are not nodes: a view costs nothing, and lives and dies with
its base. A `Node` is an operation that makes storages. An id is a position in a tuple, and nodes are in program order:
first the forward pass, then the backward pass. Graphs are independent of torch, and can be solved and inspected without
it.

The representation of operations and storages follows Rockmate (X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O.
Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for re-materialization in PyTorch", 2023,
https://proceedings.mlr.press/v202/zhao23b.html), with views contracted into their bases.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fckpt.errors import ArgumentValueError

__all__ = ["DECISIONS", "Graph", "Node", "Value", "changed", "checked", "checked_texts"]

FORMAT = 4
FORMATS = (2, 3, 4)
"""Format 3 lacks `Node.replayed_nbytes`; format 2 also lacks `Node.module`, `in_place`, `writes`, `arguments`,
`accumulates` and `Value.held_to`."""


@dataclass(frozen=True)
class Value:
    """A storage: one block of the allocator's memory."""

    id: int
    nbytes: int
    """The size that the allocator reserves."""
    producer: int | None
    """The id of the node that makes the value; None for inputs and cotangents."""
    origin: str = ""
    """A readable name: `params['w']`, or the operation that makes the value."""
    names: tuple[str, ...] = ()
    """The names given by `checkpoint_name`."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    decision: str = ""
    """The policy's decision about saving the value for the backward pass: one of `DECISIONS`, or empty."""
    held_to: int | None = None
    """The last node during which the plain function holds the value; None if that node is the last reader."""


DECISIONS = ("must_save", "prefer_save", "prefer_recompute", "must_recompute")


@dataclass(frozen=True)
class Node:
    """An operation."""

    id: int
    op: str
    """For example `aten.mm.default`."""
    inputs: tuple[int, ...]
    """The values that the node reads, each listed once."""
    outputs: tuple[int, ...]
    """The values that the node makes."""
    backward: bool = False
    """Whether the node depends on a cotangent, directly or indirectly, and so cannot run before the backward pass. In a
    call without cotangents: whether the node depends on a backward pass inside of the call."""
    random: bool = False
    """Whether the node draws random numbers. Random nodes keep their order, and are replayed from a saved generator
    state."""
    once: bool = False
    """Whether the node must run exactly once, in the forward pass."""
    seconds: float = 0.0
    flops: int = 0
    temporary_nbytes: int = 0
    """The memory that the node allocates while it runs, in addition to its outputs."""
    replayed_nbytes: int = 0
    """The least such memory of a random node that runs again: a copy of the generator's state."""
    source: str = ""
    """The line of the user's program: `model.py:12 (forward)`."""
    module: str = ""
    """The path of the module that ran the node: `encoder.layer.3.mlp`."""
    overwrites: tuple[int, ...] = ()
    """Inputs over which the node may write its only output, if the node is the input's last use. The first input in
    this tuple that dies at the node is overwritten."""
    in_place: bool = False
    """Whether the plain function also writes over `overwrites`. If the node is not the input's last use, a plan writes
    to a copy."""
    writes: tuple[int, ...] = ()
    """Values whose memory the node's first run overwrites, visibly to the caller; nothing may read these values
    afterwards. Each is an input of the graph, or was made from such an input by an earlier node in the same way. A node
    of the backward pass that writes (the update of a parameter) runs once."""
    arguments: str = ""
    """Everything else on which the node's memory use depends: `self=%0=float32[2,3](3,1), dim=[1]`."""
    accumulates: tuple[int, ...] = ()
    """Inputs over which autograd's engine writes the output, if the node is the input's last use: the engine adds a
    gradient to the input in place."""

    @property
    def place(self) -> str:
        """The position in the user's program: ` in encoder.layer.3.mlp at model.py:12`; empty if unknown."""
        line = self.source.partition(" ")[0] if self.module else self.source
        return (f" in {self.module}" if self.module else "") + (f" at {line}" if line else "")

    @property
    def structure(self) -> tuple[Any, ...]:
        """What the node does, without arguments and sizes."""
        return (self.op, self.inputs, self.outputs, self.backward, self.random, self.once, self.in_place, self.writes)

    def overwritten(self, freed: Collection[int]) -> int | None:
        """Returns the input over which the node writes its output, given the values freed directly after the node."""
        return next((v for v in self.overwrites if v in freed), None)


Record = TypeVar("Record")


def changed(record: Record, **fields: Any) -> Record:
    """Returns a frozen dataclass with other fields, like `dataclasses.replace` in a fraction of its time.

    Cached properties are taken over: they must not depend on these fields.
    """
    found = object.__new__(type(record))
    object.__setattr__(found, "__dict__", vars(record) | fields)
    return found


@dataclass(frozen=True)
class Graph:
    """Nodes in program order, their values, and which values must be held, when, and by whom."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    """Values that the caller holds throughout: arguments and constants. Their bytes are not counted."""
    cotangents: tuple[int, ...]
    """Values that arrive with the backward pass and are held until its end. Without any, the graph describes a
    call that nothing differentiates from outside, and its two passes run one directly after the other."""
    outputs: tuple[int, ...]
    """Values that the forward pass makes and that are held until the end of the backward pass."""
    gradients: tuple[int, ...]
    """Values that the backward pass makes and that are held at its end."""
    boundary: int
    """`nodes[:boundary]` is the forward pass as recorded; the other nodes are the backward pass."""
    plain_order: tuple[int, ...] = ()
    """The nodes in the order in which the plain function runs them, if that is not the order of `nodes`."""

    def __post_init__(self) -> None:
        made = set(self.inputs) | set(self.cotangents)
        _require(all(self.values[v].producer is None for v in made), "an input or a cotangent has a producer")
        late = set(self.cotangents)
        gone: set[int] = set()
        for i, node in enumerate(self.nodes):
            name = f"node {i} ({node.op})"
            _require(node.id == i, f"node {i} has the id {node.id}")
            _require(made.issuperset(node.inputs), f"{name} reads a value before it is made")
            _require(not made.intersection(node.outputs), f"{name} makes a value that exists already")
            _require(all(self.values[v].producer == i for v in node.outputs), f"a producer is not node {i}")
            if node.overwrites:
                whole = len(node.outputs) == 1 and set(node.inputs).issuperset(node.overwrites) and not node.once
                sizes = [self.values[v].nbytes for v in (*node.overwrites, *node.outputs)]
                same = all(nbytes == sizes[0] for nbytes in sizes)  # symbolic sizes have no hash
                _require(whole and same, f"{name} overwrites a value that it may not overwrite")
            accumulates = set(node.accumulates)
            _require(accumulates.issubset(node.inputs), f"{name} accumulates into a value that it does not read")
            depends = not late.isdisjoint(node.inputs)
            starts = node.backward and not self.cotangents  # with a backward pass inside of the call
            _require(node.backward == (depends or starts), f"node {i}: the flag `backward` is wrong")
            _require(gone.isdisjoint((*node.inputs, *node.writes)), f"{name} reads a value that was overwritten")
            if node.writes:
                _require(
                    made.issuperset(node.writes) and (not node.backward or all(map(self._is_callers, node.writes))),
                    f"{name} writes to a value that it may not write",
                )
                gone.update(node.writes)
            if node.backward:
                _require(i >= self.boundary and not node.once, f"node {i} cannot be in the forward pass")
                late.update(node.outputs)
            made.update(node.outputs)
        _require(all(v.id == i and v.nbytes >= 0 for i, v in enumerate(self.values)), "values are not numbered")
        _require(made == set(range(len(self.values))), "some values have no producer and are not inputs or cotangents")
        _require(late.isdisjoint(self.outputs), "an output needs a cotangent")
        _require(gone.isdisjoint((*self.outputs, *self.gradients)), "an output or a gradient was overwritten")

    @functools.cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """By value: the nodes that read it, in program order."""
        found: list[list[int]] = [[] for _ in self.values]
        for node in self.nodes:
            for value in node.inputs:
                found[value].append(node.id)
        return tuple(map(tuple, found))

    @functools.cached_property
    def held(self) -> frozenset[int]:
        """Inputs and cotangents: values that are never freed by a schedule."""
        return frozenset(self.inputs) | frozenset(self.cotangents)

    def _is_callers(self, value: int) -> bool:
        """Whether a value is in the caller's memory: an input, or made by a write over one."""
        producer = self.values[value].producer
        return value in self.held or (producer is not None and bool(self.nodes[producer].writes))

    @functools.cached_property
    def plain_places(self) -> tuple[int, ...]:
        """By node: its position in the order in which the plain function runs the nodes."""
        found = list(range(len(self.nodes)))
        for place, index in enumerate(self.plain_order):
            found[index] = place
        return tuple(found)

    @functools.cached_property
    def plain(self) -> Graph:
        """The same computation without overwriting an operand, except where the user's program does so."""
        return self._overwriting(lambda node: ())

    @functools.cached_property
    def eager(self) -> Graph:
        """The same computation as autograd runs it.

        An operand is overwritten where the user's program does so, and where autograd accumulates gradients.
        """
        return self._overwriting(lambda node: node.accumulates)

    def _overwriting(self, allowed: Callable[[Node], tuple[int, ...]]) -> Graph:
        """Returns the graph in which nodes overwrite these values only, except where the user's program is in place."""
        nodes = [
            n if n.in_place or n.overwrites == allowed(n) else changed(n, overwrites=allowed(n)) for n in self.nodes
        ]
        return self.with_costs(nodes, self.values)

    @functools.cached_property
    def replaying_nbytes(self) -> int:
        """The most bytes that a random node takes in addition if it runs again."""
        return max([0, *[n.replayed_nbytes - n.temporary_nbytes for n in self.nodes if n.replayed_nbytes]])

    @functools.cached_property
    def without_replays(self) -> Graph:
        """The graph in which random nodes take no more memory if they run again."""
        if not self.replaying_nbytes:
            return self
        nodes = [changed(node, replayed_nbytes=0) if node.replayed_nbytes else node for node in self.nodes]
        return self.with_costs(nodes, self.values)

    def with_costs(self, nodes: Iterable[Node], values: Iterable[Value]) -> Graph:
        """Returns a graph of the same structure, unchecked, because a check takes as long as a simulation.

        Args:
            nodes: the same nodes with other times, bytes or texts, or which overwrite fewer values.
            values: the same values in other sizes.
        """
        found = self.deferred(lambda: (nodes, values))
        found._complete()
        return found

    def deferred(self, make: Callable[[], tuple[Iterable[Node], Iterable[Value]]]) -> Graph:
        """Returns a graph of the same structure like `with_costs`, whose nodes and values are made when they are read.

        Args:
            make: returns the nodes and the values.
        """
        found, parts = object.__new__(Graph), ("nodes", "values")
        vars(found).update({f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in parts})
        vars(found).update(skeleton=self.skeleton, _make=make)
        return found

    def _complete(self) -> None:
        """Makes the nodes and values of a graph that `deferred` returned."""
        make = vars(self).get("_make")
        if make is not None:  # otherwise another thread has made them
            nodes, values = make()
            vars(self).update(nodes=tuple(nodes), values=tuple(values))
            vars(self).pop("_make", None)

    def __getstate__(self) -> dict[str, Any]:
        self._complete()  # functions cannot be pickled
        return vars(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("nodes", "values"):
                self._complete()
                if name in vars(self):
                    return vars(self)[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @functools.cached_property
    def skeleton(self) -> str:
        """A hash of operations and dependencies, without arguments, sizes and decisions."""
        return hashlib.sha256(repr(([n.structure for n in self.nodes], self.ends)).encode()).hexdigest()

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that come in and go out, and where the backward pass begins."""
        return (self.inputs, self.cotangents, self.outputs, self.gradients, self.boundary)

    @functools.cached_property
    def seconds(self) -> float:
        """The time of one step without recomputation."""
        return sum(node.seconds for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Returns the graph as plain data that `json` can write."""
        parts = {"nodes": _fields(self.nodes), "values": _fields(self.values)}
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in parts}
        return {"format": FORMAT, **parts, **rest}

    @staticmethod
    def from_json(data: dict[str, Any] | str) -> Graph:
        """Returns the graph that `to_json` wrote, from its data or its text.

        Raises:
            ArgumentValueError: the data is not a graph, or has an unknown format.
        """
        try:
            read: dict[str, Any] = json.loads(data) if isinstance(data, str) else data
            _require(read["format"] in FORMATS, f"the format is {read['format']!r}; this version reads {FORMATS}")
            nodes = tuple(_part(Node, node, _NODE) for node in read["nodes"])
            values = tuple(_part(Value, value, _VALUE) for value in read["values"])
            ends = [_ints(read[k], k) for k in ("inputs", "cotangents", "outputs", "gradients")]
            boundary, order = checked(read["boundary"], "boundary", int), read.get("plain_order", ())
            graph = Graph(nodes, values, *ends, boundary=boundary, plain_order=_ints(order, "plain_order"))
            graph.check_ends()
        except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as error:
            raise ArgumentValueError(f"the data is not a graph written by fckpt: {error!r}.") from error
        except RecursionError as error:
            raise ArgumentValueError("the data is not a graph written by fckpt: it is nested too deeply.") from error
        return graph

    def check_ends(self) -> None:
        """Raises `ArgumentValueError` if inputs, outputs, cotangents, gradients or lifetimes are inconsistent."""
        count, size = len(self.nodes), len(self.values)
        _require(self.boundary <= count, f"the boundary is {self.boundary}, of {count} nodes")
        for name in ("inputs", "cotangents", "outputs", "gradients"):
            ids = getattr(self, name)
            _require(
                all(v < size for v in ids) and len(set(ids)) == len(ids),
                f"`{name}` has unknown or repeated ids",
            )
        for node in self.nodes:
            _require(len(set(node.inputs)) == len(node.inputs), f"node {node.id} reads a value twice")
            over = [*node.overwrites, *node.accumulates]
            _require(self.held.isdisjoint(over), f"node {node.id} overwrites a value that the caller holds")
        _require(
            not self.plain_order or sorted(self.plain_order) == list(range(count)),
            "`plain_order` is not an order of the nodes",
        )
        places = self.plain_places
        for value in self.values:
            last = max([places[n] for n in (value.producer or 0, *self.consumers[value.id])], default=0) if count else 0
            _require(
                value.held_to is None or not count or (value.held_to < count and last <= places[value.held_to]),
                f"value {value.id} is held to node {value.held_to}",
            )


def _ints(value: Any, name: str) -> tuple[int, ...]:
    _require(isinstance(value, (list, tuple)), f"{name} is not a list: {value!r}")
    return tuple(checked(item, name, int) for item in value)


def checked_texts(value: Any, name: str) -> tuple[str, ...]:
    """Returns a field of parsed data that is a list of texts.

    Raises:
        ArgumentValueError: the value is something else.
    """
    _require(isinstance(value, (list, tuple)), f"{name} is not a list: {value!r}")
    return tuple(checked(item, name, str) for item in value)


def _decision(value: Any, name: str) -> str:
    _require(value == "" or value in DECISIONS, f"{name} is {value!r}")
    return value


def checked(value: Any, name: str, kind: type, *, positive: bool = False) -> Any:
    """Returns a field of parsed data after checking its type; numbers must be finite and not negative.

    Args:
        value: the field's value.
        name: the name of the field in error messages.
        kind: `int`, `float` (which also accepts ints), `str` or `bool`.
        positive: whether 0 is refused as well.

    Raises:
        ArgumentValueError: the value has another type or is out of range.
    """
    kinds = (int, float) if kind is float else kind
    _require(isinstance(value, kinds) and (kind is bool or not isinstance(value, bool)), f"{name} is {value!r}")
    if kind in (int, float):
        _require((value > 0 if positive else value >= 0) and value < float("inf"), f"{name} is {value!r}")
    return value


def _or_none(value: Any, name: str) -> Any:
    return None if value is None else checked(value, name, int)


def _field(kind: type) -> Callable[[Any, str], Any]:
    return lambda value, name: checked(value, name, kind)


_INT, _FLOAT, _TEXT, _FLAG = map(_field, (int, float, str, bool))
_NODE = {
    "id": _INT, "op": _TEXT, "inputs": _ints, "outputs": _ints, "backward": _FLAG, "random": _FLAG, "once": _FLAG,
    "seconds": _FLOAT, "flops": _INT, "temporary_nbytes": _INT, "replayed_nbytes": _INT, "source": _TEXT,
    "module": _TEXT, "overwrites": _ints, "in_place": _FLAG, "writes": _ints, "arguments": _TEXT, "accumulates": _ints,
}  # fmt: skip
_VALUE = {
    "id": _INT, "nbytes": _INT, "producer": _or_none, "origin": _TEXT, "names": checked_texts, "shape": _ints,
    "dtype": _TEXT, "decision": _decision, "held_to": _or_none,
}  # fmt: skip


def _fields(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the fields of nodes or values; `dataclasses.asdict` takes ten times as long."""
    names = [field.name for field in dataclasses.fields(parts[0])] if parts else []
    return [{name: getattr(part, name) for name in names} for part in parts]


def _part(kind: Any, fields: Any, checks: dict[str, Callable[[Any, str], Any]]) -> Any:
    """Builds a `Node` or a `Value` from plain data."""
    _require(isinstance(fields, dict), f"a {kind.__name__.lower()} is {fields!r}")
    unknown = sorted(map(str, set(fields) - set(checks)))
    _require(not unknown, f"a {kind.__name__.lower()} has {', '.join(unknown)}")
    return kind(**{name: checks[name](value, name) for name, value in fields.items()})


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ArgumentValueError(f"the graph is inconsistent: {what}.")
