"""The overhead of a region: `fckpt.remat` compared with eager PyTorch and `torch.utils.checkpoint`.

    python -m benches.overhead --json benches/results/overhead-cpu.json --check     # about 3 minutes
    python -m benches.overhead --device cuda --json benches/results/overhead-cuda.json --check
    python -m benches.overhead --quick                                              # under a minute
    python -m benches.overhead --only tiny                                          # or planned, steps, grad

Four parts; all methods run alternately in one process (see `common/timing.py`):

tiny     forward and backward of a region with next to no computation: the cost of the call itself.
planned  forward and backward by a plan that recomputes nothing, of small networks with many operations: the cost of a
         planned call in Python, the microseconds of its guards and the seconds of the first call.
steps    a training step of ResNet-50, DenseNet-121 and BERT in the sizes of `benches.budgets`, one region per
         bottleneck, dense layer or encoder layer: time, and peak bytes as counted by the allocator.
grad     a 16-block MLP: `fckpt.grad` compared with `torch.func.grad` and `torch.autograd.grad`, plain and with a region
         per block.

PyTorch's checkpoint is called as its documentation recommends: `use_reentrant=False`, otherwise with its defaults. On
CUDA all methods run with deterministic kernels. With `--check` the exit code is 1 if fckpt is slower than the method it
is compared with beyond noise (a sign test over the rounds, and a median above the resolution), or peaks higher.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fckpt
from benches.common.command import DEVICE, mib, opening, report_parser, steps, table_of
from benches.common.results import write_json
from benches.common.timing import Spread, alternate, is_slower, paired_ratio, set_up, spread
from benches.common.training import size_of, step_of
from benches.models.budget_networks import NETWORKS
from benches.models.wrapping import TorchCheckpoint
from fckpt._capture.captured import Captured
from fckpt._memory import measure_peak

Methods = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """Methods with the same result. Ratios are relative to the first."""

    part: str
    name: str
    methods: Methods
    other: str
    """The method that fckpt is compared with."""
    subject: str
    """The method of fckpt."""
    rounds: int
    calls: int = 1
    has_peak: bool = True
    checks_time: bool = True
    first_call: Callable[[], dict[str, float]] | None = None
    """Returns the costs of planning, after the rounds."""


@dataclass(frozen=True)
class Outcome:
    """The measurements of a case. The dicts are by method."""

    part: str
    name: str
    other: str
    subject: str
    seconds: dict[str, Spread]
    to_reference: dict[str, Spread]
    to_other: dict[str, Spread]
    peak_bytes: dict[str, int]
    complaints: list[str]
    first_call: dict[str, float]
    """The seconds of planning, by part, and the microseconds of a call's guards."""


def measure(case: Case, device: torch.device, advance: Callable[[], object]) -> Outcome:
    """Measures the time and, if `case.has_peak`, the peak of every method."""
    names = list(case.methods)
    seconds = alternate(case.methods, rounds=case.rounds, calls=case.calls, device=device, on_sample=advance)
    peaks: dict[str, int] = {}
    if case.has_peak:
        # After the timed rounds, so that every library has allocated its permanent memory.
        peaks = {name: measure_peak(case.methods[name], device).peak_bytes for name in names}
    to_other = {name: paired_ratio(seconds, name, case.other) for name in names}
    complaints = []
    if case.checks_time and is_slower(seconds, case.subject, case.other):
        complaints.append(f"takes {to_other[case.subject].median:.3f} of the time of {case.other}")
    if peaks and peaks[case.subject] > peaks[case.other]:
        more = peaks[case.subject] - peaks[case.other]
        complaints.append(f"peaks {more:,} bytes higher than {case.other}")
    return Outcome(
        part=case.part,
        name=case.name,
        other=case.other,
        subject=case.subject,
        seconds={name: spread(values) for name, values in seconds.items()},
        to_reference={name: paired_ratio(seconds, name, names[0]) for name in names},
        to_other=to_other,
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

    def methods(fn: Callable[..., Tensor], *arguments: Tensor) -> Methods:
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
        ("tanh(x @ w), 4x4", methods(two_ops, x, w)),
        ("20 ops on 4x4", methods(twenty_ops, x, w)),
        ("module: Linear(4, 4), Tanh", methods(module, x)),
    ):
        yield Case(
            part="tiny",
            name=name,
            methods=regions,
            other="torch",
            subject="fckpt",
            rounds=50 if quick else 200,
            calls=50,
            has_peak=False,
        )


