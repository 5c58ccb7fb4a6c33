"""Residuals of a schedule, each with its size, its origin and the reason why it is saved; and their table."""

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
    """A tensor that is held from the forward to the backward pass."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: Any
    """A `torch.dtype`, or its name if `residuals` was called without `dtype`."""
    origin: str
    """The path of an argument or parameter, `params['w']`, or the operation that made the tensor: `mm at model.py:12
    (fn)`, within modules `mm in encoder.layer.3.mlp at model.py:12`."""
    name: str
    """The name that `checkpoint_name` has given to the tensor; empty if none."""
    reason: str
    """The first operation of the backward pass, or of a recompute in it, that reads the tensor."""
    recompute_seconds: float | None
    """The time to recompute the tensor from the other residuals. None for arguments and outputs, and for tensors that
    cannot be recomputed."""
    kind: Kind = "intermediate"
    """Intermediates cost memory. Arguments and outputs are held in any case."""


def residuals(graph: Graph, schedule: Schedule, dtype: Callable[[str], Any] = str) -> list[Residual]:
    """Lists the residuals of a schedule, in the order in which they are made.

    Args:
        graph: the graph.
        schedule: a valid schedule of the graph.
        dtype: a function from the name of a dtype to the value of `Residual.dtype`.

    Returns:
        All intermediates that are held between the passes, and the arguments and outputs that the backward pass reads.
        The bytes of the intermediates and of all outputs add up to `Timeline.forward_nbytes`.
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
    """Returns the values that are live at the end of the forward pass: inputs, outputs and saved intermediates."""
    live = set(graph.inputs)
    for step in schedule.forward:
        if isinstance(step, Compute):
            live.update(graph.nodes[step.node].outputs)
        else:
            live.discard(step.value)
    return frozenset(live)


def _first_readers(schedule: Schedule, graph: Graph, held: Collection[int]) -> dict[int, int]:
    """Returns, by value of `held`, the first node of the backward pass that reads it before it is freed."""
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
    """Returns the seconds to recompute `value` from the other held values; None if a node must not run again."""
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
    """Formats an operation with its source: `mm in encoder.layer.3.mlp at model.py:12`, `mm at model.py:12 (fn)`."""
    return short_op(node) + node.place


def short_op(node: Node) -> str:
    """Formats an operation without namespace and overload: `mm` for `aten.mm.default`."""
    return ".".join(node.op.split(".")[:2]).removeprefix("aten.")


# As text ----------------------------------------------------------------------------------------------------------

_WIDTHS = (9, 24, 34, 36, 9)
"""The maximum widths of the columns; 120 in all with the gaps between them."""


def format_residuals(rows: Iterable[Residual]) -> str:
    """Formats residuals as a table of at most 120 columns, with totals.

    Intermediates come first, then outputs, then arguments; within each kind, the largest come first. Residuals of
    repeated blocks (with the same line and shape, or arguments whose paths differ in an index) are one row, marked
    "x12", with their sums.

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
    totals = [*table, *_totals(rows)]  # aligned together with the table, so that the bytes share a column
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
    """Returns the most frequent text. The texts of repeated blocks count as one."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(path_pattern(text), []).append(text)
    most = max(groups.values(), key=len)
    return brief(_folded(most, path_pattern)) + (", ..." if len(groups) > 1 else "")


def _fold_key(row: Residual) -> object:
    return row.kind, row.shape, row.dtype, row.nbytes, path_pattern(row.origin), _name_pattern(row.name)


def path_pattern(path: str) -> str:
    """Replaces indices by `*`: `params['a'][*]['w']` for `params['a'][3]['w']`, `mm in h.*.mlp` for `mm in h.3.mlp`."""
    path = re.sub(r"(?<= in )\S+", lambda module: module_pattern(module[0]), path)
    return re.sub(r"(?<=\[)\d+(?=\])|(?<=[.'\"])\d+(?=[.'\"])|^\d+(?=\.)", "*", path)


def module_pattern(module: str) -> str:
    """Replaces indices in a module path by `*`: `h.*.mlp` for `h.3.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def brief(origin: str) -> str:
    """Removes the line if there is a module: `mm in h.3.mlp` for `mm in h.3.mlp at gpt2.py:12`."""
    return re.sub(r"( in \S+) at \S+$", r"\1", origin)


def _name_pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Returns lines with the cells in columns, two blanks apart. Columns whose numbers are in `right` align right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """Shortens `text` to `width` by replacing its middle by "...", because both ends identify the origin.

    In `mm in encoder.layer.3.attention.self.query`, the start of the path is cut: `mm in ...attention.self.query`.
    """
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    start = text.find(" in ") + len(" in ")
    if len(" in ") <= start <= width - _TAIL:
        head = start
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


_TAIL = 12  # the minimum length of the end of a path that is cut
