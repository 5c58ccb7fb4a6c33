"""Calls of operations as a trace has them, for the tests of costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from fckpt._trace.operations import Call, Ref, TensorSpec, Trace
from fckpt.graph import Graph, Node, Value


def call_of(op: Any, *args: Any, **kwargs: Any) -> tuple[Call, list[TensorSpec]]:
    """The call of `op` on these arguments, as a trace has it."""
    specs: list[TensorSpec] = []
    known: dict[int, int] = {}

    def number(t: torch.Tensor) -> int:
        specs.append(TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.device, len(specs), t.storage_offset()))
        return len(specs) - 1

    def refs(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in known:
                known[id(value)] = number(value)
            return Ref(known[id(value)])
        return [refs(item) for item in value] if isinstance(value, (list, tuple)) else value

    inputs, keywords = tuple(map(refs, args)), {k: refs(v) for k, v in kwargs.items()}
    result = op(*args, **kwargs)
    results = result if isinstance(result, (list, tuple)) else [result]
    outputs = tuple(number(t) if isinstance(t, torch.Tensor) else None for t in results)
    return Call(op, inputs, keywords, outputs, 0), specs


def trace_of(*calls: tuple[Call, list[TensorSpec]]) -> Trace:
    """A trace of calls that have nothing to do with each other."""
    nodes, values, tensors, moved = [], [], [], []
    inputs = []
    for i, (call, specs) in enumerate(calls):
        start = len(tensors)
        shift = lambda value, start=start: (
            Ref(value.tensor + start)
            if isinstance(value, Ref)
            else [shift(v) for v in value]
            if isinstance(value, (list, tuple))
            else value
        )
        made = tuple(o + start for o in call.outputs if o is not None)
        for j, spec in enumerate(specs, start):
            nbytes = math.prod(spec.shape) * spec.dtype.itemsize
            values.append(Value(j, nbytes, producer=i if j in made else None))
            tensors.append(dataclasses.replace(spec, value=j))
            if j not in made:
                inputs.append(j)
        read = tuple(j for j in range(start, start + len(specs)) if j not in made)
        nodes.append(Node(i, str(call.op), read, made))
        outputs = tuple(None if o is None else o + start for o in call.outputs)
        moved.append(
            Call(call.op, tuple(map(shift, call.args)), {k: shift(v) for k, v in call.kwargs.items()}, outputs, i)
        )
    graph = Graph(tuple(nodes), tuple(values), tuple(inputs), (), (), (), boundary=len(nodes))
    return Trace(graph, tuple(moved), tuple(tensors))


class Counter:
    """A library operation that counts how often it runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + 1

    def __str__(self) -> str:
        return "mylib.counter.default"
