"""Layers of decoders that append to a cache, as they do unless told not to: each a region of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision_shim  # noqa: F401  before transformers
from helpers import assert_equal
from torch import nn

import fckpt

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return model, model.transformer.h


def llama() -> Any:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=0.1))
    return model, model.model.layers


def sliding() -> Any:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)
    model = transformers.MistralForCausalLM(config)
    return model, model.model.layers


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=50, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, model.decoder.block


def tensors_of(cache: Any) -> list[torch.Tensor]:
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache]
        if hasattr(cache, "cross_attention_cache")
        else [cache]
    )
    return [t.detach() for part in parts for layer in part.layers for t in (layer.keys, layer.values) if t is not None]


def trained(model: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    tokens = torch.arange(16).view(2, 8)
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    assert out.past_key_values is not None
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [out.loss.detach(), *grads, *tensors_of(out.past_key_values)]


@pytest.mark.parametrize("make", [gpt2, llama, sliding, t5])
def test_the_cache_is_appended_to_once(make: Callable[[], tuple[nn.Module, nn.ModuleList]]) -> None:
    torch.manual_seed(0)
    model, layers = make()
    expected = trained(model.train())
    for i, layer in enumerate(layers):
        layers[i] = fckpt.remat(layer)
    assert_equal(trained(model), expected)
