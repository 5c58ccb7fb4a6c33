"""What a schedule holds between the passes: residuals, each with its size, its origin and why it is there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fckpt._units import format_bytes, format_seconds
from fckpt.graph.graph import Graph, Node
from fckpt.graph.schedule import Compute, Schedule

__all__ = [
    "Residual",
    "aligned",
    "brief",
    "format_residuals",
    "held_between",
    "module_pattern",
    "path_pattern",
    "place",
    "residuals",
    "short_op",
    "shortened",
]

Kind = Literal["intermediate", "output", "argument"]
KINDS: tuple[Kind, ...] = ("intermediate", "output", "argument")


@dataclass(frozen=True, slots=True)
class Residual:
    """Memory that is held from the forward to the backward pass."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: Any
    """A `torch.dtype`; what the graph says, a text like "float32", where `residuals` was not told how to read it."""
    origin: str
    """The path of an argument or parameter, `params['w']`, or the operation that made it: `mm at model.py:12 (fn)`,
    within modules `mm in encoder.layer.3.mlp at model.py:12`."""
    name: str
    """What `checkpoint_name` calls it, or nothing."""
    reason: str
    """What needs it first in the backward pass: an operation of it, or one that is computed again."""
    recompute_seconds: float | None
    """What it would take to compute it from the others instead. None for what is held anyway, and what cannot be."""
    kind: Kind = "intermediate"
    """Intermediates cost memory; arguments and outputs are held anyway."""


def residuals(graph: Graph, schedule: Schedule, dtype: Callable[[str], Any] = str) -> list[Residual]:
    """Lists what is held between the passes, in the order in which it is made.

    Args:
        graph: the graph.
        schedule: a valid schedule of it.
        dtype: what makes of the name of a dtype what the rows are to say.

    Returns:
        All intermediates (their bytes and those of the outputs are `Timeline.forward_nbytes`), and of the arguments
        and outputs those that the backward pass reads.
    """
    held = held_between(graph, schedule)
    readers = _first_readers(schedule, graph, held)
    again = {step.node for step in schedule.forward if isinstance(step, Compute)}
    anyway: dict[int, Kind] = dict.fromkeys(graph.inputs, "argument")
    anyway.update(dict.fromkeys(graph.outputs, "output"))
    rows = []
    for value in sorted(held):
        kind = anyway.get(value, "intermediate")
        if kind == "intermediate" or value in readers:
            row = _residual(graph, value, kind, _reason(graph, value, readers.get(value), again), held)
            rows.append(dataclasses.replace(row, dtype=dtype(row.dtype)))
    return rows


