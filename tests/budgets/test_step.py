"""A training step as one planned call has the bits of the plain step, within its budget, to the byte."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from trained import NETS, OPTIMIZERS, PAIRS, Model, Twins, mlp, squares

import fckpt
from fckpt import measure_peak
from fckpt._planned import late_writes
from fckpt.graph.simulation import simulate


@pytest.mark.parametrize(("net", "optimizer"), PAIRS)
def test_without_a_budget(net: str, optimizer: str) -> None:
    make, batch, loss_fn = NETS[net]
    twins, data = Twins(make, OPTIMIZERS[optimizer], loss_fn), batch()
    twins.check(data)
    plan = twins.check_peak(data)
    assert plan.peak_bytes <= plan.baseline_peak_bytes and plan.overhead == 0


@pytest.mark.parametrize(("net", "optimizer"), [pair for pair in PAIRS if pair[0] != "transformer"])
def test_the_least_budget(net: str, optimizer: str) -> None:
    make, batch, loss_fn = NETS[net]
    data = batch()
    with pytest.raises(fckpt.BudgetError) as error:
        Twins(make, OPTIMIZERS[optimizer], loss_fn, budget=1).step(data)
    twins = Twins(make, OPTIMIZERS[optimizer], loss_fn, budget=error.value.least_bytes)
    twins.check(data)
    plan = twins.check_peak(data)
    assert plan.peak_bytes <= error.value.least_bytes < plan.baseline_peak_bytes
    assert fckpt.stats(twins.step).fallbacks == {}


FUSED: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", FUSED)
def test_fused_updates(optimizer: str) -> None:
    make, batch, loss_fn = NETS["mlp"]
    twins, data = Twins(make, FUSED[optimizer], loss_fn, budget=0.75), batch()
    twins.check(data)
    plan = twins.check_peak(data)
    assert plan.peak_bytes <= 0.75 * plan.baseline_peak_bytes


@pytest.mark.parametrize("net", ["mlp", "transformer"])
def test_a_fraction_of_the_plain_peak(net: str) -> None:
    make, batch, loss_fn = NETS[net]
    twins, data = Twins(make, OPTIMIZERS["adam"], loss_fn, budget=0.75), batch()
    twins.check(data)
    plan = twins.check_peak(data)
    assert plan.peak_bytes <= 0.75 * plan.baseline_peak_bytes


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("accumulate", "budget"), [(2, 0.9), (4, None)])
@pytest.mark.parametrize("net", NETS)
def test_microbatches(net: str, accumulate: int, budget: float | None) -> None:
    make, batch, loss_fn = NETS[net]
    twins, data = Twins(make, OPTIMIZERS["adamw"], loss_fn, budget=budget, accumulate=accumulate), batch()
    twins.check(data)
    plan = twins.check_peak(data)
    assert budget is None or plan.peak_bytes <= budget * plan.baseline_peak_bytes


def test_a_plan_is_of_the_microbatches_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a budget was too low for the earlier microbatches at first, and is enough once more plans are known."""
    make, batch, loss_fn = NETS["mlp"]
    twins, data = Twins(make, OPTIMIZERS["adamw"], loss_fn, budget=0.95, accumulate=3), batch()
    planned, budgets = twins.step._program, []

    def refused_at_first(part: Any, place: Any) -> Any:
        if not place.last and place.budget is not None:
            budgets.append(place.budget)
            if len(budgets) == 1:
                raise fckpt.BudgetError("no plan fits", place.budget + 1)
        return planned(part, place)

    monkeypatch.setattr(twins.step, "_program", refused_at_first)
    plan = twins.step.plan(data)
    assert budgets[0] < budgets[-1] == plan.budget_bytes
    assert set(budgets[1:]) == {plan.budget_bytes}
    twins.check(data, 2)
    twins.check_peak(data)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("clip", [{"clip_norm": 0.1}, {"clip_value": 1e-3}], ids=["norm", "value"])