# ---- planned: a plan without recomputation -------------------------------------------------------


def planned_cases(*, quick: bool, device: torch.device) -> Iterator[Case]:
    """Networks with many operations on small tensors, with the memory of the plain step as their budget."""
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
            methods={"plain": functools.partial(step, loss), "fckpt": functools.partial(step, planned)},
            other="plain",
            subject="fckpt",
            rounds=11 if quick else 51,
            checks_time=False,  # the time is reported, not compared
            first_call=functools.partial(_planning, planned, functools.partial(step, planned)),
        )


def _gpt2(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    sys.path.append(str(Path(__file__).parent.parent / "docs" / "examples"))
    importlib.import_module("repair_torchvision")  # transformers imports torchvision, if it is there
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


def _planning(planned: Callable[..., Any], step: Callable[[], None]) -> dict[str, float]:
    """Returns the seconds of the first call, by part, and the microseconds of the guards of a later call."""
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
    """Training steps of networks of `benches.budgets`, one region per block."""
    for name in ("resnet50", "densenet121", "bert"):
        task = NETWORKS[name].task(size_of(device, quick=quick), device)
        losses = {"plain": task.loss, "torch": task.in_blocks(TorchCheckpoint), "fckpt": task.in_blocks(fckpt.remat)}
        yield Case(
            part="steps",
            name=f"{task.name}, {task.what}",
            methods={method: step_of(loss, task) for method, loss in losses.items()},
            other="torch",
            subject="fckpt",
            rounds=7 if quick else 11,
        )


# ---- grad: the transform -------------------------------------------------------------------------


def grad_cases(*, quick: bool, device: torch.device) -> Iterator[Case]:
    """Gradients of the parameters of a residual MLP, by three functions."""
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
            methods={
                "func.grad": lambda g=functional: g(params),
                "autograd.grad": lambda f=loss: torch.autograd.grad(f(leaves), flat),
                "fckpt.grad": lambda g=own: g(params),
            },
            other="autograd.grad",
            subject="fckpt.grad",
            rounds=7 if quick else 11,
            checks_time=False,  # only memory must be equal; wrapping the parameters takes microseconds
        )


# ---- the script ----------------------------------------------------------------------------------


def show(outcome: Outcome, console: Console) -> None:
    """Prints the table of one case and its complaints."""
    names = list(outcome.seconds)
    columns = ["time", f"to {names[0]}", f"to {outcome.other}", *(["peak"] if outcome.peak_bytes else [])]
    table = table_of(outcome.part, *columns, left=[outcome.part])
    for name in names:
        row = [
            _duration(outcome.seconds[name].least),
            "1" if name == names[0] else str(outcome.to_reference[name]),
            "1" if name == outcome.other else str(outcome.to_other[name]),
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
            with steps((case.rounds + 1) * len(case.methods)) as advance:
                outcomes.append(measure(case, device, lambda name=case.name: advance(name)))
            show(outcomes[-1], console)
    console.print(
        "Times: the fastest round. Ratios: median and quartiles of the rounds.",
        style="dim",
    )
    if parsed.json:
        document["options"] = {"only": parsed.only, "quick": parsed.quick}
        write_json(parsed.json, {**document, "outcomes": [asdict(outcome) for outcome in outcomes]})
    return int(parsed.check and any(outcome.complaints for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
