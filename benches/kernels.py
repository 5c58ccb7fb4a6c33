"""Compiled kernels: peak, time and differences of twelve networks, by fckpt's kernels and by torch.compile's budgets.

    python -m benches kernels --json benches/results/kernels-cpu.json --check    # an hour
    python -m benches kernels --networks unet pointwise                          # some of the networks
    python -m benches kernels --tiny                                             # small sizes, for a try

For each network, in one process, with times taken alternately:

plain                the function under autograd.
compile              `torch.compile`, alone and with its own budgets 0.5 and 0.2 (`activation_memory_budget`).
backend              `torch.compile(fn, backend="fckpt")`, with the two peaks of the compiled functions as budgets.
aten, exact, fused   `fckpt.remat` with these kernels, within the plain peak, half of it, and the least known budget.
around               `torch.compile` around `fckpt.remat` with these budgets.

The difference is the largest of any gradient from the plain one, relative to the largest element of that gradient; 0
means equal bits. Each function is made twice. The first call of the first one plans and compiles with empty caches; the
first call of the second one ("warm") finds kernels and plans there. With `--check` the exit code is 1 if a plan exceeds
its budget, or if gradients by `aten` or `exact` are not bitwise equal to the plain ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fckpt
from benches.common.command import add_names, described, mib, opening, report_each, report_parser, share, table_of
from benches.common.rows import Compared, compare
from benches.common.timing import set_up
from benches.common.training import sizes_from
from benches.models.budget_networks import NETWORKS
from benches.models.sequence import Llama
from fckpt._fuse import trial

Loss = Callable[[], Tensor]
Step = tuple[Loss, list[Tensor]]
SHARES: dict[str, float | None] = {"1.0": 1.0, "0.5": 0.5, "least": None}
"""Budgets by name: fractions of the plain peak, and the least one for which a plan is known."""
OWN = (0.5, 0.2)
"""The budgets of `torch.compile` itself."""
KERNELS: tuple[Any, ...] = ("aten", "exact", "fused")
_CPU = dict(
    line.split(maxsplit=1)
    for line in """
resnet50 batch=4 side=64 stages=2
vgg16    batch=4 side=64 width=16 hidden=64
unet     batch=2 side=64 width=16 depth=3
vit      batch=4 side=64 patch=8 hidden=128 heads=4 layers=2
bert     batch=4 tokens=64 hidden=128 layers=2 heads=4 vocabulary=512
gpt2     batch=4 tokens=64 hidden=128 layers=2 heads=4 vocabulary=512
lstm     batch=32 steps=8 features=32 hidden=64 span=4
mixer    batch=4 side=64 patch=8 hidden=128 layers=2
""".strip().splitlines()
)
"""Sizes by network: few layers, because compilation takes most of the time of this bench."""


@dataclass
class Method(Compared):
    """One method on one network."""

    network: str
    method: str
    budget: str = ""
    """A key of `SHARES`, or a budget of torch.compile; empty for none."""
    first_seconds: float = 0.0
    """The time of the first call."""
    warm_seconds: float = 0.0
    """The time of the first call of the same function, made again."""
    compile_seconds: float = 0.0
    """The time of compilation with empty caches: as `fckpt.stats` says, or what the first call takes longer than the
    first call of the function made again."""
    refused: str = ""
    """Why there are no figures: a budget below every plan, or an error of a compiler."""

    @property
    def title(self) -> str:
        """The method and its budget."""
        return f"{self.method} {self.budget}".strip()


def llama(layers: int, width: int, length: int) -> Step:
    """Returns the mean square of the result of a small Llama, whose attention is not a fused kernel."""
    net = Llama(hidden=width, layers=layers, heads=4, groups=4, vocabulary=width, positions=length)
    tokens = torch.randint(width, (4, length))

    def loss() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return net(tokens).square().mean()

    return loss, list(net.parameters())


def perceptron(activation: type[nn.Module], layers: int, width: int, rows: int) -> Step:
    """Returns the sum of squares of the result of a deep perceptron."""
    net = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), activation())])
    x = torch.randn(rows, width)
    return lambda: net(x).square().sum(), list(net.parameters())


def elementwise(count: int, rows: int, width: int) -> Step:
    """Returns a chain of pointwise operations, most of them exactly rounded."""
    w, x = torch.randn(count, width, requires_grad=True), torch.randn(rows, width, requires_grad=True)

    def loss() -> Tensor:
        h = x
        for row in w:
            a = (h * row + x).relu() * 0.5
            h = torch.maximum(a, h) / (a.abs() + 1.5)
            h = h * h - a
        return h.square().sum()

    return loss, [w, x]


def network(name: str, tiny: bool) -> Step:
    """Returns the loss of a network of `budget_networks`, without dropout: compilers draw other masks."""
    sizes = NETWORKS[name].sizes["tiny"] if tiny else sizes_from(_CPU[name])
    task = dataclasses.replace(NETWORKS[name], sizes={"cpu": sizes}).task("cpu", torch.get_default_device())
    for module in task.loss.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return lambda: task.loss(task.inputs, task.labels), list(task.loss.parameters())


def cases(*, tiny: bool) -> dict[str, Callable[[], Step]]:
    """Returns functions that make the networks on the default device, by name."""
    width = 32 if tiny else 256
    return {
        "pointwise": functools.partial(elementwise, 3 if tiny else 6, 8 * width, 2 * width),
        "Llama": functools.partial(llama, 2, width // 2, width // 2),
        "ReLU perceptron": functools.partial(perceptron, nn.ReLU, 6 if tiny else 8, width, 4 * width),
        "GELU perceptron": functools.partial(perceptron, nn.GELU, 6 if tiny else 8, width, 4 * width),
        **{name: functools.partial(network, name, tiny) for name in _CPU},
    }


# ---- the methods ---------------------------------------------------------------------------------


def compiled_within(fn: Loss, budget: float) -> Loss:
    """Returns the function by torch.compile with its own budget."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(module: Any, inputs: Any) -> Any:  # another one each time, so that Dynamo keeps the results apart
        with config.patch(activation_memory_budget=budget):
            return compile_fx(module, inputs)

    return torch.compile(fn, backend=backend)


