"""Calls with tensors of other sizes: plans of known structure at once, within the budget, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import OLD
from helpers import assert_equal, seeded
from planned import Block, ConvNet, Squared, UNet, Unrolled, Words, measured
from torch import Tensor, nn

import fckpt
from fckpt._planned.background import PENDING
from fckpt._planned.plan import Plan
from fckpt._planned.planner import Planner
from fckpt._planned.program import Program
from fckpt._planned.resized import Resized
from fckpt._planned.solving import solved
from fckpt.cost import price
from fckpt.graph.graph import Graph
from fckpt.graph.identity import structure
from fckpt.graph.simulation import simulate
from fckpt.solve._adapt import adapt
from fckpt.solve._greedy import fit


class Messages(nn.Module):
    """A graph network: each node adds up what its edges carry."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 16) for _ in range(4))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            sent = torch.tanh(layer(torch.cat([nodes[edges[0]], nodes[edges[1]]], -1)))
            nodes = nodes + torch.zeros_like(nodes).index_add(0, edges[1], sent)
        return nodes.square().mean()


def _edges(r: random.Random) -> tuple[Tensor, ...]:
    nodes, edges = r.randint(2, 40), r.randint(1, 120)
    return torch.randn(nodes, 16), torch.randint(0, nodes, (2, edges))


Sizes = Callable[[random.Random], tuple[Tensor, ...]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Sizes]] = {
    "mlp": (
        lambda: Squared(nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU())])),
        lambda r: (torch.randn(r.randint(1, 200), 32),),
    ),
    "convolutions": (ConvNet, lambda r: (torch.randn(r.randint(1, 5), 3, r.randint(4, 20), r.randint(4, 20)),)),
    "transformer": (
        lambda: Squared(nn.Sequential(Block(), Block())),
        lambda r: (torch.randn(r.randint(1, 5), r.randint(1, 40), 32),),
    ),
    "words": (Words, lambda r: (torch.randint(0, 50, (r.randint(1, 6), r.randint(1, 40))),)),
    "lstm": (Unrolled, lambda r: (torch.randn(5, r.randint(1, 64), 8),)),
    "unet": (UNet, lambda r: (torch.randn(r.randint(1, 3), 2, 4 * r.randint(1, 6), 4 * r.randint(1, 6)),)),
    "messages": (Messages, _edges),
}


def results(net: nn.Module, given: tuple[Tensor, ...]) -> Any:
    net.zero_grad()
    loss = net(*given)
    loss.backward()
    return loss, [p.grad for p in net.parameters()], [b.clone() for b in net.buffers()]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MODELS)
def test_any_size_is_kept_within_a_budget_and_equals_the_plain_function(name: str, frozen: None) -> None:
    make, sizes = MODELS[name]
    torch.manual_seed(0)
    plain = make()
    planned = fckpt.remat(copy.deepcopy(plain), budget=0.8)
    generator, kept = random.Random(0), 0
    for number in range(5):
        given = sizes(generator)
        plain.load_state_dict(planned.state_dict())  # statistics of BatchNorm
        try:
            got = seeded(lambda given=given: results(planned, given), seed=number)
        except fckpt.BudgetError:  # a tensor of one row: nothing can be recomputed
            continue
        assert_equal(got, seeded(lambda given=given: results(plain, given), seed=number))
        peaks = []
        for net in (plain, planned):
            net.zero_grad()
            peaks.append(fckpt.measure_peak(lambda net=net, given=given: net(*given).backward()).peak_bytes)
        assert peaks[1] <= 0.81 * peaks[0]  # 0.8 of the baseline, which is this peak within 1 %
        kept += 1
    stats = fckpt.stats(planned)
    assert kept >= 3
    assert stats.adapted >= kept - 2 and not stats.fallbacks, stats
    assert stats.captures <= 4, stats  # a size of 1 has its own


def test_a_fixed_budget_holds_for_larger_and_smaller_sizes() -> None:
    net = Squared(nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(32, 32), nn.Tanh())]))
    budget = int(fckpt.plan(net, torch.randn(100, 32), budget=1.0).baseline_peak_bytes * 0.7)
    planned = fckpt.remat(net, budget=budget)
    for rows in (20, 100, 130, 60, 160):
        assert measured(planned, torch.randn(rows, 32)) <= budget
    assert fckpt.stats(planned).adapted == 4
    with pytest.raises(fckpt.BudgetError):
        planned(torch.randn(20_000, 32))


