"""The computation graph of one training step: operations, and the blocks of memory that they make and read.

A `Value` is a storage, what the allocator holds as one block. Views of it are not nodes: they cost nothing, and
live and die with their base. A `Node` is an operation that makes storages. Ids are positions, and nodes stand in
the order in which the program ran them: first the forward pass, then the backward pass. No torch in here, so that
a graph can be solved and looked at anywhere.

The representation of operations and storages is that of Rockmate (X. Zhao, T. Le Hellard, L. Eyraud-Dubois,
J. Gusak, O. Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for re-materialization in PyTorch",
2023, https://proceedings.mlr.press/v202/zhao23b.html), with views contracted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from fckpt.errors import ArgumentValueError

__all__ = ["DECISIONS", "Graph", "Node", "Value", "checked"]

FORMAT = 3
FORMATS = (2, 3)
"""Format 2 did not have `Node.module`, `in_place`, `writes`, `arguments`, `accumulates`, and `Value.held_to`."""


@dataclass(frozen=True, slots=True)
class Value:
    """A storage."""

    id: int
    nbytes: int
    """What the allocator holds for it."""
    producer: int | None
    """The node that makes it; None for inputs and cotangents."""
    origin: str = ""
    """Where it comes from: `params['w']`, or an operation."""
    names: tuple[str, ...] = ()
    """What `checkpoint_name` calls it."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    decision: str = ""
    """What a policy says of keeping it from the forward to the backward pass: one of `DECISIONS`, or nothing."""
    held_to: int | None = None
    """The last node at whose run the plain function holds it; None if that is its last reader."""


DECISIONS = ("must_save", "prefer_save", "prefer_recompute", "must_recompute")


@dataclass(frozen=True, slots=True)
class Node:
    """An operation."""

    id: int
    op: str
    """`aten.mm.default`, say."""
    inputs: tuple[int, ...]
    """The values that it reads, each once."""
    outputs: tuple[int, ...]
    """The values that it makes."""
    backward: bool = False
    """Whether it needs a cotangent, directly or through others, and so cannot run before the backward pass."""
    random: bool = False
    """Whether it draws random numbers: nodes that do keep their order, and are replayed from a generator state."""
    once: bool = False
    """Whether it must run exactly once, in the forward pass."""
    seconds: float = 0.0
    flops: int = 0
    temporary_nbytes: int = 0
    """What it allocates while it runs, besides its outputs."""
    source: str = ""
    """The user's line, `model.py:12 (forward)`."""
    module: str = ""
    """The path of the module that ran it, `encoder.layer.3.mlp`."""
    overwrites: tuple[int, ...] = ()
    """Inputs over which it may write its one output, if this is their last use; the first of those that die is."""
    in_place: bool = False
    """Whether it writes over `overwrites` in the plain function too. Where that is not their last use, it writes to a
    copy."""
    writes: tuple[int, ...] = ()
    """Values whose memory its first run writes over, as the caller sees: nothing may read them after that. They are
    inputs of the graph, or what an earlier node made of one in the same way."""
    arguments: str = ""
    """What the memory that it takes depends on besides: `self=%0=float32[2,3](3,1), dim=[1]`."""
    accumulates: tuple[int, ...] = ()
    """Inputs over which autograd's engine writes its output, if this is their last use: it adds a gradient to them."""

    @property
    def place(self) -> str:
        """Where it stands in the user's program: ` in encoder.layer.3.mlp at model.py:12`; nothing if unknown."""
        line = self.source.partition(" ")[0] if self.module else self.source
        return (f" in {self.module}" if self.module else "") + (f" at {line}" if line else "")

    def overwritten(self, freed: Collection[int]) -> int | None:
        """The input over which it writes its output, where `freed` are the values that go right after it."""
        return next((v for v in self.overwrites if v in freed), None)


