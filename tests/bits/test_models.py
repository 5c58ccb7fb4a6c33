"""Blocks of Hugging Face and timm models, rematerialised in a loop: the same step, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision_shim  # noqa: F401  before transformers and timm
from helpers import assert_equal
from torch import nn

import fckpt

LAYERS = 3
HIDDEN = 32
TOKENS = 16

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


def bert(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=TOKENS,
        attn_implementation=attention,
    )
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, TOKENS // 2 :] = 0
    batch = {
        "input_ids": torch.randint(99, (2, TOKENS)),
        "attention_mask": mask,
        "labels": torch.tensor([0, 1]),
    }
    return transformers.BertForSequenceClassification(config), batch


def gpt2(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=99,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        n_positions=TOKENS,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(99, (2, TOKENS))
    return model, {"input_ids": tokens, "labels": tokens}


def vit(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        image_size=16,
        patch_size=4,
        num_labels=3,
        attn_implementation=attention,
    )
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
    return transformers.ViTForImageClassification(config), batch


class _WithLoss(nn.Module):
    """A timm model that is called like Hugging Face's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.inner(images), labels)}


def timm_vit() -> tuple[nn.Module, dict[str, Any]]:
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=16,
        patch_size=4,
        embed_dim=HIDDEN,
        depth=LAYERS,
        num_heads=4,
        num_classes=3,
        drop_rate=0.1,
        proj_drop_rate=0.1,
        attn_drop_rate=0.1,
        drop_path_rate=0.3,
    )
    return _WithLoss(model), {"images": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 2, 1, 1])}


def timm_resnet() -> tuple[nn.Module, dict[str, Any]]:
    """Its blocks hold BatchNorm, whose statistics must be updated once a step."""
    pytest.importorskip("timm")
    from timm.models.resnet import Bottleneck, ResNet

    model = ResNet(Bottleneck, (2, 1, 1, 1), num_classes=3, channels=(8, 8, 8, 8), stem_width=8, drop_path_rate=0.3)
    return _WithLoss(model), {"images": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 2, 1, 1])}


def layers_of(model: Any) -> Iterator[nn.Module]:
    """The lists of layers that a user would loop over."""
    if hasattr(model, "inner"):
        model = model.inner
        if hasattr(model, "blocks"):
            yield model.blocks
        else:
            yield from (model.layer1, model.layer2, model.layer3, model.layer4)
    elif hasattr(model, "bert"):
        yield model.bert.encoder.layer
    elif hasattr(model, "transformer"):
        yield model.transformer.h
    else:
        yield model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer


MODELS: dict[str, Build] = {
    "bert": lambda: bert("sdpa"),
    "bert-eager": lambda: bert("eager"),
    "gpt2": lambda: gpt2("sdpa"),
    "gpt2-eager": lambda: gpt2("eager"),
    "vit": lambda: vit("sdpa"),
    "vit-eager": lambda: vit("eager"),
    "timm-vit": timm_vit,
    "timm-resnet": timm_resnet,
}


def pair(name: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """A model in training mode, the same with every layer rematerialised, and a batch."""
    torch.manual_seed(0)
    plain, batch = MODELS[name]()
    plain.train()
    model = copy.deepcopy(plain)
    for layers in layers_of(model):
        for i, layer in enumerate(layers):
            layers[i] = fckpt.remat(layer)
    return plain, model, batch


def step(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward from a seed, and all that comes out of it."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradients": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "generator": torch.get_rng_state(),
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_bitwise_that_of_the_plain_model(name: str) -> None:
    plain, model, batch = pair(name)
    expected = step(plain, batch)
    assert expected["gradients"]
    assert_equal(step(model, batch), expected)
    assert_equal(step(model, batch)["gradients"], step(plain, batch)["gradients"])


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_on(name: str) -> None:
    """Otherwise the tests here would say little about random numbers."""
    plain, _, batch = pair(name)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    plain(**batch)
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_is_that_of_the_plain_model(name: str) -> None:
    plain, model, _ = pair(name)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_and_no_grad_change_nothing(name: str) -> None:
    plain, model, batch = pair(name)
    with torch.no_grad():
        assert_equal(model.eval()(**batch)["loss"], plain.eval()(**batch)["loss"])


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "timm-vit", "timm-resnet"])
def test_a_step_takes_less_memory(name: str) -> None:
    plain, model, batch = pair(name)
    step(plain, batch), step(model, batch)
    plain.zero_grad(), model.zero_grad()

    def peak(model: nn.Module) -> int:
        return fckpt.measure_peak(lambda: model(**batch)["loss"].backward()).peak_bytes

    assert peak(model) < peak(plain)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_functional_gradients(name: str, scale: float) -> None:
    """`from_module` of a model with rematerialised layers, at parameters that are not the module's own."""
    plain, model, batch = pair(name)
    expected = _functional(fckpt.grad, plain, batch, scale)
    assert_equal(_functional(fckpt.grad, model, batch, scale), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_functional_gradients_of_torch_func(name: str, scale: float) -> None:
    plain, model, batch = pair(name)
    try:
        expected = _functional(torch.func.grad, plain, batch, scale)
    except RuntimeError as error:
        pytest.skip(f"the plain model fails under torch.func.grad: {str(error)[:80]}")
    assert_equal(_functional(torch.func.grad, model, batch, scale), expected)


def _functional(grad: Any, model: nn.Module, batch: dict[str, Any], scale: float) -> dict[str, torch.Tensor]:
    apply, params, buffers = fckpt.from_module(model)
    params = {name: scale * p for name, p in params.items()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return apply(params, buffers, **batch)[0]["loss"]

    torch.manual_seed(1)
    return grad(loss)(params)


def test_per_sample_gradients_of_a_hugging_face_model() -> None:
    plain, model, batch = pair("bert-eager")
    plain.eval(), model.eval()

    def per_sample(model: nn.Module) -> dict[str, torch.Tensor]:
        apply, params, buffers = fckpt.from_module(model)

        def loss(params: Any, tokens: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            out, _ = apply(params, buffers, input_ids=tokens[None])
            return F.cross_entropy(out["logits"], label[None])

        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, batch["input_ids"], batch["labels"])

    try:
        expected = per_sample(plain)
    except RuntimeError as error:
        pytest.skip(f"the plain model fails under vmap(grad): {str(error)[:80]}")
    assert_equal(per_sample(model), expected)
