"""Trains Hugging Face models in several ways: peak memory, time, and whether the gradients are bitwise equal.

    python -m benches demo                       # BERT-base and ViT-B/16, on the GPU if there is one
    python -m benches demo --models bert --budgets 0.8 0.5 --json demo.json

With the same random weights, data and random numbers, it runs training steps (forward, loss, backward): plain; with a
checkpoint per block, by the model's `gradient_checkpointing_enable()`; with `fckpt.remat_blocks(model)`; and with
`fckpt.remat(lambda **batch: model(**batch).loss, budget=...)`. The exit code is 1 if a loss, a gradient or the state of
the random generator of a way of fckpt is not bitwise equal to the plain step's.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import benches.common.repaired  # noqa: F401  lets transformers import torchvision
import fckpt
from benches.common.command import add_names, described, fraction, mib, opening, report_each, report_parser
from benches.common.rows import Record, Row, different
from benches.common.timing import alternate, paired_ratio, set_up, spread
from benches.common.training import SEED, Outcome, taken, unequal
from fckpt._memory import measure_peak

PLAIN = "plain"


@dataclass(frozen=True)
class Task:
    """A model with a batch of synthetic data."""

    name: str
    what: str
    model: nn.Module
    batch: dict[str, Tensor]


@dataclass
class Way(Row):
    """The measurements of one way to run the step."""

    name: str
    first_seconds: float
    """Of the first step, which plans if there is a budget."""


@dataclass
class Result(Record):
    """The results of one model; the first way is plain."""

    model: str
    what: str
    gradient_bytes: int
    ways: list[Way]


# ---- the models --------------------------------------------------------------------------------------------


def bert(parsed: argparse.Namespace) -> Task:
    """BERT-base, which classifies sentences."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**_sizes(parsed), use_cache=False)
    tokens = torch.randint(30_522, (parsed.batch, parsed.tokens))
    batch = {"input_ids": tokens, "labels": torch.arange(parsed.batch) % 2}
    return Task("BERT-base", _described(parsed, "tokens"), BertForSequenceClassification(config), batch)


def vit(parsed: argparse.Namespace) -> Task:
    """ViT-B/16, which classifies images of at most `tokens` patches."""
    from transformers import ViTConfig, ViTForImageClassification

    side = 16 * int(parsed.tokens**0.5)
    more: dict[str, Any] = {"image_size": side, "num_labels": 1000}
    more |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = ViTConfig(**_sizes(parsed), **more)
    batch = {"pixel_values": torch.randn(parsed.batch, 3, side, side), "labels": torch.arange(parsed.batch)}
    return Task("ViT-B/16", _described(parsed, "patches"), ViTForImageClassification(config), batch)


MODELS: dict[str, Callable[[argparse.Namespace], Task]] = {"bert": bert, "vit": vit}


def _sizes(parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        "hidden_size": parsed.hidden,
        "num_hidden_layers": parsed.layers,
        "num_attention_heads": parsed.hidden // 64,
        "intermediate_size": 4 * parsed.hidden,
    }


def _described(parsed: argparse.Namespace, what: str) -> str:
    own = "" if (parsed.layers, parsed.hidden) == (12, 768) else f", {parsed.layers} layers of {parsed.hidden}"
    return f"batch {parsed.batch} of {parsed.tokens} {what}, dropout 0.1{own}"


# ---- the ways ----------------------------------------------------------------------------------------------


Step = Callable[[], Tensor]


def steps_of(task: Task, budgets: Sequence[float]) -> dict[str, Step]:
    """Returns the steps to compare, by the name of the way. Their models share parameters."""
    shared = {id(t): t for t in (*task.model.parameters(), *task.model.buffers())}
    clone = lambda: copy.deepcopy(task.model, dict(shared))
    checkpointed, blockwise = clone(), clone()
    enable = "activation_checkpointing_enable"  # from transformers 5 on
    enable = enable if hasattr(checkpointed, enable) else "gradient_checkpointing_enable"
    getattr(checkpointed, enable)({"use_reentrant": False})
    fckpt.remat_blocks(blockwise)
    models = {PLAIN: task.model, "checkpoint per block": checkpointed, "fckpt.remat_blocks": blockwise}
    found = {name: _step(task, _loss_of(model)) for name, model in models.items()}
    for budget in budgets:
        found[f"fckpt.remat, budget={budget:g}"] = _step(task, fckpt.remat(_loss_of(clone()), budget=budget))
    return found


def _loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda **batch: model(**batch).loss


def _step(task: Task, loss: Callable[..., Tensor]) -> Step:
    """Returns a function that runs forward, loss and backward, always from the same seed, and returns the loss."""

    def step() -> Tensor:
        torch.manual_seed(SEED)
        task.model.zero_grad(set_to_none=True)
        value = loss(**task.batch)
        value.backward()
        return value.detach()

    return step


# ---- the comparison ----------------------------------------------------------------------------------------