@dataclass(frozen=True)
class Graph:
    """Nodes in program order, values, and who holds which of them."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    """Values that the caller holds throughout, arguments and constants: their bytes are not counted."""
    cotangents: tuple[int, ...]
    """Values that come with the backward pass and are held to its end."""
    outputs: tuple[int, ...]
    """Values that the forward pass makes and that are held to the end of the backward pass."""
    gradients: tuple[int, ...]
    """Values that the backward pass makes and that are held at its end."""
    boundary: int
    """`nodes[:boundary]` are the forward pass as it ran, the rest the backward pass."""

    def __post_init__(self) -> None:
        made = set(self.inputs) | set(self.cotangents)
        late = set(self.cotangents)
        gone: set[int] = set()
        for i, node in enumerate(self.nodes):
            _require(node.id == i, f"node {i} has the id {node.id}")
            _require(made.issuperset(node.inputs), f"node {i} ({node.op}) reads a value before it is made")
            _require(not made.intersection(node.outputs), f"node {i} ({node.op}) makes a value again")
            _require(all(self.values[v].producer == i for v in node.outputs), f"a producer is not node {i}")
            if node.overwrites:
                whole = len(node.outputs) == 1 and set(node.inputs).issuperset(node.overwrites) and not node.once
                sizes = {self.values[v].nbytes for v in (*node.overwrites, *node.outputs)}
                _require(whole and len(sizes) == 1, f"node {i} ({node.op}) overwrites what it cannot")
            _require(set(node.accumulates).issubset(node.inputs), f"node {i} ({node.op}) adds to what it does not read")
            _require(node.backward == (not late.isdisjoint(node.inputs)), f"node {i}: the flag `backward` is wrong")
            _require(gone.isdisjoint((*node.inputs, *node.writes)), f"node {i} ({node.op}) reads what was written over")
            if node.writes:
                _require(
                    made.issuperset(node.writes) and not node.backward, f"node {i} ({node.op}) writes what it cannot"
                )
                gone.update(node.writes)
            if node.backward:
                _require(i >= self.boundary and not node.once, f"node {i} cannot be in the forward pass")
                late.update(node.outputs)
            made.update(node.outputs)
        _require(all(v.id == i and v.nbytes >= 0 for i, v in enumerate(self.values)), "values are not numbered")
        _require(made == set(range(len(self.values))), "there are values that nothing makes")
        _require(late.isdisjoint(self.outputs), "an output needs a cotangent")
        _require(gone.isdisjoint((*self.outputs, *self.gradients)), "a result was written over")

    @functools.cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """By value: the nodes that read it, in order."""
        found: list[list[int]] = [[] for _ in self.values]
        for node in self.nodes:
            for value in node.inputs:
                found[value].append(node.id)
        return tuple(map(tuple, found))

    @functools.cached_property
    def held(self) -> frozenset[int]:
        """Values that are never counted or freed in favour of recomputing: inputs and cotangents."""
        return frozenset(self.inputs) | frozenset(self.cotangents)

    @functools.cached_property
    def plain(self) -> Graph:
        """The same computation with nothing written over an operand, but where the user wrote it so."""
        nodes = (n if n.in_place else dataclasses.replace(n, overwrites=()) for n in self.nodes)
        return dataclasses.replace(self, nodes=tuple(nodes))

    @functools.cached_property
    def eager(self) -> Graph:
        """The same computation as autograd runs it: it writes over an operand where the user wrote it so, and where it
        adds up gradients.
        """
        nodes = (n if n.in_place else dataclasses.replace(n, overwrites=n.accumulates) for n in self.nodes)
        return dataclasses.replace(self, nodes=tuple(nodes))

    @functools.cached_property
    def seconds(self) -> float:
        """The time of one step that recomputes nothing."""
        return sum(node.seconds for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Returns the graph as plain data."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(data: dict[str, Any] | str) -> Graph:
        """Reads what `to_json` wrote (or its text).

        Raises:
            ArgumentValueError: it is no graph, or one of another format.
        """
        try:
            read: dict[str, Any] = json.loads(data) if isinstance(data, str) else data
            _require(read["format"] in FORMATS, f"the format is {read['format']!r}, not {FORMAT}")
            nodes = tuple(_part(Node, node, _NODE) for node in read["nodes"])
            values = tuple(_part(Value, value, _VALUE) for value in read["values"])
            ends = [_ints(read[k], k) for k in ("inputs", "cotangents", "outputs", "gradients")]
            graph = Graph(nodes, values, *ends, boundary=checked(read["boundary"], "boundary", int))
            graph.check_ends()
        except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as error:
            raise ArgumentValueError(f"this is no graph of fckpt: {error!r}.") from error
        except RecursionError as error:
            raise ArgumentValueError("this is no graph of fckpt: it is nested too deeply.") from error
        return graph

    def check_ends(self) -> None:
        """Raises `ArgumentValueError` if what goes in and comes out, or a lifetime, makes no sense."""
        count, size = len(self.nodes), len(self.values)
        _require(self.boundary <= count, f"the boundary is {self.boundary}, of {count} nodes")
        for name in ("inputs", "cotangents", "outputs", "gradients"):
            ids = getattr(self, name)
            _require(all(v < size for v in ids) and len(set(ids)) == len(ids), f"{name} are no values of it")
        for node in self.nodes:
            _require(len(set(node.inputs)) == len(node.inputs), f"node {node.id} reads a value twice")
            over = [*node.overwrites, *node.accumulates]
            _require(self.held.isdisjoint(over), f"node {node.id} overwrites what the caller holds")
        for value in self.values:
            last = max((value.producer or 0, *self.consumers[value.id][-1:]))
            _require(
                value.held_to is None or not count or last <= value.held_to < count,
                f"value {value.id} is held to node {value.held_to}",
            )


def _ints(value: Any, name: str) -> tuple[int, ...]:
    _require(isinstance(value, (list, tuple)), f"{name} is no list: {value!r}")
    return tuple(checked(item, name, int) for item in value)


def _texts(value: Any, name: str) -> tuple[str, ...]:
    _require(isinstance(value, (list, tuple)), f"{name} is no list: {value!r}")
    return tuple(checked(item, name, str) for item in value)


def _decision(value: Any, name: str) -> str:
    _require(value == "" or value in DECISIONS, f"{name} is {value!r}")
    return value


def checked(value: Any, name: str, kind: type, *, positive: bool = False) -> Any:
    """Returns a field of what was read, if it is of its type and, a number, neither negative nor infinite.

    Args:
        value: the field.
        name: what errors call it.
        kind: `int`, `float` (which takes ints), `str` or `bool`.
        positive: whether 0 is too little.

    Raises:
        ArgumentValueError: it is not.
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
    "seconds": _FLOAT, "flops": _INT, "temporary_nbytes": _INT, "source": _TEXT, "module": _TEXT, "overwrites": _ints,
    "in_place": _FLAG, "writes": _ints, "arguments": _TEXT, "accumulates": _ints,
}  # fmt: skip
_VALUE = {
    "id": _INT, "nbytes": _INT, "producer": _or_none, "origin": _TEXT, "names": _texts, "shape": _ints, "dtype": _TEXT,
    "decision": _decision, "held_to": _or_none,
}  # fmt: skip


def _part(kind: Any, fields: Any, checks: dict[str, Callable[[Any, str], Any]]) -> Any:
    """A node or a value out of plain data."""
    _require(isinstance(fields, dict), f"a {kind.__name__.lower()} is {fields!r}")
    unknown = sorted(map(str, set(fields) - set(checks)))
    _require(not unknown, f"a {kind.__name__.lower()} has {', '.join(unknown)}")
    return kind(**{name: checks[name](value, name) for name, value in fields.items()})


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ArgumentValueError(f"the graph is inconsistent: {what}.")