@pytest.mark.parametrize("adapts", [True, False])
def test_a_budget_error_comes_only_after_a_solver_has_run(adapts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Graph] = []

    def solve(graph: Graph, *rest: Any) -> Plan:
        asked.append(graph)
        return solved(graph, *rest)

    monkeypatch.setattr("fckpt._planned.making.solved", solve)
    if not adapts:
        monkeypatch.setattr("fckpt._planned.families.adapt", lambda *_, **__: None)
    plain = Squared(nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(32, 32), nn.Tanh())]))
    budget = measured(plain, torch.randn(100, 32)) * 7 // 10
    planned = fckpt.remat(copy.deepcopy(plain), budget=budget)
    for rows in (100, 120):
        x = torch.randn(rows, 32)
        assert_equal(results(planned, (x,)), results(plain, (x,)))
        assert measured(planned, x) <= budget < measured(plain, x)
    assert (len(asked), fckpt.stats(planned).adapted) == ((1, 1) if adapts else (2, 0))
    with pytest.raises(fckpt.BudgetError):
        planned(torch.randn(20_000, 32))
    assert len(asked) == (2 if adapts else 3)


FIRST_STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "batch norms": (
        lambda: Squared(
            nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())])
        ),
        lambda size: torch.randn(size, 32),
    ),
    "convolutions": (ConvNet, lambda size: torch.randn(2, 3, 4, size)),
    "transformer": (lambda: Squared(Block()), lambda size: torch.randn(size, 4, 32)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FIRST_STEPS)
def test_the_first_step_of_a_new_size_keeps_a_budget(name: str, monkeypatch: pytest.MonkeyPatch, frozen: None) -> None:
    make, of = FIRST_STEPS[name]
    torch.manual_seed(0)
    plain = make()
    budget = measured(plain, of(320)) * 7 // 10
    planned = fckpt.remat(copy.deepcopy(plain), budget=budget)
    as_it_was, found = list[bool](), Resized.program

    def noted(self: Resized, *given: Any) -> Any:
        program = found(self, *given)
        as_it_was.append(program is not None)
        return program

    monkeypatch.setattr(Resized, "program", noted)
    exceeding = 0
    for number, size in enumerate((320, 240, 280, 304, 303, 256, 255, 319, 120, 119)):
        x, peaks, states = of(size), list[int](), list[Any]()
        for net in (plain, planned):
            net.zero_grad()
            torch.manual_seed(number)
            peaks.append(fckpt.measure_peak(lambda net=net, x=x: net(x).backward()).peak_bytes)
            states.append(([p.grad for p in net.parameters()], [b.clone() for b in net.buffers()]))
        assert_equal(states[1], states[0])
        if number >= 3:
            assert peaks[1] <= budget, (size, peaks, budget)
            exceeding += peaks[0] > budget
    assert exceeding >= 5
    assert any(as_it_was) or (OLD and name == "transformer")  # whose operations have no symbolic sizes there
    stats = fckpt.stats(planned)
    assert stats.adapted >= 7 and not stats.fallbacks


def test_a_size_of_one_or_none_is_right() -> None:
    net = Squared(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32)))
    planned = fckpt.remat(copy.deepcopy(net), budget=1.0)
    for rows in (5, 1, 0, 7, 2, 1, 0):
        given = (torch.randn(rows, 32),)
        assert_equal(results(planned, given), results(net, given))


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mse": lambda x: F.mse_loss(x, torch.ones(x.shape)),
    "smooth l1": lambda x: F.smooth_l1_loss(x, torch.ones(x.shape)),
    "huber": lambda x: F.huber_loss(x, torch.ones(x.shape)),
    "cross-entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "layer norm": lambda x: F.layer_norm(x, (4,)).sum(),
    "interpolate": lambda x: F.interpolate(x[:, None], scale_factor=2).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_batch(name: str) -> None:
    """Some of torch's own code for fake tensors fails for these, as its kernels do not."""
    w = torch.randn(4, 4, requires_grad=True)
    fn = lambda x: LOSSES[name](torch.tanh(x @ w))
    planned = fckpt.remat(fn, budget="1MiB")
    for count in (0, 3, 0):
        x = torch.randn(count, 4)
        assert_equal(torch.autograd.grad(planned(x), w), torch.autograd.grad(fn(x), w))


def test_one_size_in_two_arguments_may_become_two() -> None:
    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ w).tanh().sum(0) * (y @ w).sin().sum(0)).sum()

    planned = fckpt.remat(loss, budget=1.0)
    w = torch.randn(4, 4, requires_grad=True)
    for rows in ((3, 3), (5, 5), (4, 6), (6, 4), (1, 3), (3, 1)):
        x, y = torch.randn(rows[0], 4), torch.randn(rows[1], 4)
        assert_equal(torch.autograd.grad(planned(w, x, y), w), torch.autograd.grad(loss(w, x, y), w))


