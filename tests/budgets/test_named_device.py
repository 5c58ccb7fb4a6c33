"""Plans for a CUDA device on a machine without one: the operations are those of CUDA, and so are the bytes.

The peaks are compared with the allocations in the source of torch's CUDA kernels, not with a device.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torchvision_shim  # noqa: F401  before transformers
from helpers import TORCH
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fckpt
from fckpt._trace.attention_backends import Attention, backend_of
from fckpt.cost import Analytic, DeviceProfile, profiles

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
A100, RTX, H100, V100 = (8, 0), (8, 9), (9, 0), (7, 0)


def ops(plan: fckpt.Plan) -> list[str]:
    return [node.op.removeprefix("aten.").removesuffix(".default") for node in plan.graph.nodes]


def on_cuda(fn, *args, costs="A100", **kwargs) -> list[str]:
    return ops(fckpt.plan(fn, *args, device="cuda", costs=costs, **kwargs))


def causal(q, k, v):
    """Attention of queries, keys and values with rows of heads, as a model's linear layer returns them."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).sum()


def rows_of_heads(dtype, batch=2, length=2048, heads=8, width=64, device="meta"):
    shape = (batch, length, heads, width)
    return [torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]


# -- attention


@pytest.mark.parametrize(
    ("dtype", "costs", "name", "sizes"),
    [
        # The output, three gradients, the copied gradient of the sum, and the float32 sum of the query's gradient.
        (torch.bfloat16, "A100", "flash", 1 + 3 + 1 + 2),
        # The output, three gradients, the copied gradient of the sum, and its product with the output.
        (torch.float32, "H100", "efficient", 1 + 3 + 1 + 1),
        (torch.bfloat16, "H100", "cudnn", 1 + 3 + 1 + 2),
    ],
)
def test_causal_attention_of_2048_tokens_takes_what_the_kernels_allocate(dtype, costs, name, sizes) -> None:
    inputs = rows_of_heads(dtype)
    plan = fckpt.plan(causal, *inputs, device="cuda", costs=costs)
    kernel = f"_scaled_dot_product_{name}_attention"
    assert [op for op in ops(plan) if "attention" in op] == [kernel, f"{kernel}_backward"]
    rows = 2 * 8 * 2048 * 4  # float32 numbers by row: the logarithms of the sums, and sums of backward
    expected = sizes * inputs[0].nbytes + (3 if name == "efficient" else 2) * rows
    assert abs(plan.peak_bytes - expected) < 0.002 * expected
    assert plan.peak_bytes % 512 == 0


def test_attention_on_the_meta_device_itself_takes_many_times_as_much() -> None:
    inputs = rows_of_heads(torch.bfloat16)
    costs = Analytic(profiles["A100"])
    meta = fckpt.plan(causal, *inputs, costs=costs, device="meta")
    assert "bmm" in ops(meta)
    assert meta.peak_bytes > 5 * fckpt.plan(causal, *inputs, costs=costs).peak_bytes  # the profile says what it is


def attention(dtype=torch.float16, width=64, **given) -> Attention:
    q, k, v = [x.transpose(1, 2) for x in rows_of_heads(dtype, 1, 16, 4, width)]
    rest = {"mask": None, "dropout": 0.0, "causal": False, "grouped": False}
    return Attention(**({"query": q, "key": k, "value": v} | rest | given))


def few_heads(width=64) -> torch.Tensor:
    return torch.empty(1, 2, 16, width, dtype=torch.float16, device="meta")


MASK = torch.empty(1, 1, 16, 16, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("given", "capability", "expected"),
    [
        ({}, A100, FLASH),
        ({}, H100, CUDNN),
        ({"dropout": 0.1}, H100, FLASH if TORCH >= (2, 12) else CUDNN),  # cuDNN's probabilities: multiples of 1/16
        ({"dropout": 0.125}, H100, CUDNN),
        ({"width": 256}, H100, FLASH),
        ({"width": 256}, RTX, FLASH),
        ({"width": 200}, RTX, EFFICIENT),
        ({"width": 264}, A100, EFFICIENT),
        ({"width": 60}, A100, FLASH),  # it is padded
        ({"width": 260}, A100, MATH),
        ({"dtype": torch.float32}, H100, EFFICIENT),
        ({"dtype": torch.float64}, H100, MATH),
        ({"mask": MASK}, A100, EFFICIENT),
        ({"mask": MASK}, H100, CUDNN),
        ({"key": few_heads(), "value": few_heads(), "grouped": True}, A100, FLASH),
        ({"key": few_heads(), "value": few_heads()}, A100, MATH),
        ({"query": torch.empty(16, 64, device="meta")}, A100, MATH),
        ({}, V100, EFFICIENT),
        ({"dtype": torch.bfloat16}, V100, MATH),
    ],
)
def test_the_kernel_is_chosen_by_torchs_rules(given, capability, expected) -> None:
    assert backend_of(attention(**given), capability) is expected


