"""Schedules: which nodes are computed and which values are freed, in which order. A solver returns a schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fckpt.errors import ArgumentValueError
from fckpt.graph.graph import Graph

__all__ = [
    "Compute",
    "Free",
    "FusedBlock",
    "FusedSchedule",
    "FusedStep",
    "Schedule",
    "Step",
    "plain_schedule",
    "schedule_of",
    "with_freed",
]


class Compute(NamedTuple):
    """Runs a node. If an output is already live, the live copy stays and the new copy is dropped."""

    node: int


class Free(NamedTuple):
    """Frees a value."""

    value: int


Step = Compute | Free


class FusedBlock(NamedTuple):
    """Runs several nodes in one compiled kernel. Values that only the kernel reads have no memory."""

    nodes: tuple[int, ...]
    makes: tuple[int, ...]
    """The values that the kernel makes."""
    overwrites: tuple[int, ...] = ()
    """Values that are freed directly after the block, and whose memory the kernel writes outputs over."""
    temporary_nbytes: int = 0
    kernel: Any = None
    """What runs the block: a `fckpt._fuse.blocks.Runnable`."""


FusedStep = Compute | Free | FusedBlock
AnyStep = TypeVar("AnyStep", bound=FusedStep)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of a forward pass and of its backward pass. A node may be computed any number of times."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @functools.cached_property
    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The steps of both passes as numbers: +n computes node n, -(v + 1) frees value v."""
        return tuple(map(_number, self.forward)), tuple(map(_number, self.backward))

    @functools.cached_property
    def computed(self) -> tuple[list[int], list[int]]:
        """The nodes that both passes compute, in order."""
        forward, backward = ([number for number in half if number >= 0] for half in self.numbers)
        return forward, backward

    def __eq__(self, other: object) -> bool:  # a step alone equals one of the other kind: both are tuples of a number
        return isinstance(other, Schedule) and self.numbers == other.numbers

    def __hash__(self) -> int:
        return hash(self.numbers)

    def to_json(self) -> dict[str, Any]:
        """Returns the schedule as plain data: the `numbers` of its steps."""
        return {"forward": [*self.numbers[0]], "backward": [*self.numbers[1]]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Schedule:
        """Returns the schedule that `to_json` wrote.

        Raises:
            ArgumentValueError: the data is not a schedule.
        """
        try:
            return Schedule(tuple(map(_step, data["forward"])), tuple(map(_step, data["backward"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ArgumentValueError(f"the data is not a schedule written by fckpt: {error!r}.") from error


@dataclass(frozen=True)
class FusedSchedule:
    """A schedule in which blocks of computations run as compiled kernels. It is derived, and not saved."""

    forward: tuple[FusedStep, ...]
    backward: tuple[FusedStep, ...]


def plain_schedule(graph: Graph) -> Schedule:
    """Returns the schedule of the plain function: every node once, in the plain order, with autograd's lifetimes.

    Simulate it on `Graph.eager`.
    """
    permanent, places = graph.held.union(graph.outputs, graph.gradients), graph.plain_places
    frees: list[list[Step]] = [[] for _ in graph.nodes]
    for value in graph.values:
        if value.producer is not None and value.id not in permanent:
            last = max((value.producer, *graph.consumers[value.id]), key=places.__getitem__)
            frees[last if value.held_to is None else value.held_to].append(Free(value.id))
    steps: tuple[list[Step], list[Step]] = ([], [])
    for index in graph.plain_order or range(len(graph.nodes)):
        steps[index >= graph.boundary].extend([Compute(index), *frees[index]])
    return Schedule(tuple(steps[0]), tuple(steps[1]))


def with_freed(steps: Sequence[AnyStep]) -> Iterator[tuple[AnyStep, frozenset[int]]]:
    """Yields each step with the values that are freed directly after it."""
    freed = _NOTHING
    found: list[tuple[AnyStep, frozenset[int]]] = []
    for step in reversed(steps):
        found.append((step, freed))
        freed = freed.union((step.value,)) if isinstance(step, Free) else _NOTHING
    return reversed(found)


_NOTHING = frozenset[int]()


def _number(step: Step) -> int:
    return step.node if isinstance(step, Compute) else -step.value - 1


def _step(number: int) -> Step:
    if type(number) is not int:
        raise TypeError(f"a step is an int, not {number!r}")
    return Compute(number) if number >= 0 else Free(-number - 1)


def schedule_of(graph: Graph, forward: Sequence[int], backward: Sequence[int]) -> Schedule:
    """Returns the schedule that computes nodes in the given order and frees every value after its last use.

    A value that is made several times is freed after the last use of each copy. Outputs and gradients of the graph are
    not freed.

    Args:
        graph: the graph.
        forward: the nodes of the forward pass, in order; a node may appear several times.
        backward: the nodes of the backward pass, likewise.
    """
    sequence = [*forward, *backward]
    permanent = graph.held.union(graph.outputs, graph.gradients)
    needed: set[int] = set()
    frees: list[list[int]] = [[] for _ in sequence]
    for i in range(len(sequence) - 1, -1, -1):  # backwards, so that later reads are known
        node = graph.nodes[sequence[i]]
        frees[i] = [v for v in (*node.outputs, *node.inputs) if v not in needed and v not in permanent]
        needed.difference_update(node.outputs)
        needed.update(v for v in node.inputs if v not in permanent)
    steps: list[list[Step]] = [[], []]
    for i, index in enumerate(sequence):
        steps[i >= len(forward)] += [Compute(index), *map(Free, frees[i])]
    return Schedule(tuple(steps[0]), tuple(steps[1]))
