"""The joint graph of AOTAutograd as a fckpt graph: operations that Inductor fuses are one node.

AOTAutograd traces a compiled function and its backward pass into one graph (the joint graph), and Inductor decomposes
operations such as GELU into small pointwise steps. A pointwise step that only one later operation reads gets no memory,
because Inductor computes it inside the kernel of its reader. So such steps join the node of their reader, and a node
stands for about one kernel. Values are storages; views are not nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import get_default_op_list

from fckpt._trace.operations import Call, Ref, TensorSpec
from fckpt.cost import Measured, profile_of
from fckpt.graph.graph import Graph, Node, Value

__all__ = [
    "Joint",
    "copied",
    "is_late_write",
    "is_random",
    "joint_graph",
    "mutates",
    "reads_overwritten",
    "saved_nbytes",
    "size_of",
    "source_of",
]


@dataclass
class Joint:
    """A fckpt graph with the operations of the joint graph behind its nodes and values."""

    graph: Graph
    members: list[list[fx.Node]]
    """By node: its operations in order."""
    tensors: list[fx.Node]
    """By value: the operation or input of the joint graph whose result it is, never a view."""
    cotangents: set[fx.Node]
    late: set[fx.Node]
    """Operations that depend on a cotangent."""
    sizes: list[fx.Node]
    """Numbers that the backward pass may need: symbolic sizes."""


@dataclass
class _Group:
    """Operations that become one node."""

    members: list[fx.Node]
    reads: list[fx.Node] = field(default_factory=list)
    """The storages that the operations read, from outside of the group."""
    makes: list[fx.Node] = field(default_factory=list)

    @property
    def root(self) -> fx.Node:
        """The operation whose reader is outside of the group."""
        return next(m for m in reversed(self.members) if not _is_getitem(m))


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph with the same tensors. (`copy.deepcopy` also copies what nodes refer to.)"""
    graph = fx.Graph(tracer_cls=getattr(module.graph, "_tracer_cls", None))
    places: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(module.graph, places)
    old = next(n for n in module.graph.nodes if n.op == "output")
    graph.output(results).meta = dict(old.meta)
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def mutates(node: fx.Node) -> bool:
    """Whether an operation writes to one of its arguments: in a joint graph, to an input of the function."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws from a generator. Inductor's own draws are functions of a seed."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and node.target not in _OF_SEED


def is_late_write(node: fx.Node, joint: Joint) -> bool:
    """Whether an operation that writes, or has no result, belongs to the backward pass."""
    return node in joint.late or node.meta.get("partitioner_tag") == "must_be_in_backward"


def _overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Returns the inputs, or views of inputs, to which a joint graph writes, or AOTAutograd writes after it."""
    targets = (n.args[0] for n in graph.nodes if n.op == "call_function" and mutates(n))
    return {n for n in targets if isinstance(n, fx.Node)} | {*_updated_inputs(graph)}


