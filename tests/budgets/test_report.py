"""Reports: exact texts for a small graph, totals that add up, and pictures whose heights are right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fckpt.graph import Compute, Graph, Node, Schedule, Timeline, Value, schedule_of, simulate
from fckpt.report import summary, timeline
from fckpt.report.summary import summary_line, summary_table
from fckpt.report.table import Residual, aligned, format_residuals, held_between, residuals, shortened
from fckpt.report.timeline import memory_svg

KB = 1024


def layers(depth: int, once: bool = False) -> Graph:
    """sum(tanh(tanh(x @ w0) @ w1) ...), in 1 KiB blocks; products take 1 ms, all else 1/4 ms.

    Node 2i is the product of layer i, 2i + 1 its tanh; the values are x, the weights, the cotangent, then these.
    """
    values: list[Value] = []
    nodes: list[Node] = []

    def value(nbytes: int, producer: int | None, origin: str, name: str = "") -> int:
        shape = (16, 16) if nbytes == KB else ()
        values.append(Value(len(values), nbytes, producer, origin, (name,) if name else (), shape, "float32"))
        return len(values) - 1

    def node(op: str, inputs: Sequence[int], line: int, *, backward: bool = False, name: str = "") -> int:
        made = value(4 if "sum" in op else KB, len(nodes), op, name)
        seconds = 1e-3 if op == "aten.mm.default" else 0.25e-3
        source = f"mlp.py:{line} (forward)"
        nodes.append(
            Node(
                id=len(nodes),
                op=op,
                inputs=tuple(inputs),
                outputs=(made,),
                backward=backward,
                once=once and len(nodes) == 1,
                seconds=seconds,
                source=source,
            )
        )
        return made

    x = value(KB, None, "x")
    weights = [value(KB, None, f"params['layers'][{i}]['w']") for i in range(depth)]
    cotangent = value(4, None, "a cotangent")
    hidden = [x]
    for i, w in enumerate(weights):
        product = node("aten.mm.default", (hidden[-1], w), 7)
        hidden.append(node("aten.tanh.default", (product,), 8, name=f"h{i}"))
    out = node("aten.sum.default", (hidden[-1],), 9)
    boundary, gradients, gradient = len(nodes), [], cotangent
    for i in reversed(range(depth)):
        gradient = node("aten.tanh_backward.default", (gradient, hidden[i + 1]), 8, backward=True)
        gradients.append(node("aten.mm.default", (hidden[i], gradient), 7, backward=True))
        if i:
            gradient = node("aten.mm.default", (gradient, weights[i]), 7, backward=True)
    return Graph(tuple(nodes), tuple(values), (x, *weights), (cotangent,), (out,), tuple(gradients), boundary)


def plain(graph: Graph) -> Schedule:
    everything = range(len(graph.nodes))
    return schedule_of(graph, everything[: graph.boundary], everything[graph.boundary :])


def again(graph: Graph, nodes: Sequence[int]) -> Schedule:
    """The schedule that runs these nodes of the forward pass a second time, before the backward pass."""
    everything = range(len(graph.nodes))
    return schedule_of(graph, everything[: graph.boundary], [*nodes, *everything[graph.boundary :]])


# Residuals --------------------------------------------------------------------------------------------------------


def test_residuals() -> None:
    graph = layers(2)
    tanh, product = "tanh at mlp.py:8 (forward)", "mm at mlp.py:7 (forward)"
    seconds = 1e-3 + 0.25e-3
    assert residuals(graph, plain(graph)) == [
        Residual(KB, (16, 16), "float32", "x", "", product, None, "argument"),
        Residual(KB, (16, 16), "float32", "params['layers'][1]['w']", "", product, None, "argument"),
        Residual(KB, (16, 16), "float32", tanh, "h0", product, seconds),
        Residual(KB, (16, 16), "float32", tanh, "h1", "tanh_backward at mlp.py:8 (forward)", seconds),
    ]


def test_residuals_of_a_schedule_that_recomputes() -> None:
    graph = layers(2)
    rows = residuals(graph, again(graph, range(4)))
    assert [(row.origin, row.reason, row.kind) for row in rows] == [
        ("x", "recompute of mm at mlp.py:7 (forward)", "argument"),
        ("params['layers'][0]['w']", "recompute of mm at mlp.py:7 (forward)", "argument"),
        ("params['layers'][1]['w']", "recompute of mm at mlp.py:7 (forward)", "argument"),
    ]
    # Kept in the first layer, the tanh is what the second layer's is computed from: both layers if it were not.
    rows = residuals(graph, again(graph, [2, 3]))
    assert [(row.name, row.reason) for row in rows if row.kind == "intermediate"] == [
        ("h0", "recompute of mm at mlp.py:7 (forward)")
    ]


def test_the_recompute_chain_ends_at_what_is_held() -> None:
    graph = layers(3)
    held = {4 + 2, 4 + 6}  # h0 and h2
    schedule = again(graph, [2, 3])
    rows = {row.name: row for row in residuals(graph, schedule)}
    assert held <= held_between(graph, schedule)
    assert rows["h0"].recompute_seconds == pytest.approx(1.25e-3)
    assert rows["h2"].recompute_seconds == pytest.approx(2.5e-3)


def test_what_cannot_be_recomputed() -> None:
    graph = layers(2, once=True)
    rows = {row.name: row for row in residuals(graph, plain(graph))}
    assert rows["h0"].recompute_seconds is None
    assert rows["h1"].recompute_seconds == pytest.approx(1.25e-3)


def test_residuals_that_nothing_reads_and_that_are_gradients() -> None:
    values = (Value(0, 4, None, "x"), Value(1, 4, 0), Value(2, 4, 1), Value(3, 4, 2))
    nodes = (Node(0, "aten.exp.default", (0,), (1,)), Node(1, "a.b.c", (0,), (2,)), Node(2, "a.out.c", (0,), (3,)))
    graph = Graph(nodes, values, (0,), (), (3,), (2,), boundary=3)
    wasteful = Schedule(plain(graph).forward[:1] + plain(graph).forward[2:], ())
    rows = residuals(graph, wasteful)
    assert [(row.origin, row.reason) for row in rows] == [("exp", "nothing"), ("a.b", "it is a gradient")]


@given(depth=st.integers(1, 6), data=st.data())
def test_totals_add_up(depth: int, data: st.DataObject) -> None:
    graph = layers(depth)
    first = data.draw(st.integers(0, depth - 1))
    schedule = data.draw(st.sampled_from([plain(graph), again(graph, range(2 * first, 2 * depth))]))
    ran = simulate(graph, schedule)
    rows = residuals(graph, schedule)
    outputs = sum(graph.values[v].nbytes for v in graph.outputs)
    assert sum(row.nbytes for row in rows if row.kind == "intermediate") + outputs == ran.forward_nbytes
    total = re.split(r"  +", summary_table(graph, schedule, ran, ran, solver="s").splitlines()[-1])
    assert total[0] == "total"
    assert total[4] == (str(ran.recomputed_nodes) if ran.recomputed_nodes else "-")


def test_table() -> None:
    graph = layers(3)
    expected = """\
   bytes  what                from                              needed by                      recompute
