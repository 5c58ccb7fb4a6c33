"""Trains Hugging Face models in several ways: peak memory, time, and whether the gradients are bitwise equal.

    python -m benches.demo                       # BERT-base and ViT-B/16, on the GPU if there is one
    python -m benches.demo --models bert --budgets 0.8 0.5 --json demo.json

With the same random weights, data and random numbers, it runs training steps (forward, loss, backward): plain; with a
checkpoint per block, by the model's `gradient_checkpointing_enable()`; with `fckpt.remat_blocks(model)`; and with
`fckpt.remat(lambda **batch: model(**batch).loss, budget=...)`. The exit code is 1 if a loss, a gradient or the state of
the random generator of a way of fckpt is not bitwise equal to the plain step's.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fckpt
from benches.common.command import DEVICE, mib, opening, report_parser, steps, table_of
from benches.common.results import write_json
from benches.common.timing import Spread, alternate, paired_ratio, set_up, spread
from fckpt._memory import measure_peak

sys.path.append(str(Path(__file__).parent.parent / "docs" / "examples"))
import repair_torchvision  # noqa: F401  transformers imports torchvision, if it is there

SEED = 0
WARM_UP = 1
PLAIN = "plain"

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A model with a batch of synthetic data."""

    name: str
    what: str
    model: nn.Module
    batch: Batch


@dataclass(frozen=True)
class Way:
    """The measurements of one way to run the step."""

    name: str
    budget: float | None
    """The budget as a fraction of the plain peak, if there is one."""
    peak_bytes: int
    step_seconds: Spread
    time_ratio: Spread
    """Relative to plain, by round."""
    first_seconds: float
    """Of the first step, which plans if there is a budget."""
    unequal: list[str]
    """What is not bitwise equal to the plain step: names of gradients, "loss", "generator"."""


@dataclass(frozen=True)
class Result:
    """The results of one model; the first way is plain."""

    model: str
    what: str
    gradients: int
    gradient_bytes: int
    ways: list[Way]
    failed: dict[str, str]
    """Ways that raised an error."""

    @property
    def equal(self) -> bool:
        """Whether all ways of fckpt are bitwise equal to the plain step."""
        return not self.failed and not any(way.unequal for way in self.ways if "fckpt" in way.name)


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
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = ViTConfig(**_sizes(parsed), image_size=side, num_labels=1000, **dropout)
    batch = {"pixel_values": torch.randn(parsed.batch, 3, side, side), "labels": torch.arange(parsed.batch)}
    return Task("ViT-B/16", _described(parsed, "patches"), ViTForImageClassification(config), batch)


def gpt2(parsed: argparse.Namespace) -> Task:
    """GPT-2 small, which predicts the next token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_layer=parsed.layers, n_embd=parsed.hidden, n_head=parsed.hidden // 64, use_cache=False)
    )
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # the default, which warns unless it is named
    tokens = torch.randint(50_257, (parsed.batch, parsed.tokens))
    return Task("GPT-2 small", _described(parsed, "tokens"), model, {"input_ids": tokens, "labels": tokens})


MODELS: dict[str, Callable[[argparse.Namespace], Task]] = {"bert": bert, "vit": vit, "gpt2": gpt2}


def _sizes(parsed: argparse.Namespace) -> dict[str, int]:
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


@dataclass(frozen=True)
class Prepared:
    """A model with a loss, ready for steps."""

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: Batch
    budget: float | None = None

    def step(self) -> Tensor:
        """Runs forward, loss and backward, always from the same random seed. Returns the loss."""
        torch.manual_seed(SEED)
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(**self.batch)
        loss.backward()
        return loss.detach()


def prepared(task: Task, budgets: Sequence[float]) -> dict[str, Prepared]:
    """Returns the ways to train, by name. Their models share parameters."""
    shared = {id(t): t for t in (*task.model.parameters(), *task.model.buffers())}
    clone = lambda: copy.deepcopy(task.model, dict(shared))
    checkpointed, blockwise = clone(), clone()
    _checkpoint(checkpointed)
    fckpt.remat_blocks(blockwise)
    made = {
        PLAIN: Prepared(task.model, _loss_of(task.model), task.batch),
        "checkpoint per block": Prepared(checkpointed, _loss_of(checkpointed), task.batch),
        "fckpt.remat_blocks": Prepared(blockwise, _loss_of(blockwise), task.batch),
    }
    for budget in budgets:
        model = clone()
        loss = fckpt.remat(_loss_of(model), budget=budget)
        made[f"fckpt.remat, budget={budget:g}"] = Prepared(model, loss, task.batch, budget)
    return made


def _loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda **batch: model(**batch).loss


def _checkpoint(model: Any) -> None:
    """Enables the checkpointing of the model: torch's, around each block."""
    name = "activation_checkpointing_enable"  # from transformers 5 on
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")({"use_reentrant": False})


# ---- the comparison ----------------------------------------------------------------------------------------


