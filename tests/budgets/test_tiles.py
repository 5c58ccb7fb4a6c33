"""Tiles: operations cut by rows keep their bits or their closeness, their peaks are as predicted, and plans say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planned import ConvNet
from programs import Program, plain, programs
from sampling import SLOW
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import fckpt
from fckpt._call.arguments import Arguments
from fckpt._call.conditions import Observation
from fckpt._call.levels import below_autograd
from fckpt._planned.lower import lower
from fckpt._planned.plan import Plan
from fckpt._planned.planner import traced_without_running
from fckpt._planned.tracing import CapturedTensors, traced_call
from fckpt._tile.choice import _calls, _grown
from fckpt._tile.exact import inexact
from fckpt._tile.rewriting import Rewriting, rewritten
from fckpt._tile.slices import Slices
from fckpt._tile.stretches import Gathered, Step, Stretch, Untileable, step_from_json, step_to_json
from fckpt._tile.ways import ways
from fckpt._trace.layouts import layouts_below
from fckpt._trace.operations import Backward, Trace
from fckpt.graph.schedule import Schedule
from fckpt.graph.simulation import simulate
from fckpt.solve import recompute_all, save_all

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def large_vocabulary(rows: int = 128, words: int = 1024, width: int = 16, **options: Any) -> Call:
    """A small network with cross-entropy over many classes: the loss is the largest operation by far."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(width, width, generator=generator).requires_grad_()
    head = torch.randn(words, width, generator=generator).requires_grad_()
    x = torch.randn(rows, width, generator=generator)
    target = torch.randint(words, (rows,), generator=generator)
    target[:: max(1, rows // 4)] = options.get("ignore_index", -100)

    def loss(hidden: Tensor, head: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x @ hidden) @ head.t(), target, **options)

    return loss, (hidden, head, x, target)


def attention(length: int = 128, heads: int = 4, width: int = 16) -> Call:
    """Causal attention by the math kernel, whose scores are the largest values."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.1 * torch.randn(heads * width, 3 * heads * width, generator=generator)).requires_grad_()
    x = torch.randn(1, length, heads * width, generator=generator)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        parts = (x @ weight).view(1, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            q, k, v = parts.unbind(0)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.0)
        return attended.square().mean()

    return loss, (weight, x)


@cache
def cut(budget: float, tile: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Plan]:
    """The network with the large vocabulary, its arguments, and a plan with tiles, made once for all tests."""
    fn, args = large_vocabulary()
    return fn, args, fckpt.plan(fn, *args, budget=budget, tile=tile)


def trace_of(call: Call) -> Trace:
    return traced_without_running(*call, {})[0]


def plan_of(trace: Trace, steps: Sequence[Step]) -> Plan:
    """A plan that saves everything, with the operations of a trace cut as given."""
    graph = rewritten(trace, steps).graph
    plan = Plan(graph, save_all(graph), "save_all", None, str(torch.__version__))
    return dataclasses.replace(plan, tiles=tuple(steps), tile=True, untiled=trace.graph) if steps else plan


def furthest(check: fckpt.Check) -> float:
    """The largest difference that a check found."""
    return max([float(text.rsplit("by up to ", 1)[1].rstrip(")")) for text in check.differences], default=0.0)


# what plans with tiles compute ---------------------------------------------------------------------


@pytest.mark.parametrize("call", [large_vocabulary(), attention()], ids=["vocabulary", "attention"])
def test_exact_tiles_give_the_bits_of_the_plain_function_in_less_memory_than_any_plan_without(call: Call) -> None:
    fn, args = call
    with pytest.raises(fckpt.BudgetError):
        fckpt.plan(fn, *args, budget=0.5)
    plan = fckpt.plan(fn, *args, budget=0.5, tile="exact")
    assert plan.tiles and plan.tile == "exact"
    check = fckpt.check(fn, *args, plan=plan)
    assert check, check
    assert check.peak_bytes == plan.peak_bytes <= plan.baseline_peak_bytes / 2
    assert check.plain_peak_bytes == pytest.approx(plan.baseline_peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("call", "budget"), [(large_vocabulary(), 0.3), (attention(), 0.45)], ids=["vocabulary", "attention"]
)
def test_tiles_with_sums_need_less_again_and_differ_by_rounding(call: Call, budget: float) -> None:
    fn, args = call
    plan = fckpt.plan(fn, *args, budget=budget, tile=True)
    assert plan.tiles
    check = fckpt.check(fn, *args, plan=plan)
    scale = max(g.abs().max().item() for g in torch.autograd.grad(fn(*args), [a for a in args if a.requires_grad]))
    assert furthest(check) <= 1e-5 * scale
    assert check.peak_bytes == plan.peak_bytes <= budget * plan.baseline_peak_bytes


def test_remat_runs_tiles_in_training() -> None:
    fn, args = large_vocabulary()
    f = fckpt.remat(fn, budget=0.5, tile="exact")
    wanted = args[:2]
    expected = torch.autograd.grad(fn(*args), wanted)
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(f(*args), wanted), expected))
    assert fckpt.stats(f).plans == 1
    got = torch.func.grad(f, argnums=(0, 1))(*args)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"ignore_index": 3}, {"reduction": "none"}, {"label_smoothing": 0.1}]
)
def test_losses_of_all_kinds_are_exact(options: dict[str, Any]) -> None:
    fn, args = large_vocabulary(**options)
    plan = fckpt.plan(lambda *a: fn(*a).sum(), *args, budget=0.6, tile="exact")
    check = fckpt.check(lambda *a: fn(*a).sum(), *args, plan=plan)
    assert check, check


def test_a_loss_whose_targets_are_all_ignored_is_that_of_the_plain_function() -> None:
    fn, (hidden, head, x, _) = large_vocabulary()
    target = torch.full((128,), -100)
    plan = fckpt.plan(fn, hidden, head, x, target, budget=0.6, tile="exact")
    assert fckpt.check(fn, hidden, head, x, target, plan=plan)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        fckpt.remat(fn, plan=plan)(hidden, head, x, torch.full((128,), 1024))


@pytest.mark.parametrize("rows", [125, 129, 67])
def test_rows_that_cannot_be_divided_evenly_leave_a_smaller_last_tile(rows: int) -> None:
    fn, args = large_vocabulary(rows=rows)
    plan = fckpt.plan(fn, *args, budget=0.5, tile=True)
    assert plan.tiles
    assert furthest(fckpt.check(fn, *args, plan=plan)) < 1e-6


class Decoder(nn.Module):
    """A language model of two blocks with a large vocabulary and the loss inside."""

    def __init__(self, words: int = 1024, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.heads = heads

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens[:, :-1])
        for i in range(2):
            parts = self.qkv[i](self.norms[2 * i](h)).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
            with sdpa_kernel(SDPBackend.MATH):
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + attended.transpose(1, 2).flatten(2)
            h = h + self.mlp[i](self.norms[2 * i + 1](h))
        return F.cross_entropy(self.head(h).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("tile", ["exact", True])
def test_a_language_model_trains_below_its_largest_operation(tile: Any) -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(), torch.randint(1024, (2, 65))
    plan = fckpt.plan(model, tokens, budget=0.45, tile=tile)
    check = fckpt.check(model, tokens, plan=plan)
    assert check or tile is True, check
    assert furthest(check) < 1e-5
    assert check.peak_bytes == plan.peak_bytes


def test_what_has_nothing_to_cut_keeps_its_plan() -> None:
    model, x = ConvNet(), torch.randn(2, 3, 16, 16)
    plan = fckpt.plan(model, x, budget=0.8, tile="exact")
    assert not plan.tiles and plan.tile is False and plan.untiled is None
    assert fckpt.plan(*large_vocabulary()[:1], *large_vocabulary()[1], budget=1.0, tile=True).tiles == ()


# random programs -----------------------------------------------------------------------------------

PROFILE = settings(
    max_examples=250 if SLOW else 15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def run(trace: Trace, schedule: Schedule, operands: list[Tensor]) -> list[Tensor | None]:
    """The outputs and gradients of a trace by a schedule, with cotangents of ones."""
    lowered = lower(trace, schedule, trace.graph)
    given = [*operands, *(data for _, data in trace.constants)]
    torch.manual_seed(3)
    with torch.no_grad(), below_autograd():
        outputs, residuals = lowered.forward(list(given))
        cotangents = [torch.ones(trace.tensors[t].shape).double() for t in trace.cotangents if t is not None]
        return [*outputs, *lowered.backward(list(given), residuals, cotangents)]


@PROFILE
@given(programs(), st.integers(2, 4), st.lists(st.integers(0, 10**6), min_size=3, max_size=3))
def test_any_stretch_of_a_random_program_can_be_cut_or_is_refused(
    program: Program, count: int, choices: list[int]
) -> None:
    fn = program.function(plain)
    arguments = Arguments((pytree.tree_map(lambda t: t.requires_grad_(), program.parameters()),), {})
    observation = Observation([fn], arguments.statics, arguments.tensors, {})
    captured = CapturedTensors(observation, arguments.tensors)
    operands = [*arguments.tensors, *captured.tensors]
    trace = traced_call(fn, arguments, captured, layouts_below(operands), Backward())
    starts = [(n, way) for n, call in _calls(trace).items() for way, _ in enumerate(ways(call, trace.tensors))]
    assume(starts)
    data = [t.detach() for t in operands]
    expected = run(trace, save_all(trace.graph), data)
    for choice in choices:
        members = _grown(trace, *starts[choice % len(starts)], set(), 40)
        try:
            rewriting = Rewriting(Slices(trace, Stretch(tuple(sorted(members.items())), count)))
            made = rewriting.trace()
        except Untileable:
            continue
        exact = not inexact(rewriting)
        for solver in (save_all, recompute_all):
            schedule = solver(made.graph)
            simulate(made.graph, schedule)
            for one, other in zip(run(made, schedule, data), expected, strict=True):
                if other is None:
                    assert one is None
                else:
                    rounding = 0.0 if exact else 1e-9
                    torch.testing.assert_close(one, other, rtol=rounding, atol=rounding, equal_nan=True)


# what is refused -----------------------------------------------------------------------------------


def first_stretch(fn: Callable[..., Any], *args: Any, op: str, way: int = 0, count: int = 2) -> None:
    """Cuts the operations of a name in two."""
    trace = trace_of((fn, args))
    nodes = [n.id for n in trace.graph.nodes if n.op.startswith(f"aten.{op}")]
    Rewriting(Slices(trace, Stretch(tuple((n, way) for n in nodes), count))).trace()


def test_random_and_in_place_operations_are_not_cut() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with pytest.raises(Untileable):
        first_stretch(lambda x: F.dropout(x, 0.5).sum(), x, op="native_dropout")
    with pytest.raises(Untileable):
        first_stretch(lambda x: (x * 2).relu_().sum(), x, op="relu_")


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row_are_not_cut(rows: int) -> None:
    x = torch.randn(rows, 8, requires_grad=True)
    with pytest.raises(Untileable):
        first_stretch(lambda x: torch.log_softmax(x, 1).sum(), x, op="_log_softmax.default")


def test_more_tiles_than_rows_are_refused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(Untileable, match="3 rows cannot be cut into 4 tiles"):
        first_stretch(lambda x: torch.log_softmax(x, 1).sum(), x, op="_log_softmax.default", count=4)


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 1:], lambda x: x.expand(4, 8, 6)])
def test_operands_with_any_strides_are_cut(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 6, requires_grad=True)
    fn = lambda x: torch.log_softmax(view(x) * 2, -1).square().sum()
    trace = trace_of((fn, (x,)))
    nodes = [n.id for n in trace.graph.nodes if "softmax" in n.op and "mul" not in n.op]
    plan = plan_of(trace, [Stretch(tuple((n, 0) for n in nodes), 2)])
    assert fckpt.check(fn, x, plan=plan)


def test_an_index_with_fewer_rows_than_what_it_reads_is_not_cut_along_them() -> None:
    x, index = torch.randn(8, 6, requires_grad=True), torch.randint(6, (4, 6))
    with pytest.raises(Untileable):
        first_stretch(lambda x: (x * 2).gather(1, index).sum(), x, op="gather")


# the option ----------------------------------------------------------------------------------------


def test_a_wrong_option_is_refused_and_tiles_need_a_budget() -> None:
    fn, args = large_vocabulary(rows=8, words=16)
    with pytest.raises(fckpt.ArgumentValueError, match=r"tile must be False, True or \"exact\", not 'rows'"):
        fckpt.remat(fn, budget=0.5, tile="rows")  # type: ignore[call-overload]
    with pytest.raises(fckpt.ArgumentValueError, match="tile=True needs a budget"):
        fckpt.remat(fn, tile=True)
    with pytest.raises(fckpt.ArgumentValueError, match="tile='exact' needs a budget"):
        fckpt.plan(fn, *args, tile="exact")


def test_a_budget_error_says_what_tiles_make_possible() -> None:
    fn, args = large_vocabulary()
    with pytest.raises(
        fckpt.BudgetError, match=r"Cut into tiles.*at least .* with tile='exact', .* with tile=True\."
    ) as info:
        fckpt.plan(fn, *args, budget=0.2)
    with pytest.raises(fckpt.BudgetError, match=r"at least .* with tile=True\.") as exact:
        fckpt.plan(fn, *args, budget=0.2, tile="exact")
    assert exact.value.least_bytes < info.value.least_bytes
    assert fckpt.plan(fn, *args, budget=exact.value.least_bytes, tile="exact").peak_bytes == exact.value.least_bytes


def test_a_plan_says_how_it_is_cut() -> None:
    assert "with the bits of the whole operations" in str(cut(0.5, "exact")[-1])
    text = str(cut(0.3, True)[-1])
    assert "sums may be in another order" in text and "Lower bounds hold for plans with these tiles" in text


def test_bounds_are_those_of_the_graph_with_tiles() -> None:
    fn, args, plan = cut(0.3, True)
    assert plan.least_peak_bytes <= plan.peak_bytes < fckpt.plan(fn, *args, budget=1.0).least_peak_bytes
    assert plan.lower_bound <= plan.overhead


def test_a_curve_reaches_lower_with_tiles() -> None:
    fn, args = large_vocabulary()
    without = fckpt.pareto(fn, *args, points=3)
    tiled = fckpt.pareto(fn, *args, points=3, tile=True)
    assert tiled[0].peak_bytes < without[0].peak_bytes / 2


# plan files ----------------------------------------------------------------------------------------


def test_a_saved_plan_runs_with_the_same_tiles(tmp_path: Path) -> None:
    fn, args, plan = cut(0.5, "exact")
    plan.save(tmp_path / "step.plan.json")
    loaded = fckpt.Plan.load(tmp_path / "step.plan.json")
    assert loaded == plan and loaded.fingerprint == plan.fingerprint
    assert fckpt.check(fn, *args, plan=loaded)


def test_a_plan_with_tiles_does_not_run_another_computation() -> None:
    plan = cut(0.5, "exact")[-1]
    other, args = large_vocabulary(words=1000)
    with pytest.raises(fckpt.PlanError, match="another computation"):
        fckpt.remat(other, plan=plan)(*args)


def test_exact_tiles_are_tested_again_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args, plan = cut(0.5, "exact")
    monkeypatch.setattr("fckpt._planned.tiling.is_exact", lambda *_: False)
    with pytest.raises(fckpt.PlanError, match="do not give equal bits"):
        fckpt.remat(fn, plan=plan)(*args)


def test_steps_are_plain_data() -> None:
    for step in (Gathered(3), Stretch(((1, 0), (2, 1)), 8)):
        assert step_from_json(step_to_json(step)) == step
    for broken in ({}, {"ways": [[1]], "count": 2}, {"ways": [[1, 0]], "count": 0}, {"gathered": -1}):
        with pytest.raises(fckpt.ArgumentValueError):
            step_from_json(broken)
