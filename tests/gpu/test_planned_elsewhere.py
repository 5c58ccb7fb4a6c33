"""Plans for a GPU that were made without it: on the device, operations and peak are those that were predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision_shim  # noqa: F401  before transformers
from helpers import assert_equal
from torch import nn
from torch.nn import functional as F

import fckpt

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
CUDA = torch.device("cuda")


def compare(fn: Any, args: tuple[Any, ...], module: nn.Module | None = None, *, within: float = 0.1) -> None:
    """Plans with tensors on the CPU for the GPU, then runs the plan on the GPU, and compares the peak."""
    plan = fckpt.plan(fn, *args, device="cuda", costs="H100", budget=1.0)
    if module is not None:
        module.to(CUDA)
    args = tuple(a.detach().to(CUDA).requires_grad_(a.requires_grad) for a in args)
    leaves = [t for t in (*args, *(module.parameters() if module else ())) if t.requires_grad]
    real = fckpt.plan(fn, *args, budget=1.0)
    assert [n.op for n in plan.graph.nodes] == [n.op for n in real.graph.nodes]

    def plain() -> None:
        torch.autograd.grad(fn(*args), leaves, allow_unused=True)

    plain()
    measured = min(fckpt.measure_peak(plain, CUDA).peak_bytes for _ in range(2))
    off = plan.baseline_peak_bytes / measured - 1
    print(f"predicted elsewhere {plan.baseline_peak_bytes:,}, here {real.baseline_peak_bytes:,}, measured {measured:,}")
    assert abs(off) <= within, f"{off:+.1%}"
    region = fckpt.remat(fn, plan=plan)
    torch.autograd.grad(region(*args), leaves, allow_unused=True)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128, 60])
def test_causal_attention_of_2048_tokens(dtype: torch.dtype, width: int) -> None:
    compare(causal, tuple(torch.randn(2, 2048, 8, width, dtype=dtype, requires_grad=True) for _ in range(3)))


@pytest.mark.parametrize("mask", [torch.bool, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_mask(dtype: torch.dtype, mask: torch.dtype) -> None:
    allowed = torch.ones(512, 512, dtype=torch.bool).tril()
    given = allowed if mask is torch.bool else torch.zeros(512, 512).masked_fill(~allowed, -1e4).to(dtype)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, given).sum()

    compare(fn, (*[torch.randn(2, 4, 512, 64, dtype=dtype, requires_grad=True) for _ in range(3)], given))


LAYERS = {
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)),
        (16, 3, 64, 64),
    ),
    "layer norm": lambda: (nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()), (64, 128, 256)),
    "group norm": lambda: (nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.SiLU()), (16, 3, 64, 64)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 32, 3)), (16, 32, 256)),
    "transposed": lambda: (nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2), nn.Upsample(scale_factor=2)), (8, 8, 32, 32)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    net, shape = LAYERS[name]()
    within = 0.25 if name == "weight norm" else 0.1  # cuDNN's workspace is not known without the device
    compare(lambda x: net(x).square().sum(), (torch.randn(shape, requires_grad=True),), net, within=within)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_models_of_hugging_face(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4}
    kinds = {"gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "llama": "LlamaForCausalLM"}
    more = {"intermediate_size": 512} if name != "gpt2" else {"n_positions": 256, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.AutoConfig.for_model(name, **sizes, **more)
    model = getattr(transformers, kinds[name])(config).to(torch.bfloat16).train()
    tokens = torch.randint(512, (8, 256))
    compare(lambda ids: model(input_ids=ids, labels=ids).loss, (tokens,), model)


RECOMPUTING = {
    torch.float32: lambda: [m for _ in range(6) for m in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())],
    torch.bfloat16: lambda: [m for _ in range(6) for m in (nn.Linear(512, 1024), nn.GLU(), nn.LayerNorm(512))],
}


@pytest.mark.parametrize("dtype", RECOMPUTING)
def test_a_plan_that_recomputes_has_the_bits_of_the_plain_function_and_the_peak_that_was_predicted(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*RECOMPUTING[dtype]()).to(dtype)
    fn, x = lambda x: net(x).square().sum(), torch.randn(8192, 512, dtype=dtype, requires_grad=True)
    plan = fckpt.plan(fn, x, device="cuda", costs="H100", budget=0.5)
    assert plan.overhead > 0
    net.to(CUDA)
    x = x.detach().to(CUDA).requires_grad_()
    region = fckpt.remat(fn, plan=plan)
    gradients = lambda f: torch.autograd.grad(f(x), [x, *net.parameters()])
    for _ in range(2):
        assert_equal(gradients(region), gradients(fn))
    plain, measured = (fckpt.measure_peak(lambda f=f: gradients(f), CUDA).peak_bytes for f in (fn, region))
    print(f"predicted {plan.peak_bytes:,}, measured {measured:,}, plain {plain:,}")
    assert abs(measured / plan.peak_bytes - 1) <= 0.1
    assert measured < 0.6 * plain
    assert not fckpt.stats(region).fallbacks
