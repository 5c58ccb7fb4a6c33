"""Tiny models of transformers and timm with random weights, dropout on, in their default configurations otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision_shim  # noqa: F401  before transformers and timm
from torch import nn

__all__ = ["MASKS", "TEXT", "ZOO", "make"]

VOCABULARY = 99
TOKENS = 12
Batch = dict[str, Any]
MASKS = ("none", "ones", "padding")
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}


def text(labels: Callable[[torch.Tensor], torch.Tensor], mask: str) -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, TOKENS))
    batch = {"input_ids": ids, "labels": labels(ids)}
    if mask != "none":
        batch["attention_mask"] = torch.ones(2, TOKENS, dtype=torch.int64)
    if mask == "padding":
        batch["attention_mask"][1, TOKENS // 2 :] = 0
    return batch


def classes(ids: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, 1])


def encoder(name: str, model: str = "ForSequenceClassification", **config: Any) -> Callable[[str], tuple[Any, Batch]]:
    def build(mask: str) -> tuple[Any, Batch]:
        transformers = pytest.importorskip("transformers")
        sizes = config or {**SIZES, "max_position_embeddings": TOKENS + 3}
        made = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **sizes)
        return getattr(transformers, name + model)(made), text(classes, mask)

    return build


def decoder(name: str, model: str = "ForCausalLM", **config: Any) -> Callable[[str], tuple[Any, Batch]]:
    def build(mask: str) -> tuple[Any, Batch]:
        transformers = pytest.importorskip("transformers")
        special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        made = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **special, **config)
        net = getattr(transformers, name + model)(made)
        if model != "ForConditionalGeneration":
            net.loss_type = "ForCausalLM"  # taken anyway, with a warning, unless it is named
        return net, text(lambda ids: ids, mask)

    return build


LLAMA = {**SIZES, "num_key_value_heads": 2, "attention_dropout": 0.1}
PIXELS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "image_size": 32, "patch_size": 8}


def vision(name: str, **config: Any) -> Callable[[str], tuple[Any, Batch]]:
    def build(mask: str) -> tuple[Any, Batch]:
        transformers = pytest.importorskip("transformers")
        net = getattr(transformers, f"{name}ForImageClassification")(
            getattr(transformers, f"{name}Config")(num_labels=3, **config)
        )
        return net, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}

    return build


def clip(mask: str) -> tuple[Any, Batch]:
    transformers = pytest.importorskip("transformers")
    towers = {
        "text_config": {**SIZES, "vocab_size": VOCABULARY, "attention_dropout": 0.1, "eos_token_id": 1},
        "vision_config": {**SIZES, "image_size": 32, "patch_size": 8, "attention_dropout": 0.1},
    }
    net = transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=16))
    batch = text(classes, mask)
    del batch["labels"]
    return net, {**batch, "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def whisper(mask: str) -> tuple[Any, Batch]:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=10,
        max_target_positions=TOKENS, decoder_start_token_id=0, pad_token_id=2, bos_token_id=0, eos_token_id=1,
        dropout=0.1,
    )  # fmt: skip
    labels = torch.randint(3, VOCABULARY, (2, TOKENS))
    net = transformers.WhisperForConditionalGeneration(config)
    return net, {"input_features": torch.randn(2, 8, 20), "labels": labels}


def wav2vec2(mask: str) -> tuple[Any, Batch]:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        **SIZES, vocab_size=VOCABULARY, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, apply_spec_augment=False,
    )  # fmt: skip
    net = transformers.Wav2Vec2ForSequenceClassification(config)
    return net, {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])}


class WithLoss(nn.Module):
    """A timm model that is called like Hugging Face's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.inner(images), labels)}


def timm(module: str, name: str, **arguments: Any) -> Callable[[str], tuple[Any, Batch]]:
    def build(mask: str) -> tuple[Any, Batch]:
        pytest.importorskip("timm")
        import importlib

        library = importlib.import_module(f"timm.models.{module}")
        options = dict(arguments)
        if "block" in options:
            options["block"] = getattr(library, options["block"])
        net = getattr(library, name)(num_classes=3, drop_path_rate=0.2, **options)
        return WithLoss(net), {"images": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}

    return build