@pytest.mark.parametrize("backend", [FLASH, EFFICIENT, MATH, CUDNN])
def test_the_users_choice_of_a_kernel_counts(backend) -> None:
    with sdpa_kernel(backend):
        assert backend_of(attention(), H100) is backend


def test_masks_and_odd_widths_are_prepared_as_on_the_device() -> None:
    q, k, v = [torch.randn(1, 2, 24, 20, requires_grad=True) for _ in range(3)]
    mask = torch.ones(24, 24, dtype=torch.bool)
    masked = on_cuda(lambda q: F.scaled_dot_product_attention(q, k, v, mask).sum(), q)
    here = ops(fckpt.plan(lambda q: F.scaled_dot_product_attention(q, k, v, mask).sum(), q))
    prepared = here[: here.index("_scaled_dot_product_flash_attention_for_cpu")]
    assert masked[: len(prepared) + 1] == [*prepared, "constant_pad_nd"]
    assert "where.self" in prepared
    halves = [x.detach().half().requires_grad_() for x in (q, k, v)]
    padded = on_cuda(lambda *args: F.scaled_dot_product_attention(*args).sum(), *halves)
    assert padded[:4] == ["constant_pad_nd"] * 3 + ["_scaled_dot_product_flash_attention"]


# -- other functions that choose by device


def test_layers_run_the_kernels_of_cuda() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.1), nn.LayerNorm(6)]
    names = ["cudnn_batch_norm", "native_dropout", "native_layer_norm"]
    if TORCH < (2, 12):
        with pytest.raises(fckpt.TraceError, match="RMS norms, with this version of torch"):
            on_cuda(lambda x: nn.RMSNorm(6)(x).sum(), torch.randn(4, 6, requires_grad=True))
    else:
        layers.append(nn.RMSNorm(6))
        names.append("_fused_rms_norm")
    net = nn.Sequential(*layers)
    found = on_cuda(lambda x: net(x).sum(), torch.randn(4, 3, 8, 8))
    for name in names:
        assert name in found
        assert f"{name}_backward" in found
    assert "bernoulli_.float" not in found
    norm = nn.BatchNorm2d(8).to(torch.bfloat16)
    assert "native_batch_norm" in on_cuda(lambda x: norm(x).sum(), torch.randn(2, 8, 3, 3, dtype=torch.bfloat16))
    half = torch.randn(4, 4, dtype=torch.float16, requires_grad=True)
    assert "_to_copy" not in on_cuda(lambda x: x.softmax(-1, dtype=torch.float32).sum(), half)


@pytest.mark.parametrize(("dim", "fused"), [(0, True), (2, True), (1, False)])
def test_weight_normalisations_are_one_kernel_where_cuda_has_one(dim, fused) -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3), dim=dim)
    found = on_cuda(lambda x: net(x).square().sum(), torch.randn(2, 4, 8))
    for name in ("_weight_norm_interface", "_weight_norm_interface_backward"):
        assert (name in found) is fused


def test_cells_of_lstms_run_the_kernel_of_cuda() -> None:
    cell = nn.LSTMCell(8, 4)
    plan = fckpt.plan(lambda x: sum(cell(x)).sum(), torch.randn(2, 8), device="cuda", costs="A100")
    assert {"_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl"} <= {*ops(plan)}


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 8, 8, 8)])
def test_grid_samples_run_the_kernels_of_cuda(shape) -> None:
    dims = len(shape) - 2
    grid = torch.rand(2, *[4] * dims, dims)
    found = on_cuda(lambda x: F.grid_sample(x, grid, align_corners=False).sum(), torch.randn(shape, requires_grad=True))
    assert {f"grid_sampler_{dims}d", f"grid_sampler_{dims}d_backward"} <= {*found}


def test_code_that_asks_for_the_device_gets_the_named_one() -> None:
    def fn(x):
        # No assert: pytest's would refer to all of pytest, which changes meanwhile.
        if (x.device, x.is_cuda, x.get_device(), x.is_meta) != (torch.device("cuda", 0), True, 0, False):
            raise RuntimeError("not the named device")
        y = x + torch.arange(4, device=x.device) + torch.zeros(4).to(x.device)
        return (y.to("cuda") * y.cuda()).sum()

    plan = fckpt.plan(fn, torch.randn(4, requires_grad=True), device="cuda", costs="A100", outputs=0)
    assert ops(plan).count("_to_copy") == 1  # of the zeros; the others are there
    assert ops(plan)[:6] == ["arange", "add.Tensor", "zeros", "_to_copy", "add.Tensor", "mul.Tensor"]


