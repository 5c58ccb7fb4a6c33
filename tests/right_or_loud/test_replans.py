"""What a function does not read makes no new plan, and what it reads makes one."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal
from judge import Session, judge, stats_of
from planned import measured
from torch import Tensor, nn

import fckpt


class Config:
    width, rate, architectures = 32, 0.5, None

    def __init__(self) -> None:
        self.name, self.unread = "net", [1, 2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.epoch = Config(), 0
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor, unread: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.config.rate + x
        return self.norm(x).square().mean()


def save(net: Net) -> None:
    net.config.architectures = ["Net"]
    copy.deepcopy(net.state_dict())


def load(net: Net) -> None:
    net.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in net.state_dict().items()})


def replace(net: Net) -> None:
    net.layers[0][0].weight = nn.Parameter(torch.full((32, 32), 0.01))


def optimise(net: Net) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.step()
    optimizer.zero_grad()


def evaluate(net: Net) -> None:
    net.eval()
    with torch.no_grad():
        net(torch.ones(4, 32))
    net.train()


UNREAD: dict[str, Callable[[Net], Any]] = {
    "epoch": lambda net: setattr(net, "epoch", net.epoch + 1),
    "a new attribute": lambda net: setattr(net, f"new{len(vars(net))}", 1),
    "an attribute of a part": lambda net: setattr(net.layers[1], "seen", 7),
    "an attribute of the config": lambda net: setattr(net.config, "name", net.config.name + "+"),
    "a list": lambda net: net.config.unread.append(3),
    "a class attribute": lambda net: setattr(Config, "architectures", str(Config.architectures)),
    "save": save,
    "load": load,
    "replaced parameter": replace,
    "a step of an optimizer": optimise,
    "evaluation between": evaluate,
    "training again": lambda net: net.train(),
    "the number of gradients": lambda net: net.zero_grad(set_to_none=False),
    "a deepcopy beside": lambda net: copy.deepcopy(net),
    "the default thread count": lambda net: torch.set_num_threads(torch.get_num_threads()),
    "another stream of numbers": lambda net: torch.manual_seed(77),
    "the state dict": lambda net: net.state_dict(),
}


@pytest.mark.parametrize("change", UNREAD)
def test_what_is_not_read_makes_no_plan(change: str) -> None:
    def scenario(session: Session) -> None:
        net, x = Net(), session.leaf(96, 32)
        session.watch(net=net)
        session.undo(lambda: setattr(Config, "architectures", None))
        f = session.region(net)
        session.step(lambda: f(x))
        before = stats_of(f)
        before = None if before is None else (before.captures, before.plans)
        for _ in range(4):
            UNREAD[change](net)
            session.step(lambda: f(x), times=1)
        if not session.is_plain:
            after = fckpt.stats(f)  # type: ignore[attr-defined]
            assert (after.captures, after.plans) == before
            assert after.hits >= 4

    verdict = judge(scenario, budget=0.9)
    assert verdict.kept, (verdict.error, verdict.over)


@pytest.mark.parametrize("values", [(512, 500, 512, 3), (0.1, 0.2, 0.3, 0.4), ("a", "b", "c", "d")])
def test_an_argument_that_is_not_read_makes_no_plan(values: tuple[Any, ...]) -> None:
    def scenario(session: Session) -> None:
        net, x = Net(), session.leaf(96, 32)
        session.watch(net=net)
        f = session.region(net)
        for value in values:
            session.step(lambda: f(x, unread=value), times=2)
        if not session.is_plain:
            assert fckpt.stats(f).plans == 1  # type: ignore[attr-defined]

    verdict = judge(scenario, budget=0.9)
    assert verdict.kept, (verdict.error, verdict.over)


def test_a_copy_of_a_planned_module_is_planned_for_itself() -> None:
    def scenario(session: Session) -> None:
        net, x = Net(), session.leaf(96, 32)
        f = session.region(net)
        session.step(lambda: f(x))
        twin = copy.deepcopy(f)
        twin.config.rate = 0.25
        session.watch(net=net, twin=twin)
        session.step(lambda: twin(x), times=2)
        session.step(lambda: f(x), times=2)

    verdict = judge(scenario, budget=0.9)
    assert verdict.kept, (verdict.error, verdict.over)


def test_a_number_that_is_read_and_changes_at_every_call_is_said() -> None:
    """The third capture names what changed."""
    net, x = Net(), torch.randn(96, 32)
    f = fckpt.remat(net, budget=0.95, solver="greedy")
    with pytest.warns(UserWarning, match="rate") as caught:
        for i in range(5):
            net.config.rate = f"{i}" and [0.1, 0.2, 0.4, 0.8, 1.6][i]
            f(x).backward()
    assert len(caught) >= 1


def test_counters_move_at_every_call() -> None:
    def scenario(session: Session) -> None:
        class Counting(Net):
            def forward(self, x: Tensor, unread: Any = None) -> Tensor:
                self.epoch += 1
                self.norm.weight.calls = self.epoch
                return super().forward(x)

        net, x = Counting(), session.leaf(96, 32)
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x), times=4)

    judge(scenario, budget=0.9)


class Mapped(nn.Module):
    """Counts, and has numbers of its graph that are sizes of intermediate tensors."""

    def __init__(self, counters: int) -> None:
        super().__init__()
        self.calls, self.rows, self.counters, self.linear = 0, 0, counters, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        half = torch.tanh(x)[::2]
        if self.counters > 1:
            self.rows += half.shape[0]
        return torch.func.vmap(lambda row: torch.tanh(self.linear(row)).exp())(half).sum()


@pytest.mark.parametrize("counters", [1, 2])
def test_counters_move_where_other_numbers_are_sizes_of_intermediate_tensors(counters: int) -> None:
    net = Mapped(counters)
    f = fckpt.remat(lambda x: net(x), budget=0.9)
    rows, batches = 0, [torch.randn(many, 32, requires_grad=True) for many in (96, 64)]
    for call, which in enumerate((0, 0, 0, 0, 1, 1, 1, 0, 1), 1):
        f(batches[which]).backward()
        rows += len(batches[which]) // 2 if counters > 1 else 0
        assert (net.calls, net.rows) == (call, rows)


STEPS, KEPT = 0, Mapped(2)


def test_numbers_behind_global_variables_become_inputs_like_those_behind_local_ones() -> None:
    def loss(x: Tensor) -> Tensor:
        global STEPS
        STEPS += 1
        return KEPT(x) * STEPS

    f, x = fckpt.remat(loss, budget=0.9), torch.randn(96, 32, requires_grad=True)
    for call in range(1, 7):
        before = STEPS, KEPT.calls, KEPT.rows
        (grad,) = torch.autograd.grad(f(x), x)
        assert before == (call - 1, call - 1, 48 * (call - 1)) and STEPS == KEPT.calls == call
        assert torch.equal(grad, torch.autograd.grad(Mapped.forward(copy.copy(KEPT), x) * STEPS, x)[0])
    assert fckpt.stats(f).captures <= 3


def test_equal_graphs_share_a_plan() -> None:
    """Another batch of the same size, another instance of equal layers: nothing is solved again."""

    def scenario(session: Session) -> None:
        net, x = Net(), session.leaf(96, 32)
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x))
        for _ in range(3):
            y = session.leaf(96, 32)
            session.step(lambda: f(y), times=1)
        if not session.is_plain:
            assert fckpt.stats(f).plans == 1  # type: ignore[attr-defined]

    verdict = judge(scenario, budget=0.9)
    assert verdict.kept, (verdict.error, verdict.over)


class Choosing(Net):
    """Reads an option, a method and a submodule, of which others may give the same graph."""

    kinds = ("plain", "residual")

    def __init__(self) -> None:
        super().__init__()
        self.option, self.outer = "plain", nn.Tanh()

    def inner(self, x: Tensor) -> Tensor:
        return x.sin()

    def forward(self, x: Tensor, unread: Any = None) -> Tensor:
        if self.option not in self.kinds:
            x = x.exp()
        return super().forward(self.outer(self.inner(x)))


ALIKE: dict[str, Callable[[Choosing, pytest.MonkeyPatch], Any]] = {
    "an option of the same branch": lambda net, patch: setattr(net, "option", "residual"),
    "a class attribute": lambda net, patch: patch.setattr(Choosing, "kinds", ("plain", "residual", "third")),
    "a method": lambda net, patch: patch.setattr(Choosing, "inner", lambda self, x: x.sin()),
    "a layer of another class": lambda net, patch: setattr(net, "outer", type("Tanh", (nn.Tanh,), {})()),
    "a hook that changes nothing": lambda net, patch: net.outer.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", ALIKE)
def test_an_equal_graph_that_is_captured_again_is_not_solved_again(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = Choosing(), torch.randn(96, 32)
    budget = measured(net, x) * 9 // 10
    f = fckpt.remat(net, budget=budget)
    assert measured(f, x) <= budget
    monkeypatch.setattr("fckpt._planned.planner.make_plan", lambda *_: pytest.fail("solved"))
    monkeypatch.setattr("fckpt._planned.families.adapt", lambda *_, **__: pytest.fail("adapted"))
    ALIKE[change](net, monkeypatch)
    assert measured(f, x) <= budget
    stats = fckpt.stats(f)
    assert (stats.captures, stats.plans, stats.fallbacks) == (2, 1, {})
    found = [torch.autograd.grad(loss(x), list(net.parameters())) for loss in (f, net)]
    assert_equal(*found)


COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": torch.ones_like,
    "expanded": lambda y: torch.tensor(1.5, dtype=y.dtype).expand(y.shape),
    "expanded rows": lambda y: torch.arange(1.0, 1 + y.shape[-1], dtype=y.dtype).expand(y.shape),
    "transposed": lambda y: torch.randn(y.shape[1], y.shape[0], dtype=y.dtype).t(),
    "a slice": lambda y: torch.randn(y.shape[0], 2 * y.shape[1], dtype=y.dtype)[:, ::2],
    "contiguous": lambda y: torch.randn(y.shape, dtype=y.dtype),
}


@pytest.mark.parametrize("product", ["plain", "transposed"])
def test_cotangents_of_all_layouts(product: str) -> None:
    """Strides decide which kernel multiplies, and so the last bits: a backward pass has those of the plain one."""
    w = torch.randn(24, 24, dtype=torch.float64, requires_grad=True)
    x = torch.randn(40, 24, dtype=torch.float64)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (torch.tanh(x @ w) * x.sgn()).cumsum(0)
        return x.t() if product == "transposed" else x

    region = fckpt.remat(fn, budget=0.8)
    for _ in range(2):
        for make in COTANGENTS.values():
            y = fn(w, x)
            cotangent = make(y)
            expected = torch.autograd.grad(y, w, cotangent)[0]
            assert torch.equal(torch.autograd.grad(region(w, x), w, cotangent)[0], expected)
    found = fckpt.stats(region)
    assert found.captures == 1 and not found.fallbacks
    assert found.plans <= 3  # expanded ones share that of the output's strides


def chain(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.tanh(x @ w) * x.sgn()
    return x


def of_cotangent(fn: Callable[..., Tensor], w: Tensor, x: Tensor, layout: str) -> Tensor:
    torch.manual_seed(1)
    y = fn(w, x)
    return torch.autograd.grad(y, w, COTANGENTS[layout](y))[0]


@pytest.mark.parametrize("given", ["budget", "plan"])
@pytest.mark.parametrize("layout", COTANGENTS)
def test_a_backward_pass_from_a_cotangent_of_any_layout_keeps_a_budget_or_warns(layout: str, given: str) -> None:
    w, x = torch.randn(24, 24, requires_grad=True), torch.randn(400, 24)
    expected = of_cotangent(chain, w, x, layout)
    budget = fckpt.measure_peak(lambda: of_cotangent(chain, w, x, layout)).peak_bytes * 8 // 10
    options = {"budget": budget} if given == "budget" else {"plan": fckpt.plan(chain, w, x, budget=budget)}
    region, said = fckpt.remat(chain, **options), list[type[Warning]]()
    for call in range(4):
        found: list[Tensor] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            held = fckpt.measure_peak(lambda found=found: found.append(of_cotangent(region, w, x, layout))).peak_bytes
        said += [warning.category for warning in caught]
        assert_equal(found, [expected])
        assert said or call == 0 or held <= budget  # the first backward pass of a kind shows what to plan for
    # A plan that is given cannot be made for other strides.
    assert said == [fckpt.BudgetWarning] * (given == "plan" and layout in ("transposed", "a slice"))


def test_backward_passes_from_cotangents_of_changing_layouts_keep_a_budget_or_warn() -> None:
    w, x = torch.randn(24, 24, requires_grad=True), torch.randn(400, 24)
    layouts = [name for name in COTANGENTS if name != "a slice"]  # of a larger tensor, which the caller holds
    budget = min(fckpt.measure_peak(lambda k=k: of_cotangent(chain, w, x, k)).peak_bytes for k in layouts) * 9 // 10
    region, said = fckpt.remat(chain, budget=budget), False
    for number in range(3):
        for layout in layouts:
            found: list[Tensor] = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step = lambda layout=layout, found=found: found.append(of_cotangent(region, w, x, layout))
                held = fckpt.measure_peak(step).peak_bytes
            assert_equal(found, [of_cotangent(chain, w, x, layout)])
            said = said or any(warning.category is fckpt.BudgetWarning for warning in caught)
            assert said or number == 0 or held <= budget, (number, layout, held, budget)


FIRST_COMPILED = """
import fckpt, torch
from torch import nn

def loss(layer, x):
    return nn.Sequential(layer, nn.Tanh())(x).sum()

region, layer, x = fckpt.remat(loss, budget=1.0), nn.Linear(4, 4), torch.ones(2, 4)
region(layer, x).backward()
torch.compile(torch.sin, backend="eager")(x)
region(layer, x).backward()
print(fckpt.stats(region).captures)
"""


def test_the_first_compilation_of_a_process_changes_no_class_that_was_read() -> None:
    """Dynamo replaces the constructor of modules then, so this needs a process that has compiled nothing."""
    made = subprocess.run([sys.executable, "-c", FIRST_COMPILED], capture_output=True, text=True)
    assert made.stdout.split() == ["1"], made.stderr
