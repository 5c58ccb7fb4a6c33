"""One call by a plan: the forward pass, the residuals that it leaves, the backward pass that uses them up."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from fckpt import ambient
from fckpt.errors import MutationError
from fckpt.graph import Graph
from fckpt.lower import Lowered, lower
from fckpt.operations import Trace, written_by
from fckpt.schedule import Schedule

__all__ = ["Execution", "Program"]


class Program:
    """A traced function and a plan for it, ready to run any number of times, in any threads."""

    def __init__(self, trace: Trace, schedule: Schedule, graph: Graph, count: int):
        """Prepares to run a schedule.

        Args:
            trace: the function.
            schedule: what runs.
            graph: the trace's, as the schedule was made for it.
            count: how many of the trace's operands are arguments; the rest is closed over.
        """
        self.trace = trace
        self.schedule = schedule
        self.graph = graph
        self.lowered = lower(trace, schedule, graph)
        self.count = count
        self.ambient = ambient.capture()
        """The settings of the trace, which are those of every call: backward recomputes under them."""
        self.constants = [data for _, data in trace.constants]
        read = {trace.tensors[t].value for t in trace.operands}
        used = read.intersection(v for node in trace.graph.nodes for v in node.inputs)
        used.update(trace.tensors[t].value for t in trace.outputs)
        self.uses = {i for i, t in enumerate(trace.operands) if i < count or trace.tensors[t].value in used}
        """The operands that matter: all arguments, and the closed-over tensors that the function uses."""
        self.draws = any(node.random for node in trace.graph.nodes)
        """Whether it draws random numbers."""
        self.differentiable = tuple(i for i, flag in enumerate(trace.flags) if flag)
        self.strict = any(op in str(call.op) for call in trace.calls for op in ("as_strided", "_reshape_alias"))
        """Whether an operation relies on the strides that tensors had when traced."""
        shapes = [(torch.Size(trace.tensors[t].shape), trace.tensors[t].dtype) for t in trace.outputs]
        self.ends = (trace.spec, trace.leaves, shapes)
        """What the function returns: structure, leaves, and its tensors' shapes and dtypes."""
        writes = {t for call in trace.calls for t in written_by(call)}
        written = {i for i, t in enumerate(trace.operands) if t in writes}
        closed_over = [i for i in range(count, len(trace.operands)) if i in self.uses]
        self.lifts = [i for i in closed_over if i not in written]
        """The closed-over tensors that are used and not written: operands of the call."""
        self.statistics = [i for i in closed_over if i in written]
        """Those that the forward pass writes."""
        self.complex = [i for i, t in enumerate(trace.operands) if trace.tensors[t].dtype.is_complex]

    @functools.cached_property
    def functional(self) -> Lowered:
        """The same, with nothing written over anything: a residual has no room for a batch of results."""
        return lower(self.trace, self.schedule, self.graph.plain)

    def lifted(self, closure: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the closed-over tensors that are used and not written."""
        return [closure[i - self.count] for i in self.lifts]


class Execution:
    """One call of a `Program`."""

    def __init__(self, program: Program, closure: Sequence[torch.Tensor]):
        """Prepares a call of `program`; `closure` are the closed-over tensors, in the order of the trace."""
        self.program = program
        self.statistics = [(i, closure[i - program.count]) for i in program.statistics]
        """The operands of the trace that are none of the call."""
        self.residuals: list[Any] | None = None
        self.shared: list[tuple[torch.Tensor, int]] = []
        """Outputs that are residuals too, and their versions: the caller may change them."""
        self.versions: list[int] = []
        self.has_run = False
        self.lock = threading.Lock()

    def forward(self, operands: Sequence[torch.Tensor]) -> list[Any] | None:
        """Runs the forward pass, the first time; None after that."""
        with self.lock:
            if self.has_run:
                return None
            self.has_run = True
        with _below_autograd():
            outputs, self.residuals = self.program.lowered.forward(self._given(operands))
            kept = {t.untyped_storage()._cdata for t in self.residuals if isinstance(t, torch.Tensor)}
            self.shared = [(t, t._version) for t in outputs if t.untyped_storage()._cdata in kept]
        return outputs

    def backward(
        self, operands: Sequence[torch.Tensor], given: Sequence[int], cotangents: Sequence[torch.Tensor]
    ) -> list[Any] | None:
        """Runs the backward pass, the first time and if it is the one that was planned; else None."""
        program = self.program
        tensors = (*operands, *cotangents)
        if tuple(given) != program.differentiable or any(map(is_functorch_wrapped_tensor, tensors)):
            return None
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return None
        with self.lock:
            residuals, self.residuals = self.residuals, None
        if residuals is None:
            return None
        self._check_outputs()
        cts = list(cotangents)
        if program.strict:
            cts = [self._as_traced(ct, i) for i, ct in zip(given, cts, strict=True)]
        elsewhere = program.ambient != ambient.capture()
        with ambient.restored(program.ambient) if elsewhere else contextlib.nullcontext(), _below_autograd():
            lowered = program.functional if any(map(is_legacy_batchedtensor, cts)) else program.lowered
            grads = lowered.backward(self._given(operands), residuals, cts)
        return [*grads[: program.count], *(grads[i] for i in program.lifts)]

    def _check_outputs(self) -> None:
        for tensor, then in self.shared:
            if tensor._version != then:
                raise MutationError(
                    f"an output of a rematerialised function (shape {list(tensor.shape)}, {tensor.dtype}) was changed "
                    f"in place between forward and backward (version {then} -> {tensor._version}), and its plan keeps "
                    "that output for backward. Change a copy instead."
                )
        self.shared = []

    def _given(self, operands: Sequence[torch.Tensor]) -> list[Any]:
        program = self.program
        own: list[Any] = [None] * len(program.trace.operands)
        own[: program.count] = operands[: program.count]
        for i, tensor in zip(program.lifts, operands[program.count :], strict=True):
            own[i] = tensor
        for i, tensor in self.statistics:
            own[i] = tensor
        for i in program.complex:
            if own[i] is not None:  # lazy conjugation and negation are views above the operations that were recorded
                own[i] = own[i].resolve_conj().resolve_neg()
        return own + program.constants

    def _as_traced(self, cotangent: torch.Tensor, output: int) -> torch.Tensor:
        number = self.program.trace.cotangents[output]
        assert number is not None
        spec = self.program.trace.tensors[number]
        if cotangent.stride() == spec.stride:
            return cotangent
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(cotangent)


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Where the trace was made: nothing records, casts or intercepts. Grad mode is on, which some kernels ask."""
    with (
        torch._C.DisableTorchFunction(),
        torch.enable_grad(),
        torch._C._DisableAutocast(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_LEGACY_VMAP),
    ):
        yield


# `is_grads_batched` runs backward under the older vmap, which forbids random operations, also those on no batches.
_LEGACY_VMAP = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("VmapMode"))  # type: ignore[call-overload]
