"""Compiled kernels: the bits of the plain function (exact) or nearly (fused), and the peak that was simulated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact_kernels import compile_by, do_not_compile, one_by_one, use_every_kernel
from helpers import assert_equal
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fckpt
from fckpt._fuse import trial
from fckpt._fuse.data import made_up, same_bits
from fckpt._fuse.kernel import Kernel
from fckpt._fuse.operations import fusible
from fckpt._planned import program
from fckpt._trace.operations import Call, Ref, TensorSpec
from fckpt.errors import ScheduleError
from fckpt.graph.graph import Node
from fckpt.graph.schedule import Compute, FusedBlock, FusedSchedule
from fckpt.graph.simulation import simulate

Program = tuple[fckpt.Plan, FusedSchedule | None]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that a test makes, in which every kernel is used that passes its trial except for its speed."""
    found: list[Program] = []
    blocks = program.with_blocks

    def noted(trace: Any, plan: fckpt.Plan, kernels: Any, within: int | None) -> fckpt.Plan:
        made = blocks(trace, plan, kernels, within)
        found.append((made, made.fused))
        return made

    monkeypatch.setattr(program, "with_blocks", noted)
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(trial, "_warned", set())
    use_every_kernel(monkeypatch)
    return found


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    do_not_compile(monkeypatch)


def blocks_in(schedule: FusedSchedule | None) -> list[FusedBlock]:
    steps = () if schedule is None else (*schedule.forward, *schedule.backward)
    return [step for step in steps if isinstance(step, FusedBlock)]


def gradients(fn: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    loss = fn()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def compared(fn: Callable[[], Tensor], leaves: list[Tensor], made: list[Program], budget: Any, kernels: Any) -> Any:
    """The results of the plain function and of the planned one, whose peak is checked."""
    planned = fckpt.remat(fn, budget=budget, kernels=kernels)
    gradients(planned, leaves)
    found = gradients(planned, leaves)
    peak = fckpt.measure_peak(lambda: gradients(planned, leaves)).peak_bytes
    plan, schedule = made[-1]
    simulated = simulate(plan.graph, schedule or plan.schedule).peak_nbytes
    assert peak == simulated
    assert plan.budget_bytes is not None and peak <= plan.budget_bytes
    return gradients(fn, leaves), found


# -- networks, with inductor's kernels


def elementwise() -> tuple[Callable[[], Tensor], list[Tensor]]:
    w, x = torch.randn(3, 64, requires_grad=True), torch.randn(100, 64, requires_grad=True)

    def loss() -> Tensor:
        h = x
        for row in w:
            a = (h * row + x).relu() * 0.5
            h = torch.maximum(a, h) / (a.abs() + 1.5)
        return (h * h).sum()

    return loss, [w, x]


def relu_mlp() -> tuple[Callable[[], Tensor], list[Tensor]]:
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.ReLU())])
    x = torch.randn(64, 32)
    return lambda: net(x).square().sum(), list(net.parameters())


class Gated(nn.Module):
    """RMS norm, rotation and a gated product, as in Llama."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.gate, self.up = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.register_buffer("cos", torch.arange(16.0).unsqueeze(1).mul(torch.ones(width)).cos())
        self.register_buffer("sin", torch.arange(16.0).unsqueeze(1).mul(torch.ones(width)).sin())

    def forward(self, x: Tensor) -> Tensor:
        h = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        a, b = h.chunk(2, -1)
        h = h * self.cos + torch.cat((-b, a), -1) * self.sin
        return x + F.silu(self.gate(h)) * self.up(h)


def llama_like() -> tuple[Callable[[], Tensor], list[Tensor]]:
    net, x = nn.Sequential(Gated(), Gated(), Gated()), torch.randn(8, 16, 32)
    return lambda: net(x).square().mean(), list(net.parameters())


@pytest.mark.parametrize("network", [elementwise, relu_mlp, llama_like])
def test_exact_kernels_give_the_bits_of_the_plain_function_within_the_budget(network: Any, made: list[Program]) -> None:
    torch.manual_seed(0)
    fn, leaves = network()
    expected, found = compared(fn, leaves, made, 0.6, "exact")
    assert_equal(found, expected)
    assert blocks_in(made[-1][1])


def test_in_place_operations_are_part_of_kernels(made: list[Program]) -> None:
    w, x = torch.randn(4, 64, requires_grad=True), torch.randn(256, 64)

    def loss() -> Tensor:
        h = x
        for row in w:
            h = ((h * row).relu_() - 1).mul_(0.5).add_(h)
        return h.square().sum()

    expected, found = compared(loss, [w], made, 0.8, "exact")
    assert_equal(found, expected)
    graph = made[-1][0].graph
    inside = [graph.nodes[n].op for block in blocks_in(made[-1][1]) for n in block.nodes]
    assert {"aten.relu_.default", "aten.mul_.Tensor", "aten.add_.Tensor"} <= set(inside)


@pytest.mark.parametrize("op", [torch.maximum, torch.minimum, lambda a, b: a.clamp(min=b)])
def test_zeros_of_both_signs_at_every_place(made: list[Program], op: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Torch's vector instructions take one of two zeros, and its code for the last elements takes the other one."""
    a, b = torch.zeros(4099, requires_grad=True), torch.full((4099,), -0.0)

    def loss() -> Tensor:
        h = a * 1.0
        for _ in range(4):
            h = op(b * 1.0, h * 2.0) * 1.0
        return (h.detach().reciprocal().clamp(-1, 1) * h.add(1.0)).sum()

    expected, found = compared(loss, [a], made, 1.0, "exact")
    assert_equal(found, expected)