def test_a_branch_on_a_size_is_another_program() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        return h.exp().sum() if x.shape[0] > 6 else h.sin().sum()

    planned = fckpt.remat(loss, budget=1.0)
    w = torch.randn(4, 4, requires_grad=True)
    for rows in (3, 8, 6, 7, 5, 9, 2):
        x = torch.randn(rows, 4)
        assert_equal(torch.autograd.grad(planned(w, x), w), torch.autograd.grad(loss(w, x), w))


def test_a_size_that_counts_operations_is_another_structure() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.stack([(row @ w).tanh().sum() for row in x]).sum()

    planned = fckpt.remat(loss, budget=1.0)
    w = torch.randn(4, 4, requires_grad=True)
    for rows in (3, 4, 3, 5):
        x = torch.randn(rows, 4)
        assert_equal(torch.autograd.grad(planned(w, x), w), torch.autograd.grad(loss(w, x), w))
    assert fckpt.stats(planned).adapted == 0


class Attention(nn.Module):
    """Options that are integers, as models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = 4, 8
        self.inner = nn.Linear(32, 96)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).split(self.heads * self.width, -1)
        q, k, v = (t.view(*t.shape[:-1], self.heads, self.width).transpose(1, 2) for t in parts)
        return (q @ k.transpose(2, 3) / self.width**0.5).softmax(-1).matmul(v).square().sum() * (self.steps + 1)


def test_options_of_modules_are_constants_and_counters_are_not() -> None:
    net, x = Attention(), torch.randn(2, 24, 32)
    planned = fckpt.remat(net, budget=0.9)
    for step in (2, 3, 4, 4):
        net.steps = step
        net.zero_grad()
        assert_equal(planned(x), net(x))
    assert fckpt.stats(planned).captures == 2  # what has changed once may change again
    planner: Planner = planned._fckpt_region.planner  # type: ignore[attr-defined]
    counts = [len(captured.graph.numbers) for captured, _ in planner.captures]
    assert counts == [2, 3], "batch, length, and the counter"
    net.heads, net.width = 2, 16
    assert_equal(planned(x), net(x))


def test_plans_of_a_named_solver_are_its_own() -> None:
    planned = fckpt.remat(Squared(nn.Sequential(Block())), budget=0.9, solver="greedy")
    for rows in (3, 4, 5):
        planned(torch.randn(rows, 8, 32)).backward()
    assert (fckpt.stats(planned).plans, fckpt.stats(planned).adapted) == (3, 0)


def test_steps_of_other_batches() -> None:
    def trained(step_of: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], Any]]) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh())])
        step = step_of(net, torch.optim.AdamW(net.parameters()))
        losses = [step(torch.randn(rows, 32)) for rows in (50, 70, 40, 90)]
        return losses, list(net.parameters())

    def plain(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        def step(batch: Tensor) -> Tensor:
            loss = net(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    steps: list[Any] = []

    def planned(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        steps.append(fckpt.step(net, optimizer, lambda model, batch: model(batch).square().mean(), budget=0.6))
        return steps[0]

    assert_equal(trained(planned), trained(plain))
    assert fckpt.stats(steps[0]).adapted >= 3


# -- adapting


def graphs(rows: int) -> Graph:
    torch.manual_seed(0)
    net = Squared(nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]))
    return fckpt.plan(net, torch.randn(rows, 32), budget=1.0, costs=A100).graph


A100 = fckpt.cost.Analytic(fckpt.cost.profiles["A100"])


def test_adapted_schedules_are_nearly_as_fast_as_solved_ones() -> None:
    known = [fckpt.solve.auto(g, peak(g) * 6 // 10) for g in (graphs(160),)]
    for rows in (240, 400, 640):
        graph = graphs(rows)
        for tenths in (8, 6, 5):
            budget = peak(graph) * tenths // 10
            found = adapt(graph, budget, known)
            assert found is not None
            adapted, solved = simulate(graph, found), simulate(graph, fckpt.solve.auto(graph, budget))
            assert adapted.peak_nbytes <= budget
            assert adapted.seconds <= solved.seconds + 0.02 * graph.seconds


def test_a_schedule_that_fills_the_budget_is_not_searched_further(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graphs(640)
    schedule = fckpt.solve.auto(graph, peak(graph) * 6 // 10)
    taken = simulate(graph, schedule).peak_nbytes
    plain = fckpt.solve.save_all(graph)
    searched: list[int] = []
    monkeypatch.setattr("fckpt.solve._adapt.fit", lambda *args, **options: searched.append(1) or fit(*args, **options))
    assert adapt(graph, taken * 100 // 99, [schedule]) == schedule
    assert adapt(graph, peak(graph), [schedule]) == plain and not searched  # what recomputes nothing comes first
    assert adapt(graph, taken * 100 // 90, [schedule]) != schedule and searched


def test_nothing_is_adapted_below_the_least_budget() -> None:
    graph = graphs(160)
    schedule = fckpt.solve.auto(graph, peak(graph) * 6 // 10)
    assert adapt(graph, 1, [schedule]) is None


def peak(graph: Graph) -> int:
    return simulate(graph, fckpt.solve.save_all(graph)).peak_nbytes


def test_structure_depends_on_operations_and_decisions_not_on_sizes() -> None:
    policy = fckpt.policies.dots_saveable
    of = lambda rows, fn, **o: structure(fckpt.plan(fn, torch.ones(rows, 8, requires_grad=True), **o).graph)
    fn = lambda x: (x @ x.mT).sin().sum()
    assert of(3, fn, budget=1.0) == of(5, fn, budget=1.0)
    assert of(3, fn, budget=1.0) != of(3, lambda x: (x @ x.mT).cos().sum(), budget=1.0)
    assert of(3, fn, budget=1.0) != of(3, fn, budget=1.0, policy=policy)


# -- programs of other sizes


@pytest.mark.parametrize("budget", [0.7, "0.7 of 160 rows"])
def test_a_program_of_another_size_is_what_planning_returns(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Squared(nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.1))]))
    if isinstance(budget, str):
        budget = int(fckpt.plan(net, torch.randn(160, 32), budget=1.0).baseline_peak_bytes * 0.7)
    made = list[Any]()
    found = Resized.program

    def noted(self: Resized, traced: Any, *given: Any) -> Any:
        made.append((found(self, traced, *given), traced))
        return made[-1][0]

    monkeypatch.setattr(Resized, "program", noted)
    planned = fckpt.remat(copy.deepcopy(net), budget=budget)
    for rows in (160, 130, 150, 120, 140, 155, 60, 90):
        x = torch.randn(rows, 32)
        assert_equal(seeded(lambda x=x: results(planned, (x,))), seeded(lambda x=x: results(net, (x,))))
    programs = [part for part in made if part[0] is not None]
    assert len(programs) >= 2, fckpt.stats(planned)
    for program, traced in programs:
        plan = program.plan
        assert "nodes" not in vars(plan.graph)  # nothing has read the graph
        assert pickle.loads(pickle.dumps(copy.copy(plan.graph))) == plan.graph
        assert plan.peak_bytes <= plan.budget_bytes
        graph, measured_now = plan.graph, price(traced, fckpt.cost.Measured(cache=False))
        for node, again in zip(graph.nodes, measured_now.nodes, strict=True):
            assert dataclasses.replace(node, seconds=again.seconds) == again
        assert graph.values == measured_now.values
        assert simulate(graph, plan.schedule).live_nbytes == plan.timeline.live_nbytes
        fresh = Program(traced, Plan(graph, plan.schedule, "auto", plan.budget_bytes, ""), program.count)
        assert fresh.lowered.is_same(program.lowered)
        fixed = ("uses", "written", "read_only", "delivered", "summed", "sampled", "sampled_again", "reread", "casts")
        changing = ("backward", "returned", "again_nbytes", "dependents")
        for name in (*fixed, *changing, "constant", "statistics", "remembered", "draws", "writes_late"):
            assert getattr(fresh, name) == getattr(program, name), name


def test_a_size_without_a_graph_is_solved_in_the_background_once_it_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = list[Plan]()
    monkeypatch.setattr("fckpt._planned.background.Request.__init__", lambda self, plan: requests.append(plan))
    monkeypatch.setattr("fckpt._planned.background.Request.answer", lambda self: PENDING)
    net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())])
    planned = fckpt.remat(lambda x: net(x).square().sum(), budget=0.6)
    for rows in (160, 130, 150, 120, 140):
        before = len(requests)
        planned(torch.randn(rows, 32)).backward()
    assert fckpt.stats(planned).adapted == 4 and len(requests) == before
    for _ in range(2):
        planned(torch.randn(140, 32)).backward()
    assert len(requests) == before + 1
