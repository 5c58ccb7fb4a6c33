"""What operations cost: temporaries to the byte, rooflines by hand, and nothing disturbed on the way."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from priced import call_of, trace_of
from torch.func import grad, vmap

from fckpt._trace.operations import Call, TensorSpec
from fckpt.cost import (
    Analytic,
    DeviceProfile,
    Measured,
    OpCost,
    calibrated,
    price,
    profile_of,
    profiles,
    register_cost,
)
from fckpt.cost.calls import _REGISTRY
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.report.progress import Line

aten = torch.ops.aten
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("cost_folder")


def temporary(op: Any, *args: Any) -> int:
    return Measured(cache=False, repeats=1)(*call_of(op, *args)).temporary_nbytes


# ------------------------------------------------------------------------------------------------- measured
def test_temporaries_by_hand() -> None:
    x = torch.rand(64, 256)
    nbytes = 64 * 256 * 4
    assert temporary(aten.mm.default, x, x.t()) == 0
    assert temporary(aten.add.Tensor, x, x) == 0
    assert temporary(aten._softmax.default, x, 1, False) == 0
    # exp(x - max) in full, the maxima, and the result is the output
    assert nbytes <= temporary(aten.logsumexp.default, x, [1]) <= nbytes + 2 * 64 * 4
    # the squares of the differences, and the constants of the mean
    assert nbytes <= temporary(aten.mse_loss.default, x, x) <= nbytes + 64


def test_convolution_has_temporaries() -> None:
    x, w = torch.rand(2, 8, 16, 16), torch.rand(16, 8, 3, 3)
    args = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert temporary(aten.convolution.default, x, w, None, *args) > 0
    # In float64 no oneDNN: the columns of the whole batch, 8 channels * 9 places * 256 pixels.
    columns = 2 * 8 * 9 * 256 * 8
    assert temporary(aten.convolution.default, x.double(), w.double(), None, *args) == columns


def test_seconds_grow_with_the_work() -> None:
    source = Measured(cache=False)
    small, large = (source(*call_of(aten.mm.default, *[torch.rand(n, n)] * 2)) for n in (8, 256))
    assert 0 < small.seconds < large.seconds < 1
    assert large.flops == 2 * 256**3


def test_strides_are_kept() -> None:
    seen = []

    def op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape, x.stride(), y.shape, y.stride()))
        return x + y

    x, y = torch.rand(6, 4).t(), torch.rand(6).expand(4, 6)
    Measured(cache=False, repeats=1)(*call_of(op, x, y))
    assert set(seen) == {(x.shape, x.stride(), y.shape, y.stride())}


x, labels = torch.rand(8, 10), torch.zeros(8, dtype=torch.long)
image, plane = torch.rand(2, 4, 8, 8), [2, 2]
kernel, bias = torch.rand(6, 4, 3, 3), torch.rand(6)
shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
heads = torch.rand(2, 2, 8, 4)
pooled = aten.max_pool2d_with_indices.default(image, plane, plane)
normed = aten.native_layer_norm.default(x, [10], x[0], x[1], 1e-5)
four = (torch.rand(4), torch.rand(4), torch.rand(4), torch.rand(4))
attended = aten._scaled_dot_product_flash_attention_for_cpu.default(heads, heads, heads)
CASES: dict[str, tuple[Any, ...]] = {
    "embedding": (aten.embedding.default, x, labels),
    "embedding_backward": (aten.embedding_dense_backward.default, x, labels, 100, -1, False),
    "gather": (aten.gather.default, x, 1, labels[:, None]),
    "gather of rows": (aten.gather.default, x, -2, labels[None, :]),
    "index_select": (aten.index_select.default, x, 0, labels),
    "index": (aten.index.Tensor, x, [None, labels]),
    "index_put": (aten.index_put.default, x, [labels], x, True),
    "index_put_": (aten.index_put_.default, x.clone(), [labels], x),
    "scatter": (aten.scatter.value, x, 1, labels[:, None], 1.0),
    "scatter_add": (aten.scatter_add.default, x, 1, labels[:, None], x),
    "nll_loss": (aten.nll_loss_forward.default, x, labels, None, 1, -100),
    "nll_loss_backward": (aten.nll_loss_backward.default, x[0, 0], x, labels, None, 1, -100, x[0, 1]),
    "nll_loss of one": (aten.nll_loss_forward.default, x[0], labels[0], None, 1, -100),
    "nll_loss2d": (aten.nll_loss2d_forward.default, image, labels[:2, None, None].expand(2, 8, 8), None, 1, -100),
    "cross_entropy": (aten.cross_entropy_loss.default, x, labels),
    "max_pool": (aten.max_pool2d_with_indices.default, image, plane, plane),
    "max_pool_backward": (
        aten.max_pool2d_with_indices_backward.default, pooled[0], image, plane, plane, [0, 0], [1, 1], False, pooled[1]
    ),
    "batch_norm": (aten.native_batch_norm.default, image, *four, True, 0.1, 1e-5),
    "batch_norm functional": (aten._native_batch_norm_legit_functional.default, image, *four, True, 0.1, 1e-5),
    "batch_norm_backward": (
        aten.native_batch_norm_backward.default, image, image, four[0], *four[:2], *four[2:], True, 1e-5, [True] * 3
    ),
    "layer_norm": (aten.native_layer_norm.default, x, [10], x[0], x[1], 1e-5),
    "layer_norm_backward": (
        aten.native_layer_norm_backward.default, x, x, [10], normed[1], normed[2], x[0], x[1], [True] * 3
    ),
    "dropout": (aten.native_dropout.default, x, 0.5, True),
    "dropout_backward": (aten.native_dropout_backward.default, x, x > 0.5, 2.0),
    "bernoulli of probabilities": (aten.bernoulli.default, x),
    "convolution": (aten.convolution.default, image, kernel, bias, *shape),
    "convolution_backward": (
        aten.convolution_backward.default, torch.rand(2, 6, 8, 8), image, kernel, [6], *shape, [True] * 3
    ),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, heads, heads, heads),
    "attention_backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, heads, heads, heads, heads, *attended, 0.0,
        False,
    ),
    "cholesky": (aten.linalg_cholesky.default, torch.eye(5)),
    "integer division": (aten.remainder.Tensor, labels, labels + 1),
    "masks": (aten.where.self, x > 0.5, x, x),
    "complex": (aten.mul.Tensor, x.cfloat(), x.cfloat()),
    "bfloat16": (aten.mul.Tensor, x.bfloat16(), x.bfloat16()),
    "nothing": (aten.ones.default, [3]),
    "empty": (aten.exp.default, x[:0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_runs_on_synthetic_data(name: str) -> None:
    op, *args = CASES[name]
    call, specs = call_of(op, *args)
    source = Measured(cache=False, repeats=1)
    cost = source(call, specs)
    assert not source.failures
    assert 0 < cost.seconds < 1
    assert cost.temporary_nbytes >= 0
    estimate = Analytic(profiles["cpu"])(call, specs)
    assert estimate.flops == cost.flops and 0 < estimate.seconds < 1


def test_indices_spread_over_the_table() -> None:
    table, rows, rest = torch.rand(50, 2), torch.zeros(200, dtype=torch.long), (0, False, False)
    call, specs = call_of(aten.embedding.default, table, rows, *rest)
    from fckpt.cost.synthetic import arguments

    indices = arguments(call, specs, "usual")[0][1]
    assert indices.max() < 50 and indices.unique().numel() > 25
    assert not arguments(call, specs, "zeros")[0][1].any()


def test_generators_are_untouched() -> None:
    generator = torch.Generator().manual_seed(3)
    call, specs = call_of(aten.bernoulli.p, torch.rand(100), 0.5)
    call = dataclasses.replace(call, kwargs={"generator": generator})
    before = torch.get_rng_state(), generator.get_state()
    for name in ("dropout", "bernoulli of probabilities"):
        Measured(cache=False)(*call_of_saved(name))
    source = Measured(cache=False)
    source(call, specs)
    assert not source.failures
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(generator.get_state(), before[1])


def call_of_saved(name: str) -> tuple[Call, list[TensorSpec]]:
    """The call of a case, with the generator where it was."""
    with torch.random.fork_rng([]):
        return call_of(CASES[name][0], *CASES[name][1:])


def test_surroundings_are_out_of_force() -> None:
    """Transforms, autocast, fake tensors, function modes and grad mode change nothing of what is measured."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call, specs = call_of(aten.mm.default, torch.rand(4, 4), torch.rand(4, 4))
    dropout = call_of_saved("dropout")
    seen: list[OpCost] = []

    def op(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = aten.mm.default(a, b)
        assert type(out) is torch.Tensor and out.dtype == torch.float32 and out.device == CPU
        assert not torch.is_grad_enabled()
        return out

    def run(z: torch.Tensor) -> torch.Tensor:
        source = Measured(cache=False, repeats=1)
        seen.append(source(dataclasses.replace(call, op=op), specs))
        source(*dropout)
        assert not source.failures
        return (z * z).sum()

    z = torch.rand(3)
    vmap(grad(run))(torch.rand(2, 3))
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        run(z)
    with FakeTensorMode():
        run(torch.rand(3))
    assert len(seen) == 3
    assert torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
def test_an_outer_profiler_is_left_alone() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    source = Measured(cache=False, repeats=1)
    x = torch.rand(4)
    call, specs = call_of(aten.exp.default, x)
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        assert source(call, specs).temporary_nbytes == 0
        x.sin()
    assert not source.failures
    assert any(event.key == "aten::sin" for event in recording.key_averages())


def test_garbage_is_not_counted() -> None:
    """A cycle that holds tensors may be collected at any time."""

    def op(x: torch.Tensor) -> torch.Tensor:
        cycle: list[Any] = [torch.empty(1000)]
        cycle.append(cycle)
        out = x.neg()
        gc.collect() if gc.isenabled() else None
        return out

    assert gc.isenabled()
    assert temporary(op, torch.rand(4)) == 0  # the 4000 bytes are still held when it returns
    assert gc.isenabled()


@pytest.mark.gpu
def test_on_cuda() -> None:
    x = torch.rand(512, 512, device="cuda")
    source = Measured(cache=False)
    assert source(*call_of(aten.mm.default, x, x)).temporary_nbytes == 0
    assert source(*call_of(aten.logsumexp.default, x, [1])).temporary_nbytes >= 512 * 512 * 4
    call, specs = call_of(aten.native_dropout.default, x, 0.5, True)
    state = torch.cuda.get_rng_state()
    cost = source(call, specs)
    assert 0 < cost.seconds < 1e-2
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert not source.failures


# ---------------------------------------------------------------------------------------------------- price
def test_equal_operations_are_priced_once() -> None:
    calls: list[Call] = []

    def source(call: Call, specs: Any) -> OpCost:
        calls.append(call)
        return OpCost(1.5, 7, 11)

    a, b, other = (call_of(aten.exp.default, torch.rand(n)) for n in (4, 4, 5))
    graph = price(trace_of(a, b, other), source)
    assert len(calls) == 2
    assert [(n.seconds, n.flops, n.temporary_nbytes) for n in graph.nodes] == [(1.5, 7, 11)] * 3


def test_views_cost_nothing_and_nodes_of_two_calls_cost_both() -> None:
    trace = trace_of(call_of(aten.exp.default, torch.rand(4)))
    call = trace.calls[0]
    view, again = dataclasses.replace(call, node=None), dataclasses.replace(call, op=aten.sin.default)
    trace = dataclasses.replace(trace, calls=(view, call, again))
    graph = price(trace, lambda call, specs: OpCost(1.0, 2, 3 if call.op is aten.exp.default else 4))
    assert (graph.nodes[0].seconds, graph.nodes[0].flops, graph.nodes[0].temporary_nbytes) == (2.0, 4, 4)


def test_what_cannot_run_is_estimated_with_one_warning() -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        if x.max() < 2:
            raise ValueError("x is too small")
        return x.exp()

    trace = trace_of(call_of(op, torch.full((4,), 3.0)), call_of(op, torch.full((5,), 3.0)))
    source = Measured()
    with pytest.warns(UserWarning, match=r"fckpt estimated .*register_cost.*x is too small") as caught:
        graph = price(trace, source)
    assert len(caught) == 1
    assert all(node.seconds > 0 for node in graph.nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        price(trace, source)


def test_measured_graph() -> None:
    trace = trace_of(*(call_of(CASES[name][0], *CASES[name][1:]) for name in ("masks", "convolution", "layer_norm")))
    graph = price(trace, Measured(), progress=True)  # stderr is no terminal
    assert all(node.seconds > 0 for node in graph.nodes)
    assert graph.seconds == pytest.approx(sum(node.seconds for node in graph.nodes))
    assert (
        dataclasses.replace(
            graph, nodes=tuple(dataclasses.replace(n, seconds=0.0, flops=0, temporary_nbytes=0) for n in graph.nodes)
        )
        == trace.graph
    )


def test_progress_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Line() as line:
        line.start, line.last = line.start - 3, line.last - 3
        line.update(10, 100, "priced {} of {} operations")
    shown = capsys.readouterr().err
    assert "fckpt: priced 10 of 100 operations, 27.0 s left" in shown
    assert shown.endswith("\r")  # it is wiped


# ------------------------------------------------------------------------------------------------- analytic
MACHINE = DeviceProfile("machine", {torch.float32: 1e12, torch.bfloat16: 4e12}, 1e11, 1e-6, 2**34, 512)


def analytic(op: Any, *args: Any) -> OpCost:
    """What it costs on MACHINE, an accelerator."""
    call, specs = call_of(op, *args)
    return Analytic(MACHINE)(call, [dataclasses.replace(spec, device=torch.device("cuda", 0)) for spec in specs])


def test_roofline_by_hand() -> None:
    a = torch.empty(1000, 1000, device="meta")
    assert analytic(aten.mm.default, a, a) == OpCost(pytest.approx(2e9 / 1e12 + 1e-6), 2 * 10**9, 0)
    b = a.bfloat16()
    assert analytic(aten.mm.default, b, b).seconds == pytest.approx(2e9 / 4e12 + 1e-6)
    # 8 MB moved at 100 GB/s
    assert analytic(aten.exp.default, a) == OpCost(pytest.approx(8e6 / 1e11 + 1e-6), 10**6, 0)
    # what is expanded is read once: 4 kB, 4 MB and 4 MB
    row = torch.empty(1000, device="meta").expand(1000, 1000)
    assert analytic(aten.add.Tensor, a, row).seconds == pytest.approx(8.004e6 / 1e11 + 1e-6)
    # only the rows that are taken: 2 * 40 kB and 10 indices
    taken = analytic(aten.index_select.default, a, 0, torch.zeros(10, dtype=torch.long, device="meta"))
    assert taken.seconds == pytest.approx(80_080 / 1e11 + 1e-6)


@pytest.mark.parametrize(
    ("op", "flops"),
    [
        ("attention", 2 * 2 * (2 * 2 * 8 * 8 * 4)),
        ("attention_backward", 5 * 2 * (2 * 2 * 8 * 8 * 4)),
        ("convolution", 2 * 2 * 64 * 6 * 4 * 9),
        ("convolution_backward", 2 * 2 * 2 * 64 * 6 * 4 * 9),
        ("masks", 80),
    ],
)
def test_flops_by_hand(op: str, flops: int) -> None:
    assert Analytic(MACHINE)(*call_of(CASES[op][0], *CASES[op][1:])).flops == flops


def test_estimated_temporaries() -> None:
    x = torch.empty(100, 100, device="meta")
    nbytes = 40_000 + 400
    assert analytic(aten.logsumexp.default, x, [1]).temporary_nbytes == math.ceil(nbytes / 512) * 512
    assert analytic(aten.mm.default, x, x).temporary_nbytes == 0


@pytest.mark.parametrize("double", [False, True])
def test_estimates_of_convolutions_are_those_of_this_cpu(double: bool) -> None:
    x, w = torch.rand(4, 16, 16, 16), torch.rand(32, 16, 3, 3)
    if double:
        x, w = x.double(), w.double()
    call, specs = call_of(aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    measured, estimated = Measured(cache=False, repeats=1)(call, specs), Analytic(MACHINE)(call, specs)
    assert estimated.temporary_nbytes > 0
    if double:  # oneDNN picks layouts by processor
        assert estimated.temporary_nbytes == measured.temporary_nbytes


def test_profiles() -> None:
    assert set(profiles) == {"H200", "H100", "A100", "RTX 4090", "cpu"}
    h100, h200 = profiles["H100"], profiles["H200"]
    assert h100.flops[torch.bfloat16] == pytest.approx(0.7 * 989.4e12)
    assert h200.bytes_per_second == pytest.approx(0.85 * 4.8e12)
    assert h100.flops == h200.flops and h200.memory_nbytes > h100.memory_nbytes
    assert h100.flops_of(torch.int64) == h100.flops[torch.float32] == 4 * h100.flops_of(torch.complex64)
    assert all(p.allocation_granularity == (1 if p.name == "cpu" else 512) for p in profiles.values())
    assert hash(h100) != hash(h200)


def test_profile_of_this_machine() -> None:
    found = profile_of("cpu")
    assert found is profile_of(CPU) is calibrated("cpu")
    assert 1e8 < found.flops[torch.float32] < 1e15 and 1e8 < found.bytes_per_second < 1e14
    assert 0 < found.launch_seconds < 1e-3 and found.memory_nbytes > 2**28


def test_gpus_are_known_by_name() -> None:
    from fckpt.cost.devices import _listed

    assert _listed("NVIDIA H100 80GB HBM3") is profiles["H100"]
    assert _listed("NVIDIA GeForce RTX 4090") is profiles["RTX 4090"]
    for other in (
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ):
        assert _listed(other) is None


@pytest.mark.parametrize("name", ["TPU", "meta", "cuda:17"])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(ArgumentValueError, match=f"no device '{name}', .*H200, H100.*DeviceProfile"):
        profile_of(name)


def test_profiles_are_checked() -> None:
    with pytest.raises(ArgumentValueError, match=r"'x' must have positive rates, including one for float32"):
        DeviceProfile("x", {torch.float64: 1e9}, 1e9, 0.0, 1)


# ------------------------------------------------------------------------------------------------- registry
@pytest.mark.parametrize(
    "op",
    [aten.erfinv, aten.erfinv.default, "aten::erfinv", "aten::erfinv.default", "aten.erfinv.default"],
    ids=str,
)
@pytest.mark.parametrize(
    "source", [lambda: Measured(cache=False), lambda: Analytic(MACHINE)], ids=["measured", "analytic"]
)
def test_users_costs_come_first(op: Any, source: Callable[[], Any]) -> None:
    cost = OpCost(0.25, 5, 6)
    before = dict(_REGISTRY)
    try:
        register_cost(op, lambda call, specs: dataclasses.replace(cost, flops=specs[call.args[0].tensor].shape[0]))
        call, specs = call_of(aten.erfinv.default, torch.rand(5))
        assert source()(call, specs) == cost
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(before)


def test_register_cost_is_checked() -> None:
    with pytest.raises(ArgumentTypeError, match=r"an operation is an OpOverload.* not int: 3"):
        register_cost(3, lambda call, specs: OpCost(0.0, 0, 0))
    with pytest.raises(ArgumentTypeError, match=r"a cost is a function .* not float: 1.0"):
        register_cost("a::b", 1.0)  # type: ignore[arg-type]