@pytest.mark.usefixtures("uncompiled")
def test_a_kernel_with_other_bits_in_the_last_element_is_not_used(
    monkeypatch: pytest.MonkeyPatch, made: list[Program]
) -> None:
    def compiled(kernel: Kernel) -> Any:
        def run(given: list[Tensor]) -> list[Tensor]:
            zero = not any(bool(t.any()) for t in given)
            results = one_by_one(kernel)(given)
            for t in results if zero else ():
                t[-1] = 0.0
            return results

        return run

    compile_by(monkeypatch, compiled)
    a = torch.randn(4099, requires_grad=True)
    expected, found = compared(lambda: (a * 1.5 * 2.5 * a * -1.0).sum(), [a], made, 1.0, "exact")
    assert_equal(found, expected)
    assert not blocks_in(made[-1][1])


def test_fused_kernels_give_nearly_the_numbers_of_the_plain_function(made: list[Program]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.Softmax(-1))
    x = torch.randn(64, 32)
    expected, found = compared(lambda: net(x).square().sum(), list(net.parameters()), made, 0.9, "fused")
    ops = {made[-1][0].graph.nodes[n].op for block in blocks_in(made[-1][1]) for n in block.nodes}
    assert any("gelu" in op for op in ops) and any("norm" in op or "softmax" in op for op in ops)
    for a, b in zip(found, expected, strict=True):  # other orders of sums, and other approximations of erf
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("made")
def test_check_says_how_far_fused_kernels_are_from_the_plain_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(kernel: Kernel) -> Any:
        return lambda given: [t * (1 + 2**-10) for t in one_by_one(kernel)(given)]

    compile_by(monkeypatch, rounded)
    monkeypatch.setattr(trial, "_has_compiler", {"cpu": True})
    fn, _ = relu_mlp()
    found = fckpt.check(fn, budget=0.9, kernels="fused")
    assert not found and 2**-11 < found.largest < 2**-5
    assert f"the largest relative difference is {found.largest:.2g}" in str(found)
    assert fckpt.check(fn, budget=0.9).largest == 0


@pytest.mark.usefixtures("uncompiled")
def test_kernels_are_used_only_if_they_are_faster(monkeypatch: pytest.MonkeyPatch, made: list[Program]) -> None:
    monkeypatch.setattr(trial, "_FASTER", 0.0)
    compared(*elementwise(), made, 0.6, "exact")
    assert not blocks_in(made[-1][1])


@pytest.mark.parametrize("activation", [F.softplus, F.elu])
def test_tensors_with_other_strides_than_their_stand_ins(made: list[Program], activation: Any) -> None:
    """The backward operations give the strides of the cotangent here, but their stand-ins have those of the input.

    A compiled kernel that reads by the strides of the stand-in reads the elements in another order.
    """
    x = torch.randn(5, 6).t().requires_grad_()
    rows = torch.arange(30.0).view(6, 5)
    loss = lambda: (activation(x.mul(2).mul(x.detach())).contiguous() * rows).sum()
    region = fckpt.remat(loss, budget=1.0, kernels="exact")
    for _ in range(2):
        assert_equal(gradients(region, [x]), gradients(loss, [x]))
    assert blocks_in(made[-1][1])