def run(
    task: Task, budgets: Sequence[float], rounds: int, device: torch.device, advance: Callable[[str], None]
) -> Result:
    """Runs the first step of each way and compares it bitwise, then measures memory, then time."""
    task.model.to(device).train()
    ready = prepared(task, budgets)
    failed: dict[str, str] = {}
    expected: dict[str, Tensor] = {}
    unequal: dict[str, list[str]] = {}
    planning: dict[str, float] = {}
    for name, way in list(ready.items()):
        advance(f"{name}: first step")
        start = time.perf_counter()
        try:
            loss = way.step()
        except fckpt.FckptError as error:
            failed[name] = f"{type(error).__name__}: {error}"
            del ready[name]
            continue
        planning[name] = time.perf_counter() - start
        found = {n: p.grad.clone() for n, p in way.model.named_parameters() if p.grad is not None}
        found |= {"loss": loss, "generator": _generator_state(device)}
        expected = expected or found
        unequal[name] = [n for n, t in expected.items() if n not in found or not torch.equal(t, found[n])]
        task.model.zero_grad(set_to_none=True)
        del found
        gc.collect()
    gradient_bytes = sum(g.nbytes for n, g in expected.items() if n not in ("loss", "generator"))
    count = len(expected) - 2
    expected.clear()
    peaks = {}
    for name, way in ready.items():
        advance(f"{name}: memory")
        peaks[name] = measure_peak(way.step, device).peak_bytes
        task.model.zero_grad(set_to_none=True)
    seconds = alternate(
        {name: way.step for name, way in ready.items()},
        rounds=rounds,
        warm_up=WARM_UP,
        device=device,
        on_sample=lambda: advance("time"),
    )
    return Result(
        model=task.name,
        what=task.what,
        gradients=count,
        gradient_bytes=gradient_bytes,
        ways=[
            Way(
                name=name,
                budget=way.budget,
                peak_bytes=peaks[name],
                step_seconds=spread(seconds[name]),
                time_ratio=paired_ratio(seconds, name, PLAIN),
                first_seconds=planning[name],
                unequal=unequal[name],
            )
            for name, way in ready.items()
        ],
        failed=failed,
    )


def _generator_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def cells(result: Result, way: Way) -> list[str]:
    """Returns a row of the table, without equality."""
    plain = result.ways[0]
    memory = [mib(way.peak_bytes), f"{way.peak_bytes / plain.peak_bytes:.2f}"]
    return [*memory, f"{way.step_seconds.least:.2f} s", f"{way.time_ratio.median:.2f}"]


def show(result: Result, console: Console) -> None:
    """Prints the table of one model."""
    table = table_of("", "peak", "of plain", "step", "of plain", "gradients", left=["", "gradients"])
    for i, way in enumerate(result.ways):
        few = ", ".join(way.unequal[:3]) + (", ..." if len(way.unequal) > 3 else "")
        equal = f"[bold red]NOT EQUAL[/]: {few}" if way.unequal else "equal"
        table.add_row(way.name, *cells(result, way), equal if i else "")
    console.print(f"[bold]{result.model}[/]: {result.what}", highlight=False, soft_wrap=True)
    console.print(table)
    held = f"{mib(result.gradient_bytes)} of each peak are the {result.gradients} gradients themselves."
    first = ", ".join(f"{way.name} {way.first_seconds:.0f} s" for way in result.ways if way.budget)
    console.print(f"  {held}" + (f" First steps, which plan: {first}." if first else ""), style="dim", highlight=False)
    for name, error in result.failed.items():
        console.print(f"  [bold red]{name} failed[/]: {error}", highlight=False)
    console.print()


def markdown(results: Sequence[Result]) -> str:
    """Returns the tables as one Markdown table, for docs/huggingface.md."""
    rows = [["model", "way", "peak", "of plain", "step", "of plain", "gradients"], ["---", "---", *["---:"] * 4, "---"]]
    for result in results:
        for i, way in enumerate(result.ways):
            title = "" if i else f"{result.model}, {result.what}"
            name = f"`{way.name}`" if "fckpt" in way.name else way.name
            rows.append([title, name, *cells(result, way), ("differ" if way.unequal else "equal") if i else ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = report_parser("demo", __doc__)
    parser.add_argument("--device", help=DEVICE)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["bert", "vit"], help="default: bert vit")
    parts = "fractions of the plain peak (default 0.6 0.4)"
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.6, 0.4], metavar="PART", help=parts)
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="sequences (default 4)")
    parser.add_argument("--tokens", type=int, default=256, help="length of a sequence, at most 512 (default 256)")
    parser.add_argument("--layers", type=int, default=12, help="layers of each model (default 12)")
    parser.add_argument("--hidden", type=int, default=768, help="width, a multiple of 64 (default 768)")
    parser.add_argument("--markdown", action="store_true", help="also print a Markdown table")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each kind (default 5)")
    parsed = parser.parse_args(arguments)
    if min(parsed.batch, parsed.tokens, parsed.layers, parsed.repeats) < 1 or parsed.tokens > 512:
        parser.error("--batch, --tokens, --layers and --repeats are at least 1, --tokens at most 512")
    if parsed.hidden < 64 or parsed.hidden % 64:
        parser.error("--hidden is a multiple of 64")
    if not all(0 < budget <= 1 for budget in parsed.budgets):
        parser.error("--budgets are above 0 and at most 1")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo. Returns 1 if a way of fckpt failed or was not bitwise equal, otherwise 0."""
    parsed = parse(arguments)
    device = set_up(parsed.device)
    console, document = opening("demo", arguments, device)
    results = []
    for name in parsed.models:
        torch.manual_seed(SEED)
        task = MODELS[name](parsed)
        task.batch.update({key: t.to(device) for key, t in task.batch.items()})
        number = 3 + len(parsed.budgets)
        with steps(number * (2 + WARM_UP + parsed.repeats)) as advance:
            bar = lambda what, title=task.name: advance(f"{title}: {what}")
            results.append(run(task, parsed.budgets, parsed.repeats, device, bar))
        show(results[-1], console)
        if parsed.json:
            write_json(parsed.json, {**document, "results": [asdict(r) for r in results]})
    console.print(
        "Peak: the most bytes above those before the step, including gradients. Step: the fastest; its ratio is the "
        "median of the rounds. Equal: loss, all gradients and the random generator, bitwise. A checkpoint per block is "
        "the model's gradient_checkpointing_enable().",
        style="dim",
    )
    if parsed.markdown:
        print(f"\n{markdown(results)}")
    return 0 if all(result.equal for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
