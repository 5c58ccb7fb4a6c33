"""Synthetic training steps for the tests of solvers: small random ones, and large ones with a known structure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from hypothesis import strategies as st

from fckpt.graph import DECISIONS, Graph, Node, Value, simulate
from fckpt.solve._save_all import save_all


def plain_nbytes(graph: Graph) -> int:
    """Returns the peak of the plan that saves everything."""
    return simulate(graph, save_all(graph)).peak_nbytes


@dataclass
class Builder:
    """Records a forward pass, and a backward pass as autograd runs it."""

    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    late: set[int] = field(default_factory=set)

    def value(self, nbytes: int, producer: int | None = None, decision: str = "") -> int:
        self.values.append(Value(len(self.values), nbytes, producer, decision=decision))
        return len(self.values) - 1

    def node(
        self, op: str, inputs: list[int], sizes: list[int], seconds: float = 1.0, temporary: int = 0, **flags: bool
    ) -> list[int]:
        index = len(self.nodes)
        outputs = [self.value(size, index) for size in sizes]
        backward = not self.late.isdisjoint(inputs)
        if backward:
            self.late.update(outputs)
        reads = tuple(dict.fromkeys(inputs))
        node = Node(
            index, op, reads, tuple(outputs), backward=backward, seconds=seconds, temporary_nbytes=temporary, **flags
        )
        self.nodes.append(node)
        return outputs

    def cotangent(self, nbytes: int) -> int:
        value = self.value(nbytes)
        self.late.add(value)
        return value


@dataclass
class Layer:
    """One forward operation and what its backward reads."""

    inputs: list[int]
    outputs: list[int]
    saved: list[int]
    seconds: float
    temporary: int
    parameter: int | None = None


def differentiated(build: Builder, layers: list[Layer], inputs: list[int], ends: list[int]) -> Graph:
    """Adds the backward pass of `layers`: a node per layer, one per sum of two cotangents, one per parameter."""
    boundary = len(build.nodes)
    cotangent = {v: build.cotangent(build.values[v].nbytes) for v in ends}
    cotangents = tuple(cotangent.values())
    gradients: list[int] = []
    for layer in reversed(layers):
        arrived = [cotangent[v] for v in layer.outputs if v in cotangent]
        if not arrived:
            continue
        wanted = [v for v in layer.inputs if build.values[v].producer is not None or v in inputs[:1]]
        if wanted:
            sizes = [build.values[v].nbytes for v in wanted]
            made = build.node("backward", [*layer.saved, *arrived], sizes, layer.seconds, layer.temporary)
            for value, grad in zip(wanted, made, strict=True):
                old = cotangent.get(value)
                size = build.values[value].nbytes
                cotangent[value] = grad if old is None else build.node("add", [old, grad], [size], 0.1)[0]
        if layer.parameter is not None:
            nbytes = build.values[layer.parameter].nbytes
            gradients += build.node("backward_parameter", [*layer.saved, *arrived], [nbytes], layer.seconds)
    gradients += [cotangent[v] for v in inputs[:1] if v in cotangent and cotangent[v] not in cotangents]
    return Graph(
        tuple(build.nodes),
        tuple(build.values),
        inputs=tuple(inputs),
        cotangents=cotangents,
        outputs=tuple(ends),
        gradients=tuple(gradients),
        boundary=boundary,
    )


def chain(count: int, nbytes: int = 1, seconds: float = 1.0) -> Graph:
    """`count` layers, each of which reads one value and whose backward reads that value and a cotangent."""
    build = Builder()
    values = [build.value(nbytes)]
    layers = []
    for _ in range(count):
        outputs = build.node("layer", values[-1:], [nbytes], seconds)
        layers.append(Layer(values[-1:], outputs, values[-1:], seconds, 0))
        values += outputs
    end = build.node("loss", values[-1:], [0], 0.0)
    layers.append(Layer(values[-1:], end, values[-1:], 0.0, 0))
    return differentiated(build, layers, values[:1], end)


def network(
    blocks: int,
    *,
    dense: int = 0,
    skips: bool = False,
    size: int = 1 << 20,
    shrink: float = 1.0,
    parameters: bool = True,
) -> Graph:
    """Blocks of norm, matmul, activation and matmul, with a residual connection.

    Args:
        blocks: the number of blocks.
        dense: every block reads the results of this many earlier blocks, concatenated (DenseNet).
        skips: block i of the second half also reads the result of block `blocks - 1 - i` (U-Net).
        size: the bytes of an activation.
        shrink: the factor by which activations shrink per block in the first half, and grow in the second (U-Net).
        parameters: whether matmuls have parameters.
    """
    build = Builder()
    x = build.value(size)
    inputs, layers, results = [x], [], [x]

    def layer(op: str, reads: list[int], nbytes: int, seconds: float, keep: list[int] | None, **more: int) -> int:
        outputs = build.node(op, reads, [nbytes], seconds, more.get("temporary", 0))
        saved = outputs if keep is None else keep
        layers.append(Layer(reads, outputs, saved, 1.5 * seconds, 0, more.get("parameter")))
        return outputs[0]

    scale = 1.0
    for i in range(blocks):
        now = int(size * scale)
        reads = [results[-1]]
        if dense:
            reads = results[-dense:]
        if skips and i >= (blocks + 1) // 2:
            reads = [results[-1], results[blocks - i]]
        h = layer("cat", reads, len(reads) * now, 0.2 * len(reads) * scale, []) if len(reads) > 1 else reads[0]
        weights = [build.value(1 << 16) if parameters else None for _ in range(2)]
        inputs += [w for w in weights if w is not None]
        n = layer("norm", [h], build.values[h].nbytes, 0.4 * scale, [h])
        a = layer("matmul", [n], 4 * now, 4.0 * scale, [n], **({"parameter": weights[0]} if parameters else {}))
        g = layer("gelu", [a], 4 * now, 0.8 * scale, [a])
        m = layer("matmul", [g], now, 4.0 * scale, [g], **({"parameter": weights[1]} if parameters else {}))
        residual = results[-1] if not dense and build.values[results[-1]].nbytes == now else m
        out = layer("add", [m, residual] if residual != m else [m], now, 0.3 * scale, [])
        results.append(out)
        scale *= shrink if i < blocks // 2 else 1 / shrink
    end = layer("loss", [results[-1]], 4, 0.1, [results[-1]])
    return differentiated(build, layers, inputs, [end])


@st.composite
def graphs(draw: st.DrawFn, most: int = 6, decisions: bool = False, flags: bool = True) -> Graph:
    """Random training steps of at most `most` forward nodes, with everything that a graph may have."""
    build = Builder()
    size, cost = draw(st.sampled_from([st.integers(0, 9), st.sampled_from([2, 5])])), st.integers(0, 4)
    inputs = [build.value(draw(size)) for _ in range(draw(st.integers(1, 2)))]
    known, layers = list(inputs), []
    for _ in range(draw(st.integers(1, most))):
        reads = draw(st.lists(st.sampled_from(known[-4:]), min_size=1, max_size=3, unique=True))
        sizes = draw(st.lists(size, min_size=1, max_size=2))
        flag = draw(st.sampled_from(["", "", "", "random", "once"])) if flags else ""
        seconds, temporary = float(draw(cost)), draw(st.integers(0, 5))
        outputs = build.node("op", reads, sizes, seconds, temporary, **({flag: True} if flag else {}))
        saved = draw(st.lists(st.sampled_from([*reads, *outputs]), max_size=3, unique=True))
        layers.append(Layer(reads, outputs, saved, float(draw(cost)), draw(st.integers(0, 3))))
        known += outputs
    ends = draw(st.lists(st.sampled_from(known[len(inputs) :][-3:]), min_size=1, max_size=2, unique=True))
    if draw(st.booleans()):  # something that autograd derives from saved values alone, in the backward pass
        late = draw(st.sampled_from(known))
        layers[0].saved = list(dict.fromkeys([*layers[0].saved, late]))
    graph = differentiated(build, layers, inputs, ends)
    graph = with_late_node(graph) if draw(st.booleans()) else graph
    graph = dataclasses.replace(graph, nodes=tuple(_overwriting(draw, graph, node) for node in graph.nodes))
    if not decisions:
        return graph
    choice = st.sampled_from(["", *DECISIONS])
    made = [v for node in graph.nodes[: graph.boundary] for v in node.outputs]
    values = list(graph.values)
    for v in made:
        values[v] = dataclasses.replace(values[v], decision=draw(choice))
    return dataclasses.replace(graph, values=tuple(values))


def _overwriting(draw: st.DrawFn, graph: Graph, node: Node) -> Node:
    """Returns the node with permission to overwrite some inputs of the same size as its output."""
    if len(node.outputs) != 1 or node.once:
        return node
    nbytes = graph.values[node.outputs[0]].nbytes
    fitting = [v for v in node.inputs if graph.values[v].nbytes == nbytes and graph.values[v].producer is not None]
    chosen = draw(st.lists(st.sampled_from(fitting), unique=True)) if fitting else []
    return dataclasses.replace(node, overwrites=tuple(chosen))


def with_late_node(graph: Graph) -> Graph:
    """Returns the same step with a node at the start of its backward pass that reads only forward values."""
    first = next((n for n in graph.nodes if n.backward and any(v not in graph.held for v in n.inputs)), None)
    if first is None:
        return graph
    made = {v for n in graph.nodes[: graph.boundary] for v in n.outputs}
    reads = tuple(v for v in first.inputs if v in made)
    if not reads:
        return graph
    fresh = len(graph.values)
    at = graph.boundary
    shifted = [dataclasses.replace(n, id=n.id + 1) for n in graph.nodes[at:]]
    i = first.id - at
    shifted[i] = dataclasses.replace(shifted[i], inputs=(*shifted[i].inputs, fresh))
    late = Node(at, "late", reads, (fresh,), seconds=1.0)
    values = [
        dataclasses.replace(v, producer=v.producer + 1) if v.producer is not None and v.producer >= at else v
        for v in graph.values
    ]
    values.append(Value(fresh, 2, at))
    return dataclasses.replace(graph, nodes=(*graph.nodes[:at], late, *shifted), values=tuple(values))