def _updated_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs over which AOTAutograd writes a result after the forward pass: statistics of batch norms."""
    output = next(n for n in graph.nodes if n.op == "output")
    updated = [getattr(description, "mutated_input", None) for description in output.meta.get("desc") or ()]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    return [n for n in inputs if n.meta.get("desc") is not None and n.meta["desc"] in updated]


def _namespace(node: fx.Node) -> str:
    return node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if target is torch.ops.aten._unsafe_view.default:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None for r in returns)


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def size_of(number: Any) -> int:
    """Returns a size; for a symbolic one, the size at which the function is compiled."""
    if isinstance(number, int):
        return number
    hint = number.node.hint if number.node.has_hint() else None
    return int(hint) if hint is not None else 4096


def spec_of(value: torch.Tensor) -> TensorSpec:
    """Returns the layout of the tensor behind an operation."""
    shape, stride = tuple(map(size_of, value.shape)), tuple(map(size_of, value.stride()))
    return TensorSpec(shape, stride, value.dtype, value.device, value=0)


def nbytes_of(value: torch.Tensor) -> int:
    """Returns the bytes of the storage of a tensor that an operation makes."""
    spec = spec_of(value)
    if 0 in spec.shape:
        return 0
    extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return extent * spec.dtype.itemsize


def saved_nbytes(backward: fx.GraphModule) -> int:
    """Returns the bytes of the intermediates that a backward half takes."""
    given = [n for n in backward.graph.nodes if n.op == "placeholder" and _is_tensor(n)]
    own = [n for n in given if not str(n.target).startswith(("primals", "tangents"))]
    return sum(nbytes_of(n.meta["val"]) for n in own)


def reads_overwritten(backward: fx.GraphModule, joint: fx.Graph) -> bool:
    """Whether a backward half of a joint graph takes an input, or a view of one, that the forward pass overwrites."""
    overwritten = _overwritten(joint)
    for node in joint.nodes:
        if node.op == "call_function" and _is_view(node) and node.args[0] in overwritten:
            overwritten.add(node)
    names = {n.name for n in overwritten}
    return any(n.op == "placeholder" and n.name in names for n in backward.graph.nodes)


class _Reading:
    """The state of the conversion of one joint graph."""

    def __init__(self, graph: fx.Graph, forward_outputs: Sequence[Any], outputs: Sequence[Any]):
        self.ops = get_default_op_list()
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        is_tangent = lambda n: "tangents" in str(n.target) or "bwd_rng" in str(n.target)
        self.tangents = [n for n in self.placeholders if is_tangent(n)]
        self.calls = [n for n in graph.nodes if n.op == "call_function"]
        self.bases: dict[fx.Node, fx.Node | None] = {}
        for node in graph.nodes:
            self.bases[node] = self._base(node)
        self.written = {self.bases[n] for n in _overwritten(graph)}
        self.late = self._depending_on(self.tangents)
        roots = [self.bases[n] for n in forward_outputs if isinstance(n, fx.Node)]
        self.forward_outputs = [n for n in dict.fromkeys(roots) if n is not None]
        ends = [self.bases[n] for n in outputs if isinstance(n, fx.Node)]
        self.outputs = {n for n in ends if n is not None}
        once = [n for n in self.calls if self.is_node(n) and self.is_once(n) and n not in self.late]
        self.early = self._needed_for([*[n for n in forward_outputs if isinstance(n, fx.Node)], *once])

    def _base(self, node: fx.Node) -> fx.Node | None:
        """Returns the operation or input that makes the storage of a tensor; None if it is not a tensor of the graph.

        Operations without tensor inputs (constants, ranges) are no storages: Inductor computes them where they are
        read.
        """
        if node.op == "placeholder":
            return node if _is_tensor(node) else None
        if node.op != "call_function" or not _is_tensor(node) or mutates(node):
            return None
        if _is_getitem(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return next((self.bases[i] for i in source.all_input_nodes if _is_view(source)), node)
        if _is_view(node):
            source = node.args[0]
            return self.bases[source] if isinstance(source, fx.Node) else node
        return None if not self.is_node(node) else node

    def is_node(self, node: fx.Node) -> bool:
        """Whether an operation makes storages. Others are emitted where they are needed."""
        if node.op != "call_function" or _is_getitem(node) or _is_view(node) or mutates(node):
            return False
        value = node.meta.get("val")
        made = value if isinstance(value, (list, tuple)) else [value]
        if not any(isinstance(v, torch.Tensor) for v in made):
            return False
        return is_random(node) or bool(node.all_input_nodes)

    def is_once(self, node: fx.Node) -> bool:
        """Whether an operation of the forward pass must not be repeated in the backward pass."""
        if is_random(node) or any(self.bases.get(n) in self.written for n in node.all_input_nodes):
            return True
        if node.meta.get("unbacked_bindings"):  # a repetition would find a size that Inductor takes for another one
            return True
        # Operators on graphs (loops, conditions, kernels), messages and custom operations run once.
        return _namespace(node) not in ("aten", "prims", "inductor") and not self.ops.is_recomputable(node)

    def _depending_on(self, starts: Sequence[fx.Node]) -> set[fx.Node]:
        found = set(starts)
        for node in self.order:
            if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _needed_for(self, ends: Sequence[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        left = list(ends)
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += node.all_input_nodes
        return found

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yields the operations that read the storage of `node`, through views."""
        for user in node.users:
            if user.op == "output" or not (_is_view(user) or _is_getitem(user)):
                yield user
            else:
                yield from self.readers(user)

    def groups(self) -> list[_Group]:
        """Returns the groups of operations, each in order; forward first."""
        owner: dict[fx.Node, fx.Node] = {}
        nodes = [n for n in self.calls if self.is_node(n)]
        for node in reversed(nodes):  # readers first
            owner[node] = node
            if not self._is_inlined(node):
                continue
            owners = {owner.get(r) for r in self.readers(node)}
            into = owners.pop() if len(owners) == 1 else None
            if into is not None and self.ops.is_fusible(into) and self._phase(into) == self._phase(node):
                owner[node] = into
        groups: dict[fx.Node, _Group] = {}
        for node in nodes:
            groups.setdefault(owner[node], _Group([])).members.append(node)
        found = list(groups.values())
        for group in found:
            items = [u for m in group.members for u in m.users if _is_getitem(u) and not _is_view(m)]
            root = group.members[-1]
            group.makes = sorted((i for i in items if _is_tensor(i)), key=self.order.__getitem__)
            if _is_tensor(root):
                group.makes = [root]
            inside = set(group.members)
            reads = [self._storage(n, inside) for m in group.members for n in self._arguments(m)]
            group.reads = list(dict.fromkeys(n for n in reads if n is not None))
            group.members += group.makes if not _is_tensor(root) else []
        found.sort(key=lambda g: (not self._is_early(g), self.order[g.members[-1]]))
        return found

    def _arguments(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yields the inputs of an operation, and the inputs of those that are emitted where they are needed."""
        for given in node.all_input_nodes:
            yield given
            if given.op == "call_function" and self.bases[given] is None:
                yield from self._arguments(given)

    def _storage(self, node: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
        base = self.bases[node]
        return None if base in inside else base

    def _phase(self, node: fx.Node) -> tuple[bool, bool]:
        return node in self.early, node in self.late

    def _is_early(self, group: _Group) -> bool:
        return group.members[0] in self.early or group.root in self.early

    def _is_inlined(self, node: fx.Node) -> bool:
        """Whether Inductor can compute an operation inside the kernel of its only reader."""
        tags = getattr(node.target, "tags", ())
        pointwise = torch.Tag.pointwise in tags or node.target in _POINTWISE
        if not pointwise or not _is_tensor(node) or node in self.outputs or self.is_once(node):
            return False
        return all(r.op == "call_function" for r in self.readers(node))


_POINTWISE = {torch.ops.prims.convert_element_type.default, torch.ops.aten.clone.default}
_OF_SEED = {
    getattr(getattr(torch.ops.prims, name, None), "default", None)
    for name in ("inductor_random", "inductor_randint", "inductor_lookup_seed")
}


def joint_graph(module: fx.GraphModule, forward_outputs: Sequence[Any], outputs: Sequence[Any]) -> Joint:
    """Converts a joint graph.

    Args:
        module: the joint graph of AOTAutograd, after Inductor's passes.
        forward_outputs: the results of the forward pass in it.
        outputs: all of its results.

    Returns:
        The graph with the costs of its nodes, and what its nodes stand for.
    """
    reading = _Reading(module.graph, forward_outputs, outputs)
    groups = reading.groups()
    cotangents = [n for n in reading.tangents if _is_tensor(n)]
    inputs = [n for n in reading.placeholders if _is_tensor(n) and n not in set(cotangents)]
    tensors = [*inputs, *cotangents]
    producers: list[int | None] = [None] * len(tensors)
    for i, group in enumerate(groups):
        tensors += group.makes
        producers += [i] * len(group.makes)
    numbers = {n: i for i, n in enumerate(tensors)}
    values = [_value(i, n, producers[i]) for i, n in enumerate(tensors)]
    boundary = sum(map(reading._is_early, groups))
    held = range(len(inputs) + len(cotangents))
    nodes = _nodes(groups, boundary, numbers, values, held, reading)
    for node in nodes:
        if node.once:  # what must not be repeated is saved, whatever a region says
            for v in node.outputs:
                values[v] = dataclasses.replace(values[v], decision="")
    made = lambda ends: tuple(dict.fromkeys(numbers[n] for n in ends if values[numbers[n]].producer is not None))
    results = made(reading.forward_outputs)
    gradients = [n for n in reading.order if n in reading.outputs and n in numbers and numbers[n] not in results]
    graph = Graph(
        nodes,
        tuple(values),
        tuple(range(len(inputs))),
        tuple(held[len(inputs) :]),
        results,
        made(gradients),
        boundary,
    )
    sizes = [n for n in module.graph.nodes if _is_symbolic(n) and n not in reading.late]
    return Joint(graph, [g.members for g in groups], tensors, set(cotangents), reading.late, sizes)


def _nodes(
    groups: Sequence[_Group],
    boundary: int,
    numbers: dict[fx.Node, int],
    values: Sequence[Value],
    held: range,
    reading: _Reading,
) -> tuple[Node, ...]:
    """Returns a node with its costs for each group; the first `boundary` groups are the forward pass."""
    costs = _Costs()
    nodes = []
    for i, group in enumerate(groups):
        reads = tuple(numbers[n] for n in group.reads)
        once = i < boundary and any(reading.is_once(m) for m in group.members)
        node = Node(
            i,
            str(group.root.target),
            reads,
            tuple(numbers[n] for n in group.makes),
            backward=any(m in reading.late for m in group.members),
            once=once,
            overwrites=() if once else _overwrites(group, reads, values, held),
            source=source_of(group.root),
            module=_module(group.root),
        )
        nodes.append(costs.priced(node, group.members, values, reading))
    return tuple(nodes)


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _value(number: int, node: fx.Node, producer: int | None) -> Value:
    fake = node.meta["val"]
    shape = tuple(map(size_of, fake.shape))
    dtype = str(fake.dtype).removeprefix("torch.")
    policy = node.meta.get("recompute") if producer is not None else None  # of a checkpointed region of torch
    decision = "" if policy is None else "must_save" if "SAVE" in policy.name else "must_recompute"
    return Value(number, nbytes_of(fake), producer, node.name, (), shape, dtype, decision)


def _overwrites(group: _Group, reads: Sequence[int], values: Sequence[Value], held: range) -> tuple[int, ...]:
    """Returns the operands whose memory Inductor reuses for the result of a pointwise kernel."""
    root = group.members[-1]
    pointwise = torch.Tag.pointwise in getattr(root.target, "tags", ()) or root.target in _POINTWISE
    if not pointwise or len(group.makes) != 1:
        return ()
    size = nbytes_of(group.makes[0].meta["val"])
    return tuple(v for v in reads if v not in held and values[v].nbytes == size)


def source_of(node: fx.Node) -> str:
    """Returns the user's line behind an operation: `model.py:12 (forward)`."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    place = next((line for line in reversed(lines) if line.startswith("File ")), "")
    parts = place.split(", ")
    if len(parts) != 3:
        return ""
    name = parts[0].removeprefix("File ").strip('"').rpartition("/")[2]
    return f"{name}:{parts[1].removeprefix('line ')} ({parts[2].removeprefix('in ')})"


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(stack.values()))), "")
    return str(path).removeprefix("L['self'].").replace("_modules['", "").replace("']", "")


