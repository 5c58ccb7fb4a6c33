"""Models of alike blocks, and captures of them with and without copies."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import GraphCaptureOutput

from fckpt._capture.block_copies import CHECKS
from fckpt._capture.captured import CaptureError, Entry, capture
from fckpt._capture.repeated_blocks import Repeated
from fckpt._capture.wrapped import name_of

# Torch 2.11 has no functions that compare the guards of two places, so that nothing is copied there.
copies = pytest.mark.skipif(not CHECKS, reason="torch 2.11 evaluates each block")


class Stack(nn.Module):
    """Blocks after a layer: all of them get a result, with a width that is no variable of the capture."""

    def __init__(self, *blocks: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(width, width), nn.ModuleList(blocks)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, *args)
        return x


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.1)
        self.act: Any = nn.GELU()

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return x + self.dropout(self.act(self.linear(self.norm(x))))


def parts(fn: Any, *args: Any) -> Any:
    """Returns all that a capture records, with names that do not depend on the order of creation; or why it fails."""
    torch._dynamo.reset()
    guards: list[Any] = []
    check = GraphCaptureOutput.build_guards

    def build_guards(made: Any, *args: Any, **kwargs: Any) -> Any:
        guards.extend(made.output_graph.guards)
        return check(made, *args, **kwargs)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GraphCaptureOutput, "build_guards", build_guards)
            found = capture(Entry(), fn, args, {})
    except CaptureError as error:
        return str(error)
    graph = found.graph
    assert graph is not None
    for module in graph.module.modules():
        if isinstance(module, torch.fx.GraphModule):
            numbers = itertools.count()
            for node in module.graph.nodes:
                if node.op.startswith("call"):
                    node._rename(f"call_{next(numbers)}")
            module.recompile()
    calls = [node for node in graph.module.graph.nodes if node.op.startswith("call")]
    return {
        "code": [str(getattr(module, "code", "")) for module in graph.module.modules()],
        "guards": {(re.sub(r"_\d+_c\d+|___\d+", "", name_of(g)), g.create_fn_name()) for g in guards},
        "inputs": found.inputs,
        "numbers": (graph.numbers, graph.decisive),
        "held": {node.name: end.name for node, end in graph._held.items()},
        "sources": {node.name: node.meta["source"] for node in calls},
    }


def parts_without_copies(monkeypatch: pytest.MonkeyPatch, fn: Any, *args: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(Repeated, "recorded", lambda self: contextlib.nullcontext())
        return parts(fn, *args)


def check_same(short: Any, evaluated: Any) -> None:
    """Checks that copies leave out no guard, except for classes that all blocks share, and nothing else."""
    if isinstance(short, dict) and isinstance(evaluated, dict):
        missing = {guard for guard in evaluated.pop("guards") - short.pop("guards") if "type(" not in guard[0]}
        assert not missing
    assert evaluated == short


def check_same_captures(monkeypatch: pytest.MonkeyPatch, fn: Any, *args: Any) -> None:
    short = parts(fn, *args)
    check_same(short, parts_without_copies(monkeypatch, fn, *args))
