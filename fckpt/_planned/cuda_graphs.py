"""CUDA graphs of a planned function: each half of a plan is recorded once, and launched as a whole from then on.

The two halves of a plan are straight-line code that allocates and frees the same tensors in each call, so they can be
recorded (`torch.cuda.CUDAGraph`). A recording reads and writes fixed addresses. Parameters and buffers stay where they
are; other operands are copied to a fixed place before each launch, and outputs and gradients are copied out of the
memory of the recording after it, because the next launch writes over them. That memory stays allocated between calls.
All of it counts: the budget is for what the recordings hold and the copies together.

B. Nguyen, M. Carilli et al., "Accelerating PyTorch with CUDA Graphs" (2021),
https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fckpt._memory import measure_peak
from fckpt._planned.lower import Lowered
from fckpt._planned.program import Program
from fckpt._trace.operations import Call, Trace, generators_in
from fckpt._units import format_bytes
from fckpt.errors import ArgumentValueError, BudgetError
from fckpt.graph.graph import Graph
from fckpt.graph.graph import changed as node_with
from fckpt.graph.schedule import Compute
from fckpt.spmd.mesh import mesh_in_use

__all__ = ["CudaGraphs", "Halves", "check_recordable", "drawing_once"]

_KIND = "cuda"
"""The type of the devices that have such graphs."""
_CALLS = 3
"""A program is recorded in the third of its calls in a row: in the first ones, libraries choose kernels and allocate
workspaces. Operands that were the same memory in all of them are taken to stay there."""
_TRIES = 3


class CudaGraphs:
    """The CUDA graphs of a planned function. They are those of one program, which has run several times in a row."""

    def __init__(self, replanned: Callable[[Program, int], Lowered]):
        """Prepares to record.

        Args:
            replanned: returns the lowered functions of a program with a plan for fewer bytes; a `BudgetError` if there
                is no such plan.
        """
        self._replanned = replanned
        self._program: Program | None = None
        self._places: list[list[_Place | None]] = []
        self._halves: Halves | None = None
        self._lock = threading.Lock()

    def halves(self, program: Program, given: Sequence[Any], caller: object) -> Halves | None:
        """Returns the recordings that can run a call now, and reserves them for it; None if the call runs without.

        Calls run without recordings while a program is new, and if the residuals of an earlier call are still needed,
        or if another stream is current than at the recording, or if an outer CUDA graph is recorded.

        Args:
            program: the program of the call.
            given: the operands and constants of the call.
            caller: the call. As long as it lives and does not return the recordings, their residuals are its own.

        Raises:
            BudgetError: the recordings and copies do not fit the budget.
            ArgumentValueError: the call cannot be recorded.
        """
        with self._lock:
            if _is_recording():
                return None
            known = self._halves
            if known is not None and known.program is program:
                self._program = None
                if known.is_reserved or known.stream != _stream(known.device):
                    return None
                if known.is_valid(given):
                    return known.reserved(caller)
                self._forget()
            if program is not self._program:
                self._program, self._places = program, []
            self._places = [*self._places[1 - _CALLS :], _places(given)]
            if len(self._places) < _CALLS or (known is not None and known.is_reserved):
                return None
            moving = _moving(program, self._places)
            del known
            self._forget()  # before anything is recorded, so that its memory is free
            self._halves = self._recorded(program, given, moving)
            return self._halves.reserved(caller)

    def _forget(self) -> None:
        self._program, self._places, self._halves = None, [], None

    def _recorded(self, program: Program, given: Sequence[Any], moving: Sequence[int]) -> Halves:
        """Records a program, by a plan for as many bytes as the copies and the memory of the recordings leave."""
        budget = program.plan.budget_bytes
        beside = _copied_nbytes(program, given, moving)
        lowered, planned = program.lowered, program.timeline.peak_nbytes
        nbytes = 0
        for _ in range(_TRIES):
            if budget is not None and planned + beside > budget:
                planned = budget - beside
                lowered = self._fitting(program, planned, beside)
            made = Halves(program, lowered, given, moving)
            nbytes = made.nbytes
            if budget is None or nbytes <= budget:
                return made
            beside += nbytes - budget
            del made
        raise BudgetError(
            f"cuda_graphs=True: the recordings of the call take {format_bytes(nbytes)} with all copies, which is more "
            f"than the budget of {format_bytes(budget or 0)}. Give more bytes, or leave cuda_graphs out.",
            nbytes,
        )

    def _fitting(self, program: Program, nbytes: int, beside: int) -> Lowered:
        try:
            return self._replanned(program, max(nbytes, 1))
        except BudgetError as error:
            least = error.least_bytes + beside
            raise BudgetError(
                f"cuda_graphs=True: beside its plan, the call needs {format_bytes(beside)} for copies of arguments, "
                f"outputs and gradients and for workspaces. With them, it needs a budget of at least "
                f"{format_bytes(least)}. Give more bytes, or leave cuda_graphs out.",
                least,
            ) from error


class Halves:
    """The recordings of the forward and the backward pass of a program."""

    def __init__(self, program: Program, lowered: Lowered, given: Sequence[Any], moving: Sequence[int]):
        self.program = program
        self.device = program.trace.tensors[0].device
        self.stream = _stream(self.device)
        self._caller: weakref.ref[Any] | None = None
        self._twins = {i: _twin(given[i]) for i in moving}
        own: list[Any] = [self._twins.get(i, value) for i, value in enumerate(given)]
        self._fixed = {
            i: place[1] for i, place in enumerate(_places(given)) if place is not None and i not in self._twins
        }
        trace = program.trace
        arriving = [(output, ct) for output, ct in enumerate(trace.cotangents) if ct is not None]
        strides = dict(zip(trace.backward.outputs or (), trace.backward.strides or (), strict=True))
        specs = [(trace.tensors[ct], strides[output]) for output, ct in arriving]
        self._cotangents: list[Any] = [_empty(s.shape, stride, s.dtype, s.device) for s, stride in specs]
        generators = _generators(trace.calls)
        self._forward: Any = None
        self._backward: Any = None

        def record() -> None:
            pool = torch.cuda.graph_pool_handle()
            self._forward = _Recording(lambda: lowered.forward(list(own)), pool, generators)
            if arriving:
                residuals, self._forward.result = self._forward.result[1], (self._forward.result[0], None)
                backward = lambda: lowered.backward(list(own), residuals, list(self._cotangents))
                self._backward = _Recording(backward, pool, generators)

        held = sum([t.untyped_storage().nbytes() for t in (*self._twins.values(), *self._cotangents)])
        try:
            with torch.cuda.device(self.device):
                _free_workspaces()  # new ones are then allocated in the memory of the recordings, and freed with it
                peak = measure_peak(record, self.device).peak_bytes
                _free_workspaces()
        except RuntimeError as error:
            raise ArgumentValueError(
                f"cuda_graphs=True: the call cannot be recorded as a CUDA graph ({error}). Leave cuda_graphs out."
            ) from error
        self.nbytes = held + peak + _returned_nbytes(program)
        """The most bytes held in a call: recordings, and copies of arguments, outputs and gradients."""

    @property
    def is_reserved(self) -> bool:
        """Whether the residuals of a call are still needed."""
        return self._caller is not None and self._caller() is not None

    def reserved(self, caller: object) -> Halves:
        """Reserves the recordings for a call, if there will be a backward pass."""
        self._caller = None if self._backward is None else weakref.ref(caller)
        return self

    def release(self) -> None:
        """Notes that the residuals are not needed any more."""
        self._caller = None

    def is_valid(self, given: Sequence[Any]) -> bool:
        """Whether the tensors that the recordings read and write in place are where they were."""
        return all(given[i].data_ptr() == address for i, address in self._fixed.items())

    def forward(self, given: Sequence[Any]) -> list[torch.Tensor]:
        """Runs the forward pass; returns copies of the outputs."""
        for i, twin in self._twins.items():
            _fill(twin, given[i])
        self._forward.replay()
        return [_copy(t) for t in self._forward.result[0]]

    def backward(self, cotangents: Sequence[torch.Tensor]) -> list[Any]:
        """Runs the backward pass; returns copies of the gradients."""
        for own, cotangent in zip(self._cotangents, cotangents, strict=True):
            _fill(own, cotangent)
        self._backward.replay()
        return [None if t is None else _copy(t) for t in self._backward.result]


class _Recording:
    """The CUDA graph of a function without arguments, and the result of the function in the memory of the graph."""

    def __init__(self, fn: Callable[[], Any], pool: Any, generators: Sequence[torch.Generator]):
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # Other threads, of a data loader for example, may allocate meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.result = fn()
        self.replay = graph.replay


# -- what can be recorded


def check_recordable(program: Program) -> None:
    """Checks that the calls of a program can be recorded.

    Raises:
        ArgumentValueError: they cannot, or what they return would not be what the program returns.
    """
    trace, graph = program.trace, program.graph
    values = [trace.tensors[t].value for t in trace.outputs]
    aliased = len(values) != len({*values}) or not {*graph.inputs}.isdisjoint(values)
    steps = (*program.schedule.forward, *program.schedule.backward)
    drawn = [s.node for s in steps if isinstance(s, Compute) and graph.nodes[s.node].random]
    devices = {spec.device for spec in trace.tensors}
    other = next((d for d in devices if d.type != _KIND), None)
    if mesh_in_use() is not None:
        why = "it runs on one rank of a mesh"
    elif other is not None or len(devices) > 1:
        why = f"it computes on {other or ' and '.join(sorted(map(str, devices)))}, and must be on one CUDA device alone"
    elif len(drawn) != len({*drawn}):
        why = "its plan draws random numbers again, which recordings cannot; plans that remat makes itself do not"
    elif aliased:
        why = "it returns an argument, a view of one, or two tensors that share memory"
    else:
        return
    raise ArgumentValueError(f"cuda_graphs=True does not work for this function: {why}. Leave cuda_graphs out.")


def drawing_once(graph: Graph) -> Graph:
    """Returns a graph whose forward pass draws random numbers once: recordings cannot restore a generator's state."""
    forward = [node_with(n, once=True) if n.random and n.id < graph.boundary else n for n in graph.nodes]
    found = graph.with_costs(forward, graph.values)
    del vars(found)["skeleton"]  # it depends on `once`
    return found


