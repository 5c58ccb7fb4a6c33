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
from fckpt._call.modules import is_plain_type
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
    """Whether a call with these inputs can run: they are plain tensors, and no other measurement is running."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    return bool(tensors) and all(map(_is_plain, tensors)) and not torch.autograd._profiler_enabled()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory that can be copied as it is."""
    real = is_plain_type(type(tensor)) and tensor.device.type != "meta"
    return real and tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def peak_of(compiled: Callable[..., Any], inputs: Sequence[Any], held: Sequence[torch.Tensor] = ()) -> int:
    """Runs a compiled function and returns the peak in bytes, above the memory of the inputs.

    If grad is enabled, the backward pass runs too.

    The run changes nothing: the function gets copies of the inputs to which it writes, held tensors get their contents
    back, gradients are discarded, and the random generators are set back. Every output that requires grad gets a
    cotangent.

    Args:
        compiled: the compiled function, which runs once before it is measured.
        inputs: example inputs.
        held: tensors that the function reads or writes, and that are no inputs.
    """
    device = next(t.device for t in (*inputs, *held) if isinstance(t, torch.Tensor))
    with without_modes(), _generators_restored(inputs), _contents_restored(held):
        memory = _copies(inputs)  # the first run shows to which inputs the function writes

        def step() -> None:
            given, leaves = _detached(inputs, memory)
            results = compiled(*given)
            results = results if isinstance(results, (list, tuple)) else [results]
            ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            if ends and leaves:
                cotangents = [torch.ones_like(r) for r in ends]
                gradients = torch.autograd.grad(ends, leaves, cotangents, allow_unused=True)
                del gradients

        step()  # kernels are loaded, and workspaces allocated
        written = _written(inputs, memory)
        memory = [copy if _storage_key(t) in written else t for t, copy in zip(inputs, memory, strict=True)]
        return measure_peak(step, device).peak_bytes


def plain_peak_of(module: fx.GraphModule, inputs: Sequence[Any]) -> int:
    """Returns the peak in bytes of a function, and of its backward pass if grad is enabled, without a compiler.

    The function is traced, and nothing runs. Inputs that are not differentiated may be buffers that the function
    writes, so they are traced as captured tensors. A function that cannot be traced runs once, as in `peak_of`.

    Args:
        module: the function; its parameters become buffers if grad is not enabled.
        inputs: example inputs.

    Raises:
        TraceError: the function cannot be traced, nor run on these inputs.
    """
    if not torch.is_grad_enabled():  # a trace enables it, and a write to a parameter would be an error
        for name, parameter in [*module.named_parameters(recurse=False)]:
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    with without_modes(), TRACING:
        given, _ = _detached(inputs, inputs)
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
    return peak_of(module, inputs, [*module.parameters(), *module.buffers()])


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


class _Computed(torch.autograd.Function):
    """Returns a tensor with the same memory that is not a leaf: a function may write to it while grad is recorded."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _detached(inputs: Sequence[Any], memory: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Returns the inputs outside of autograd's graph, and the leaves to differentiate. Symbolic sizes become numbers.

    A leaf stays one, because a write to a leaf is an error, and a write to another tensor is not.

    Args:
        inputs: the inputs.
        memory: by input, the tensor whose memory is used.
    """
    given, leaves = list(inputs), []
    for i, t in enumerate(inputs):
        if isinstance(t, torch.SymInt):
            given[i] = size_of(t)
        elif isinstance(t, torch.Tensor):
            given[i] = memory[i].detach() if memory[i].requires_grad else memory[i]  # a view stays one of its base
            if t.requires_grad and torch.is_grad_enabled():
                leaf = memory[i].detach().requires_grad_()
                leaves.append(leaf)
                given[i] = leaf if t.is_leaf else _Computed.apply(leaf)
    return given, leaves


def _storage_key(value: Any) -> int | None:
    """Returns a number that tensors have in common if they share a storage; None if the value is no tensor."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of the memory in which a tensor lies."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs with copies of the tensors. Copies of tensors that share memory are views of one base."""
    storages: dict[int | None, torch.UntypedStorage] = {}
    bases: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
    copies = list(inputs)
    for i, t in enumerate(inputs):
        if isinstance(t, torch.Tensor):
            key = _storage_key(t), t.dtype
            if key[0] not in storages:
                storages[key[0]] = t.untyped_storage().clone()
            if key not in bases:
                bases[key] = torch.empty(0, dtype=t.dtype, device=t.device).set_(storages[key[0]])
            copies[i] = bases[key].as_strided(t.shape, t.stride(), t.storage_offset())
    return copies


def _written(inputs: Sequence[Any], copies: Sequence[Any]) -> set[int | None]:
    """Returns the keys of the storages whose copies have other bytes.

    Version counters do not show every write: a compiled batch norm, for example, updates its statistics without them.
    """
    pairs = {_storage_key(t): (t, c) for t, c in zip(inputs, copies, strict=True) if isinstance(t, torch.Tensor)}
    return {key for key, (t, c) in pairs.items() if not torch.equal(_bytes_of(t), _bytes_of(c))}


@contextlib.contextmanager
def _contents_restored(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Gives tensors the contents and version counts that they had before the body."""
    copies = _copies(tensors)
    with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        try:
            yield
        finally:
            written = _written(tensors, copies)
            for tensor, copy in zip(tensors, copies, strict=True):
                if _storage_key(tensor) in written:
                    _bytes_of(tensor).copy_(_bytes_of(copy))


@contextlib.contextmanager
def _generators_restored(inputs: Sequence[Any]) -> Iterator[None]:
    state = RandomState.capture({t.device for t in inputs if isinstance(t, torch.Tensor)})
    try:
        yield
    finally:
        state.rewind()