3.00 KiB  float32[16, 16] x3  'h*', tanh at mlp.py:8 (forward)  mm at mlp.py:7 (forward), ...    3.75 ms
2.00 KiB  float32[16, 16] x2  params['layers'][*]['w']          mm at mlp.py:7 (forward)               -
1.00 KiB  float32[16, 16]     x                                 mm at mlp.py:7 (forward)               -

3.00 KiB  3 intermediates
3.00 KiB  3 arguments that backward needs, held anyway"""
    assert format_residuals(residuals(graph, plain(graph))).splitlines() == expected.splitlines()


def test_table_of_nothing() -> None:
    assert format_residuals([]) == "Nothing is held between the forward and the backward pass."


def test_table_marks_outputs() -> None:
    output = Residual(8, (2,), "float32", "exp at a.py:1 (f)", "y", "mul at a.py:1 (f)", None, "output")
    one = Residual(1, (), "bool", "gt at a.py:2 (f)", "", "where at a.py:2 (f)", None)
    assert format_residuals([output, one]).splitlines() == [
        "bytes  what        from                            needed by            recompute",
        "  1 B  bool[]      gt at a.py:2 (f)                where at a.py:2 (f)          -",
        "  8 B  float32[2]  output, 'y', exp at a.py:1 (f)  mul at a.py:1 (f)            -",
        "",
        "  1 B  1 intermediate",
        "  8 B  1 output that backward needs, held anyway",
    ]


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        (["p[0]['w']", "p[11]['w']"], "p[*]['w']"),
        (["p['h.0.w']", "p['h.3.w']"], "p['h.*.w']"),
        (["p['0']['w']", "p['1']['w']"], "p['*']['w']"),
        (["p['w1']", "p['w2']"], None),
        (["p['w']", "p['w']"], "p['w']"),
    ],
)
def test_folding(paths: list[str], folded: str | None) -> None:
    lines = format_residuals([Residual(4, (), "int8", p, "", "r", None, "argument") for p in paths]).splitlines()
    if folded is None:
        assert [path in line for path, line in zip(paths, lines[1:], strict=False)] == [True, True]
    else:
        assert folded in lines[1] and "x2" in lines[1]


def test_tables_are_at_most_120_columns_wide() -> None:
    long = "aten._scaled_dot_product_efficient_attention at a_long_file_name.py:1234 (Transformer.forward)"
    row = Residual(1023 * KB**2, (1024,) * 9, "complex128", long, "name" * 20, "recompute of " + long, 59.9)
    assert max(map(len, format_residuals([row]).splitlines())) <= 120
    values = (Value(0, 8, None, "x"), Value(1, 1023 * KB**2, 0))
    graph = Graph(
        (Node(0, long.split()[0] + ".default", (0,), (1,), source=long * 2, seconds=59.0),),
        values,
        (0,),
        (),
        (1,),
        (),
        1,
    )
    ran = simulate(graph, plain(graph))
    assert max(map(len, summary_table(graph, plain(graph), ran, ran, solver="s").splitlines())) <= 120


def test_aligned_and_shortened() -> None:
    assert aligned([("a", "bb"), ("ccc", "d")], right=(1,)) == ["a    bb", "ccc   d"]
    assert aligned([("a", "b"), ("ccc", "")]) == ["a    b", "ccc"]
    assert shortened("0123456789", 10) == "0123456789"
    assert shortened("0123456789x", 10) == "012...789x"


# Summaries --------------------------------------------------------------------------------------------------------


def test_summary() -> None:
    graph = layers(3)
    schedule = again(graph, range(2, 6))
    ran, baseline = simulate(graph, schedule), simulate(graph, plain(graph))
    expected = """\