ZOO: dict[str, tuple[Callable[[str], tuple[Any, Batch]], str]] = {
    "bert": (encoder("Bert"), "3 blocks: bert.encoder.layer.0-2 (BertLayer)"),
    "distilbert": (
        encoder("DistilBert", dim=32, n_layers=3, n_heads=4, hidden_dim=64, max_position_embeddings=TOKENS),
        "3 blocks: distilbert.transformer.layer.0-2 (TransformerBlock)",
    ),
    "roberta": (encoder("Roberta"), "3 blocks: roberta.encoder.layer.0-2 (RobertaLayer)"),
    "albert": (
        encoder("Albert", **{**SIZES, "embedding_size": 16, "hidden_dropout_prob": 0.1}),
        "1 block: albert.encoder.albert_layer_groups.0.albert_layers.0 (AlbertLayer)",
    ),
    "gpt2": (
        decoder("GPT2", "LMHeadModel", n_embd=32, n_layer=3, n_head=4, n_positions=TOKENS),
        "3 blocks: transformer.h.0-2 (GPT2Block)",
    ),
    "llama": (decoder("Llama", **LLAMA), "3 blocks: model.layers.0-2 (LlamaDecoderLayer)"),
    "mistral": (decoder("Mistral", **LLAMA, sliding_window=6), "3 blocks: model.layers.0-2 (MistralDecoderLayer)"),
    "qwen2": (decoder("Qwen2", **LLAMA), "3 blocks: model.layers.0-2 (Qwen2DecoderLayer)"),
    "mixtral": (
        decoder("Mixtral", **LLAMA, num_local_experts=4, num_experts_per_tok=2),
        "3 blocks: model.layers.0-2 (MixtralDecoderLayer)",
    ),
    "t5": (
        decoder("T5", "ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                decoder_start_token_id=0),
        "4 blocks: encoder.block.0-1, decoder.block.0-1 (T5Block)",
    ),
    "bart": (
        decoder("Bart", "ForConditionalGeneration", d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
                decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4,
                max_position_embeddings=TOKENS, decoder_start_token_id=0, forced_eos_token_id=1),
        "4 blocks: model.encoder.layers.0-1 (BartEncoderLayer); model.decoder.layers.0-1 (BartDecoderLayer)",
    ),
    "vit": (vision("ViT", **SIZES, **PIXELS), "3 blocks: vit.layers.0-2 (ViTLayer)"),
    "swin": (
        vision("Swin", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
        "4 blocks: swin.encoder.layers.0.blocks.0-1, swin.encoder.layers.1.blocks.0-1 (SwinLayer)",
    ),
    "clip": (clip, "6 blocks: text_model.encoder.layers.0-2, vision_model.encoder.layers.0-2 (CLIPEncoderLayer)"),
    "whisper": (
        whisper,
        "4 blocks: model.encoder.layers.0-1 (WhisperEncoderLayer); model.decoder.layers.0-1 (WhisperDecoderLayer)",
    ),
    "wav2vec2": (
        wav2vec2,
        "6 blocks: wav2vec2.feature_extractor.conv_layers.0 (Wav2Vec2GroupNormConvLayer); "
        "wav2vec2.feature_extractor.conv_layers.1-2 (Wav2Vec2NoLayerNormConvLayer); "
        "wav2vec2.encoder.layers.0-2 (Wav2Vec2EncoderLayer)",
    ),
    "timm-vit": (
        timm("vision_transformer", "VisionTransformer", img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4,
             proj_drop_rate=0.1),
        "3 blocks: inner.blocks.0-2 (Block)",
    ),
    "timm-resnet": (
        timm("resnet", "ResNet", block="Bottleneck", layers=(2, 1, 1, 1), channels=(8, 8, 8, 8), stem_width=8),
        "5 blocks: inner.layer1.0-1, inner.layer2.0, inner.layer3.0, inner.layer4.0 (Bottleneck)",
    ),
    "timm-convnext": (
        timm("convnext", "ConvNeXt", depths=(1, 2, 1, 1), dims=(8, 16, 16, 16)),
        "5 blocks: inner.stages.0.blocks.0, inner.stages.1.blocks.0-1, inner.stages.2.blocks.0, "
        "inner.stages.3.blocks.0 (ConvNeXtBlock)",
    ),
    "timm-swin": (
        timm("swin_transformer", "SwinTransformer", img_size=32, patch_size=4, embed_dim=16, depths=(2, 2),
             num_heads=(2, 4), window_size=4, proj_drop_rate=0.1),
        "4 blocks: inner.layers.0.blocks.0-1, inner.layers.1.blocks.0-1 (SwinTransformerBlock)",
    ),
}  # fmt: skip
"""By name: how to build the model and a batch for a kind of mask, and what `remat_blocks` says."""

TEXT = ["bert", "distilbert", "roberta", "albert", "gpt2", "llama", "mistral", "qwen2", "mixtral", "t5", "bart"]


def make(name: str, mask: str = "none") -> tuple[Any, Batch]:
    """Returns a model in training mode and a batch with its labels, from a seed."""
    torch.manual_seed(0)
    model, batch = ZOO[name][0](mask)
    return model.train(), batch