@pytest.mark.parametrize("captured", [False, True])
def test_lazy_negatives(made: list[Program], captured: bool) -> None:
    """A compiled kernel reads memory as it is. The second call differs from the first in the negative bit only."""
    z, w = torch.randn(16, 16, dtype=torch.complex64), torch.ones(16, requires_grad=True)
    x = z.imag
    mixed = lambda x, w: ((x * w * w + x).relu() * 2 - x).sum()
    fn = lambda: mixed(x, w)
    region = fckpt.remat(fn if captured else mixed, budget=1.0, kernels="exact")
    for x in (z.imag, z.conj().imag):
        found = gradients(region if captured else functools.partial(region, x, w), [w])
        assert_equal(found, gradients(fn, [w]))
        assert blocks_in(made[-1][1])


@pytest.mark.usefixtures("uncompiled")
def test_a_fused_kernel_with_wrong_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch, made: list[Program]) -> None:
    compile_by(monkeypatch, lambda kernel: lambda given: [t * 1.5 for t in one_by_one(kernel)(given)])
    expected, found = compared(*elementwise(), made, 0.6, "fused")
    assert not blocks_in(made[-1][1])
    assert_equal(found, expected)


@pytest.mark.usefixtures("uncompiled")
def test_made_up_data_that_torch_refuses_are_no_failure(made: list[Program]) -> None:
    """A division of integers by zero."""
    i, x = torch.arange(12) - 6, torch.randn(12, requires_grad=True)
    fn = lambda: ((i % (i.abs() + 1) * 2 + 1) % 7 * x * x).sum()
    expected, found = compared(fn, [x], made, 1.0, "fused")
    assert_equal(found, expected)


# -- random programs, with a stand-in for compilation

Op = Callable[[Tensor, Tensor], Tensor]
OPS: dict[str, Op] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - 2.5,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (b * b + 1),
    "relu": lambda a, b: a.relu(),
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "clamp": lambda a, b: a.clamp(-1, 1),
    "row": lambda a, b: a * b[:1],
    "column": lambda a, b: a.mean(1, keepdim=True) + b,
    "float": lambda a, b: a.float().double() * b,
    "transposed": lambda a, b: (a.t() * b.t()).t(),
    "half": lambda a, b: torch.cat([a[:4] * 2, b[4:] - 1]),
    "sin": lambda a, b: a.sin(),
    "matmul": lambda a, b: (a @ b) / 8,
    "dropout": lambda a, b: F.dropout(a, 0.3),
    "maximum": torch.maximum,  # its derivative writes in place
    "relu_": lambda a, b: (a * b).relu_(),
    "masked_fill_": lambda a, b: (a - b).masked_fill_(b > a, 0.5),
    "add_": lambda a, b: (a * 2).add_(b),
    "add_ itself": lambda a, b: doubled(a + b),
    "add_ wider": lambda a, b: a.float().add_(b).double(),
    "clamp_ rows": lambda a, b: clamped_rows(a - b),
}


def doubled(a: Tensor) -> Tensor:
    return a.add_(a)


def clamped_rows(a: Tensor) -> Tensor:
    a[2:4].clamp_(-0.5, 0.5)
    return a


STEPS = st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 4), st.integers(0, 7)), min_size=6, max_size=24)


@pytest.mark.usefixtures("uncompiled")
def test_random_programs_have_the_bits_and_the_peak_that_was_simulated(made: list[Program]) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=8, derandomize=True, deadline=None, phases=[Phase.generate])
    @given(STEPS, st.sampled_from([0.5, 0.7, 0.9, 1.0]))
    def check(steps: list[tuple[str, int, int]], share: float) -> None:
        torch.manual_seed(0)
        leaves = [torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]

        def loss() -> Tensor:
            found = list(leaves)
            for name, i, j in steps:
                found.append(OPS[name](found[-1 - i % len(found)], found[-1 - j % len(found)]))
            return torch.stack([h.sum() for h in found]).sum()

        try:
            expected, found = compared(loss, leaves, made, share, "exact")
        except fckpt.BudgetError as error:
            share = error.least_bytes  # type: ignore[assignment]  # bytes instead of a fraction
            expected, found = compared(loss, leaves, made, error.least_bytes, "exact")
        assert_equal(found, expected)
        seen["compared"] += 1
        seen["with blocks"] += bool(blocks_in(made[-1][1]))

    check()
    assert seen["with blocks"] >= 0.6 * seen["compared"]