class _Costs:
    """The seconds of nodes: measured for kernels that Inductor calls, from memory traffic for those that it makes."""

    def __init__(self) -> None:
        self.measured = Measured()

    def priced(self, node: Node, members: Sequence[fx.Node], values: Sequence[Value], reading: _Reading) -> Node:
        calls = [m for m in members if not _is_getitem(m)]
        call = calls[-1]
        library = _namespace(call) == "aten" and not reading.ops.is_fusible(call)
        if library and len(calls) == 1 and not node.once:
            cost = self.measured(*_call(call))
            return dataclasses.replace(
                node, seconds=cost.seconds, flops=cost.flops, temporary_nbytes=cost.temporary_nbytes
            )
        device = call.meta["val"].device if _is_tensor(call) else torch.device("cpu")
        profile = profile_of(device)
        moved = sum(values[v].nbytes for v in (*node.inputs, *node.outputs))
        elements = max((math.prod(values[v].shape) for v in (*node.inputs, *node.outputs)), default=0)
        flops = elements * len(calls)
        seconds = max(moved / profile.bytes_per_second, flops / profile.flops_of(torch.float32))
        return dataclasses.replace(node, seconds=seconds + profile.launch_seconds, flops=flops)


def _call(node: fx.Node) -> tuple[Call, list[TensorSpec]]:
    """Returns an operation of the joint graph for a cost source."""
    specs: list[TensorSpec] = []

    def ref(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            if not isinstance(value, torch.Tensor):
                return size_of(value) if isinstance(value, (int, torch.SymInt)) else value
            if argument not in known:
                known[argument] = len(specs)
                specs.append(dataclasses.replace(spec_of(value), value=len(specs)))
            return Ref(known[argument])
        if isinstance(argument, (list, tuple)):
            return [ref(a) for a in argument]
        return argument

    known: dict[fx.Node, int] = {}
    args, kwargs = tuple(ref(a) for a in node.args), {k: ref(v) for k, v in node.kwargs.items()}
    value = node.meta["val"]
    outputs: list[int | None] = []
    for result in value if isinstance(value, (list, tuple)) else [value]:
        outputs.append(len(specs) if isinstance(result, torch.Tensor) else None)
        if isinstance(result, torch.Tensor):
            specs.append(dataclasses.replace(spec_of(result), value=len(specs)))
    return Call(node.target, args, kwargs, tuple(outputs), 0), specs
