"""The overhead of a region: `fckpt.remat` compared with eager PyTorch and `torch.utils.checkpoint`.

    python -m benches overhead --json benches/results/overhead-cpu.json --check     # about 3 minutes
    python -m benches overhead --device cuda --json benches/results/overhead-cuda.json --check
    python -m benches overhead --quick                                              # under a minute
    python -m benches overhead --only tiny                                          # or planned, steps

Three parts; all methods run alternately in one process (see `common/timing.py`):

tiny     forward and backward of a region with next to no computation: the cost of the call itself.
planned  forward and backward by a plan that recomputes nothing, of small networks with many operations: the cost of a
         planned call in Python, the microseconds of its guards and the seconds of the first call.
steps    a training step of ResNet-50, DenseNet-121 and BERT in the sizes of `benches.budgets`, one region per
         bottleneck, dense layer or encoder layer: time, and peak bytes as counted by the allocator.

PyTorch's checkpoint is called as its documentation recommends: `use_reentrant=False`, otherwise with its defaults. On
CUDA all methods run with deterministic kernels. With `--check` the exit code is 1 if fckpt is slower than PyTorch's
checkpoint beyond noise (a sign test over the rounds, and a median above the resolution), or peaks higher.
"""

from __future__ import annotations

import functools
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import benches.common.repaired  # noqa: F401  lets transformers import torchvision
import fckpt
from benches.common.command import mib, opening, report_each, report_parser, share, table_of
from benches.common.rows import Record
from benches.common.timing import Spread, alternate, is_slower, paired_ratio, set_up, spread
from benches.common.training import size_of, step_of
from benches.models.budget_networks import NETWORKS
from benches.models.wrapping import TorchCheckpoint
from fckpt._capture.captured import Captured
from fckpt._memory import measure_peak

Methods = dict[str, Callable[[], object]]
"""Steps with the same result: "plain", "fckpt", and "torch" if fckpt is compared with PyTorch's checkpoint."""


@dataclass
class Outcome(Record):
    """The measurements of one case. The dicts are by method."""

    part: str
    name: str
    seconds: dict[str, Spread]
    to_plain: dict[str, Spread]
    to_torch: dict[str, Spread] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    first_call: dict[str, float] = field(default_factory=dict)
    """The seconds of planning, by stage, and the microseconds of a call's guards."""


def measure(
    part: str, name: str, methods: Methods, device: torch.device, *, rounds: int, calls: int = 1, peak: bool = True
) -> Outcome:
    """Measures the time and, if asked, the peak of every method, and compares fckpt with PyTorch's checkpoint."""
    seconds = alternate(methods, rounds=rounds, calls=calls, device=device)
    ratios = lambda to: {name: paired_ratio(seconds, name, to) for name in methods if to in methods}
    spreads = {name: spread(values) for name, values in seconds.items()}
    found = Outcome(part, name, spreads, ratios("plain"), ratios("torch"))
    if peak:
        # After the timed rounds, so that every library has allocated its permanent memory.
        found.peak_bytes = {name: measure_peak(method, device).peak_bytes for name, method in methods.items()}
    if "torch" in methods:
        if is_slower(seconds, "fckpt", "torch"):
            found.complaints.append(f"{name}: takes {found.to_torch['fckpt'].median:.3f} of the time of torch")
        if peak and (more := found.peak_bytes["fckpt"] - found.peak_bytes["torch"]) > 0:
            found.complaints.append(f"{name}: peaks {more:,} bytes higher than torch")
    return found


# ---- tiny: the call itself -----------------------------------------------------------------------


def tiny(*, quick: bool, device: torch.device) -> Iterator[Outcome]:
    """Regions over 4x4 matrices: functions of one and of ten layers, and a module."""
    x, cotangent = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    w = (torch.randn(4, 4, device=device) / 2).requires_grad_()

    def layers(count: int) -> Callable[[Tensor, Tensor], Tensor]:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            for _ in range(count):
                x = torch.tanh(x @ w)
            return x

        return fn

    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    regions: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
        "tanh(x @ w), 4x4": (layers(1), (x, w)),
        "20 ops on 4x4": (layers(10), (x, w)),
        "module: Linear(4, 4), Tanh": (module, (x,)),
    }
    for name, (fn, arguments) in regions.items():
        forward = {
            "plain": fn,
            "torch": functools.partial(checkpoint, fn, use_reentrant=False),
            "fckpt": fckpt.remat(fn),
        }
        methods: Methods = {
            method: lambda run=run, arguments=arguments: run(*arguments).backward(cotangent)
            for method, run in forward.items()
        }
        yield measure("tiny", name, methods, device, rounds=50 if quick else 200, calls=50, peak=False)