def run(
    task: Task, budgets: Sequence[float], rounds: int, device: torch.device, advance: Callable[[str], object]
) -> Result:
    """Runs the first step of each way and compares it bitwise, then measures memory, then time."""
    task.model.to(device).train()
    ready = steps_of(task, budgets)
    complaints: list[str] = []
    expected: Outcome = {}
    ways: dict[str, Way] = {}
    for name, step in list(ready.items()):
        advance(f"{name}: first step")
        start = time.perf_counter()
        try:
            loss = step()
        except fckpt.FckptError as error:
            complaints.append(f"{name} failed: {described(error)}")
            del ready[name]
            continue
        seconds = time.perf_counter() - start
        actual = taken(task.model, loss)
        expected = expected or actual
        differences = unequal(expected, actual)
        if "fckpt" in name:
            complaints += [f"{name}: {text}" for text in different(differences)]
        ways[name] = Way(name, seconds, unequal=differences)
        del actual
    del expected
    for name, step in ready.items():
        ways[name].peak_bytes = measure_peak(step, device).peak_bytes
        task.model.zero_grad(set_to_none=True)
    advance("time")
    samples = alternate(ready, rounds=rounds, device=device)
    for name, values in samples.items():
        ways[name].step_seconds, ways[name].time_ratio = spread(values), paired_ratio(samples, name, PLAIN)
    gradient_bytes = sum(p.nbytes for p in task.model.parameters() if p.requires_grad)
    return Result(task.name, task.what, gradient_bytes, [*ways.values()], complaints=complaints)


def show(results: Sequence[Result], console: Console) -> None:
    """Prints the table of each model as Markdown, for docs/huggingface.md."""
    rows = [["model", "way", "peak", "of plain", "step", "of plain", "gradients"], ["---", "---", *["---:"] * 4, "---"]]
    for result in results:
        plain = result.ways[0]
        for way in result.ways:
            assert plain.peak_bytes and way.peak_bytes and way.step_seconds and way.time_ratio
            title = f"{result.model}, {result.what}" if way is plain else ""
            name = f"`{way.name}`" if "fckpt" in way.name else way.name
            memory = [f"{mib(way.peak_bytes)} MiB", f"{way.peak_bytes / plain.peak_bytes:.2f}"]
            time = [f"{way.step_seconds.least:.2f} s", f"{way.time_ratio.median:.2f}"]
            rows.append([title, name, *memory, *time, "" if way is plain else "differ" if way.unequal else "equal"])
    console.print("\n".join(f"| {' | '.join(row)} |" for row in rows), soft_wrap=True, markup=False)
    for result in results:
        console.print(f"{mib(result.gradient_bytes)} MiB of each peak are the gradients themselves.", style="dim")
        for way in result.ways:
            if "budget" in way.name:
                console.print(f"First step of {way.name}, which plans: {way.first_seconds:.0f} s.", style="dim")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = report_parser("demo", __doc__)
    parser.set_defaults(check=True)
    add_names(parser, "models", MODELS)
    parts = "fractions of the plain peak (default 0.6 0.4)"
    parser.add_argument("--budgets", type=fraction, nargs="+", default=[0.6, 0.4], metavar="PART", help=parts)
    for name, default, what in (
        ("batch", 4, "sequences"),
        ("tokens", 256, "length of a sequence, at most 512"),
        ("layers", 12, "layers of each model"),
        ("hidden", 768, "width, a multiple of 64"),
        ("repeats", 5, "timed steps of each kind"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})")
    parsed = parser.parse_args(arguments)
    if min(parsed.batch, parsed.tokens, parsed.layers, parsed.repeats) < 1 or parsed.tokens > 512:
        parser.error("--batch, --tokens, --layers and --repeats are at least 1, --tokens at most 512")
    if parsed.hidden < 64 or parsed.hidden % 64:
        parser.error("--hidden is a multiple of 64")
    return parsed


def main(arguments: list[str]) -> int:
    """Runs the demo. Returns 1 if a way of fckpt failed or was not bitwise equal, otherwise 0."""
    parsed = parse(arguments)
    device = set_up(parsed.device)

    def examine(name: str, advance: Callable[[str], object]) -> list[Result]:
        torch.manual_seed(SEED)
        task = MODELS[name](parsed)
        task.batch.update({key: t.to(device) for key, t in task.batch.items()})
        return [run(task, parsed.budgets, parsed.repeats, device, advance)]

    note = (
        "Peak: the most bytes above those before the step, including gradients. Step: the fastest; its ratio is the "
        "median of the rounds. Equal: loss, all gradients and the random generator, bitwise. A checkpoint per block is "
        "the model's gradient_checkpointing_enable()."
    )
    opened = opening("demo", arguments, device)
    count = 4 + len(parsed.budgets)
    return report_each(parsed, opened, "results", parsed.models, examine, show, note=note, count=count)
