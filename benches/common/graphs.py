"""The graphs on which solvers are compared: training steps of networks, traced once, and random graphs.

The networks lie on the meta device, so nothing is allocated, and times come from the profile of an A100
(`fckpt.cost.Analytic`): tracing a ResNet-152 on 16 images takes some seconds anywhere. On the meta device torch runs
the operations that it runs on a CPU; a GPU differs in some kernels (dropout keeps its mask as floats here, as bools
there). A graph is stored as gzip'd JSON, without the source lines and modules of its operations. Versions of torch
trace different operations; the `checksum` tells whether two graphs are the same.

The random graphs follow M. Gagrani, C. Rainone, Y. Yang, H. Teague, W. Jeon, H. Van Hoof, W. W. Zeng, P. Zappi,
C. Lott, R. Bondesan, "Neural Topological Ordering for Computation Graphs", NeurIPS 2022, appendix A,
https://arxiv.org/abs/2207.05899. Its four parameters are set so that widths, edges and sizes are about those of the
graphs of this kind that are distributed with Moccasin (`checkmate.py`). A backward pass is added. Unlike networks, they
have no bottlenecks.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from benches.common.training import Task, TrainingLoss
from benches.models.convolutional import DenseNet, InceptionV3, ResNet, UNet
from benches.models.sequence import BertEncoder, Decoder, MixtureOfExperts, UnrolledLSTM, ViT
from fckpt.cost import Analytic, profiles
from fckpt.graph import Graph, Node, Value

PROFILE = "A100"


# ---- networks --------------------------------------------------------------------------------------


Step = tuple[nn.Module, Tensor, Tensor]


def _text(model: nn.Module, batch: int) -> Step:
    return model, torch.empty(batch, 512, dtype=torch.long), torch.empty(batch, 512, dtype=torch.long)


def _labelled(model: nn.Module, *shape: int, axis: int = 0) -> Step:
    return model, torch.empty(shape), torch.empty(shape[axis], dtype=torch.long)


def _resnet(batch: int, *layers: int) -> Step:
    return _labelled(ResNet(layers, classes=1000, small=False), batch, 3, 224, 224)


def _densenet(batch: int, *layers: int) -> Step:
    return _labelled(DenseNet(32, layers, classes=1000, small=False), batch, 3, 224, 224)


_gpt = partial(Decoder, positions=512, dropout=0.0)
_moe = partial(MixtureOfExperts, hidden=768, layers=8, heads=12, experts=8, vocabulary=32000, tokens=512)
STEPS: dict[str, Callable[[], Step]] = {
    "gpt12": lambda: _text(_gpt(layers=12), 8),
    "gpt48": lambda: _text(_gpt(layers=48), 8),
    "gpt400": lambda: _text(_gpt(layers=400), 8),
    "gpt850": lambda: _text(_gpt(layers=850), 8),
    "bert": lambda: (BertEncoder(), torch.empty(16, 512, dtype=torch.long), torch.empty(16, dtype=torch.long)),
    "vit": lambda: _labelled(ViT(classes=1000), 64, 3, 224, 224),
    "moe": lambda: _text(_moe(), 8),
    "lstm": lambda: _labelled(UnrolledLSTM(features=256, hidden=1024, span=8), 96, 128, 256, axis=1),
    "unet": lambda: (UNet(), torch.empty(8, 3, 256, 256), torch.empty(8, 256, 256, dtype=torch.long)),
    "inception_v3": lambda: _labelled(InceptionV3(), 32, 3, 299, 299),
    "resnet50": lambda: _resnet(64, 3, 4, 6, 3),
    "resnet152": lambda: _resnet(16, 3, 8, 36, 3),
    "densenet121": lambda: _densenet(32, 6, 12, 24, 16),
    "densenet201": lambda: _densenet(16, 6, 12, 48, 32),
}
"""Makes a network and a batch on the current default device."""


def traced(name: str) -> Graph:
    """Traces one of `STEPS`."""
    with torch.device("meta"):
        model, inputs, labels = STEPS[name]()
        task = Task(name, "", TrainingLoss(model), inputs, labels)
    graph = task.plan(Analytic(profiles[PROFILE])).graph
    # Without source lines and names of modules, an edit of a network's file does not change the graph.
    nodes = tuple(dataclasses.replace(node, source="", module="") for node in graph.nodes)
    values = tuple(dataclasses.replace(value, origin="", names=()) for value in graph.values)
    return dataclasses.replace(graph, nodes=nodes, values=values)


# ---- random layered graphs -------------------------------------------------------------------------

WIDTH, VARIATION, DENSITY, SKIPS = 0.4, 0.75, 0.2, 0.14
"""Mean nodes per layer, relative to a square; the deviation of layers from that; the fraction of pairs of nodes in
neighbouring layers that are edges; the fraction of all edges that skip layers."""
SIZES = ((0.35, 450, 300), (0.3, 1300, 500), (0.2, 2700, 700), (0.15, 4400, 1000))
"""A mixture of normal distributions of bytes: weights, means, deviations."""


def layered(count: int, seed: int = 0) -> Graph:
    """Makes a random training step: a layered graph of `count` nodes, and its backward pass.

    The backward of a node reads the inputs of the node and the gradient of its result. Gradients of a value with
    several readers are added up in place. Times do not depend on bytes, so that values differ in what they are worth
    saving.
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
    """Returns layers of nodes; the first and the last have one node."""
    width, layers, start = (WIDTH * count) ** 0.5, [[0]], 1
    while start < count - 1:
        size = round(draw.uniform((1 - VARIATION) * width, (1 + VARIATION) * width))
        layers.append(list(range(start, min(start + max(1, size), count - 1))))
        start += len(layers[-1])
    return [*layers, [count - 1]]


def _joint(reads: list[list[int]], sizes: list[int], seconds: list[float]) -> Graph:
    """Returns the graph of forward nodes that make one value each, with their backward pass."""
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


# ---- files -----------------------------------------------------------------------------------------

LARGER: dict[str, Callable[[], Graph]] = {"gpt850": partial(traced, "gpt850")}
"""Used only if they are named, because tracing them takes minutes."""
GRAPHS: dict[str, Callable[[], Graph]] = {
    **{name: partial(traced, name) for name in STEPS if name not in LARGER},
    **{f"layered{count}": partial(layered, count) for count in (100, 250, 500)},
}
"""By name, in the order of the tables."""


def checksum(graph: Graph) -> str:
    """Returns a hash of everything in a graph."""
    return hashlib.sha256(json.dumps(graph.to_json(), sort_keys=True).encode()).hexdigest()[:16]


def write(graph: Graph, path: Path) -> None:
    """Writes a graph as gzip'd JSON; equal graphs give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(graph.to_json(), separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> Graph:
    """Reads a graph, gzip'd or not."""
    data = path.read_bytes()
    return Graph.from_json((gzip.decompress(data) if path.suffix == ".gz" else data).decode())


def frozen(name: str, folder: Path | None) -> Graph:
    """Returns the graph `name` from the folder, into which it is written if it is not there yet."""
    path = folder / f"{name}.json.gz" if folder else None
    if path is not None and path.exists():
        return read(path)
    graph = {**GRAPHS, **LARGER}[name]()
    if path is not None:
        write(graph, path)
    return graph
