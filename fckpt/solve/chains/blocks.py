"""Repeated blocks: where a forward pass repeats itself, and parts of a graph as separate graphs.

A layer that occurs four hundred times is one problem, not four hundred. `cut_positions` finds the parts of a forward
pass in which the same operations recur directly after each other (tandem repeats), and cuts them once per period, where
the fewest bytes live. A `Block` is what one stage of such a chain runs in both passes, renumbered and without names:
equal blocks have equal plans.

    around the block                                          in its graph
    values read from earlier stages, and arguments            inputs, which are not counted
    values for later stages, or for earlier ones in backward  outputs
    cotangents, and what later stages leave in backward       cotangents, which are held to the end
    gradients, and what earlier stages read of its backward   gradients
    what runs between its two passes                          a node that needs a given number of bytes (`with_rest`)

Planning equal layers once follows X. Zhao et al., "Rockmate", 2023, https://proceedings.mlr.press/v202/zhao23b.html. In
that paper, blocks are separated by single tensors; here any set of values may live across a cut.

Complexity: O(k n p) for k repeats, n operations and periods up to p, in numpy. Left out: repetitions that do not
directly follow each other, and equal parallel branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Graph, Node, Value
from fckpt.solve.chains.stages import Stages
from fckpt.solve.core.cuts import CutPoints
from fckpt.solve.core.rules import Order, Rules

__all__ = ["Block", "Repeat", "cut_out", "cut_positions", "repeats", "with_rest", "without_rest"]

LONGEST = 2048
"""The longest period that is considered, in operations."""
SHORTEST = 4
"""The shortest period that is considered, in operations."""
BETTER = 1.1
"""A longer period must cover this many times as many operations as a shorter one to be preferred."""
COVERED = 0.5
"""A forward pass is cut by its periods if they cover this fraction of it."""


class Repeat(NamedTuple):
    """A part of a sequence that consists of equal periods."""

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.times


def repeats(labels: Sequence[Hashable], most: int = 100) -> list[Repeat]:
    """Returns disjoint parts of a sequence of labels in which a period recurs directly, in order.

    The part that covers most is taken first, with the shortest of the periods that cover about as much; then the same
    is done in the longest remaining part, up to `most` times.
    """
    numbers = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    row = np.array([numbers[label] for label in labels], dtype=np.int64)
    parts, found = [(0, len(row))], list[Repeat]()
    while parts and len(found) < most:
        low, high = parts.pop(max(range(len(parts)), key=lambda k: parts[k][1] - parts[k][0]))
        repeat = _longest(row[low:high])
        if repeat is not None:
            found.append(repeat._replace(first=low + repeat.first))
            parts += [(low, found[-1].first), (found[-1].end, high)]
    return sorted(found)


def _longest(labels: np.ndarray) -> Repeat | None:
    """Returns the repeat that covers most labels, or None."""
    found, most = None, 0.0
    for period in range(SHORTEST, min(len(labels) // 2, LONGEST) + 1):
        differs = np.flatnonzero(labels[period:] != labels[:-period])
        ends = np.concatenate([[-1], differs, [len(labels) - period]])
        equal = np.diff(ends) - 1
        at = int(equal.argmax())
        count = (int(equal[at]) + period) // period
        if count > 1 and count * period > BETTER * most:
            found, most = Repeat(int(ends[at]) + 1, period, count), count * period
    return found


def cut_positions(rules: Rules, forward: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` cuts of a forward pass: one per period or, without repeats, where few bytes live.

    Args:
        rules: the rules of the graph.
        forward: the nodes of the forward pass, in order.
        most: the largest number of cuts. If there are more periods, several periods form one stage.

    Returns:
        Positions as in `CutPoints`, in ascending order.
    """
    points = CutPoints(rules, forward)
    found = repeats([_label(rules, index) for index in forward], most)  # each repeat makes at least one cut
    if not found or sum(repeat.end - repeat.first for repeat in found) < COVERED * len(forward):
        return points.low(most)
    longest = max(repeat.period for repeat in found)
    step = 1
    while True:
        cuts = sorted(cut for repeat in found for cut in _cuts(points, repeat, step))
        cuts = _refined(points, cuts, step * longest)
        if len(cuts) <= most:
            return cuts
        step += 1


def _refined(points: CutPoints, cuts: list[int], length: int) -> list[int]:
    """Adds cuts to stages longer than one and a half times `length`, where the fewest bytes live."""
    stack = [*pairwise([-1, *cuts, points.length - 1])]
    found = [*cuts]
    while stack:
        low, high = stack.pop()
        if 2 * (high - low) > 3 * length:
            margin = length // 4 + 1
            middle = low + margin + int(points.live[low + margin : high - margin + 1].argmin())
            found.append(middle)
            stack += [(low, middle), (middle, high)]
    return sorted(found)


