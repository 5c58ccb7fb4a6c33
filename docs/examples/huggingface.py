"""Hugging Face models: one call for all layers, same gradients, less memory.

    python docs/examples/huggingface.py                   # BERT, GPT-2 and ViT, small, random weights
    python docs/examples/huggingface.py --model bert --layers 12 --hidden 768

Needs transformers. Nothing is downloaded. Dropout is on.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass

import repair_torchvision  # noqa: F401  transformers imports torchvision, if it is there
import torch
from torch import Tensor, nn

import fckpt


@dataclass(frozen=True)
class Task:
    """A model and a batch for it."""

    model: nn.Module
    batch: dict[str, Tensor]


def bert(layers: int, hidden: int) -> Task:
    """A BERT classifier; one sequence is shorter, so there is an attention mask."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        intermediate_size=4 * hidden,
    )
    mask = torch.ones(4, 128, dtype=torch.int64)
    mask[1, 100:] = 0
    batch = {
        "input_ids": torch.randint(1000, (4, 128)),
        "attention_mask": mask,
        "labels": torch.randint(2, (4,)),
    }
    return Task(BertForSequenceClassification(config), batch)


def gpt2(layers: int, hidden: int) -> Task:
    """A GPT-2 language model. Its cache is for generation; training does without (`use_cache=False`)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=1000,
        n_positions=128,
        n_embd=hidden,
        n_layer=layers,
        n_head=hidden // 16,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # taken anyway, with a warning, unless it is named
    tokens = torch.randint(1000, (4, 128))
    return Task(model, {"input_ids": tokens, "labels": tokens})


def vit(layers: int, hidden: int) -> Task:
    """A ViT classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    batch = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(10, (4,))}
    return Task(ViTForImageClassification(config), batch)


TASKS: dict[str, Callable[[int, int], Task]] = {"bert": bert, "gpt2": gpt2, "vit": vit}


@dataclass(frozen=True)
class Row:
    """What the comparison found about one model."""

    name: str
    peak_bytes: tuple[int, int]
    """Plain, rematerialised."""
    equal: bool
    """Whether loss and all gradients are equal, bit for bit."""
    same_keys: bool
    """Whether the `state_dict` has the same keys."""


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Forward and backward, with the same dropout each time. Returns the loss."""
    torch.manual_seed(1)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def compare(name: str, task: Task) -> Row:
    """Takes one step, plain and rematerialised."""
    plain = task.model.train()
    model = copy.deepcopy(plain)

    print(f"{name}: {fckpt.remat_blocks(model)}")

    losses: list[Tensor] = []
    peaks = [fckpt.measure_peak(lambda m=m: losses.append(step(m, task.batch))).peak_bytes for m in (plain, model)]
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    equal = torch.equal(*losses) and all(
        (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad) for a, b in pairs
    )
    return Row(name, (peaks[0], peaks[1]), equal, list(plain.state_dict()) == list(model.state_dict()))


def main(arguments: list[str] | None = None) -> list[Row]:
    """Parses the command line, runs, prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description="Rematerialised layers in Hugging Face models.")
    parser.add_argument("--model", choices=list(TASKS), help="one of them; default: all")
    parser.add_argument("--layers", type=int, default=6, help="layers (default 6)")
    parser.add_argument("--hidden", type=int, default=64, help="width of a token, a multiple of 16 (default 64)")
    options = parser.parse_args(arguments)
    rows = []
    for name in TASKS if options.model is None else [options.model]:
        torch.manual_seed(0)
        row = compare(name, TASKS[name](options.layers, options.hidden))
        rows.append(row)
        plain, remat = (nbytes / 2**20 for nbytes in row.peak_bytes)
        same = "equal" if row.equal else "DIFFER"
        print(f"{name:5} peak {plain:7.1f} MiB plain, {remat:7.1f} MiB rematerialised; gradients {same}")
    return rows


if __name__ == "__main__":
    main()