# -- where kernels are not used


def test_without_a_compiler_one_warning_says_so_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, made: list[Program]
) -> None:
    monkeypatch.setattr(trial, "_has_compiler", {"cpu": False})
    with pytest.warns(fckpt.KernelWarning, match="no C\\+\\+ compiler was found") as caught:
        expected, found = compared(*elementwise(), made, 0.6, "exact")
        compared(*relu_mlp(), made, 0.6, "exact")
    assert len(caught) == 1
    assert_equal(found, expected)


@pytest.mark.usefixtures("uncompiled")
def test_a_kernel_that_fails_to_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, made: list[Program]) -> None:
    def fails(kernel: Kernel) -> Any:
        raise NotImplementedError("no such lowering")

    compile_by(monkeypatch, fails)
    with pytest.warns(fckpt.KernelWarning, match="NotImplementedError: no such lowering") as caught:
        expected, found = compared(*elementwise(), made, 0.6, "exact")
    assert len(caught) == 1
    assert_equal(found, expected)


def negated_zeros(results: list[Tensor]) -> list[Tensor]:
    return [torch.where(t == 0, -t, t) if t.dtype.is_floating_point else t for t in results]


def transposed(results: list[Tensor]) -> list[Tensor]:
    return [t.t().contiguous().t() for t in results]


def views(results: list[Tensor]) -> list[Tensor]:
    return [torch.stack([t, t])[1] for t in results]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("wrong", [negated_zeros, transposed, views])
def test_a_kernel_with_other_bits_or_another_layout_is_not_used(
    monkeypatch: pytest.MonkeyPatch, made: list[Program], wrong: Any
) -> None:
    compile_by(monkeypatch, lambda kernel: lambda given: wrong(one_by_one(kernel)(given)))
    expected, found = compared(*elementwise(), made, 0.6, "exact")
    assert not blocks_in(made[-1][1])
    assert_equal(found, expected)


def test_no_kernels_are_looked_for_unless_asked(made: list[Program]) -> None:
    fn, leaves = elementwise()
    gradients(fckpt.remat(fn, budget=0.6), leaves)
    assert not made


@pytest.mark.usefixtures("uncompiled")
def test_cotangents_with_other_strides_run_without_kernels(made: list[Program]) -> None:
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    fn = lambda x: (x * 2 + 1).relu() * x
    planned = fckpt.remat(fn, budget=1.0, kernels="exact")
    for ct in (torch.randn(6, 5).double(), torch.ones(1, 1).double().expand(6, 5), torch.randn(5, 6).double().t()):
        for _ in range(2):
            assert_equal(torch.autograd.grad(planned(x), x, ct), torch.autograd.grad(fn(x), x, ct))
    rows, other = torch.randn(3, 6, 5).double(), fckpt.remat(fn, budget=1.0, kernels="exact")
    batched = torch.autograd.grad(other(x), x, rows, is_grads_batched=True)
    assert_equal(batched, torch.autograd.grad(fn(x), x, rows, is_grads_batched=True))
    assert any(blocks_in(schedule) for _, schedule in made)


# -- the option


def test_what_is_not_an_option() -> None:
    with pytest.raises(fckpt.ArgumentValueError, match='kernels must be "aten", "exact" or "fused", not True'):
        fckpt.remat(torch.sin, budget=1.0, kernels=True)  # type: ignore[call-overload]
    with pytest.raises(fckpt.ArgumentValueError, match="kernels='exact' needs a plan"):
        fckpt.remat(torch.sin, kernels="exact")
    with pytest.raises(fckpt.ArgumentValueError, match="kernels='fused' needs a plan"):
        fckpt.plan(torch.sin, torch.ones(3, requires_grad=True), kernels="fused")


@pytest.mark.usefixtures("uncompiled")
def test_a_plan_file_has_the_option_but_no_kernels(made: list[Program], tmp_path: Path) -> None:
    fn, leaves = elementwise()
    plan = fckpt.plan(fn, budget=0.6, kernels="exact")
    assert "kernels='exact'" in str(plan) and not made
    plan.save(tmp_path / "plan.json")
    loaded = fckpt.Plan.load(tmp_path / "plan.json")
    assert loaded.kernels == "exact" and loaded.schedule == plan.schedule
    assert "kernels" not in fckpt.plan(fn, budget=0.6).to_json()
    assert_equal(gradients(fckpt.remat(fn, plan=loaded), leaves), gradients(fn, leaves))
    assert blocks_in(made[-1][1])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("budget", [None, 0.9])