def held_between(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """Returns the values that are live when the forward pass has ended: inputs, outputs and what is kept."""
    live = set(graph.inputs)
    for step in schedule.forward:
        if isinstance(step, Compute):
            live.update(graph.nodes[step.node].outputs)
        else:
            live.discard(step.value)
    return frozenset(live)


def _first_readers(schedule: Schedule, graph: Graph, held: Collection[int]) -> dict[int, int]:
    """By value of `held`: the node that reads it first in the backward pass, before it is freed."""
    readers: dict[int, int] = {}
    waiting = set(held)
    for step in schedule.backward:
        if isinstance(step, Compute):
            for value in waiting.intersection(graph.nodes[step.node].inputs):
                readers[value] = step.node
                waiting.discard(value)
        else:
            waiting.discard(step.value)
    return readers


def _reason(graph: Graph, value: int, reader: int | None, again: Collection[int]) -> str:
    if reader is None:
        return "it is a gradient" if value in graph.gradients else "nothing"
    return ("recompute of " if reader in again else "") + place(graph.nodes[reader])


def _residual(graph: Graph, index: int, kind: Kind, reason: str, held: Collection[int]) -> Residual:
    value = graph.values[index]
    return Residual(
        nbytes=value.nbytes,
        shape=value.shape,
        dtype=value.dtype,
        origin=value.origin if value.producer is None else place(graph.nodes[value.producer]),
        name=", ".join(value.names),
        reason=reason,
        recompute_seconds=_recompute_seconds(graph, index, held) if kind == "intermediate" and graph.seconds else None,
        kind=kind,
    )


def _recompute_seconds(graph: Graph, value: int, held: Collection[int]) -> float | None:
    """The seconds of all nodes that make `value` from what else is held; None if one of them must not run again."""
    nodes: set[int] = set()
    stack = [value]
    while stack:
        producer = graph.values[stack.pop()].producer
        if producer is None or producer in nodes:
            continue
        if graph.nodes[producer].once:
            return None
        nodes.add(producer)
        stack += [v for v in graph.nodes[producer].inputs if v not in held]
    return sum(graph.nodes[node].seconds for node in nodes)


def place(node: Node) -> str:
    """Writes an operation and where it is: `mm in encoder.layer.3.mlp at model.py:12`, `mm at model.py:12 (fn)`."""
    return short_op(node) + node.place


def short_op(node: Node) -> str:
    """Writes an operation without namespace and overload: `mm` for `aten.mm.default`."""
    return ".".join(node.op.split(".")[:2]).removeprefix("aten.")


# As text ----------------------------------------------------------------------------------------------------------

_WIDTHS = (9, 24, 34, 36, 9)
"""Of the columns at most: 120 with the gaps between them."""


def format_residuals(rows: Iterable[Residual]) -> str:
    """Writes residuals as a table of at most 120 columns, with totals.

    Intermediates come first, then outputs and arguments; within each, the biggest. Residuals of repeated blocks (the
    same line and shape, or arguments whose paths differ in an index) are one row, marked "x12", with their sums.

    Example:
        >>> shape, origin, reason = (512, 512), "tanh at mlp.py:3 (f)", "mm at mlp.py:4 (f)"
        >>> row = Residual(2**20, shape, "float32", origin, "h", reason, recompute_seconds=1e-3)
        >>> print(format_residuals([row, row]))
           bytes  what                  from                       needed by            recompute
        2.00 MiB  float32[512, 512] x2  'h', tanh at mlp.py:3 (f)  mm at mlp.py:4 (f)    2.00 ms
        <BLANKLINE>
        2.00 MiB  2 intermediates
    """
    rows = list(rows)
    if not rows:
        return "Nothing is held between the forward and the backward pass."
    groups: dict[object, list[Residual]] = {}
    for row in rows:
        groups.setdefault(_fold_key(row), []).append(row)
    ordered = sorted(groups.values(), key=lambda group: (KINDS.index(group[0].kind), -_nbytes(group)))
    table = [("bytes", "what", "from", "needed by", "recompute"), *map(_row, ordered)]
    lines = aligned([[shortened(c, w) for c, w in zip(row, _WIDTHS, strict=True)] for row in table], right=(0, 4))
    totals = [*table, *_totals(rows)]  # with the table, so that the bytes stand in one column
    return "\n".join([*lines, "", *aligned([row[:2] for row in totals], right=(0,))[len(table) :]])


def _totals(rows: Sequence[Residual]) -> list[tuple[str, str]]:
    own = [row for row in rows if row.kind == "intermediate"]
    anyway = [row for row in rows if row.kind != "intermediate"]
    totals = [(format_bytes(_nbytes(own)), _count(len(own), "intermediate"))]
    if anyway:
        kinds = [_count(n, kind) for kind in ("argument", "output") if (n := sum(r.kind == kind for r in anyway))]
        totals.append((format_bytes(_nbytes(anyway)), f"{' and '.join(kinds)} that backward needs, held anyway"))
    return totals


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _nbytes(rows: Iterable[Residual]) -> int:
    return sum(row.nbytes for row in rows)


def _row(group: Sequence[Residual]) -> tuple[str, ...]:
    first = group[0]
    what = f"{str(first.dtype).removeprefix('torch.')}{list(first.shape)}" + (
        f" x{len(group)}" if len(group) > 1 else ""
    )
    seconds = [row.recompute_seconds for row in group if row.recompute_seconds is not None]
    return (
        format_bytes(_nbytes(group)),
        what,
        _origin(group),
        _common([row.reason for row in group]),
        format_seconds(sum(seconds)) if seconds else "-",
    )


def _origin(group: Sequence[Residual]) -> str:
    name = _folded([row.name for row in group], _name_pattern)
    origin = brief(_folded([row.origin for row in group], path_pattern))
    marker = "output, " if group[0].kind == "output" else ""
    return f"{marker}{f'{name!r}, ' if name else ''}{origin}"


def _folded(texts: Sequence[str], pattern: Callable[[str], str]) -> str:
    return texts[0] if len(set(texts)) == 1 else pattern(texts[0])


def _common(texts: Sequence[str]) -> str:
    """The text that occurs most, those of repeated blocks as one."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(path_pattern(text), []).append(text)
    most = max(groups.values(), key=len)
    return brief(_folded(most, path_pattern)) + (", ..." if len(groups) > 1 else "")


def _fold_key(row: Residual) -> object:
    return row.kind, row.shape, row.dtype, row.nbytes, path_pattern(row.origin), _name_pattern(row.name)


def path_pattern(path: str) -> str:
    """`params['layers'][*]['w']` for `params['layers'][3]['w']`, and `mm in h.*.mlp` for `mm in h.3.mlp`."""
    path = re.sub(r"(?<= in )\S+", lambda module: module_pattern(module[0]), path)
    return re.sub(r"(?<=\[)\d+(?=\])|(?<=[.'\"])\d+(?=[.'\"])|^\d+(?=\.)", "*", path)


def module_pattern(module: str) -> str:
    """`h.*.mlp` for `h.3.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def brief(origin: str) -> str:
    """Leaves the line out where there is a module: `mm in h.3.mlp` for `mm in h.3.mlp at gpt2.py:12`."""
    return re.sub(r"( in \S+) at \S+$", r"\1", origin)


def _name_pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Returns lines with the rows' cells in columns, two blanks apart; those numbered in `right` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """Returns `text`, or without its middle if it is longer than `width`: both ends tell where it comes from.

    An operation keeps its name, and the path of its module loses its head: `mm in ...attention.self.query`.
    """
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    start = text.find(" in ") + len(" in ")
    if len(" in ") <= start <= width - _TAIL:
        head = start
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


_TAIL = 12  # a path is cut no shorter than to this
