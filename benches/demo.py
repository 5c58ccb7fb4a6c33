"""One training step of real networks, plain and rematerialised, from the same weights, data and seed.

    python -m benches.demo                      # both networks, on the GPU when there is one
    python -m benches.demo --only densenet --densenet-batch 64 --json demo.json

For each network it prints the measured peak memory and the time of a step (forward, loss, backward),
and whether loss, gradients, BatchNorm statistics and the random generator come out bitwise equal.
Ends with exit code 1 if any of them does not.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fckpt
from benches.models import bert_base, densenet_bc_100, wrap_blocks
from benches.script import DEVICE, opening, report_parser, steps
from benches.timing import (
    Spread,
    alternate,
    mib,
    paired_ratio,
    set_up,
    spread,
    write_json,
)
from fckpt.memory import measure_peak

SEED = 0
WARM_UP = 1


@dataclass(frozen=True)
class Network:
    """A network with a batch of synthetic data."""

    name: str
    what: str
    build: Callable[[], nn.Module]
    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Result:
    """What the demo found out about one network; the first of a pair is plain, the second is not."""

    network: str
    what: str
    peak_bytes: tuple[int, int]
    gradient_bytes: int
    step_seconds: tuple[Spread, Spread]
    time_ratio: Spread
    gradients: int
    unequal_gradients: list[str]
    statistics: int
    unequal_statistics: list[str]
    loss_equal: bool
    generator_equal: bool
    plain_repeats: bool
    """Whether plain PyTorch agreed with itself; asked only after a difference."""

    @property
    def equal(self) -> bool:
        return not (self.unequal_gradients or self.unequal_statistics) and (self.loss_equal and self.generator_equal)


def networks(arguments: argparse.Namespace, device: torch.device) -> list[Network]:
    """Returns the networks that were asked for, with their data on `device`."""
    torch.manual_seed(SEED)
    batch, bert_batch, seq = arguments.densenet_batch, arguments.bert_batch, arguments.seq
    every = {
        "densenet": Network(
            "DenseNet-BC-100 (k=12)",
            f"batch {batch} of 3x32x32; a region per dense layer",
            densenet_bc_100,
            torch.randn(batch, 3, 32, 32, device=device),
            torch.randint(10, (batch,), device=device),
        ),
        "bert": Network(
            "BERT-base encoder (dropout 0.1)",
            f"batch {bert_batch}, {seq} tokens; a region per encoder layer",
            bert_base,
            torch.randint(30_522, (bert_batch, seq), device=device),
            torch.randint(2, (bert_batch,), device=device),
        ),
    }
    return [every[name] for name in every if arguments.only in (None, name)]


def training_step(model: nn.Module, network: Network) -> Tensor:
    """Forward, loss and backward, random numbers from the same seed each time. Returns the loss."""
    torch.manual_seed(SEED)
    model.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(network.inputs), network.labels)
    loss.backward()
    return loss.detach()


def run(network: Network, rounds: int, device: torch.device, advance: Callable[[], object]) -> Result:
    """Compares one step bitwise, then measures its memory, then its time."""
    torch.manual_seed(SEED)
    plain = network.build().to(device)
    remat = wrap_blocks(copy.deepcopy(plain), fckpt.remat)

    outcome = []
    for model in (plain, remat):
        loss = training_step(model, network)
        outcome.append((loss, _generator_state(device)))
        advance()
    (loss, state), (remat_loss, remat_state) = outcome
    gradients, statistics = _gradients(plain), dict(plain.named_buffers())
    unequal = _unequal(gradients, list(_gradients(remat).values()))
    unequal_statistics = _unequal(statistics, list(remat.buffers()))

    repeats = True
    if unequal or unequal_statistics:
        torch.manual_seed(SEED)
        fresh = network.build().to(device)
        training_step(fresh, network)
        repeats = not _unequal(gradients, list(_gradients(fresh).values()))
    gradient_bytes = sum(g.nbytes for g in gradients.values())
    del gradients

    peaks = []
    for model in (plain, remat):
        model.zero_grad(set_to_none=True)
        peaks.append(measure_peak(lambda m=model: training_step(m, network), device).peak_bytes)
        model.zero_grad(set_to_none=True)
        advance()

    seconds = alternate(
        {"plain": lambda: training_step(plain, network), "remat": lambda: training_step(remat, network)},
        rounds=rounds,
        warm_up=WARM_UP,
        device=device,
        on_sample=advance,
    )
    return Result(
        network=network.name,
        what=network.what,
        peak_bytes=(peaks[0], peaks[1]),
        gradient_bytes=gradient_bytes,
        step_seconds=(spread(seconds["plain"]), spread(seconds["remat"])),
        time_ratio=paired_ratio(seconds, "remat", "plain"),
        gradients=sum(1 for _ in plain.parameters()),
        unequal_gradients=unequal,
        statistics=len(statistics),
        unequal_statistics=unequal_statistics,
        loss_equal=torch.equal(loss, remat_loss),
        generator_equal=torch.equal(state, remat_state),
        plain_repeats=repeats,
    )


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad if p.grad is not None else torch.empty(0) for name, p in model.named_parameters()}


def _unequal(expected: dict[str, Tensor], actual: list[Tensor]) -> list[str]:
    # By position: a wrapper may prefix the names, the order of the modules stays.
    if len(expected) != len(actual):
        return [f"{len(expected)} tensors against {len(actual)}"]
    return [name for (name, a), b in zip(expected.items(), actual, strict=True) if not torch.equal(a, b)]


def _generator_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def show(result: Result, console: Console) -> None:
    """Prints one network's table and verdict."""
    (peak, remat_peak), (seconds, remat_seconds) = result.peak_bytes, result.step_seconds
    table = Table()
    for column in ("", "plain", "rematerialised", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("peak memory", mib(peak), mib(remat_peak), f"{remat_peak / peak:.2f}")
    gradient = mib(result.gradient_bytes)
    table.add_row("gradients in it", gradient, gradient, "", style="dim")
    table.add_row("step time", f"{seconds.least:.3f} s", f"{remat_seconds.least:.3f} s", f"{result.time_ratio}")
    console.print(f"[bold]{result.network}[/]: {result.what}", highlight=False, soft_wrap=True)
    console.print(table)
    verdict(console, "gradients", result.gradients, result.unequal_gradients)
    if result.statistics:
        verdict(console, "BatchNorm statistics", result.statistics, result.unequal_statistics)
    for what, equal in (("loss", result.loss_equal), ("random generator after", result.generator_equal)):
        console.print(f"  {what}: {'bitwise equal' if equal else '[bold red]NOT EQUAL[/]'}", highlight=False)
    if not result.plain_repeats:
        console.print("  [yellow]plain PyTorch does not repeat itself bitwise on this device either[/]")
    console.print()


def verdict(console: Console, what: str, count: int, unequal: list[str]) -> None:
    """Prints how many of `count` tensors are bitwise equal and names the first that are not."""
    if not unequal:
        console.print(f"  {what}: {count} of {count} tensors bitwise equal", highlight=False)
        return
    named = ", ".join(unequal[:5]) + (", ..." if len(unequal) > 5 else "")
    console.print(f"  {what}: [bold red]{len(unequal)} of {count} tensors NOT EQUAL[/]: {named}", highlight=False)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = report_parser("demo", __doc__)
    parser.add_argument("--device", help=DEVICE)
    parser.add_argument("--only", choices=["densenet", "bert"], help="one network instead of both")
    parser.add_argument("--densenet-batch", type=int, default=32, metavar="N", help="images (default 32)")
    parser.add_argument("--bert-batch", type=int, default=4, metavar="N", help="sequences (default 4)")
    parser.add_argument("--seq", type=int, default=256, help="tokens per sequence, at most 512 (default 256)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each kind (default 5)")
    parsed = parser.parse_args(arguments)
    if min(parsed.densenet_batch, parsed.bert_batch, parsed.seq, parsed.repeats) < 1 or parsed.seq > 512:
        parser.error("batches, --seq and --repeats are at least 1, --seq at most 512")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo. Returns 0 if everything was bitwise equal, 1 if not."""
    parsed = parse(arguments)
    device = set_up(parsed.device)
    console, document = opening("demo", arguments, device)

    results = []
    for network in networks(parsed, device):
        with steps(4 + 2 * (WARM_UP + parsed.repeats)) as advance:
            results.append(run(network, parsed.repeats, device, lambda name=network.name: advance(name)))
        show(results[-1], console)
    console.print(
        "Peak: most bytes held at once above what was held before the step, its gradients included. "
        "Times: the fastest step; the ratio is the median over pairs of steps, with its interquartile range.",
        style="dim",
    )
    if parsed.json:
        write_json(parsed.json, {**document, "results": [asdict(r) for r in results]})
    return 0 if all(result.equal for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