@pytest.mark.parametrize(("net", "accumulate"), [("mlp", 1), ("transformer", 2), ("conv", 2), ("lstm", 1)])
def test_clipped_gradients(net: str, accumulate: int, clip: dict[str, float]) -> None:
    make, batch, loss_fn = NETS[net]
    twins = Twins(make, OPTIMIZERS["sgd"], loss_fn, budget=0.95, accumulate=accumulate, **clip)
    data = batch()
    twins.check(data)
    twins.check_peak(data)


class Words(nn.Module):
    """A network whose logits are larger than everything else."""

    def __init__(self, words: int = 2_000, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def next_word(model: Model, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


@pytest.mark.parametrize(("accumulate", "clip"), [(1, {}), (2, {}), (1, {"clip_norm": 0.1}), (2, {"clip_value": 1e-3})])
def test_tiles(accumulate: int, clip: dict[str, float]) -> None:
    tokens = torch.randint(2_000, (256,))
    options = {"accumulate": accumulate, **clip}
    with pytest.raises(fckpt.BudgetError, match="with tile='exact'") as error:
        Twins(Words, OPTIMIZERS["adamw"], next_word, budget=0.6, **options).step(tokens)
    twins = Twins(Words, OPTIMIZERS["adamw"], next_word, budget=0.6, tile="exact", **options)
    twins.check(tokens, 3)
    plan = twins.check_peak(tokens)
    assert plan.tiles
    assert plan.peak_bytes < 0.7 * error.value.least_bytes


def test_tiles_in_another_order_of_sums() -> None:
    tokens = torch.randint(2_000, (256,))
    twins = Twins(Words, OPTIMIZERS["sgd"], next_word, budget=0.3, tile=True)
    for _ in range(3):
        torch.testing.assert_close(twins.step(tokens), twins.plain_step(tokens))  # sums over tiles round differently
    torch.testing.assert_close(twins.model.state_dict(), twins.plain.state_dict())
    assert measure_peak(lambda: twins.step(tokens)).peak_bytes == twins.step.plan(tokens).peak_bytes


def test_gradients_are_not_all_alive() -> None:
    twins = Twins(lambda: mlp(8, 64), lambda p: optim.SGD(p, lr=0.1), squares, budget=0.4)
    data = torch.randn(16, 64), torch.randn(16, 64)
    twins.check(data)
    plan = twins.check_peak(data)
    gradients = sum(p.nbytes for p in twins.model.parameters())
    assert plan.peak_bytes < gradients / 2 < plan.baseline_peak_bytes


ALL = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [*ALL, "Adafactor", "Muon"])
def test_every_optimizer_that_updates_one_by_one(name: str) -> None:
    if not hasattr(optim, name):
        pytest.skip("not in this version of torch")
    make = (lambda: nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh())) if name == "Muon" else mlp
    twins = Twins(make, lambda p: getattr(optim, name)(p, lr=0.01), squares, budget=0.9)
    data = torch.randn(64, 32), torch.randn(64, 32)
    twins.check(data, 3)
    twins.check_peak(data)


@pytest.mark.parametrize("kind", [optim.RAdam, functools.partial(optim.ASGD, t0=3)], ids=["RAdam", "ASGD"])
def test_late_updates_that_take_more_memory_keep_the_budget(kind: Callable[..., optim.Optimizer]) -> None:
    """RAdam rectifies from its sixth step on, and ASGD averages from a step that an option names."""
    plain = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])
    other, x = copy.deepcopy(plain), torch.randn(32, 64)
    loss = lambda model, batch: model(batch).square().mean()
    ours, theirs = kind(other.parameters()), kind(plain.parameters())
    step = fckpt.step(other, ours, loss, budget=0.8)
    for i in range(8):
        loss(plain, x).backward()
        theirs.step()
        theirs.zero_grad()
        peak = measure_peak(lambda: step(x)).peak_bytes
        assert i == 0 or peak <= step.plan(x).peak_bytes
    assert step.plan(x).peak_bytes == peak
    assert_equal(list(plain.parameters()), list(other.parameters()))


