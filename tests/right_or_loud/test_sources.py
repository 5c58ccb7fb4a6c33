"""Tables and errors name modules by their paths: `mm in encoder.layer.3.mlp`."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fckpt
from fckpt._capture.sources import Names, Source, current, named, running, source_of
from fckpt.report.table import path_pattern, shortened


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, mlp: type[nn.Module] = Mlp) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).exp()


def places(fn: Any, *args: Any) -> list[tuple[str, str]]:
    """(operation, module) of the nodes of a plan, forward first."""
    graph = fckpt.plan(fn, *args, budget=1.0).graph
    return [(node.op.split(".")[1], node.module) for node in graph.nodes]


X = torch.randn(4, 8)
STEPS = [("addmm", ".up"), ("tanh", ""), ("addmm", ".down")]
FORWARD = [(op, f"layers.{i}{module}") for i in range(3) for op, module in STEPS]


def test_operations_know_their_module() -> None:
    model = Model()
    found = places(model, X)
    assert [place for place in found if place[1].startswith("layers")][:9] == FORWARD
    assert ("exp", "") in found and ("addmm", "head") in found


@pytest.mark.parametrize("outputs", [None, 0])  # with outputs, the Python code is traced instead of captured
def test_operations_know_their_line(outputs: int | None) -> None:
    graph = fckpt.plan(Model(), X, budget=1.0, outputs=outputs).graph
    lines = {node.source for node in graph.nodes[: graph.boundary]}
    assert lines and all(re.fullmatch(r"test_sources\.py:\d+ \(forward\)", line) for line in lines)


@pytest.mark.parametrize("wrap", [lambda m: lambda x: m(x).sum(), lambda m: m.forward, lambda m: fckpt.remat(m)])
def test_one_model_needs_no_prefix(wrap: Any) -> None:
    assert ("tanh", "layers.1") in places(wrap(Model()), X)


def test_several_models_go_by_their_variables() -> None:
    actor, critic, loss = Model(), Model(), nn.MSELoss()
    found = places(lambda x: loss(actor(x), critic(x)), X)
    assert {("tanh", "actor.layers.1"), ("tanh", "critic.layers.1"), ("mse_loss", "loss")} <= set(found)


def test_a_loss_beside_one_model() -> None:
    model, loss = Model(), nn.MSELoss()
    found = places(lambda x: loss(model(x), x[:, :1]), X)
    assert {("tanh", "layers.1"), ("mse_loss", "loss")} <= set(found)


def test_models_in_an_object() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.other = Model(), nn.Linear(1, 1)

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.net(x)).sum()

    found = places(Trainer().loss, X)
    assert {("tanh", "net.layers.1"), ("addmm", "other")} <= set(found)


def test_models_that_are_arguments() -> None:
    assert ("tanh", "layers.1") in places(lambda net, x: net(x), Model(), X)


def test_backward_is_named_like_forward() -> None:
    """Also where operations without a derivative of their own follow, as the mask of dropout does."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Dropout(0.5)), nn.Linear(8, 1))
    assert {("tanh_backward", "1.0"), ("tanh", "1.0"), ("mul", "1.1")} <= set(places(model, X))


def test_modules_that_are_shared_go_by_their_first_path() -> None:
    model = Model()
    model.layers[2] = model.layers[0]
    assert [m for op, m in places(model, X) if op == "tanh"] == ["layers.0", "layers.1", "layers.0"]


def test_blocks_within() -> None:
    model = Model()
    fckpt.remat_blocks(model)
    assert ("tanh", "layers.1") in places(model, X)


def test_operations_of_other_threads_are_not_taken_over() -> None:
    model, seen = Model(), []
    with named(Names(model.forward)):
        thread = threading.Thread(target=lambda: (model(X), seen.append(current().module)))
        with running("here"):
            thread.start()
            thread.join()
    assert seen == [""]


def test_nothing_of_a_trace_stays() -> None:
    before = nn.Module.__call__
    places(Model(), X)
    assert nn.Module.__call__ is before
    with pytest.raises(fckpt.TraceError):
        fckpt.plan(lambda x: x.sum().item() * x, X.requires_grad_(), budget=1.0)
    X.requires_grad_(False)
    assert nn.Module.__call__ is before


# -- in tables and errors ------------------------------------------------------------------------------------


def test_repeated_blocks_are_one_row() -> None:
    model = Model()
    text = str(fckpt.plan(lambda x: model(x).sum(), X.repeat(16, 1), budget=0.9))
    assert re.search(r"^tanh in layers\.\* +3 ", text, re.MULTILINE), text


