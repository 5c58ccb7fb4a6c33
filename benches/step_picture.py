"""Draws the memory of one training step of BERT from Hugging Face: plain, and planned within a budget.

    python -m benches step_picture --svg docs/pictures/step.svg
    python -m benches step_picture --budget 0.3 --layers 12 --hidden 768 --svg step.svg

Nothing is run: the model is traced, and a plan is made with times of operations from a device profile, so that the same
options draw the same picture on every machine. It shows the bytes that are live at each step, and a strip that marks
the steps in which the plan recomputes. The model and the default budget are those of a table in the README.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import benches.common.repaired  # noqa: F401  lets transformers import torchvision
import fckpt
from benches.common.command import script_parser
from fckpt.cost import Analytic, profile_of


def plan_of(layers: int, hidden: int, batch: int, budget: float) -> fckpt.Plan:
    """Plans a training step of BERT within a fraction of its plain peak."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": hidden // 64}
    model: Any = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=4 * hidden, use_cache=False))
    tokens: dict[str, Any] = {"input_ids": torch.randint(30_522, (batch, 256)), "labels": torch.arange(batch) % 2}
    return fckpt.plan(lambda **b: model(**b).loss, **tokens, budget=budget, costs=Analytic(profile_of("cpu")))


def main(arguments: list[str]) -> int:
    """Draws the picture."""
    parser = script_parser("step_picture", __doc__)
    parser.add_argument("--svg", type=Path, required=True, help="the file to write")
    parser.add_argument("--budget", type=float, default=0.4, help="fraction of the plain peak; default: 0.4")
    parser.add_argument("--layers", type=int, default=6, help="default: 6")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model; default: 256")
    parser.add_argument("--batch", type=int, default=8, help="default: 8")
    parsed = parser.parse_args(arguments)
    plan: Any = plan_of(parsed.layers, parsed.hidden, parsed.batch, parsed.budget)
    parsed.svg.write_text(plan.svg())
    Console(highlight=False).print(f"{parsed.svg}: {plan}", markup=False)
    return 0