def test_constants_of_python_numbers_are_made_on_the_named_device() -> None:
    def fn(x):
        first = torch.tensor([1.0, 2.0], device=x.device) + torch.as_tensor([3.0, 4.0], device="cuda")
        return (x * first * torch.tensor(2.0).to(x.device)).sum()

    found = ops(fckpt.plan(fn, torch.randn(2, requires_grad=True), device="cuda", costs="A100", outputs=0))
    assert found.count("_to_copy") == 1  # of the number that is made on the CPU


@pytest.mark.parametrize("count", [2, 4000])
def test_what_a_constant_holds_on_a_named_device_is_not_taken_for_zero(count: int) -> None:
    def fn(x):
        held = torch.tensor([float(i) for i in range(count)], device=x.device)
        return (x * held * (3 if held.max().item() > 0 else 1)).sum()

    with pytest.raises(fckpt.TraceError, match="looks at the data"):
        fckpt.plan(fn, torch.randn(count, requires_grad=True), device="cuda", costs="A100")


def test_fake_cuda_tensors_are_planned() -> None:
    with FakeTensorMode():
        x = torch.empty(100, 3, device="cuda", requires_grad=True)
    fn = lambda x: x.sin().exp().sum()
    plan = fckpt.plan(fn, x, costs="A100")
    real = fckpt.plan(fn, torch.empty(100, 3, requires_grad=True), device="cuda", costs="A100")
    assert plan.peak_bytes == real.peak_bytes
    assert plan.peak_bytes % 512 == 0
    assert plan.peak_bytes >= 3 * 1536


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_models_of_hugging_face_on_the_meta_device(name) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    kinds = {"gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "llama": "LlamaForCausalLM"}
    more = {"intermediate_size": 32} if name != "gpt2" else {"n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.AutoConfig.for_model(name, **sizes, **more)
    with torch.device("meta"):
        model = getattr(transformers, kinds[name])(config).to(torch.bfloat16)
        tokens = torch.zeros(2, 64, dtype=torch.long)
    found = on_cuda(lambda ids: model(input_ids=ids, labels=ids).loss, tokens, costs="H100")
    kernel = "cudnn" if name == "llama" or TORCH < (2, 12) else "flash"  # GPT-2 and BERT have dropout of 0.1
    assert f"_scaled_dot_product_{kernel}_attention_backward" in found
    assert ("native_dropout" in found) is (name != "llama")


# -- what a plan says and refuses


def test_a_plan_for_cuda_says_which_operation_differs_here() -> None:
    inputs = rows_of_heads(torch.float32, 1, 32, 2, 16, "cpu")
    plan = fckpt.plan(causal, *inputs, device="cuda", costs="H100", budget=1.0)
    read = fckpt.Plan.from_json(plan.to_json())
    with pytest.raises(fckpt.PlanError, match=r"operation 0 is aten\._scaled_dot_product_efficient_attention.*for_cpu"):
        fckpt.remat(causal, plan=read)(*inputs)


def test_the_operations_of_the_call_are_those_of_torch_where_nothing_chooses_by_device() -> None:
    w = torch.randn(16, 16, requires_grad=True)
    fn = lambda x: (x @ w).tanh().square().sum()
    x = torch.randn(32, 16, requires_grad=True)
    plan = fckpt.plan(fn, x, device="cuda", costs="A100", budget=1.0)
    fckpt.remat(fn, plan=plan)(x).backward()  # so this plan runs here too
    assert torch.equal(x.grad, torch.autograd.grad(fn(x), x)[0])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x + torch.arange(4)).sum(),
        lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
        lambda x: torch.zeros(4, 4).index_put((torch.tensor([0]),), x[0]).sum(),
    ],
)
def test_tensors_of_two_devices_are_an_error_as_on_the_device(fn) -> None:
    with pytest.raises(fckpt.TraceError, match=r"makes a tensor on the CPU .*\(device=x\.device\)"):
        on_cuda(fn, torch.randn(4, 4, requires_grad=True))