peak 5.01 KiB (budget 6.00 KiB), 100.0% of 5.01 KiB; time +25.6% (9.75 ms -> 12.3 ms); 4 recomputations; solver chen

operation                   count  kept     bytes  again     time
mm at mlp.py:7 (forward)        3     -         -      2  2.00 ms
tanh at mlp.py:8 (forward)      3     1  1.00 KiB      2   500 us
sum at mlp.py:9 (forward)       1     1       4 B      -        -
total                           7     2  1.00 KiB      4  2.50 ms"""
    text = summary_table(graph, schedule, ran, baseline, solver="chen", budget=6 * KB)
    assert text.splitlines() == expected.splitlines()


def test_summary_of_a_backward_node_that_runs_twice() -> None:
    graph = layers(2)
    everything = list(range(len(graph.nodes)))
    schedule = schedule_of(graph, everything[:5], [*everything[5:8], 5, *everything[8:]])
    ran = simulate(graph, schedule)
    text = summary_table(graph, schedule, ran, ran, solver="s")
    assert "tanh_backward at mlp.py:8 (forward), backward      2     -         -      1" in text


def test_summary_of_nothing() -> None:
    graph = Graph((), (Value(0, 4, None),), (0,), (), (), (), 0)
    ran = simulate(graph, plain(graph))
    text = summary_table(graph, plain(graph), ran, ran, solver="none")
    assert text == "peak 0 B; no recomputations; solver none\nNothing is saved, and nothing is recomputed."


def test_summary_line() -> None:
    ran = Timeline((8, 4), 8, 0, 4, 0.0, 0.0, 1)
    assert summary_line(ran, ran, solver="s") == "peak 8 B, 100.0% of 8 B; 1 recomputation; solver s"
    assert summary_line(ran, ran, solver="s", budget=7).startswith("peak 8 B (over the budget of 7 B), 100.0%")


def test_long_summaries_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(3)
    schedule = again(graph, range(2, 6))
    ran = simulate(graph, schedule)
    monkeypatch.setattr(summary, "ROWS", 1)
    lines = summary_table(graph, schedule, ran, ran, solver="s").splitlines()
    assert [re.split("  +", line)[0] for line in lines[3:]] == ["tanh at mlp.py:8 (forward)", "2 others", "total"]
    assert re.split(" +", lines[-2])[2:] == ["4", "1", "4", "B", "2", "2.00", "ms"]


# Pictures ---------------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def of(*live: int) -> Timeline:
    return Timeline(live, max(live), live.index(max(live)), live[0], 1.0, 0.0, 0)


def heights(path: ElementTree.Element) -> list[float]:
    """How high a curve goes above the axis, step by step, in the picture's units."""
    ys = [float(y) for y in re.findall(r"(?:M[\d.]+ |V)([\d.]+)", path.attrib["d"])]
    return [timeline.HEIGHT - timeline.BOTTOM - y for y in ys]


