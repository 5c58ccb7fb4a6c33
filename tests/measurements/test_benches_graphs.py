"""The loader of the published graphs, on files of their form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benches import solvers
from benches.common.checkmate import load
from fckpt.graph import simulate
from fckpt.solve._save_all import save_all


def written(path: Path, nodes: list[dict[str, Any]], edges: list[tuple[int, int]], **graph: Any) -> Path:
    ends = ("0", "1") if graph else ("source", "target")
    links = [dict(zip(ends, edge, strict=True)) for edge in edges]
    path.write_text(json.dumps({"graph": {"name": "tiny", **graph}, "nodes": nodes, "links": links}))
    return path


def step(path: Path, edges: list[tuple[int, int]]) -> Path:
    """Two layers and their backward pass, as the Checkmate graphs are."""
    sizes = {"a": 4, "b": 2, "loss": 1, "b_backward": 3, "a_backward": 5}
    nodes = [
        {"id": i, "name": name, "backward": i > 1, "cost_cpu": i + 1, "cost_ram": nbytes}
        for i, (name, nbytes) in enumerate(sizes.items())
    ]
    return written(path, nodes, edges)


def test_a_training_step(tmp_path: Path):
    path = step(tmp_path / "step.json", [(0, 1), (1, 2), (0, 3), (2, 3), (0, 4), (3, 4)])
    graph = load(path)
    assert [n.op for n in graph.nodes] == ["a", "b", "loss", "b_backward", "a_backward"]
    assert [n.backward for n in graph.nodes] == [False, False, True, True, True]
    assert [n.inputs for n in graph.nodes] == [(), (0,), (1, 5), (0, 2), (0, 3)]
    assert (graph.boundary, graph.cotangents, graph.outputs, graph.gradients) == (2, (5,), (), (4,))
    assert graph.values[5].nbytes == 0 and graph.seconds == 15
    assert simulate(graph, save_all(graph)).peak_nbytes == 12


def test_a_random_layered_graph_has_an_order_and_no_backward_pass(tmp_path: Path):
    nodes = [{"name": i, "duration": 10 * i, "out_cost": i + 1} for i in range(3)]
    graph = load(written(tmp_path / "layers.json", nodes, [(0, 2), (2, 1)], order=[0, 2, 1]))
    assert [(n.op, n.inputs, n.seconds) for n in graph.nodes] == [("0", (), 0.0), ("2", (0,), 20.0), ("1", (1,), 10.0)]
    assert [v.nbytes for v in graph.values] == [1, 3, 2]
    assert (graph.boundary, graph.cotangents, graph.outputs, graph.gradients) == (3, (), (2,), ())


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(1, 0), (1, 2), (2, 3), (3, 4)], "node 0 comes before node 1, which it reads"),
        ([(0, 1), (1, 2), (2, 3), (0, 4)], "do not depend on the first of them, 2"),
    ],
)
def test_what_does_not_fit_is_refused(edges: list[tuple[int, int]], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        load(step(tmp_path / "step.json", edges))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nodes": []}', r"other\.json: no node-link data"),
        ('{"nodes": [{"id": 0}], "graph": {}, "links": []}', r"other\.json: a node or an edge is not .*KeyError"),
        ("", r"other\.json: no JSON"),
    ],
)
def test_another_file_is_refused(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)
    with pytest.raises(SystemExit):
        solvers.main(["--files", str(path)])
    assert re.search(message, capsys.readouterr().err)