def _moving(program: Program, places: Sequence[Sequence[_Place | None]]) -> list[int]:
    """Returns the operands that were not the same memory in all calls.

    Raises:
        ArgumentValueError: the call writes such an operand.
    """
    moving = [i for i, seen in enumerate(zip(*places, strict=True)) if seen[0] is not None and len({*seen}) > 1]
    written = next((i for i in moving if i in program.written), None)
    if written is not None:
        raise ArgumentValueError(
            f"cuda_graphs=True: the function writes to {program.origin(written)}, which is another tensor in each "
            "call. Pass the same tensor each time, or leave cuda_graphs out."
        )
    return moving


# -- memory


def _copied_nbytes(program: Program, given: Sequence[Any], moving: Sequence[int]) -> int:
    """Returns the bytes of all copies: of arguments and cotangents, which stay, and of outputs and gradients."""
    cotangents = _nbytes(program.trace, program.trace.cotangents)
    return sum([given[i].nbytes for i in moving]) + cotangents + _returned_nbytes(program)


def _returned_nbytes(program: Program) -> int:
    return _nbytes(program.trace, (*program.trace.outputs, *program.trace.gradients))


def _nbytes(trace: Trace, tensors: Sequence[int | None]) -> int:
    return sum([trace.tensors[t].nbytes for t in tensors if t is not None])


_Place = tuple[StorageWeakRef, int]
"""The storage and the address of a tensor. The address of a freed tensor may later be that of another one."""


def _places(given: Sequence[Any]) -> list[_Place | None]:
    return [(StorageWeakRef(t.untyped_storage()), t.data_ptr()) if isinstance(t, torch.Tensor) else None for t in given]


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a new tensor with the same layout, whose elements are not set."""
    return _empty(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _fill(twin: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a tensor to another one; where both are expanded, each element is written once."""
    for dim, (size, stride) in enumerate(zip(twin.shape, twin.stride(), strict=True)):
        if stride == 0 and size > 1:
            twin, tensor = twin.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    twin.copy_(tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = _twin(tensor)
    _fill(copy, tensor)
    return copy


# -- the device


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _is_recording() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _free_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()


def _generators(calls: Sequence[Call]) -> list[torch.Generator]:
    """Returns the generators that operations are given; the default generator takes part in every recording."""
    found = (generator for call in calls for generator in generators_in(call.args, call.kwargs))
    return list({id(generator): generator for generator in found}.values())
