"""Seconds of the first planned step, by stage, for six networks: in a new folder, and with plans on disk.

    python -m benches first_calls --json benches/results/first-calls-cpu.json       # ten minutes
    python -m benches first_calls --tiny

ResNet-50; BERT, GPT-2 and T5-small of transformers, with twelve layers each and without a cache; and GPTs of 48 and 150
layers. (A block that writes to a cache is not like the others, and is captured by itself.) Widths, batches and lengths
are small: what planning costs depends on the number of operations. Each network runs `fckpt.remat(loss, budget=0.5)` in
two new processes. For the first one, fckpt's cache folder is empty, so that all operations are measured, and the step
runs by a quick plan. The same process then has the solver make a plan, which is stored, and which the second process
reads.

Seconds are CPU seconds of the process, so that other load matters less. The column `imports` is the time to import the
modules that a capture needs, once per process. The first call includes the step itself. The column `quick` is the
predicted time by which the quick plan is slower than the solver's plan, in percent of the step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import benches.common.repaired  # noqa: F401  lets transformers import torchvision
import fckpt
from benches.common.command import opening, report_each, report_parser, table_of
from benches.common.rows import Record
from benches.common.timing import set_up
from benches.models.convolutional import ResNet
from benches.models.sequence import Decoder
from fckpt._planned import ledger
from fckpt._planned.families import Families
from fckpt._planned.planner import Planner
from fckpt._region import planner_of

BUDGET = 0.5
VOCABULARY = 100
FRESH, STORED = "new folder", "plans on disk"
PROGRAM = """
import json, time, torch, fckpt
start = time.process_time()
import fckpt._capture.captured
seconds = time.process_time() - start
from {name} import measure
print(json.dumps({{"import_seconds": seconds, **measure{arguments}}}))
"""
"""Run by each process. The imports of the capture come first, because transformers may import the same modules."""


def _resnet(layers: int) -> tuple[nn.Module, Tensor]:
    counts = (3, 4, 6, 3) if layers > 2 else (1, 1)
    return ResNet(counts, classes=10, small=False, width=16), torch.randn(16, 3, 64, 64)


def _bert(layers: int) -> tuple[nn.Module, Tensor]:
    import transformers as hf

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCABULARY, **sizes)), _tokens()


def _gpt2(layers: int) -> tuple[nn.Module, Tensor]:
    import transformers as hf

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=layers, n_head=4, n_positions=64, **ends)
    ), _tokens()


def _t5(layers: int) -> tuple[nn.Module, Tensor]:
    import transformers as hf

    sizes: dict[str, Any] = {
        "decoder_start_token_id": 0,
        "use_cache": False,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 256,
        "num_layers": (layers + 1) // 2,
        "num_heads": 4,
    }
    config = hf.T5Config(vocab_size=VOCABULARY, **sizes)
    return hf.T5ForConditionalGeneration(config), _tokens()


def _gpt(layers: int) -> tuple[nn.Module, Tensor]:
    return Decoder(hidden=64, layers=layers, heads=4, vocabulary=VOCABULARY, positions=64), _tokens()


def _tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 64))


NETWORKS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    "ResNet-50": _resnet,
    "BERT, 12 layers": _bert,
    "GPT-2, 12 layers": _gpt2,
    "T5-small": _t5,
    "GPT, 48 layers": lambda layers: _gpt(4 * layers),
    "GPT, 150 layers": lambda layers: _gpt(layers * 25 // 2),
}


@dataclass
class FirstCall(Record):
    """The first planned step of one network in one process."""

    network: str
    folder: str
    operations: int = 0
    import_seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    call_seconds: float = 0.0
    """The whole first step, without the imports."""
    next_seconds: float = 0.0
    """The second step."""
    overhead: float = 0.0
    """The predicted overhead of the plan of the first step."""
    solved_overhead: float | None = None
    """The predicted overhead of the solver's plan; None if the first step runs by it."""
    plans: dict[str, int] = field(default_factory=dict)
    """How many plans were quick, and how many were read."""