def test_a_training_step(made: list[Program], budget: float | None) -> None:
    trained = []
    for kernels in ("aten", "exact"):
        torch.manual_seed(0)
        net = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(16, 16), nn.Hardtanh())], nn.Linear(16, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = lambda model, x: ((model(x) * 2 - 1) * 0.5).square().mean()
        step = fckpt.step(net, optimizer, loss, budget=budget, kernels=kernels)  # type: ignore[arg-type]
        x = torch.randn(32, 16)
        trained.append([*[step(x) for _ in range(3)], *net.parameters()])
    assert_equal(*trained)
    assert blocks_in(made[-1][1])


# -- parts


def test_the_simulator_checks_blocks() -> None:
    x = torch.randn(4, requires_grad=True)
    plan = fckpt.plan(lambda x: ((x * 2).relu() + 1).sum(), x)
    graph, schedule = plan.graph, plan.schedule
    first, second = (step.node for step in schedule.forward[:2] if isinstance(step, Compute))
    made = graph.nodes[second].outputs
    inner = graph.nodes[first].outputs
    rest = schedule.forward[2:]
    good = FusedBlock((first, second), (*inner, *made))
    assert simulate(graph, FusedSchedule((good, *rest), schedule.backward)).peak_nbytes >= plan.peak_bytes
    for bad, why in (
        (good._replace(nodes=(second,), makes=made), "is not live"),
        (good._replace(makes=(*made, *graph.inputs)), "does not make or which are live"),
        (good._replace(overwrites=graph.inputs), "not freed after it"),
    ):
        with pytest.raises(ScheduleError, match=why):
            simulate(graph, FusedSchedule((bad, *rest), schedule.backward))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_data_of_trials_has_every_kind_of_number(dtype: torch.dtype) -> None:
    spec = TensorSpec((64, 64), (64, 1), dtype, torch.device("cpu"), 0)
    (x,) = made_up([spec], "any")
    tiny = torch.finfo(dtype).tiny
    for kind in (x.isnan(), x == math.inf, x == -math.inf, (x.abs() < tiny) & (x != 0), (x == 0) & x.signbit()):
        assert kind.any()
    assert same_bits(x, x.clone()) and not same_bits(x, torch.where(x == 0, -x, x))
    shared = made_up([spec, dataclasses.replace(spec, shape=(64,), stride=(64,))], "usual")
    assert torch.equal(shared[1], shared[0][:, 0])


@pytest.mark.usefixtures("uncompiled")
def test_each_default_dtype_has_its_own_kernels(monkeypatch: pytest.MonkeyPatch, made: list[Program]) -> None:
    """The result of int / int has the default dtype, so each default dtype needs a kernel of its own."""

    def with_its_dtypes(kernel: Kernel) -> Callable[[list[Tensor]], list[Tensor]]:
        dtypes = [t.dtype for t in kernel.run(made_up([kernel.specs[t] for t in kernel.inputs], "usual"))]
        run = one_by_one(kernel)
        return lambda given: [t.to(dtype) for t, dtype in zip(run(given), dtypes, strict=True)]

    compile_by(monkeypatch, with_its_dtypes)
    i, x = torch.arange(64), torch.ones(64, requires_grad=True)
    fn = lambda: ((i / 3 + 1).relu() * 2 - i / 7).abs() * x
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert_equal(fckpt.remat(fn, budget=1.0, kernels="exact")().detach(), fn().detach())
            assert blocks_in(made[-1][1])
        finally:
            torch.set_default_dtype(torch.float32)


def test_operands_may_be_passed_by_name() -> None:
    """As vmap does for conversions."""
    layout = ((4,), (1,))
    specs = tuple(
        TensorSpec(*layout, dtype, torch.device("cpu"), i) for i, dtype in enumerate([torch.bool, torch.float32])
    )
    node = Node(0, "aten._to_copy.default", (0,), (1,))
    for args, kwargs in (((Ref(0),), {}), ((), {"self": Ref(0)})):
        call = Call(torch.ops.aten._to_copy.default, args, {**kwargs, "dtype": torch.float32}, (1,), 0)
        assert fusible(node, call, specs, exact=True)