def _label(rules: Rules, index: int) -> Hashable:
    graph = rules.graph
    node = graph.nodes[index]
    read, made = ([graph.values[v].nbytes for v in values] for values in (node.inputs, node.outputs))
    return (node.op, *read, None, *made)


def _cuts(points: CutPoints, repeat: Repeat, step: int) -> list[int]:
    """Returns one position in every `step`-th period of a repeat, at the same offset in each."""
    live = points.live[repeat.first : repeat.end].reshape(repeat.times, repeat.period)[:-1].sum(axis=0)
    shift = repeat.period - 1 - int(live[::-1].argmin())  # the last of equal minima
    cuts = range(repeat.first + shift, repeat.end, step * repeat.period)
    return [cut for cut in cuts if cut < points.length - 1]


class Block(NamedTuple):
    """A part of a graph, as a separate graph."""

    graph: Graph
    nodes: list[int]
    """By node of the block: the node of the whole graph."""
    edges: tuple[tuple[int, ...], ...]
    """Boundary values on which the costs of the stage also depend: values that later stages read in the forward pass;
    values that earlier stages read in the backward pass; values that stay once they are made; arriving values that
    earlier stages also read; and values from outside that are never freed."""


def cut_out(stages: Stages, stage: int) -> Block:
    """Returns what a stage of a chain runs in both passes as a separate graph."""
    rules, graph = stages.rules, stages.graph
    indices = [*stages.forward[stage], *stages.backward[stage]]
    made = {v for i in stages.forward[stage] for v in graph.nodes[i].outputs}
    makes = {v for i in stages.backward[stage] for v in graph.nodes[i].outputs}
    arrives = stages.arriving[stage].union(graph.cotangents)
    outside = dict.fromkeys(v for i in indices for v in graph.nodes[i].inputs if v not in made and v not in makes)
    number = {v: k for k, v in enumerate([*outside, *(v for i in indices for v in graph.nodes[i].outputs)])}
    producer = {v: k for k, i in enumerate(indices) for v in graph.nodes[i].outputs}

    def renumbered(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(number[v] for v in values)

    nodes = _renumbered_nodes(rules, indices, renumbered, arrives.intersection(outside))
    decisions = {v: graph.values[v].decision for v in made}
    values = (Value(k, rules.nbytes[v], producer.get(v), decision=decisions.get(v, "")) for v, k in number.items())
    onward, fixed = stages.onward[stage], made & stages.fixed
    after = stages.arriving[stage - 1] if stage else set[int]()
    block = Graph(
        nodes=nodes,
        values=tuple(values),
        inputs=renumbered(v for v in outside if v not in arrives),
        cotangents=renumbered(v for v in outside if v in arrives),
        outputs=tuple(sorted(renumbered(onward | fixed | stages.awaited(stage)))),
        gradients=tuple(sorted(renumbered(makes & (rules.permanent | after)))),
        boundary=len(stages.forward[stage]),
    )
    edges = (onward, stages.awaited(stage), fixed, after.intersection(outside), rules.permanent.intersection(outside))
    return Block(block, indices, tuple(tuple(sorted(renumbered(values))) for values in edges))


def _renumbered_nodes(
    rules: Rules, indices: Sequence[int], renumbered: Callable[[Iterable[int]], tuple[int, ...]], late: set[int]
) -> tuple[Node, ...]:
    """Returns nodes of a graph as the nodes of a block. Its backward pass depends on the values `late`."""
    nodes: list[Node] = []
    for index in indices:
        node = rules.graph.nodes[index]
        is_late = not late.isdisjoint(node.inputs)
        late.update(node.outputs if is_late else ())
        nodes.append(
            Node(
                id=len(nodes),
                op=node.op,
                inputs=renumbered(node.inputs),
                outputs=renumbered(node.outputs),
                backward=is_late,
                random=node.random,
                once=node.once,
                seconds=rules.seconds[index],
                temporary_nbytes=node.temporary_nbytes,
                overwrites=renumbered(node.overwrites),
                in_place=node.in_place,
            )
        )
    return tuple(nodes)


def with_rest(block: Graph, nbytes: int) -> Graph:
    """Returns a block with one additional node between its passes, which needs `nbytes` while it runs."""
    boundary = block.boundary
    rest = Node(boundary, "rest", (), (), once=True, temporary_nbytes=nbytes)
    after = [dataclasses.replace(node, id=node.id + 1) for node in block.nodes[boundary:]]
    producer = {v: node.id for node in after for v in node.outputs}
    values = (dataclasses.replace(v, producer=producer.get(v.id, v.producer)) for v in block.values)
    nodes = (*block.nodes[:boundary], rest, *after)
    return dataclasses.replace(block, nodes=nodes, values=tuple(values), boundary=boundary + 1)


def without_rest(block: Graph, plan: Order) -> Order:
    """Returns an order of `with_rest(block)` as an order of `block`."""
    forward, backward = ([i - (i > block.boundary) for i in part if i != block.boundary] for part in plan)
    return Order(forward, backward)