def test_picture() -> None:
    before, after = of(100, 800, 400, 300), of(100, 500, 200, 450, 300, 20)
    svg = memory_svg(before, after, 600, forward_steps=(2, 3))
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    (title, desc) = root.attrib["aria-labelledby"].split()
    texts = {e.attrib["id"]: e.text for e in root if "id" in e.attrib}
    assert texts == {
        title: "Memory during one training step",
        desc: "Live bytes over the steps of the forward and the backward pass. The plain function peaks at 800 B in "
        "4 steps, the plan at 500 B in 6 steps. The budget is 600 B.",
    }
    curves = [heights(path) for path in root.iter(f"{SVG}path")]
    scale = (timeline.HEIGHT - timeline.TOP - timeline.BOTTOM) / 800
    assert curves[0] == pytest.approx([scale * b for b in before.live_nbytes], abs=0.01)
    assert curves[1] == pytest.approx([scale * b for b in after.live_nbytes], abs=0.01)
    (budget,) = (e for e in root.iter(f"{SVG}line") if e.attrib.get("stroke-dasharray") == "6 4")
    assert budget.attrib["y1"] == budget.attrib["y2"]
    assert timeline.HEIGHT - timeline.BOTTOM - float(budget.attrib["y1"]) == pytest.approx(600 * scale, abs=0.01)
    boundaries = [e.attrib["x1"] for e in root.iter(f"{SVG}line") if e.attrib.get("stroke-dasharray") == "2 3"]
    inner = timeline.WIDTH - timeline.LEFT - timeline.RIGHT
    assert [float(x) - timeline.LEFT for x in boundaries] == pytest.approx([inner * 2 / 6, inner * 3 / 6], abs=0.01)
    assert [e.text for e in root.iter(f"{SVG}text")] == [
        *("0", "200 B", "400 B", "600 B", "800 B"),
        *("0", "1", "2", "3", "4", "5", "6", "steps"),
        *("forward", "backward", "plain: peak 800 B", "plan: peak 500 B", "budget: 600 B"),
    ]


def test_picture_without_budget_and_boundary() -> None:
    root = ElementTree.fromstring(memory_svg(of(3 * KB**3), of(KB**3)))
    assert not [e for e in root.iter(f"{SVG}line") if "stroke-dasharray" in e.attrib]
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert texts[:7] == ["0", "0.5 GiB", "1 GiB", "1.5 GiB", "2 GiB", "2.5 GiB", "3 GiB"]


@pytest.mark.parametrize("nbytes", [0, 1, 3, KB - 1, KB, 999 * KB, KB**2 - 1, 7 * KB**4, 3 * KB**5])
def test_pictures_of_any_size(nbytes: int) -> None:
    root = ElementTree.fromstring(memory_svg(of(nbytes), of(0)))
    (high, low) = (max(heights(path)) for path in root.iter(f"{SVG}path"))
    assert low == 0 and 0 <= high <= timeline.HEIGHT - timeline.TOP - timeline.BOTTOM
    ticks = [e for e in root.iter(f"{SVG}text") if e.attrib["text-anchor"] == "end"]
    assert 1 < len(ticks) <= 8


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=5000), st.integers(0, 4999))
def test_long_curves_keep_their_peak(live: list[int], shift: int) -> None:
    longer = (live * (5000 // len(live) + 1))[shift:] + [10**12 + shift]
    (curve, _) = map(heights, ElementTree.fromstring(memory_svg(of(*longer), of(1))).iter(f"{SVG}path"))
    assert len(curve) <= timeline.POINTS
    inner = timeline.HEIGHT - timeline.TOP - timeline.BOTTOM
    assert max(curve) == pytest.approx(inner * (10**12 + shift) / (1000 * KB**3), abs=0.01)  # the axis ends at 1000 GiB


def test_pictures_do_not_share_ids() -> None:
    first, second = memory_svg(of(3), of(2)), memory_svg(of(3), of(1))
    assert not set(re.findall('id="([^"]+)"', first)) & set(re.findall('id="([^"]+)"', second))


def test_the_strip_marks_the_steps_that_recompute() -> None:
    graph = layers(3)
    forward, backward = [*range(graph.boundary)], [*range(graph.boundary, len(graph.nodes))]
    plain = simulate(graph, schedule_of(graph, forward, backward))
    assert plain.recomputed_steps == () and plain.recomputed_nodes == 0
    schedule = schedule_of(graph, forward, [1, *backward])
    again = simulate(graph, schedule)
    steps = (*schedule.forward, *schedule.backward)
    assert [steps[i] for i in again.recomputed_steps] == [Compute(1)] and again.recomputed_nodes == 1
    assert "recomputed" in memory_svg(plain, again) and "recomputed" not in memory_svg(again, plain)
