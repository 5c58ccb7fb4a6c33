"""Sizes that change: whole runs over batches of many lengths, plain, checkpointed, compiled and within a budget.

    python -m benches sizes --json benches/results/sizes-cpu.json --check       # an hour
    python -m benches sizes --tiny

Six networks train for a number of steps, each with another batch size and length: three language models of
transformers, whose lengths follow a log-normal distribution as those of sentences do (for one of them also in eight
buckets); a convolutional network for images of changing side lengths; an LSTM; and a graph network. The same steps run
plainly; with a checkpoint per block (`gradient_checkpointing_enable`), or around the whole loss where there are no
blocks; by `torch.compile(dynamic=True)`; and by `fckpt.remat(loss, budget=bytes)`. The budget is a quarter of the plain
peak of the largest batch (a larger fraction for the last three networks, whose least peaks are higher). The
`activation_memory_budget` of `torch.compile` is the same fraction. The time of a run includes its first step, and so
all captures, traces, solutions and compilations. The table shows it relative to the plain run. The graph network runs
on one thread: on several threads of a CPU, torch adds up the gradient of `x[indices]` in another order each time, so
plain steps differ from one another.

Of the planned steps the table also says how many kept the budget, measured by the allocator, and how many had losses
and gradients bitwise equal to the plain ones; how many plain steps exceed the budget; and, for the first step at a new
size, the medians of the time in which its plan is made, and of the time of the step beyond a plain one. For five of the
new sizes, the solver makes a plan afterwards; the table has the largest difference of the predicted overheads. With
`--check` the exit code is 1 if a budget was exceeded, a result was not equal, or a step was refused.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import benches.common.repaired  # noqa: F401  lets transformers import torchvision
import fckpt
from benches.common.command import add_names, described, opening, report_each, report_parser, table_of
from benches.common.rows import Record
from benches.common.timing import set_up
from benches.models.convolutional import ResNet
from fckpt._memory import measure_peak
from fckpt._planned.making import make_plan
from fckpt._planned.plan import Plan
from fckpt._region import planner_of

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]


def language(name: str, width: int, layers: int) -> nn.Module:
    """Returns a language model of transformers with random weights, without dropout."""
    import transformers as hf

    common: dict[str, Any] = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": 512, "use_cache": False}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**common, **sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    if name == "bert":
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4}
        rest = {"intermediate_size": 4 * width, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertForMaskedLM(hf.BertConfig(**common, **sizes, **rest))
    sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 4 * width, "num_layers": layers // 2, "num_heads": 4}
    rest = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
    return hf.T5ForConditionalGeneration(hf.T5Config(**common, **sizes, **rest))


class Recurrent(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.cells, self.out = nn.LSTM(width, width, 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0]).square().mean()


class Messages(nn.Module):
    """A graph network: each node adds up what its edges carry."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            sent = torch.tanh(layer(torch.cat([nodes[edges[0]], nodes[edges[1]]], -1)))
            nodes = nodes + torch.zeros_like(nodes).index_add(0, edges[1], sent)
        return nodes.square().mean()