@settings(max_examples=6, deadline=None)
@given(
    depth=st.integers(1, 4),
    width=st.sampled_from([4, 16]),
    rows=st.integers(1, 9),
    residual=st.booleans(),
    kind=st.sampled_from(["sgd", "adam", "adamw"]),
    accumulate=st.integers(1, 3),
    clip=st.sampled_from([{}, {"clip_norm": 0.01}, {"clip_value": 0.001}]),
    fraction=st.sampled_from([None, 1.0, 0.8]),
)
def test_random_steps(
    depth: int,
    width: int,
    rows: int,
    residual: bool,
    kind: str,
    accumulate: int,
    clip: dict[str, float],
    fraction: float | None,
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
            self.gate = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = torch.tanh(layer(x)) * self.gate
                x = x + y if residual else y
            return x

    count = min(accumulate, rows)
    if len(torch.empty(rows).chunk(count)) != count:
        return
    options: dict[str, Any] = {"accumulate": count, "budget": fraction, **clip}
    data = torch.randn(rows, width), torch.randn(rows, width)
    try:
        twins = Twins(Net, OPTIMIZERS[kind], squares, **options)
        twins.step.plan(data)
    except fckpt.BudgetError as error:
        twins = Twins(Net, OPTIMIZERS[kind], squares, **{**options, "budget": error.least_bytes})
    twins.check(data, 3)
    assert measure_peak(lambda: twins.step(data)).peak_bytes == twins.step.plan(data).peak_bytes


# ---- the optimizer and its surroundings ------------------------------------------------------------


def test_a_schedule_of_the_learning_rate_needs_no_new_program() -> None:
    twins = Twins(mlp, OPTIMIZERS["sgd"], squares, budget=0.9)
    schedules = [optim.lr_scheduler.OneCycleLR(o, 0.1, 10) for o in (twins.plain_optimizer, twins.optimizer)]
    data = torch.randn(64, 32), torch.randn(64, 32)
    for _ in range(6):
        twins.check(data, 1)
        for schedule in schedules:
            schedule.step()
    found = fckpt.stats(twins.step)
    assert (found.programs, found.plans, found.hits, found.calls) == (1, 1, 5, 6)


def test_the_state_can_be_saved_and_loaded() -> None:
    twins = Twins(mlp, OPTIMIZERS["adam"], squares, budget=0.9)
    data = torch.randn(64, 32), torch.randn(64, 32)
    twins.check(data, 2)
    saved = copy.deepcopy((twins.model.state_dict(), twins.optimizer.state_dict()))
    twins.check(data, 2)
    for model, optimizer in ((twins.model, twins.optimizer), (twins.plain, twins.plain_optimizer)):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    twins.check(data, 2)
    assert fckpt.stats(twins.step).programs == 1


def test_groups_with_options_of_their_own() -> None:
    def make(parameters: list[nn.Parameter]) -> optim.Optimizer:
        matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
        return optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.001}], lr=0.01)

    twins = Twins(mlp, make, squares, budget=0.9)
    data = torch.randn(64, 32), torch.randn(64, 32)
    twins.check(data, 3)
    for optimizer in (twins.optimizer, twins.plain_optimizer):
        optimizer.param_groups[1]["weight_decay"] = 0.3
    twins.check(data, 3)


def test_frozen_parameters_stay() -> None:
    def make() -> nn.Module:
        model = mlp()
        model[2].requires_grad_(False)
        return model

    twins = Twins(make, OPTIMIZERS["adam"], squares, budget=0.9)
    twins.check((torch.randn(64, 32), torch.randn(64, 32)))
    twins.check_peak((torch.randn(64, 32), torch.randn(64, 32)))


def test_parameters_in_no_group_stay_and_get_no_gradient() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    step = fckpt.step(model, optim.SGD(model[4].parameters(), lr=0.1), squares)
    step((torch.randn(64, 32), torch.randn(64, 32)))
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["4.weight", "4.bias"]
    assert all(p.grad is None for p in model.parameters())


def test_unused_parameters_stay_without_state() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    for accumulate in (1, 2):
        twins = Twins(Half, OPTIMIZERS["adam"], squares, accumulate=accumulate)
        twins.check((torch.randn(4, 8), torch.randn(4, 8)), 3)