def methods(fn: Loss, least: int) -> dict[tuple[str, str], Callable[[], Loss]]:
    """Returns functions that make the function in each way, by method and budget."""
    found: dict[tuple[str, str], Callable[[], Loss]] = {
        ("plain", ""): lambda: fn,
        ("compile", ""): functools.partial(compiled_within, fn, 1.0),
    }
    found |= {("compile", str(budget)): functools.partial(compiled_within, fn, budget) for budget in OWN}
    for name, fraction in SHARES.items():
        budget = least if fraction is None else fraction
        for kernels in KERNELS:
            found[kernels, name] = functools.partial(fckpt.remat, fn, budget=budget, kernels=kernels)
        found["around", name] = lambda budget=budget: torch.compile(fckpt.remat(fn, budget=budget))
    return found


def least_of(fn: Loss) -> int:
    """Returns the least budget for which a plan is known."""
    try:
        return fckpt.plan(fn, budget=1).peak_bytes
    except fckpt.BudgetError as error:
        return error.least_bytes


def measure(
    name: str, step: Step, rounds: int, device: torch.device, tell: Callable[[str], object] = lambda _: None
) -> list[Method]:
    """Measures all methods on one network."""
    fn, leaves = step
    torch._dynamo.reset()
    least = least_of(fn)
    made = methods(fn, least)
    granted: dict[tuple[str, str], int] = {}
    """The budgets of the backend, which are the peaks of compiled functions."""
    rows: list[Method] = []
    ran: dict[Callable[[], Sequence[Tensor]], Method] = {}
    while made:
        key = next(iter(made))
        row = Method(name, *key, budget_bytes=granted.get(key))
        rows.append(row)
        tell(row.title)
        try:
            run = _first_calls(row, made.pop(key), leaves)
        except Exception as error:
            row.refused = described(error)
            continue
        ran[run] = row
        if key[0] == "compile" and key[1]:
            peak = granted["backend", key[1]] = fckpt.measure_peak(run, device).peak_bytes
            options = {"budget": peak}
            made["backend", key[1]] = functools.partial(torch.compile, fn, backend="fckpt", options=options)
    compare(ran, rounds, device)
    _judge(rows, least)
    return rows


