"""What a region costs: `fckpt.remat` against plain eager PyTorch and `torch.utils.checkpoint`.

    python -m benches.overhead --json benches/results/overhead-cpu.json --check     # about 3 minutes
    python -m benches.overhead --device cuda --json benches/results/overhead-cuda.json --check
    python -m benches.overhead --quick                                              # under a minute
    python -m benches.overhead --only tiny                                          # or planned, steps, grad

Four parts, all contenders in turn in one process (see `timing.py`):

tiny   forward and backward of a region too small to compute anything: the cost of the call itself.
planned forward and backward by a plan that computes nothing again, of small networks of many
       operations: what a planned call costs in Python; microseconds of its guards, seconds of the first call.
steps  a training step of ResNet-50, DenseNet-121 and a BERT-base encoder, one region per bottleneck,
       dense layer or encoder layer: time, and peak bytes by the allocator's own count.
grad   a 16-block MLP: `fckpt.grad` against `torch.func.grad` and `torch.autograd.grad`, plain and
       with a region per block.

PyTorch's checkpoint is called as its documentation advises: `use_reentrant=False`, all else default.
On CUDA all contenders alike run with deterministic kernels.
With `--check` the exit code is 1 if fckpt takes longer than its yardstick beyond noise (a sign test over
the rounds, and a median above the resolution), or peaks higher.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import importlib.util
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fckpt
from benches.models import TorchCheckpoint, bert_base, densenet121, resnet50, wrap_blocks
from benches.script import DEVICE, opening, report_parser, steps, table_of
from benches.timing import (
    Spread,
    alternate,
    mib,
    paired_ratio,
    set_up,
    sign_test,
    spread,
    write_json,
)
from fckpt._capture.captured import Captured
from fckpt._memory import measure_peak

SIGNIFICANCE = 0.01
RESOLUTION = 1.01
"""A difference of the medians under 1% is not a finding: where a tensor lands in memory makes as much."""

# (batch, image side or tokens): what the device does in about a second, activations well above weights.
SIZES: dict[str, dict[str, tuple[int, int]]] = {
    "cpu": {"resnet50": (8, 112), "densenet121": (4, 112), "bert": (4, 128)},
    "cuda": {"resnet50": (64, 224), "densenet121": (32, 224), "bert": (32, 256)},
    "quick": {"resnet50": (2, 64), "densenet121": (2, 64), "bert": (2, 128)},
}

Contenders = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """Contenders for the same result: the first is the reference of the ratios."""

    part: str
    name: str
    contenders: Contenders
    yardstick: str
    """The contender that fckpt must not be worse than."""
    subject: str
    """fckpt's contender."""
    rounds: int
    calls: int = 1
    has_peak: bool = True
    checks_time: bool = True
    first_call: Callable[[], dict[str, float]] | None = None
    """Says what planning took, after the rounds."""


@dataclass(frozen=True)
class Outcome:
    """What was measured for a case; the dicts go by contender."""

    part: str
    name: str
    yardstick: str
    subject: str
    seconds: dict[str, Spread]
    to_reference: dict[str, Spread]
    to_yardstick: dict[str, Spread]
    slower_p: float
    """Sign test: how likely the subject loses so many rounds if it is as fast as the yardstick."""
    peak_bytes: dict[str, int]
    complaints: list[str]
    first_call: dict[str, float]
    """What planning took, in seconds, and the guards of a call, in microseconds; by part."""


def measure(case: Case, device: torch.device, advance: Callable[[], object]) -> Outcome:
    """Measures time and, where it makes sense, peak memory of every contender."""
    names = list(case.contenders)
    seconds = alternate(case.contenders, rounds=case.rounds, calls=case.calls, device=device, on_sample=advance)
    peaks: dict[str, int] = {}
    if case.has_peak:
        # After the timed rounds: by then every library has allocated what it keeps for good.
        peaks = {name: measure_peak(case.contenders[name], device).peak_bytes for name in names}
    to_yardstick = {name: paired_ratio(seconds, name, case.yardstick) for name in names}
    slower_p = sign_test(seconds, case.subject, case.yardstick)
    complaints = []
    median = to_yardstick[case.subject].median
    if case.checks_time and slower_p < SIGNIFICANCE and median > RESOLUTION:
        complaints.append(f"takes {median:.3f} of the time of {case.yardstick} (p = {slower_p:.4f})")
    if peaks and peaks[case.subject] > peaks[case.yardstick]:
        more = peaks[case.subject] - peaks[case.yardstick]
        complaints.append(f"peaks {more:,} bytes higher than {case.yardstick}")
    return Outcome(
        part=case.part,
        name=case.name,
        yardstick=case.yardstick,
        subject=case.subject,
        seconds={name: spread(values) for name, values in seconds.items()},
        to_reference={name: paired_ratio(seconds, name, names[0]) for name in names},
        to_yardstick=to_yardstick,
        slower_p=slower_p,
        peak_bytes=peaks,
        complaints=complaints,
        first_call=case.first_call() if case.first_call else {},
    )