# ---- planned: a plan without recomputation -------------------------------------------------------


def planned(*, quick: bool, device: torch.device) -> Iterator[Outcome]:
    """Networks with many operations on small tensors, with the memory of the plain step as their budget."""
    for name, build in (("GPT-2, 12 layers of width 48", _gpt2), ("ResNet-50, batch 2 of 3x32x32", _resnet)):
        if build is _gpt2 and find_spec("transformers") is None:
            continue
        torch.manual_seed(0)
        model, loss = build(device)
        within = fckpt.remat(loss, budget=1.0, name=name)

        def step(fn: Callable[[], Tensor], model: nn.Module = model) -> None:
            fn().backward()
            model.zero_grad(set_to_none=True)

        methods: Methods = {"plain": functools.partial(step, loss), "fckpt": functools.partial(step, within)}
        methods["fckpt"]()
        found = measure("planned", name, methods, device, rounds=11 if quick else 51)
        guards = _guard_seconds(methods["fckpt"]) * 1e6
        yield replace(found, first_call={**fckpt.stats(within).seconds, "guards": guards})


def _gpt2(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=12, n_embd=48, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0)
    model: nn.Module = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # the default, which warns unless it is named
    nn.Module.to(model, device)
    tokens = torch.randint(512, (2, 32), device=device)
    return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _resnet(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    task = replace(NETWORKS["resnet50"], sizes={"small": {"batch": 2, "side": 32}}).task("small", device)
    return task.loss, lambda: task.loss(task.inputs, task.labels)


def _guard_seconds(step: Callable[[], object]) -> float:
    """Returns the seconds of the guards of a planned call, the median of 100 calls."""
    taken: list[float] = []
    holds = Captured.holds

    def timed(*args: Any) -> bool:
        start = time.perf_counter()
        held = holds(*args)
        taken.append(time.perf_counter() - start)
        return held

    with unittest.mock.patch.object(Captured, "holds", timed):
        for _ in range(100):
            step()
    return statistics.median(taken)


# ---- steps: real networks ------------------------------------------------------------------------


def training(*, quick: bool, device: torch.device) -> Iterator[Outcome]:
    """Training steps of networks of `benches.budgets`, one region per block."""
    for name in ("resnet50", "densenet121", "bert"):
        task = NETWORKS[name].task(size_of(device, quick=quick), device)
        losses = {"plain": task.loss, "torch": task.in_blocks(TorchCheckpoint), "fckpt": task.in_blocks(fckpt.remat)}
        methods: Methods = {method: step_of(loss, task) for method, loss in losses.items()}
        yield measure("steps", f"{task.name}, {task.what}", methods, device, rounds=7 if quick else 11)


# ---- the script ----------------------------------------------------------------------------------

PARTS: dict[str, Callable[..., Iterator[Outcome]]] = {"tiny": tiny, "planned": planned, "steps": training}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints the table of each case."""
    for outcome in outcomes:
        table = table_of(outcome.part, "time", "to plain", "to torch", "peak MiB", "of plain", left=[outcome.part])
        peaks = outcome.peak_bytes
        for name, seconds in outcome.seconds.items():
            least = f"{seconds.least * 1e6:.1f} us" if seconds.least < 1e-3 else f"{seconds.least * 1e3:.1f} ms"
            ratios = (str(ratio.get(name, "")) for ratio in (outcome.to_plain, outcome.to_torch))
            part = share(peaks[name], peaks["plain"]) if peaks else ""
            table.add_row(name, least, *ratios, mib(peaks.get(name)), part)
        console.print(f"[bold]{outcome.name}[/]")
        console.print(table)
        if first := outcome.first_call:
            seconds = ", ".join(f"{what} {taken:.2f} s" for what, taken in first.items() if what != "guards")
            console.print(f"  first call: {seconds}; guards of a call: {first['guards']:.0f} us")


def main(arguments: list[str]) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parser = report_parser("overhead", __doc__, check="fckpt is slower or peaks higher")
    parser.add_argument("--only", choices=list(PARTS), help="one part instead of all")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    parsed = parser.parse_args(arguments)
    device = set_up(parsed.device)
    console, document = opening("overhead", arguments, device)
    document["options"] = {"only": parsed.only, "quick": parsed.quick}
    run = lambda part, advance: [*PARTS[part](quick=parsed.quick, device=device)]
    parts = [parsed.only] if parsed.only else [*PARTS]
    note = "Times: the fastest round. Ratios: median and quartiles of the rounds."
    return report_each(parsed, (console, document), "outcomes", parts, run, show, note=note)