class Images(nn.Module):
    def __init__(self, stages: int):
        super().__init__()
        self.net = ResNet((2, 2, 2, 2)[:stages], classes=10, small=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def _tokens(draw: random.Random, most: int) -> Batch:
    length = min(most, max(4, round(draw.lognormvariate(4.0, 0.6) * most / 256)))
    return (torch.randint(3, 1000, (draw.randint(2, 6), length)),)


def _edges(draw: random.Random, most: int, width: int) -> Batch:
    nodes = draw.randint(2, 4 * most)
    return torch.randn(nodes, width), torch.randint(0, nodes, (2, draw.randint(nodes, 6 * nodes)))


@dataclass(frozen=True)
class Task:
    """A network, and how to draw a batch."""

    make: Callable[[int, int], nn.Module]
    draw: Callable[[random.Random, int, int], Batch]
    labelled: bool = False
    budget: float = 0.25
    """The budget as a fraction of the plain peak of the largest batch."""
    repeats: bool = True
    """Whether the plain step has the same bits each time it runs with several threads of a CPU."""

    def loss(self, net: nn.Module) -> Loss:
        if self.labelled:
            return lambda tokens: net(input_ids=tokens, labels=tokens).loss
        return lambda *batch: net(*batch)


def _image(draw: random.Random, most: int, width: int) -> Batch:
    edge = 8 * draw.randint(4, max(5, most // 16))
    return (torch.randn(draw.randint(1, 4), 3, edge, edge),)


def _in_buckets(draw: random.Random, most: int, width: int) -> Batch:
    """Returns a batch whose length is rounded up to one of eight lengths."""
    (tokens,) = _tokens(draw, most)
    rows, length = tokens.shape
    bucket = max(1, most // 8)
    return (torch.randint(3, 1000, (rows, -(-length // bucket) * bucket)),)


_words = lambda draw, most, width: _tokens(draw, most)
TASKS = {
    "gpt2": Task(lambda width, layers: language("gpt2", width, layers), _words, True),
    "gpt2-buckets": Task(lambda width, layers: language("gpt2", width, layers), _in_buckets, True),
    "bert": Task(lambda width, layers: language("bert", width, layers), _words, True),
    "t5": Task(lambda width, layers: language("t5", width, layers), _words, True),
    "resnet": Task(lambda width, layers: Images(2 if layers < 4 else 3), _image, budget=0.5),
    "lstm": Task(
        lambda width, layers: Recurrent(width),
        lambda draw, most, width: (torch.randn(draw.randint(4, most // 4), draw.randint(2, 8), width),),
        budget=0.75,
    ),
    "messages": Task(Messages, _edges, budget=0.35, repeats=False),
}
SIZES = {"cuda": (512, 12, 512, 300), "cpu": (128, 6, 256, 200), "tiny": (16, 2, 64, 4)}
"""Width, layers, most tokens, and steps."""


@dataclass
class Run(Record):
    """One network, trained in all ways."""

    network: str
    steps: int
    plain_seconds: float
    checkpointed: float | None
    """The time of the run relative to the plain one; None if it failed, which a complaint says."""
    compiled: float | None
    planned: float
    kept: int = 0
    equal: int = 0
    refused: int = 0
    """Steps for which the solver finds no plan within the budget."""
    budget: float = 0.0
    budget_bytes: int = 0
    above: int = 0
    """Plain steps that exceed the budget."""
    captures: int = 0
    solved: int = 0
    planning_seconds: float = 0.0
    """The median time in which the plan of a new size is made: its trace, costs, schedule and program."""
    new_size_seconds: float = 0.0
    """By how many seconds the first step at a new size takes longer than the plain step: the median."""
    extra: float | None = None
    """The predicted overhead of an adapted plan minus that of the solver's plan for the same size, as a fraction of the
    plain step: the largest of up to five sizes. None if no plan was adapted."""


def _checkpointed(task: Task, net: nn.Module) -> Loss:
    if task.labelled:
        enable = getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable
        enable()  # type: ignore[operator]  # the name depends on the version of transformers
        return task.loss(net.train())
    loss = task.loss(net)
    return lambda *batch: checkpoint(loss, *batch, use_reentrant=False)


def _compiled(task: Task, net: nn.Module) -> Loss:
    torch._dynamo.reset()
    return torch.compile(task.loss(net), dynamic=True)


def _seconds(loss: Loss, net: nn.Module, batches: Sequence[Batch]) -> list[float | None]:
    """Returns the seconds of each step; None for a step that no plan fits, which does not run."""
    found: list[float | None] = []
    for batch in batches:
        start = time.perf_counter()
        try:
            loss(*batch).backward()
            found.append(time.perf_counter() - start)
        except fckpt.BudgetError:
            found.append(None)
        net.zero_grad(set_to_none=True)
    return found


def _ratio(seconds: Sequence[float | None], plain: Sequence[float | None]) -> float:
    """Returns the time of the steps that ran, relative to the same plain steps."""
    pairs = [(mine, theirs) for mine, theirs in zip(seconds, plain, strict=True) if mine and theirs]
    return sum(mine for mine, _ in pairs) / max(sum(theirs for _, theirs in pairs), 1e-9)


def _peak(step: Callable[[], None], net: nn.Module, device: torch.device) -> int:
    net.zero_grad(set_to_none=True)
    return measure_peak(step, device).peak_bytes


def examine(name: str, size: str, compiles: bool, device: torch.device) -> list[Run]:
    """Trains one network in all ways."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if TASKS[name].repeats else 1)
    try:
        return [_examined(name, size, compiles, device)]
    finally:
        torch.set_num_threads(before)


def _examined(name: str, size: str, compiles: bool, device: torch.device) -> Run:
    width, layers, most, count = SIZES[size]
    task, draw = TASKS[name], random.Random(0)
    fraction = 0.9 if size == "tiny" else task.budget
    torch.manual_seed(0)
    net = task.make(width, layers).to(device)
    batches = [tuple(t.to(device) for t in task.draw(draw, most, width)) for _ in range(count)]
    loss = task.loss(net)
    _seconds(loss, net, batches[:1])
    largest = max(batches, key=lambda batch: sum(t.numel() for t in batch))
    within = int(fraction * _peak(lambda: loss(*largest).backward(), net, device))
    net.zero_grad(set_to_none=True)
    plain = _seconds(loss, net, batches)
    ratios: dict[str, float | None] = {"checkpointed": None, "compiled": None}
    complaints = []
    for way, make in (("checkpointed", _checkpointed), ("compiled", _compiled)):
        if way == "checkpointed" or compiles:
            other = copy.deepcopy(net)
            try:
                with torch._functorch.config.patch(activation_memory_budget=fraction):
                    ratios[way] = _ratio(_seconds(make(task, other), other, batches), plain)
            except Exception as error:
                complaints.append(f"{way}: {described(error)}")
    planned = fckpt.remat(loss, budget=within)
    planner, spent, adapted = planner_of(planned), list[float](), list[Plan]()
    assert planner is not None

    def recorded(*batch: Tensor) -> Tensor:
        before = fckpt.stats(planned)
        try:
            return planned(*batch)
        finally:
            after = fckpt.stats(planned)
            spent.append(sum(after.seconds.values()) - sum(before.seconds.values()))
            if after.adapted > before.adapted:
                adapted.append(list(planner.plans.values())[-1])

    seconds = _seconds(recorded, net, batches)
    ratio, stats = _ratio(seconds, plain), fckpt.stats(planned)
    shapes = [[t.shape for t in batch] for batch in batches]
    pairs = list(zip(seconds, plain, strict=True))
    firsts = [i for i in range(1, count) if shapes[i] not in shapes[:i] and seconds[i]]
    new = [mine - theirs for mine, theirs in (pairs[i] for i in firsts) if mine and theirs]
    total = sum(t for t in plain if t)
    found = Run(name, count, total, ratios["checkpointed"], ratios["compiled"], ratio, complaints=complaints)
    found.budget, found.budget_bytes = fraction, within
    found.captures, found.solved = stats.captures, stats.plans - stats.adapted - stats.quick
    found.planning_seconds = statistics.median([spent[i] for i in firsts]) if firsts else 0.0
    found.new_size_seconds = statistics.median(new) if new else 0.0
    _verify(found, net, (loss, planned), batches, within, device)
    found.extra = max(map(_extra, adapted[:: max(1, len(adapted) // _SOLVED)][:_SOLVED]), default=None)
    return found


_SOLVED = 5
"""The number of new sizes for which plans are solved to compare."""


def _extra(plan: Plan) -> float:
    """Returns the predicted overhead of a plan minus that of the solver's plan for the same graph and budget."""
    return plan.overhead - make_plan(plan.graph, plan.budget_bytes, "auto", torch.__version__).overhead


def _verify(
    found: Run, net: nn.Module, losses: tuple[Loss, Loss], batches: Sequence[Batch], within: int, device: torch.device
) -> None:
    """Counts the steps that keep the budget, those that are equal to plain steps, and the plain ones that exceed it."""
    state = copy.deepcopy(net.state_dict())
    for batch in batches:
        results: list[list[Tensor]] = []
        peaks: list[int] = []
        for loss in losses:
            net.load_state_dict(state)

            def step(loss: Loss = loss, batch: Batch = batch) -> None:
                value = loss(*batch)
                value.backward()
                results.append([value.detach()])

            try:
                peaks.append(_peak(step, net, device))
            except fckpt.BudgetError:
                found.refused += 1
                break
            results[-1] += [p.grad for p in net.parameters() if p.grad is not None]
        else:
            found.above += peaks[0] > within
            found.kept += peaks[1] <= within
            found.equal += all(map(torch.equal, *results))
    net.zero_grad(set_to_none=True)
    for count, what in ((found.kept, "exceed the budget"), (found.equal, "are not bitwise equal")):
        if count + found.refused < found.steps:
            found.complaints.append(f"{found.steps - found.refused - count} steps {what}")
    if found.refused:
        found.complaints.append(f"{found.refused} steps are refused")


def show(rows: Sequence[Run], console: Console) -> None:
    """Prints the table of one network."""
    table = table_of(
        "network", "steps", "plain s", "budget", "above", "blocks", "compile", "fckpt", "kept", "equal", "plan", "new",
        "extra",
        left=("network",),
    )  # fmt: skip
    number = lambda value: "" if value is None else f"{value:.2f}"
    for row in rows:
        first = [row.network, str(row.steps), number(row.plain_seconds), number(row.budget), str(row.above)]
        times = map(number, (row.checkpointed, row.compiled, row.planned))
        counts = map(str, (row.kept, row.equal))
        new = (f"{1000 * seconds:.0f} ms" for seconds in (row.planning_seconds, row.new_size_seconds))
        extra = "" if row.extra is None else f"{100 * row.extra:.2f} %"
        table.add_row(*first, *times, *counts, *new, extra)
    console.print(table)


def main(arguments: list[str]) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parser = report_parser("sizes", __doc__, tiny=True, check="a budget or a result is not as it should be")
    add_names(parser, "networks", TASKS)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parsed = parser.parse_args(arguments)
    device = set_up(parsed.device, background=True)
    console, document = opening("sizes", arguments, device)
    document["size"] = size = "tiny" if parsed.tiny else device.type
    run = lambda name, advance: examine(name, size, not parsed.no_compile, device)
    note = (
        "Times: of whole runs, relative to the plain run. Plan: the time to make the plan of a new size. New: the time "
        "of its first step beyond a plain step. Extra: its predicted overhead minus that of the solver's plan."
    )
    return report_each(parsed, (console, document), "rows", parsed.networks, run, show, note=note)
