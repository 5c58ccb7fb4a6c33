"""Peaks of a function that torch.compile compiles: of the compiled function, measured, and of the plain one, traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fckpt._call.ambient import without_modes
from fckpt._call.arguments import Arguments
from fckpt._call.conditions import Observation
from fckpt._call.rng import RandomState
from fckpt._compile.joint import size_of
from fckpt._memory import measure_peak
from fckpt._planned.making import plain_plan
from fckpt._planned.tracing import TRACING, CapturedTensors, traced_call
from fckpt._trace.layouts import layouts_below
from fckpt._trace.operations import Backward
from fckpt.errors import FckptError

__all__ = ["can_measure", "peak_of", "plain_peak_of"]


def can_measure(inputs: Sequence[Any]) -> bool:
    """Whether a call with these inputs can run: they are real tensors, and no other measurement is running."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    real = all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type != "meta" for t in tensors)
    return real and bool(tensors) and not torch.autograd._profiler_enabled()


def peak_of(compiled: Callable[..., Any], inputs: Sequence[Any]) -> int:
    """Runs a compiled function and its backward pass and returns the peak in bytes, above the memory of the inputs.

    The run changes nothing: the compiled function gets copies of the inputs to which it writes, gradients are
    discarded, and the random generators are set back. Every output that requires grad gets a cotangent.

    Args:
        compiled: the compiled function, which runs once before it is measured.
        inputs: example inputs.
    """
    device = next(t.device for t in inputs if isinstance(t, torch.Tensor))
    with without_modes(), _generators_restored(inputs), torch.enable_grad():
        given = [_example(t, copied=True) for t in inputs]

        def step() -> None:
            results = compiled(*given)
            results = results if isinstance(results, (list, tuple)) else [results]
            ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            wanted = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
            if ends and wanted:
                cotangents = [torch.ones_like(r) for r in ends]
                gradients = torch.autograd.grad(ends, wanted, cotangents, allow_unused=True)
                del gradients

        step()  # kernels are loaded, and workspaces allocated
        return measure_peak(step, device).peak_bytes


def plain_peak_of(module: fx.GraphModule, inputs: Sequence[Any]) -> int:
    """Returns the peak in bytes of a function and its backward pass without a compiler.

    The function is traced, and nothing runs. Inputs that are not differentiated may be buffers that the function
    writes, so they are traced as captured tensors. A function that cannot be traced runs once, as in `peak_of`.

    Raises:
        TraceError: the function cannot be traced, nor run on these inputs.
    """
    with without_modes(), torch.enable_grad(), TRACING:
        given = [_example(t, copied=False) for t in inputs]
        primals = [i for i, t in enumerate(given) if isinstance(t, torch.Tensor) and t.requires_grad]
        run = _Applied(module, given, primals)
        arguments = Arguments(tuple(given[i] for i in primals), {})
        observation = Observation([run], arguments.statics, arguments.tensors, {})
        captured = CapturedTensors(observation, arguments.tensors)
        layouts = layouts_below([*arguments.tensors, *captured.tensors])
        try:
            trace = traced_call(run, arguments, captured, layouts, Backward())
            return plain_plan(trace.graph, torch.__version__).peak_bytes
        except FckptError:
            if not can_measure(inputs):
                raise
    return peak_of(module, inputs)


class _Applied:
    """A function of some of the inputs of a graph; the others are its attributes."""

    def __init__(self, module: fx.GraphModule, given: Sequence[Any], primals: Sequence[int]):
        self.module = module
        self.given = [None if i in primals else t for i, t in enumerate(given)]
        self.primals = primals

    def __call__(self, *args: Any) -> Any:
        inputs = list(self.given)
        for i, t in zip(self.primals, args, strict=True):
            inputs[i] = t
        return self.module(*inputs)


def _example(given: Any, copied: bool) -> Any:
    """Returns an input for a rehearsal: a number, or a tensor that shares nothing with autograd's graph."""
    if isinstance(given, torch.Tensor):
        writable = copied and not given.requires_grad  # a compiled function may write to buffers
        return given.detach().clone() if writable else given.detach().requires_grad_(given.requires_grad)
    return size_of(given) if isinstance(given, torch.SymInt) else given


@contextlib.contextmanager
def _generators_restored(inputs: Sequence[Any]) -> Iterator[None]:
    state = RandomState.capture({t.device for t in inputs if isinstance(t, torch.Tensor)})
    try:
        yield
    finally:
        state.rewind()
