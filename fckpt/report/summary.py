"""Summaries of a plan: one line, and a table of saved and recomputed operations by line of the user's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fckpt._units import format_bytes, format_seconds
from fckpt.graph.graph import Graph, Node
from fckpt.graph.schedule import Compute, Schedule
from fckpt.graph.simulation import Timeline
from fckpt.report.table import aligned, brief, held_between, module_pattern, path_pattern, place, shortened

__all__ = ["ROWS", "summary_line", "summary_table"]

ROWS = 40
"""The most rows of a table. The operations with the least bytes and time are combined into one additional row."""

_WIDTH = 62


@dataclass
class _Row:
    """A row of the table: the operations of one line of code with results of the same shape, in all repeated blocks."""

    what: str
    operations: int = 0
    kept: int = 0
    kept_nbytes: int = 0
    again: int = 0
    seconds: float = 0.0

    def add(self, other: _Row) -> None:
        self.operations += other.operations
        self.kept += other.kept
        self.kept_nbytes += other.kept_nbytes
        self.again += other.again
        self.seconds += other.seconds

    def cells(self) -> list[str]:
        kept = [str(self.kept), format_bytes(self.kept_nbytes)] if self.kept else ["-", "-"]
        again = [str(self.again), format_seconds(self.seconds)] if self.again else ["-", "-"]
        return [shortened(self.what, _WIDTH), str(self.operations), *kept, *again]


def summary_line(
    timeline: Timeline, baseline: Timeline, *, solver: str, budget: int | None = None, gap: float | None = None
) -> str:
    """Formats the peak, time and recomputations of a plan as one line.

    Args:
        timeline: the timeline of the plan.
        baseline: the timeline of the plain function.
        solver: the solver that made the plan.
        budget: the budget in bytes; None if there was none.
        gap: the overhead minus its lower bound; 0 if the plan is optimal, None if unknown.

    Example:
        >>> plan = Timeline((3, 2), 3 * 2**30, 0, 2**30, 1.5, 0.5, 7)
        >>> plain = Timeline((8, 2), 8 * 2**30, 0, 2**30, 1.0, 0.0, 0)
        >>> print(summary_line(plan, plain, solver="ogc", budget=4 * 2**30))
        peak 3.00 GiB (budget 4.00 GiB), 37.5% of 8.00 GiB; time +50.0% (1.00 s -> 1.50 s); 7 recomputations; solver ogc
    """
    allowed = f" (budget {format_bytes(budget)})" if budget is not None else ""
    if budget is not None and timeline.peak_nbytes > budget:
        allowed = f" (over the budget of {format_bytes(budget)})"
    parts = [f"peak {format_bytes(timeline.peak_nbytes)}{allowed}"]
    if baseline.peak_nbytes:
        share = timeline.peak_nbytes / baseline.peak_nbytes
        parts[0] += f", {share:.1%} of {format_bytes(baseline.peak_nbytes)}"
    if timeline.seconds:
        before, after = format_seconds(timeline.seconds - timeline.recomputed_seconds), format_seconds(timeline.seconds)
        parts.append(f"time {timeline.overhead:+.1%}" + (f" ({before} -> {after})" if before != after else ""))
        if gap is not None:
            parts[-1] += ", which is the least" if gap == 0 else f", at most {_points(gap)} above the least"
    number = timeline.recomputed_nodes
    parts += [f"{number or 'no'} recomputation{'' if number == 1 else 's'}", f"solver {solver}"]
    return "; ".join(parts)


def _points(gap: float) -> str:
    return f"{100 * gap:.1f} points" if gap >= 5e-4 else "0.1 points"


def summary_table(
    graph: Graph,
    schedule: Schedule,
    timeline: Timeline,
    baseline: Timeline,
    *,
    solver: str,
    budget: int | None = None,
    gap: float | None = None,
) -> str:
    """Formats `summary_line`, followed by a table of saved and recomputed operations.

    Operations of the same line and shape in repeated modules (`mm in h.*.mlp`) are one row. Rows are in execution
    order. If several rows of a module would have the same label, their lines are added. The column "kept" counts the
    values that are held between the passes, including outputs. The column "again" counts recomputations; their time is
    in the last column. Operations with neither are omitted. The table is at most 120 columns wide.

    Args:
        graph: the graph.
        schedule: a valid schedule of the graph.
        timeline: the timeline of the schedule.
        baseline: the timeline of the plain function.
        solver: the solver that made the schedule.
        budget: the budget in bytes; None if there was none.
        gap: see `summary_line`.
    """
    line = summary_line(timeline, baseline, solver=solver, budget=budget, gap=gap)
    rows = [row for row in _rows(graph, schedule) if row.kept or row.again]
    if not rows:
        return f"{line}\nNothing is saved, and nothing is recomputed."
    total = _sum("total", rows)
    table = [
        ["operation", "count", "kept", "bytes", "again", "time"],
        *(row.cells() for row in [*_weightiest(rows), total]),
    ]
    return "\n".join([line, "", *aligned(table, right=range(1, 6))])


def _rows(graph: Graph, schedule: Schedule) -> list[_Row]:
    held = held_between(graph, schedule)
    runs = Counter(step.node for step in (*schedule.forward, *schedule.backward) if isinstance(step, Compute))
    groups: dict[object, list[Node]] = {}
    for node in graph.nodes:
        groups.setdefault(_block(graph, node), []).append(node)
    rows = []
    for nodes, label in zip(groups.values(), _labels(list(groups.values())), strict=True):
        row = _Row(label)
        for node in nodes:
            kept = [graph.values[v].nbytes for v in node.outputs if v in held]
            again = max(runs[node.id] - 1, 0)
            row.add(_Row("", 1, len(kept), sum(kept), again, again * node.seconds))
        rows.append(row)
    return rows


def _block(graph: Graph, node: Node) -> object:
    shapes = tuple(graph.values[v].shape for v in node.outputs)
    return node.op, module_pattern(node.module), node.source, node.backward, shapes


def _labels(groups: Sequence[Sequence[Node]]) -> list[str]:
    """Returns the labels of the rows: operation and module, and the line if rows would otherwise have one label."""
    full = [_folded(nodes) for nodes in groups]
    several = Counter(map(brief, dict.fromkeys(full)))
    labels = [brief(text) if several[brief(text)] == 1 else text for text in full]
    return [text + (", backward" if nodes[0].backward else "") for text, nodes in zip(labels, groups, strict=True)]


def _folded(nodes: Sequence[Node]) -> str:
    modules = {node.module for node in nodes}
    return place(nodes[0]) if len(modules) == 1 else path_pattern(place(nodes[0]))


def _sum(what: str, rows: Iterable[_Row]) -> _Row:
    total = _Row(what)
    for row in rows:
        total.add(row)
    return total


def _weightiest(rows: Sequence[_Row]) -> list[_Row]:
    """Returns the rows with the most bytes and recompute time, in order, and the others combined into one row."""
    if len(rows) <= ROWS:
        return list(rows)
    total = _sum("", rows)

    def weight(row: _Row) -> float:
        time = row.seconds / total.seconds if total.seconds else row.again / (total.again or 1)
        return row.kept_nbytes / (total.kept_nbytes or 1) + time

    chosen = sorted(range(len(rows)), key=lambda i: -weight(rows[i]))[:ROWS]
    others = [row for i, row in enumerate(rows) if i not in chosen]
    return [*(rows[i] for i in sorted(chosen)), _sum(f"{len(others)} others", others)]
