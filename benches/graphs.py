"""The graphs of the arena: joint graphs of training steps, traced once and frozen, and random ones.

    python -m benches.graphs --frozen frozen                     # traces what is not in the folder yet
    python -m benches.graphs --frozen frozen --graphs gpt12 unet

Networks and arguments lie on the meta device, so nothing is allocated, and times come from the profile of an A100
(`fckpt.cost.Analytic`): tracing a ResNet-152 on 16 images takes some seconds anywhere. What torch runs on the meta
device is what it runs on a CPU; a GPU differs in some kernels (dropout keeps its mask as floats here, as bools there).
A frozen graph is gzip'd JSON, without the lines of the source that its operations came from, and its `checksum` says
whether two people have the same one: versions of torch differ in the operations of which they make a network.

The random graphs are after M. Gagrani, C. Rainone, Y. Yang, H. Teague, W. Jeon, H. Van Hoof, W. W. Zeng, P. Zappi,
C. Lott, R. Bondesan, "Neural Topological Ordering for Computation Graphs", NeurIPS 2022, appendix A,
https://arxiv.org/abs/2207.05899: its four parameters, set to have about the widths, edges and sizes of the graphs made
like that which Moccasin is published with (`checkmate_graphs.py`), and a backward pass added. Unlike networks they have
no bottlenecks.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from benches.models import DenseNet, ResNet, bert_base
from benches.script import script_parser, steps, table_of
from benches.task import Task, TrainingLoss
from benches.vision import InceptionV3
from benches.zoo import Decoder, PreNormBlock, UNet, UnrolledLSTM, ViT
from fckpt._units import format_bytes, format_seconds
from fckpt.cost import Analytic, profiles
from fckpt.graph import Graph, Node, Value, simulate
from fckpt.solve._save_all import save_all

__all__ = ["GRAPHS", "LARGER", "checksum", "frozen", "layered", "read", "traced", "write"]

PROFILE = "A100"


# ---- networks --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Tokens go to one of several MLPs each, to as many places as an expert has: the rest pass by.

    W. Fedus, B. Zoph, N. Shazeer, "Switch Transformers", 2022, https://arxiv.org/abs/2101.03961: the best expert of a
    token is its first choice, and products with one-hot masks send tokens to places and back, so that shapes do not
    depend on data.

    Args:
        hidden: width of a token.
        count: of experts.
        capacity: places of an expert for the tokens of one text.
    """

    def __init__(self, hidden: int, count: int, capacity: int) -> None:
        super().__init__()
        self.count, self.capacity = count, capacity
        self.router = nn.Linear(hidden, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.router(x).softmax(-1).max(-1)
        chosen = (choice[..., None] == torch.arange(self.count, device=x.device)).to(x.dtype)
        place = ((chosen.cumsum(1) - 1) * chosen).sum(-1)
        there = (place[..., None] == torch.arange(self.capacity, device=x.device)).to(x.dtype)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            sent = there * chosen[..., i, None]
            result = result + sent @ expert(sent.transpose(1, 2) @ x)
        return result * weights[..., None]


class MixtureOfExperts(nn.Module):
    """A causal language model; the MLP of every second block is a choice of experts."""

    def __init__(self, *, hidden: int, layers: int, heads: int, experts: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            PreNormBlock(hidden, heads, causal=True, dropout=0.0, approximate="tanh") for _ in range(layers)
        )
        for block in list(self.blocks)[1::2]:
            block.mlp = Experts(hidden, experts, 2 * tokens // experts)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


Step = tuple[nn.Module, Tensor, Tensor]


def _text(model: nn.Module, batch: int, tokens: int) -> Step:
    return model, torch.empty(batch, tokens, dtype=torch.long), torch.empty(batch, tokens, dtype=torch.long)


def _labelled(model: nn.Module, *shape: int, axis: int = 0) -> Step:
    return model, torch.empty(shape), torch.empty(shape[axis], dtype=torch.long)


def _gpt(layers: int) -> Step:
    return _text(Decoder(layers=layers, positions=512, dropout=0.0), 8, 512)


def _bert() -> Step:
    return bert_base(), torch.empty(16, 512, dtype=torch.long), torch.empty(16, dtype=torch.long)


def _moe() -> Step:
    return _text(MixtureOfExperts(hidden=768, layers=8, heads=12, experts=8, vocabulary=32000, tokens=512), 8, 512)


def _unet() -> Step:
    return UNet(), torch.empty(8, 3, 256, 256), torch.empty(8, 256, 256, dtype=torch.long)


def _resnet(batch: int, *layers: int) -> Step:
    return _labelled(ResNet(layers, classes=1000, small=False), batch, 3, 224, 224)


def _densenet(batch: int, *layers: int) -> Step:
    return _labelled(DenseNet(32, layers, classes=1000, small=False), batch, 3, 224, 224)


STEPS: dict[str, Callable[[], Step]] = {
    "gpt12": lambda: _gpt(12),
    "gpt48": lambda: _gpt(48),
    "gpt400": lambda: _gpt(400),
    "gpt850": lambda: _gpt(850),
    "bert": _bert,
    "vit": lambda: _labelled(ViT(classes=1000), 64, 3, 224, 224),
    "moe": _moe,
    "lstm": lambda: _labelled(UnrolledLSTM(features=256, hidden=1024, span=8), 96, 128, 256, axis=1),
    "unet": _unet,
    "inception_v3": lambda: _labelled(InceptionV3(), 32, 3, 299, 299),
    "resnet50": lambda: _resnet(64, 3, 4, 6, 3),
    "resnet152": lambda: _resnet(16, 3, 8, 36, 3),
    "densenet121": lambda: _densenet(32, 6, 12, 24, 16),
    "densenet201": lambda: _densenet(16, 6, 12, 48, 32),
}
"""Makes a network and a batch, on the device in force."""


def traced(name: str) -> Graph:
    """Traces one of `STEPS`."""
    with torch.device("meta"):
        model, inputs, labels = STEPS[name]()
        task = Task(name, "", TrainingLoss(model), inputs, labels)
    graph = task.plan(Analytic(profiles[PROFILE])).graph
    # where operations came from would make another graph of each edit of a network's file
    nodes = tuple(dataclasses.replace(node, source="") for node in graph.nodes)
    values = tuple(dataclasses.replace(value, origin="", names=()) for value in graph.values)
    return dataclasses.replace(graph, nodes=nodes, values=values)


# ---- random layered graphs -------------------------------------------------------------------------

WIDTH, VARIATION, DENSITY, SKIPS = 0.4, 0.75, 0.2, 0.14
"""Mean nodes per layer, over those of a square; how far layers differ from that; the share of the pairs of neighbouring
layers that are edges; the share of all edges that skip layers."""
SIZES = ((0.35, 450, 300), (0.3, 1300, 500), (0.2, 2700, 700), (0.15, 4400, 1000))
"""A mixture of normal distributions of bytes: weights, means, deviations."""


def layered(count: int, seed: int = 0) -> Graph:
    """Makes a random training step: a layered graph of `count` nodes, and its backward pass.

    The backward of a node reads what the node read, and the gradient of its result; gradients of a value with several
    readers are added up, over one of them. Times do not depend on bytes, so that there are good choices and bad ones.
    """
    draw = random.Random(seed)
    layers = _layers(draw, count)
    reads: list[list[int]] = [[] for _ in range(count)]
    for before, after in pairwise(layers):
        for node in after:
            reads[node] += [other for other in before if draw.random() < DENSITY]
            reads[node] += [] if reads[node] else [draw.choice(before)]
        read = {other for node in after for other in reads[node]}
        for other in before:
            if other not in read:
                reads[draw.choice(after)].append(other)
    far = [(a, b) for i, layer in enumerate(layers) for a in layer for later in layers[i + 2 :] for b in later]
    edges = sum(map(len, reads))
    for a, b in draw.sample(far, min(len(far), round(edges * SKIPS / (1 - SKIPS)))):
        reads[b].append(a)
    weights, means, deviations = zip(*SIZES, strict=True)
    sizes = [
        max(10, round(draw.gauss(*draw.choices([*zip(means, deviations, strict=True)], weights)[0])))
        for _ in range(count)
    ]
    return _joint([sorted(set(r)) for r in reads], [1024 * s for s in sizes], [draw.uniform(1e-5, 1e-3) for _ in reads])


def _layers(draw: random.Random, count: int) -> list[list[int]]:
    """One node, layers of about the width that gives the graph its proportions, one node."""
    width, layers, start = (WIDTH * count) ** 0.5, [[0]], 1
    while start < count - 1:
        size = round(draw.uniform((1 - VARIATION) * width, (1 + VARIATION) * width))
        layers.append(list(range(start, min(start + max(1, size), count - 1))))
        start += len(layers[-1])
    return [*layers, [count - 1]]


def _joint(reads: list[list[int]], sizes: list[int], seconds: list[float]) -> Graph:
    """Adds to forward nodes that make a value each, and read those of others, their backward pass."""
    count = len(reads)
    values = [Value(v, sizes[v], v) for v in range(count)]
    nodes = [Node(i, "op", tuple(reads[i]), (i,), seconds=seconds[i]) for i in range(count)]
    cotangent = len(values)
    values.append(Value(cotangent, sizes[-1], None))
    arrived: dict[int, int] = {count - 1: cotangent}
    gradients: list[int] = []

    def add(op: str, inputs: list[int], nbytes: list[int], cost: float, over: tuple[int, ...] = ()) -> list[int]:
        outputs = list(range(len(values), len(values) + len(nbytes)))
        values.extend(Value(v, n, len(nodes)) for v, n in zip(outputs, nbytes, strict=True))
        nodes.append(Node(len(nodes), op, tuple(inputs), tuple(outputs), backward=True, seconds=cost, overwrites=over))
        return outputs

    for i in reversed(range(count)):
        made = add("op_backward", [*reads[i], arrived[i]], [sizes[v] for v in reads[i]] or [sizes[i]], 2 * seconds[i])
        if not reads[i]:
            gradients += made
        for value, gradient in zip(reads[i], made, strict=True) if reads[i] else ():
            known = arrived.get(value)
            if known is not None:
                over = () if known == cotangent else (known,)
                gradient = add("add", [known, gradient], [sizes[value]], sizes[value] / 1e12, over)[0]
            arrived[value] = gradient
    ends = {"inputs": (), "cotangents": (cotangent,), "outputs": (count - 1,), "gradients": tuple(gradients)}
    return Graph(tuple(nodes), tuple(values), **ends, boundary=count)


# ---- freezing --------------------------------------------------------------------------------------

LARGER: dict[str, Callable[[], Graph]] = {"gpt850": partial(traced, "gpt850")}
"""Those that are taken only when they are named: making them takes minutes."""
GRAPHS: dict[str, Callable[[], Graph]] = {
    **{name: partial(traced, name) for name in STEPS if name not in LARGER},
    **{f"layered{count}": partial(layered, count) for count in (100, 250, 500)},
}
"""By name; the order is that of the tables."""


def checksum(graph: Graph) -> str:
    """Returns what tells graphs apart: a hash of all that is in them."""
    return hashlib.sha256(json.dumps(graph.to_json(), sort_keys=True).encode()).hexdigest()[:16]


def write(graph: Graph, path: Path) -> None:
    """Writes a graph as gzip'd JSON, the same bytes each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(graph.to_json(), separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> Graph:
    """Reads a graph, gzip'd or not."""
    data = path.read_bytes()
    return Graph.from_json((gzip.decompress(data) if path.suffix == ".gz" else data).decode())


def frozen(name: str, folder: Path | None) -> Graph:
    """Returns the graph `name`: from the folder, where it is made and written if it is not there yet."""
    path = folder / f"{name}.json.gz" if folder else None
    if path is not None and path.exists():
        return read(path)
    graph = {**GRAPHS, **LARGER}[name]()
    if path is not None:
        write(graph, path)
    return graph


def main(arguments: list[str] | None = None) -> int:
    """Freezes graphs, and says what they are."""
    parser = script_parser("graphs", __doc__)
    parser.add_argument("--frozen", type=Path, metavar="FOLDER", required=True, help="where they lie, or will")
    known = [*GRAPHS, *LARGER]
    parser.add_argument("--graphs", nargs="+", choices=known, metavar="NAME", help=", ".join(known))
    parsed = parser.parse_args(arguments)
    numbers = ("operations", "of forward", "edges", "plain peak", "a step takes")
    table = table_of("graph", *numbers, "checksum", left=["graph", "checksum"])
    names = parsed.graphs or list(GRAPHS)
    with steps(len(names)) as advance:
        for name in names:
            advance(name)
            graph = frozen(name, parsed.frozen)
            peak = simulate(graph.plain, save_all(graph)).peak_nbytes
            edges = sum(len(node.inputs) for node in graph.nodes)
            sizes = [f"{n:,}" for n in (len(graph.nodes), graph.boundary, edges)]
            table.add_row(name, *sizes, format_bytes(peak), format_seconds(graph.seconds), checksum(graph))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