def measure(name: str, folder: str, layers: int) -> dict[str, Any]:
    """Runs the first planned steps in this process, which must be new."""
    torch.manual_seed(0)
    net, batch = NETWORKS[name](layers)
    loss = _loss_of(net)
    loss(batch).backward()
    found: dict[str, Any] = {}
    ledger.clock = time.process_time
    planned, plans = fckpt.remat(loss, budget=BUDGET), []
    for key in ("call_seconds", "next_seconds"):
        net.zero_grad(set_to_none=True)
        start = time.process_time()
        planned(batch).backward()
        found[key] = time.process_time() - start
        plans += _planner_of(planned).plans.values()  # another one may replace it before the next step
    stats = fckpt.stats(planned)
    found["stage_seconds"] = {stage: stats.seconds[stage] for stage in ledger.STAGES}
    found["plans"] = {"quick": stats.quick, "read": stats.read}
    found["operations"], found["overhead"] = len(plans[0].graph.nodes), plans[0].overhead
    if folder == FRESH:
        os.environ["FCKPT_BACKGROUND"] = "0"  # the trace is solved now, and the plan is stored
        planner = _planner_of(planned)
        planner.families, traced = Families(), next(iter(planner.captures[0][1].values())).likely().trace
        planner.plans.clear()
        found["solved_overhead"] = planner.plan(traced).overhead if stats.quick else None
    return found


def _loss_of(net: nn.Module) -> Callable[[Tensor], Tensor]:
    if isinstance(net, ResNet):
        return lambda x: net(x).square().mean()
    if isinstance(net, Decoder):
        return lambda tokens: nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
    return lambda tokens: net(input_ids=tokens, labels=tokens).loss


def _planner_of(planned: Callable[..., Any]) -> Planner:
    planner = planner_of(planned)
    assert planner is not None
    return planner


def examine(name: str, layers: int, advance: Callable[[str], object]) -> list[FirstCall]:
    """Measures one network in two processes that share a new cache folder."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for folder in (FRESH, STORED):
            advance(folder)
            code = PROGRAM.format(name=__name__, arguments=(name, folder, layers))
            settings = {k: v for k, v in os.environ.items() if k not in ("FCKPT_BACKGROUND", "FCKPT_PLANS")}
            settings |= {"FCKPT_CACHE": cache, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings)
            row = FirstCall(name, folder)
            if made.returncode:
                row.complaints.append(made.stderr.strip().rpartition("\n")[2])
            else:
                for key, value in json.loads(made.stdout.splitlines()[-1]).items():
                    setattr(row, key, value)
            found.append(row)
    return found


def show(rows: Sequence[FirstCall], console: Console) -> None:
    """Prints the table of one network."""
    table = table_of(
        "network", "nodes", "folder", "imports", *ledger.STAGES, "first", "next", "quick", left=("network", "folder")
    )  # fmt: skip
    for row in rows:
        seconds = [row.import_seconds, *row.stage_seconds.values(), row.call_seconds, row.next_seconds]
        table.add_row(row.network, f"{row.operations:,}", row.folder, *(f"{s:.2f}" for s in seconds), slower(row))
    console.print(table)


def slower(row: FirstCall) -> str:
    """Returns by how many percent of the step's time the quick plan is slower than the solver's; empty if not quick."""
    return "" if row.solved_overhead is None else f"{100 * (row.overhead - row.solved_overhead):+.2f} %"


def main(arguments: list[str]) -> int:
    """Runs the bench. Returns 0."""
    parser = report_parser("first_calls", __doc__, device=False, tiny=True)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), metavar="NAME")
    parsed = parser.parse_args(arguments)
    opened = opening("first_calls", arguments, set_up("cpu"))
    layers = 2 if parsed.tiny else 12
    run = lambda name, advance: examine(name, layers, advance)
    note = "CPU seconds. Quick plan: how much slower it is predicted to be than the solver's, in percent of the step."
    return report_each(parsed, opened, "rows", parsed.networks, run, show, note=note, count=2)
