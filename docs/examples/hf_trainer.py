"""Hugging Face's Trainer and peft: rematerialised blocks, or the loss within a budget.

    python docs/examples/hf_trainer.py            # BERT, random weights
    python docs/examples/hf_trainer.py --lora     # adapters of peft, the rest frozen

Needs transformers, accelerate and, for --lora, peft. Nothing is downloaded. Dropout is on.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from typing import Any

import repair_torchvision  # noqa: F401  transformers imports torchvision, if it is there
import torch
from torch import Tensor, nn

import fckpt

WAYS = ("plain", "blocks", "loss within a budget")


def classifier(layers: int, hidden: int, lora: bool) -> nn.Module:
    """A BERT classifier with random weights; with `lora`, only adapters are trained."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        intermediate_size=4 * hidden,
    )
    model = BertForSequenceClassification(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["query", "value"], r=4, lora_dropout=0.1))
    return model


def samples(count: int, tokens: int) -> list[dict[str, Tensor]]:
    """Random sentences with random labels."""
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(1000, (tokens,)), "labels": torch.tensor(i % 2)} for i in range(count)]


def train(model: nn.Module, way: str, data: Any, batch: int) -> dict[str, Tensor]:
    """Trains for four steps with the Trainer; returns the weights."""
    from transformers import Trainer, TrainingArguments

    if way == "blocks":
        print(fckpt.remat_blocks(model))
    loss = lambda **inputs: model(**inputs).loss
    if way == "loss within a budget":
        loss = fckpt.remat(loss, budget=0.6)

    class BudgetTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            if return_outputs:  # for an evaluation, which takes no gradients
                return super().compute_loss(model, inputs, return_outputs, **options)
            return loss(**inputs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=batch,
            max_steps=4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        BudgetTrainer(model=model, args=arguments, train_dataset=data).train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def main(arguments: list[str] | None = None) -> dict[str, bool]:
    """Parses the command line, trains in three ways, prints; returns by way whether all weights are equal to plain."""
    parser = argparse.ArgumentParser(description="Rematerialisation under Hugging Face's Trainer.")
    parser.add_argument("--layers", type=int, default=4, help="layers (default 4)")
    parser.add_argument("--hidden", type=int, default=64, help="width of a token, a multiple of 16 (default 64)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sentence (default 64)")
    parser.add_argument("--batch", type=int, default=8, help="sentences of a batch (default 8)")
    parser.add_argument("--lora", action="store_true", help="train adapters of peft only")
    options = parser.parse_args(arguments)
    data = samples(4 * options.batch, options.tokens)
    first = classifier(options.layers, options.hidden, options.lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the libraries say of each other
        trained = {way: train(copy.deepcopy(first), way, data, options.batch) for way in WAYS}
    found = {}
    for way, weights in trained.items():
        found[way] = all(torch.equal(w, trained["plain"][name]) for name, w in weights.items())
        moved = sum(not torch.equal(w, p) for w, p in zip(weights.values(), first.parameters(), strict=True))
        print(f"{way:21} {moved} tensors trained, {'equal' if found[way] else 'DIFFERENT'}")
    return found


if __name__ == "__main__":
    main()