def _first_calls(row: Method, make: Callable[[], Loss], leaves: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Makes a function twice and times both first calls. Returns a function that returns the second one's gradients."""
    trial._known.clear()
    with empty_caches():
        for name in ("first_seconds", "warm_seconds"):
            start = time.perf_counter()
            loss = make()
            run = lambda loss=loss: torch.autograd.grad(loss(), leaves)
            run()
            setattr(row, name, time.perf_counter() - start)
            if row.method in KERNELS:
                row.compile_seconds = max(row.compile_seconds, fckpt.stats(loss).seconds.get("compile", 0.0))
    if row.method in ("compile", "backend"):
        row.compile_seconds = row.first_seconds - row.warm_seconds
    return run


def _judge(rows: Sequence[Method], least: int) -> None:
    """Complains about plans above their budget, and about bits that changed where they must not."""
    plain = rows[0].peak_bytes or 0
    for row in rows:
        if row.method in (*KERNELS, "around"):
            fraction = SHARES[row.budget]
            # A budget that is a fraction is one of the plain peak as fckpt states it, which is right within 1 %.
            row.budget_bytes = least if fraction is None else int(plain * fraction * 1.01)
        if row.refused:
            continue
        if row.peak_bytes and row.budget_bytes and row.peak_bytes > row.budget_bytes:
            row.complaints.append(f"peaks {row.peak_bytes - row.budget_bytes:,} bytes above its budget")
        if row.method in ("aten", "exact") and row.difference:
            row.complaints.append(f"gradients are off by {row.difference:.1e}")


# ---- the command ---------------------------------------------------------------------------------


def show(rows: Sequence[Method], console: Console) -> None:
    """Prints the table of one network."""
    figures = ("peak MiB", "of plain", "time to plain", "difference", "first call s", "warm s", "compiled s")
    columns = ("method", "budget", *figures)
    table = table_of(*columns, left=("method", "budget"), title=rows[0].network)
    for row in rows:
        if row.refused:
            table.add_row(row.method, row.budget, *["-"] * len(figures))
            continue
        peaks = (mib(row.peak_bytes), share(row.peak_bytes, rows[0].peak_bytes or 1))
        calls = [f"{seconds:.1f}" for seconds in (row.first_seconds, row.warm_seconds, row.compile_seconds)]
        table.add_row(
            row.method, row.budget, *peaks, str(row.time_ratio), f"{row.difference:.1e}", *calls, style=row.style
        )
    console.print(table)


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Sets empty folders for the kernels of Inductor, and for costs and plans of fckpt."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "FCKPT_CACHE": f"{folder}/fckpt"}
        with mock.patch.dict(os.environ, folders):
            yield


def main(arguments: list[str]) -> int:
    """Runs the bench."""
    parser = report_parser("kernels", __doc__, rounds="7", tiny=True, check="a budget or bits are not kept")
    add_names(parser, "networks", cases(tiny=True))
    parsed = parser.parse_args(arguments)
    os.environ.setdefault("FCKPT_PLANS", "1")  # each method begins with empty folders, see `empty_caches`
    device = set_up(parsed.device)
    opened = opening("kernels", arguments, device)
    torch.manual_seed(0)
    found = cases(tiny=parsed.tiny)

    def run(name: str, advance: Callable[[str], object]) -> list[Method]:
        with torch.device(device):
            step = found[name]()
        return measure(name, step, parsed.rounds, device, advance)

    note = "Time: median and quartiles of the rounds. A dash: there is no such plan."
    count = 2 + 2 * len(OWN) + len(SHARES) * (len(KERNELS) + 1)
    # One function is compiled in many ways, which Dynamo takes for a fault from the eighth on.
    with empty_caches(), torch._dynamo.config.patch(recompile_limit=256):
        torch.compile(torch.neg)(torch.zeros(8, device=device))  # inductor looks at compilers and processors once
        warnings.simplefilter("ignore", fckpt.BudgetWarning)  # the table has the peaks
        return report_each(parsed, opened, "rows", parsed.networks, run, show, note=note, count=count)