def test_what_cannot_be_told_without_the_device_is_refused() -> None:
    grid = torch.rand(2, 4, 4, 2)
    with pytest.raises(fckpt.TraceError, match="calls of grid_sample with bilinear"):
        on_cuda(lambda x: F.grid_sample(x, grid, align_corners=True).sum(), torch.randn(2, 3, 8, 8, requires_grad=True))
    lstm = nn.LSTM(4, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PyTorch was compiled without cuDNN")
        with pytest.raises(fckpt.TraceError, match=r"recurrent networks .* run other operations on cuda|`data_ptr`"):
            on_cuda(lambda x: lstm(x)[0].sum(), torch.randn(3, 2, 4))
    assert fckpt.plan(lambda x: lstm(x)[0].sum(), torch.randn(3, 2, 4)).peak_bytes  # on the CPU

    def autocast(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return (x @ x).sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA is not available or torch_xla")
        with pytest.raises(fckpt.TraceError, match="switches autocast for cuda off"):
            on_cuda(autocast, torch.randn(4, 4, requires_grad=True))


def test_unknown_devices_are_errors() -> None:
    x = torch.randn(4, requires_grad=True)
    fn = lambda x: x.sin().sum()
    with pytest.raises(fckpt.FckptError, match="device='xpu'"):
        fckpt.plan(fn, x, device="xpu")
    with pytest.raises(fckpt.FckptError, match=r"device must be a device of torch, not 3\.5"):
        fckpt.plan(fn, x, device=3.5)
    with pytest.raises(fckpt.FckptError, match='costs="H100"'):
        fckpt.plan(fn, x, device="cuda")
    with pytest.raises(fckpt.FckptError, match='pass costs="H100"'):
        fckpt.plan(fn, torch.empty(4, device="meta"))


def test_pareto_and_largest_take_a_device() -> None:
    inputs = rows_of_heads(torch.bfloat16, 1, 256, 2, 32)
    curve = fckpt.pareto(causal, *inputs, points=2, device="cuda", costs="H100")
    assert "_scaled_dot_product_cudnn_attention" in ops(curve[0].plan)
    of_length = lambda n: tuple(rows_of_heads(torch.bfloat16, 1, n, 2, 32))
    most = fckpt.largest(causal, of_length, budget="1MiB", least=8, device="cuda", costs="A100")
    assert fckpt.plan(causal, *of_length(most), device="cuda", costs="A100", budget="1MiB").peak_bytes <= 2**20
    assert most > 500  # on the meta device, scores of this length alone take 1 MiB


def test_a_profile_without_a_capability_plans_for_the_device_of_the_tensors() -> None:
    mine = DeviceProfile("mine", {torch.float32: 1e12}, 1e11, 1e-6, 2**30)
    assert "bmm" in ops(fckpt.plan(causal, *rows_of_heads(torch.float32, 1, 32, 2, 16), costs=Analytic(mine)))


def on_meta(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh().sum()


def with_sorted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x[:, sorted({0, 1, len(np.unique(np.ones(3)))})].tanh() @ w[:2]).sum()  # its Python code is traced


@pytest.mark.parametrize("options", [{"budget": 1.0}, {"budget": 1}, {"policy": fckpt.policies.dots_saveable}], ids=str)
@pytest.mark.parametrize("fn", [on_meta, with_sorted])
def test_a_call_on_the_device_meta_is_plain(fn, options) -> None:
    x, w = torch.empty(4, 8, device="meta"), torch.empty(8, 8, device="meta", requires_grad=True)
    planned = fckpt.remat(fn, **options)
    planned(x, w).backward()
    assert w.grad is not None and w.grad.device.type == "meta"
    assert fckpt.stats(planned).fallbacks == {"meta tensors": 1}
    grads = torch.func.grad(planned, argnums=1)(x, w.detach())
    assert grads.shape == w.shape and grads.device.type == "meta"


def test_a_module_on_the_device_meta_and_then_on_another() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
        planned = fckpt.remat(net, budget=1.0)
        planned(torch.empty(4, 8)).sum().backward()
        torch.func.grad(fckpt.remat(on_meta, budget=1.0))(torch.empty(4, 8), torch.empty(8, 8))
    assert all(p.grad is not None for p in net.parameters())
    net.to_empty(device="cpu").zero_grad()
    for t in (*net.parameters(), *net.buffers()):
        nn.init.ones_(t)
    assert fckpt.check(planned, torch.randn(4, 8))
    assert fckpt.stats(planned).plans == 1


def test_tensors_on_the_device_meta_beside_others() -> None:
    x, w = torch.empty(4, device="meta"), torch.randn(4, requires_grad=True)
    with pytest.warns(fckpt.BudgetWarning, match="on the device meta, and others are not"):
        fckpt.remat(lambda x, w: (x.sum(), w.sin().sum()), budget=1.0)(x, w)[1].backward()
    assert torch.equal(w.grad, w.cos())
    with pytest.raises(fckpt.TraceError, match="operations on the device meta"):
        fckpt.remat(lambda w: (w.sin().sum(), torch.empty(2, device="meta").sum()), budget=1.0)(w)