# ---- tiny: the call itself -----------------------------------------------------------------------


def tiny_cases(*, quick: bool, device: torch.device) -> Iterator[Case]:
    """Regions over 4x4 matrices: functions of one and of ten layers, and a module."""
    x, cotangent = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    w = (torch.randn(4, 4, device=device) / 2).requires_grad_()

    def two_ops(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    def twenty_ops(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x @ w)
        return x

    def contenders(fn: Callable[..., Tensor], *arguments: Tensor) -> Contenders:
        remat = fckpt.remat(fn)

        def plain() -> None:
            fn(*arguments).backward(cotangent)

        def with_torch() -> None:
            checkpoint(fn, *arguments, use_reentrant=False).backward(cotangent)  # type: ignore[union-attr]

        def with_fckpt() -> None:
            remat(*arguments).backward(cotangent)

        return {"plain": plain, "torch": with_torch, "fckpt": with_fckpt}

    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    for name, regions in (
        ("tanh(x @ w), 4x4", contenders(two_ops, x, w)),
        ("20 ops on 4x4", contenders(twenty_ops, x, w)),
        ("module: Linear(4, 4), Tanh", contenders(module, x)),
    ):
        yield Case(
            part="tiny",
            name=name,
            contenders=regions,
            yardstick="torch",
            subject="fckpt",
            rounds=50 if quick else 200,
            calls=50,
            has_peak=False,
        )


# ---- planned: a plan that has nothing to do ------------------------------------------------------


def planned_cases(*, quick: bool, device: torch.device) -> Iterator[Case]:
    """Networks of many operations on small tensors, with the memory that they take without a plan."""
    for name, build in (("GPT-2, 12 layers of width 48", _gpt2), ("ResNet-50, batch 2 of 3x32x32", _resnet)):
        if build is _gpt2 and importlib.util.find_spec("transformers") is None:
            continue
        torch.manual_seed(0)
        model, loss = build(device)
        planned = fckpt.remat(loss, budget=1.0, name=name)

        def step(fn: Callable[[], Tensor], model: nn.Module = model) -> None:
            fn().backward()
            model.zero_grad(set_to_none=True)

        step(planned)
        yield Case(
            part="planned",
            name=name,
            contenders={"plain": functools.partial(step, loss), "fckpt": functools.partial(step, planned)},
            yardstick="plain",
            subject="fckpt",
            rounds=11 if quick else 51,
            checks_time=False,  # this is the figure, not a comparison
            first_call=functools.partial(_planning, planned, functools.partial(step, planned)),
        )


def _gpt2(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    sys.path.append(str(Path(__file__).parent.parent / "docs" / "examples"))
    importlib.import_module("repair_torchvision")  # transformers imports torchvision, if it is there
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=12, n_embd=48, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0)
    model: nn.Module = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # taken anyway, with a warning, unless it is named
    nn.Module.to(model, device)
    tokens = torch.randint(512, (2, 32), device=device)
    return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _resnet(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = resnet50().to(device), torch.randn(2, 3, 32, 32, device=device)
    labels = torch.randint(2, (2,), device=device)
    return model, lambda: F.cross_entropy(model(x), labels)


def _planning(planned: Callable[..., Any], step: Callable[[], None]) -> dict[str, float]:
    """Seconds of the first call, by what they were spent on, and microseconds of the guards of a later one."""
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
    return {**fckpt.stats(planned).seconds, "guards": statistics.median(taken) * 1e6}


# ---- steps: real networks ------------------------------------------------------------------------


def step_cases(*, quick: bool, device: torch.device) -> Iterator[Case]:
    """Training steps of real networks, one region per block."""
    sizes = SIZES["quick" if quick else "cuda" if device.type == "cuda" else "cpu"]
    for key, name, build in (
        ("resnet50", "ResNet-50", resnet50),
        ("densenet121", "DenseNet-121", densenet121),
        ("bert", "BERT-base encoder", bert_base),
    ):
        torch.manual_seed(0)
        batch, size = sizes[key]
        plain = build().to(device)
        if key == "bert":
            shape, inputs = f"batch {batch}, {size} tokens", torch.randint(30_522, (batch, size))
        else:
            shape, inputs = f"batch {batch} of 3x{size}x{size}", torch.randn(batch, 3, size, size)
        labels = torch.randint(2, (batch,), device=device)
        models = {
            "plain": plain,
            "torch": wrap_blocks(copy.deepcopy(plain), TorchCheckpoint),
            "fckpt": wrap_blocks(copy.deepcopy(plain), fckpt.remat),
        }
        yield Case(
            part="steps",
            name=f"{name}, {shape}",
            contenders={
                contender: _training_step(model, inputs.to(device), labels) for contender, model in models.items()
            },
            yardstick="torch",
            subject="fckpt",
            rounds=7 if quick else 11,
        )


def _training_step(model: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], None]:
    def step() -> None:
        F.cross_entropy(model(inputs), labels).backward()
        # Dropped at once: gradients that outlive the step would not be the step's own memory.
        model.zero_grad(set_to_none=True)

    return step


# ---- grad: the transform -------------------------------------------------------------------------


def grad_cases(*, quick: bool, device: torch.device) -> Iterator[Case]:
    """Gradients of a residual MLP's parameters, by three ways of asking for them."""
    torch.manual_seed(0)
    width, batch, blocks = 128, 1024 if quick else 8192, 16
    x = torch.randn(batch, width, device=device)
    params = [{name: torch.randn(width, width, device=device) * 0.05 for name in ("w", "v")} for _ in range(blocks)]
    leaves = [{name: p.clone().requires_grad_() for name, p in block.items()} for block in params]
    flat = [p for block in leaves for p in block.values()]

    def block(p: dict[str, Tensor], h: Tensor) -> Tensor:
        return h + torch.tanh(h @ p["w"]) @ p["v"]

    for name, layer in (("no region", block), ("a region per block", fckpt.remat(block))):

        def loss(params: list[dict[str, Tensor]], layer: Callable[..., Tensor] = layer) -> Tensor:
            h = x
            for p in params:
                h = layer(p, h)
            return h.square().mean()

        functional, own = torch.func.grad(loss), fckpt.grad(loss)
        yield Case(
            part="grad",
            name=f"{blocks}-block MLP, batch {batch}, width {width}, {name}",
            contenders={
                "func.grad": lambda g=functional: g(params),
                "autograd.grad": lambda f=loss: torch.autograd.grad(f(leaves), flat),
                "fckpt.grad": lambda g=own: g(params),
            },
            yardstick="autograd.grad",
            subject="fckpt.grad",
            rounds=7 if quick else 11,
            # The promise here is one of memory; wrapping the parameters takes its microseconds.
            checks_time=False,
        )


# ---- the script ----------------------------------------------------------------------------------


def show(outcome: Outcome, console: Console) -> None:
    """Prints one case's table and what is wrong with it."""
    names = list(outcome.seconds)
    columns = ["time", f"to {names[0]}", f"to {outcome.yardstick}", *(["peak"] if outcome.peak_bytes else [])]
    table = table_of(outcome.part, *columns, left=[outcome.part])
    for name in names:
        row = [
            _duration(outcome.seconds[name].least),
            "1" if name == names[0] else str(outcome.to_reference[name]),
            "1" if name == outcome.yardstick else str(outcome.to_yardstick[name]),
        ]
        if outcome.peak_bytes:
            peak = outcome.peak_bytes[name]
            row.append(f"{mib(peak)} ({peak / outcome.peak_bytes[names[0]]:.2f})")
        table.add_row(name, *row, style="bold" if name == outcome.subject else None)
    console.print(f"[bold]{outcome.name}[/]", highlight=False)
    console.print(table)
    if outcome.first_call:
        seconds = ", ".join(f"{what} {taken:.2f} s" for what, taken in outcome.first_call.items() if what != "guards")
        console.print(
            f"  first call: {seconds}; guards of a call: {outcome.first_call['guards']:.0f} us", highlight=False
        )
    for complaint in outcome.complaints:
        console.print(f"  [bold red]{outcome.subject} {complaint}[/]", highlight=False)
    console.print()


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = report_parser("overhead", __doc__)
    parser.add_argument("--device", help=DEVICE)
    parser.add_argument("--only", choices=["tiny", "planned", "steps", "grad"], help="one part instead of all")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if fckpt is slower or peaks higher")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parsed = parse(arguments)
    device = set_up(parsed.device)
    console, document = opening("overhead", arguments, device)

    parts: dict[str, Callable[..., Iterator[Case]]]
    parts = {"tiny": tiny_cases, "planned": planned_cases, "steps": step_cases, "grad": grad_cases}
    outcomes: list[Outcome] = []
    for part, cases in parts.items():
        if parsed.only not in (None, part):
            continue
        for case in cases(quick=parsed.quick, device=device):
            with steps((case.rounds + 1) * len(case.contenders)) as advance:
                outcomes.append(measure(case, device, lambda name=case.name: advance(name)))
            show(outcomes[-1], console)
    console.print(
        "Times: the fastest round. Ratios: median of the quotients within a round, and their interquartile range.",
        style="dim",
    )
    if parsed.json:
        document["options"] = {"only": parsed.only, "quick": parsed.quick}
        write_json(parsed.json, {**document, "outcomes": [asdict(outcome) for outcome in outcomes]})
    return int(parsed.check and any(outcome.complaints for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
