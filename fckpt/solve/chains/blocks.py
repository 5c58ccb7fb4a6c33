"""Blocks that are alike: where a forward pass repeats itself, and a part of a graph as a graph of its own.

A layer that comes four hundred times is one problem, not four hundred. `places` finds the stretches of a forward pass
in which the same operations come again and again (tandem repeats), and cuts them once a period, where the least is
live. A `Block` is what one stage of such a chain runs in both passes, renumbered, without names: blocks that are equal
are alike, and a plan of one is a plan of all.

    around the block                                          in its graph
    what it reads of earlier stages, and arguments            inputs, which are not counted
    what later stages read, or earlier ones in backward       outputs
    cotangents, and what later stages leave in backward       cotangents, which are there to the end
    gradients, and what earlier stages read of its backward   gradients
    what runs between its two passes                          a node that needs so many bytes (`with_rest`)

Layers that are planned once are those of X. Zhao et al., "Rockmate", 2023,
https://proceedings.mlr.press/v202/zhao23b.html. Blocks lie between single tensors there; here any set of values may
cross a cut.

Complexity: O(k n p) for k stretches, n operations and periods up to p, in numpy. Left out: repetitions that do not
follow each other at once, and branches that are alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Graph, Node, Value
from fckpt.solve.chains.stages import Stages
from fckpt.solve.core.cuts import CutPoints
from fckpt.solve.core.rules import Order, Rules

__all__ = ["Block", "Repeat", "cut_out", "cut_positions", "repeats", "with_rest", "without_rest"]

LONGEST = 2048
"""Operations of the longest period that is looked for."""
SHORTEST = 4
"""And of the shortest."""
BETTER = 1.1
"""A longer period has to cover so many times as much as a shorter one."""
COVERED = 0.5
"""A forward pass is cut by its periods where they make up this part of it."""


class Repeat(NamedTuple):
    """A stretch of some periods."""

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.times


def repeats(labels: Sequence[Hashable], most: int = 100) -> list[Repeat]:
    """Returns stretches in which a row of labels comes again at once, in order; they do not overlap.

    The one that covers most is taken, with the shortest of periods that cover about as much, and then the same in the
    longest part that is left, up to `most` times.
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
    """Returns the stretch that covers most, if there is one."""
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
    """Returns at most `most` places to cut a forward pass: once a period of it, or else where little is live.

    Args:
        rules: of the graph.
        forward: its nodes, in order.
        most: how many. Where there are more periods, several of them stay together.

    Returns:
        Places as in `CutPoints`, in order.
    """
    points = CutPoints(rules, forward)
    found = repeats([_label(rules, index) for index in forward], most)  # each makes a cut at least
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
    """Cuts stages of more than one and a half times `length` again, where the least is live."""
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
    """Returns a place in every `step`th period of a stretch, the same in all."""
    live = points.live[repeat.first : repeat.end].reshape(repeat.times, repeat.period)[:-1].sum(axis=0)
    shift = repeat.period - 1 - int(live[::-1].argmin())  # the last of the best
    cuts = range(repeat.first + shift, repeat.end, step * repeat.period)
    return [cut for cut in cuts if cut < points.length - 1]


class Block(NamedTuple):
    """A part of a graph, as a graph."""

    graph: Graph
    nodes: list[int]
    """By its nodes: those of the whole."""
    edges: tuple[tuple[int, ...], ...]
    """On what else depends what its stage takes: what later stages read in the forward pass, what earlier ones read in
    the backward pass, what is there throughout once it is made, what arrives and earlier stages read as well, and what
    comes from outside and is never freed."""


def cut_out(stages: Stages, stage: int) -> Block:
    """Returns what a stage of a chain runs as a graph of its own."""
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

    late = arrives.intersection(outside)
    nodes: list[Node] = []
    for index in indices:
        node = graph.nodes[index]
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
    decisions = {v: graph.values[v].decision for v in made}
    values = (Value(k, rules.nbytes[v], producer.get(v), decision=decisions.get(v, "")) for v, k in number.items())
    onward, fixed = stages.onward[stage], made & stages.fixed
    after = stages.arriving[stage - 1] if stage else set[int]()
    block = Graph(
        nodes=tuple(nodes),
        values=tuple(values),
        inputs=renumbered(v for v in outside if v not in arrives),
        cotangents=renumbered(v for v in outside if v in arrives),
        outputs=tuple(sorted(renumbered(onward | fixed | stages.awaited(stage)))),
        gradients=tuple(sorted(renumbered(makes & (rules.permanent | after)))),
        boundary=len(stages.forward[stage]),
    )
    edges = (onward, stages.awaited(stage), fixed, after.intersection(outside), rules.permanent.intersection(outside))
    return Block(block, indices, tuple(tuple(sorted(renumbered(values))) for values in edges))


def with_rest(block: Graph, nbytes: int) -> Graph:
    """Returns a block with one more node between its passes, which needs `nbytes` while it runs."""
    boundary = block.boundary
    rest = Node(boundary, "rest", (), (), once=True, temporary_nbytes=nbytes)
    after = [dataclasses.replace(node, id=node.id + 1) for node in block.nodes[boundary:]]
    producer = {v: node.id for node in after for v in node.outputs}
    values = (dataclasses.replace(v, producer=producer.get(v.id, v.producer)) for v in block.values)
    nodes = (*block.nodes[:boundary], rest, *after)
    return dataclasses.replace(block, nodes=nodes, values=tuple(values), boundary=boundary + 1)


def without_rest(block: Graph, plan: Order) -> Order:
    """Returns a plan of what `with_rest` made of a block, as a plan of the block."""
    forward, backward = ([i - (i > block.boundary) for i in part if i != block.boundary] for part in plan)
    return Order(forward, backward)
