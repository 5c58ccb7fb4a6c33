"""Marks in a captured graph: calls that name values, that begin and end rematerialised regions, or that checkpoint.

Dynamo does not support context variables, and it evaluates Python code without running it. So each region and each
`checkpoint_name` in a captured function becomes a call of one of the functions below. The code that runs the graph
installs a handler for these calls.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils import checkpoint as torch_checkpoint

__all__ = [
    "Marks",
    "answered",
    "begin",
    "capturing",
    "checkpoint",
    "draws",
    "end",
    "is_capturing",
    "key_of",
    "marks_answered",
    "name",
    "register",
]


class Marks(Protocol):
    """A handler of the marks in a running graph."""

    def begin(self, region: Any) -> None:
        """Handles the start of a rematerialised region."""

    def end(self, region: Any, outputs: Sequence[torch.Tensor]) -> None:
        """Handles the end of a rematerialised region that returned `outputs`."""

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Handles a `checkpoint_name` of a tensor."""

    def checkpointing(self, drawing: bool) -> AbstractContextManager[None]:
        """Handles a call of `torch.utils.checkpoint`, which is the body, and may draw random numbers if `drawing`."""
        ...


class _State(threading.local):
    capturing = False
    marks: Marks | None = None


_state = _State()
_regions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys = itertools.count(1)


def register(region: Any) -> int:
    """Assigns a region the key under which marks refer to it."""
    key = next(_keys)
    _regions[key] = region
    return key


@dataclass(frozen=True)
class _Made:
    """A region that a captured function creates in each of its calls."""

    policy: Any


@functools.cache
def key_of(policy: Any) -> int:
    """Returns the key under which marks refer to regions with this policy; the policy is never freed."""
    region = _by_policy[policy] = _Made(policy)
    return register(region)


_by_policy: dict[Any, _Made] = {}


def is_capturing() -> bool:
    """Whether this thread is capturing a function for fckpt. The capture itself reads the result as a constant."""
    return _state.capturing


@contextmanager
def capturing() -> Iterator[None]:
    """Declares the body to be a capture in this thread."""
    before, _state.capturing = _state.capturing, True
    try:
        yield
    finally:
        _state.capturing = before


@contextmanager
def marks_answered(marks: Marks | None) -> Iterator[None]:
    """Makes `marks` handle the marks of graphs that run in the body. With None, marks have no effect."""
    before, _state.marks = _state.marks, marks
    try:
        yield
    finally:
        _state.marks = before


def answered() -> Marks | None:
    """Returns the handler of marks in this thread, or None."""
    return _state.marks


def begin(key: int) -> None:
    """Marks the start of a region."""
    if _state.marks is not None:
        _state.marks.begin(_regions.get(key))


def end(key: int, outputs: list[torch.Tensor]) -> None:
    """Marks the end of a region, which returned the tensors in `outputs`."""
    if _state.marks is not None:
        _state.marks.end(_regions.get(key), outputs)


def name(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """Names a tensor and returns the same tensor."""
    if _state.marks is not None:
        _state.marks.name(tensor, text)
    return tensor


def checkpoint(function: Any, *args: Any, preserve_rng_state: bool = True, **_: Any) -> Any:
    """Calls `torch.utils.checkpoint`, as the function in the graph does.

    Dynamo represents such a call by an operator that leaves the random numbers of the recompute to a compiler. In a
    trace, a function that draws random numbers is called without a checkpoint: results and gradients are the same.
    """
    options = {"context_fn": function.meta[_CONTEXT]} if _CONTEXT in function.meta else {}
    call = functools.partial(torch_checkpoint.checkpoint, function, *args, use_reentrant=False, **options)
    with torch_checkpoint.set_checkpoint_early_stop(False):  # the end of a recompute may close a level of torch.func
        if _state.marks is None:
            return call(preserve_rng_state=preserve_rng_state)
        drawing = preserve_rng_state and draws(function)
        with _state.marks.checkpointing(drawing):
            return function(*args) if drawing else call(preserve_rng_state=False)


_CONTEXT = "_checkpoint_context_fn"


def draws(module: Any) -> bool:
    """Whether a graph calls dropout or the like, for all that is known. A graph that draws otherwise is refused."""
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    return any(map(_draws, (node for graph in graphs for node in graph.nodes)))


def _draws(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    if "dropout" in name:
        chance = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        return bool(chance != 0.0 and training is not False)
    if name == "multi_head_attention_forward":
        return bool(node.args[10] != 0.0 and node.kwargs.get("training", True))
    if name == "scaled_dot_product_attention":
        return bool((node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) != 0.0)
    return name in _DRAWING


_DRAWING = {"bernoulli", "multinomial", "normal", "rand", "randn", "rand_like", "randn_like", "bernoulli_", "normal_"}
