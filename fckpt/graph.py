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
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fckpt.errors import ArgumentValueError

__all__ = ["DECISIONS", "Graph", "Node", "Value"]

FORMAT = 2


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
    overwrites: tuple[int, ...] = ()
    """Inputs over which it may write its one output, if this is their last use; the first of those that die is."""

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
        for i, node in enumerate(self.nodes):
            _require(node.id == i, f"node {i} has the id {node.id}")
            _require(made.issuperset(node.inputs), f"node {i} ({node.op}) reads a value before it is made")
            _require(not made.intersection(node.outputs), f"node {i} ({node.op}) makes a value again")
            _require(all(self.values[v].producer == i for v in node.outputs), f"a producer is not node {i}")
            if node.overwrites:
                whole = len(node.outputs) == 1 and set(node.inputs).issuperset(node.overwrites) and not node.once
                sizes = {self.values[v].nbytes for v in (*node.overwrites, *node.outputs)}
                _require(whole and len(sizes) == 1, f"node {i} ({node.op}) overwrites what it cannot")
            _require(node.backward == (not late.isdisjoint(node.inputs)), f"node {i}: the flag `backward` is wrong")
            if node.backward:
                _require(i >= self.boundary and not node.once, f"node {i} cannot be in the forward pass")
                late.update(node.outputs)
            made.update(node.outputs)
        _require(all(v.id == i and v.nbytes >= 0 for i, v in enumerate(self.values)), "values are not numbered")
        _require(made == set(range(len(self.values))), "there are values that nothing makes")
        _require(late.isdisjoint(self.outputs), "an output needs a cotangent")

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
        """The same computation as autograd runs it, which writes nothing over an operand."""
        return dataclasses.replace(self, nodes=tuple(dataclasses.replace(n, overwrites=()) for n in self.nodes))

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
            _require(read["format"] == FORMAT, f"the format is {read['format']}, not {FORMAT}")
            nodes = tuple(Node(**{k: _frozen(v) for k, v in node.items()}) for node in read["nodes"])
            values = tuple(Value(**{k: _frozen(v) for k, v in value.items()}) for value in read["values"])
            ends = [tuple(read[k]) for k in ("inputs", "cotangents", "outputs", "gradients")]
            return Graph(nodes, values, *ends, boundary=read["boundary"])
        except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
            raise ArgumentValueError(f"this is no graph of fckpt: {error!r}.") from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ArgumentValueError(f"the graph is inconsistent: {what}.")