def test_training_and_evaluation_mode() -> None:
    make, batch, loss_fn = NETS["conv"]
    twins, data = Twins(make, OPTIMIZERS["sgd"], loss_fn, budget=0.9), batch()
    twins.check(data, 2)
    for model in (twins.model, twins.plain):
        model.eval()
    twins.check(data, 2)
    for model in (twins.model, twins.plain):
        model.train()
    twins.check(data, 2)
    assert fckpt.stats(twins.step).programs == 2


@pytest.mark.parametrize("net", ["mlp", "transformer"])
def test_autocast(net: str) -> None:
    make, batch, loss_fn = NETS[net]
    twins, data = Twins(make, OPTIMIZERS["adam"], loss_fn, budget=0.8), batch()
    for _ in range(3):  # plain PyTorch would use old casts of parameters in a second step of one block
        with torch.autocast("cpu", torch.bfloat16):
            twins.check(data, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert measure_peak(lambda: twins.step(data)).peak_bytes == twins.step.plan(data).peak_bytes


def test_another_shape_is_another_program() -> None:
    twins = Twins(mlp, OPTIMIZERS["adam"], squares, budget=0.9)
    for rows in (64, 32, 64):
        twins.check((torch.randn(rows, 32), torch.randn(rows, 32)), 2)
    assert fckpt.stats(twins.step).plans == 2


def test_a_function_that_cannot_be_captured_is_traced() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.layer(x).tanh()

    for accumulate in (1, 2):
        twins = Twins(Odd, OPTIMIZERS["adam"], squares, budget=1.0, accumulate=accumulate)
        twins.check((torch.randn(4, 8), torch.randn(4, 8)), 3)
        assert fckpt.stats(twins.step).captures == 0


def test_versions_of_parameters_count_updates() -> None:
    model = nn.Linear(4, 4)
    step = fckpt.step(model, optim.SGD(model.parameters(), lr=0.1), squares)
    out = model(torch.randn(2, 4, requires_grad=True))
    step((torch.randn(2, 4), torch.randn(2, 4)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_within_another_budget_nothing_is_captured_again() -> None:
    (model, _), batch = seeded(mlp), (torch.randn(64, 32), torch.zeros(64, 32))
    free = fckpt.step(model, optim.SGD(model.parameters(), lr=0.1, foreach=False), squares)
    free(batch)
    tight = free.within(0.7, optim.AdamW(model.parameters(), foreach=False))
    plain = copy.deepcopy(model)
    plain_optimizer = optim.AdamW(plain.parameters(), foreach=False)
    for _ in range(2):
        loss = squares(plain, batch)
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert_equal(loss, tight(batch))
    assert_equal(list(plain.parameters()), list(model.parameters()))
    assert fckpt.stats(tight).captures == 0 and fckpt.stats(tight).plans >= 1
    assert tight.plan(batch).peak_bytes <= 0.7 * tight.plan(batch).baseline_peak_bytes
    with pytest.raises(ValueError, match="must be positive, not -1"):
        free.within(-1)


def test_plans_whose_updates_wait_are_searched_for_faster_ones() -> None:
    """The lowest order that is found recomputes much more than its budget asks for."""
    make, batch_of, loss_fn = NETS["conv"]
    (model, _), batch = seeded(make), batch_of()
    train_step = fckpt.step(model, optim.AdamW(model.parameters(), foreach=False), loss_fn, budget=1)
    with pytest.raises(fckpt.BudgetError) as error:
        train_step.plan(batch)
    graph = train_step.within(error.value.least_bytes).plan(batch).graph
    relaxed = late_writes._relaxed(graph)
    lowest = late_writes._smallest(graph, late_writes.orders_of(relaxed))
    found = late_writes.smallest_within(graph, relaxed, lowest.peak_nbytes)
    assert simulate(graph, found).peak_nbytes <= lowest.peak_nbytes
    assert simulate(graph, found).seconds <= simulate(graph, lowest.schedule).seconds