def test_lines_tell_rows_of_one_module_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.up(x))
            return torch.tanh(x * x)

    model = Model(Twice)
    text = str(fckpt.plan(lambda x: model(x).sum(), X, budget=1.0))
    assert len(re.findall(r"^tanh in layers\.\* at test_sources\.py:\d+ +3 ", text, re.MULTILINE)) == 2, text


def test_residuals_name_modules_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    rows = fckpt.saved_residuals(model, X)
    origins = {row.origin for row in rows}
    assert {"layers.0.down.weight", "layers.2.down.weight", "head.weight"} <= origins
    assert any(re.fullmatch(r"tanh in layers\.1 at test_sources\.py:\d+", origin) for origin in origins), origins
    fckpt.print_saved_residuals(model, X)
    printed = capsys.readouterr().out
    assert "layers.*.down.weight" in printed
    assert re.search(r"float32\[4, 16\] x3 +tanh in layers\.\* +mm in layers\.\*\.down ", printed), printed


def test_policies_may_ask_for_modules() -> None:
    model = Model()
    keep = lambda node: node.module.endswith(".up")
    rows = fckpt.saved_residuals(fckpt.remat(lambda x: model(x).sum(), policy=keep), X)
    kept = [row.origin.split(" at ")[0] for row in rows if row.kind == "intermediate"]
    assert kept == [f"addmm in layers.{i}.up" for i in range(3)]


class Peeks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.tolist()[0][0]


@pytest.mark.parametrize("kind", [Peeks, Reads])
def test_errors_name_the_module(kind: type[nn.Module]) -> None:
    model = Model()
    model.layers[1].down = kind()
    with pytest.raises(fckpt.TraceError, match=r"layers\.1\.down"):
        fckpt.plan(model, X, budget=0.5)


def test_budget_errors_name_the_module() -> None:
    with pytest.raises(fckpt.BudgetError, match=r" in (layers\.\d|head)"):
        fckpt.plan(Model(), X, budget=1)


@pytest.mark.parametrize(
    ("path", "folded"),
    [
        ("h.3.mlp.weight", "h.*.mlp.weight"),
        ("0.weight", "*.weight"),
        ("mm in h.3", "mm in h.*"),
        ("mm in h.3.mlp at gpt2.py:12", "mm in h.*.mlp at gpt2.py:12"),
        ("params['layers'][3]['w']", "params['layers'][*]['w']"),
        ("mm at model.py:12 (f2)", "mm at model.py:12 (f2)"),
    ],
)
def test_numbers_of_blocks_are_folded(path: str, folded: str) -> None:
    assert path_pattern(path) == folded


def test_long_paths_lose_their_head() -> None:
    text = "addmm in bert.encoder.layer.*.attention.self.query"
    assert shortened(text, 34) == "addmm in ...*.attention.self.query"
    assert shortened("a_very_long_operation_indeed_it_is in module.path", 34).startswith("a_very_long")


# -- the seam ------------------------------------------------------------------------------------------------


def test_whoever_runs_a_function_may_say_where() -> None:
    with running("blocks.7", "other.py:3 (g)"):
        assert current() == Source("blocks.7", "other.py:3 (g)")
    assert current().module == ""


class Located(torch.fx.Interpreter):
    """Runs a graph of Dynamo, and says for each node where it was recorded, as `names` knows it."""

    def __init__(self, graph: torch.fx.GraphModule, names: Names) -> None:
        super().__init__(graph)
        self.names = names
        self.extra_traceback = False

    def run_node(self, n: torch.fx.Node) -> Any:
        with running(*source_of(n.meta, self.names)):
            return super().run_node(n)


def test_graphs_of_dynamo_know_modules_and_lines() -> None:
    model = Model()
    fn = lambda x: model(x).sum()
    names, seen = Names(fn), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(source_of(n.meta, names) for n in graph.graph.nodes if "tanh" in n.name)
        seen.extend(source_of(n.meta) for n in graph.graph.nodes if "tanh" in n.name)

        def run(*args: torch.Tensor) -> Any:
            plan = fckpt.plan(lambda *xs: Located(graph, names).run(*xs), *args, budget=1.0)
            seen.extend(Source(n.module, n.source) for n in plan.graph.nodes if n.op == "aten.tanh.default")
            return graph(*args)

        return run

    torch.compile(fn, backend=backend)(X)
    assert [source.module for source in seen] == [f"layers.{i}" for i in range(3)] * 3
    assert all(re.fullmatch(r"test_sources\.py:\d+ \(forward\)", source.line) for source in seen)


def test_exported_graphs_know_modules() -> None:
    exported = torch.export.export(Model(), (X,))
    found = [source_of(node.meta) for node in exported.graph.nodes if "tanh" in node.name]
    assert [source.module for source in found] == [f"layers.{i}" for i in range(3)]
