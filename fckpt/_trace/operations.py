"""The operations behind a graph: what is called, on which tensors, and what goes in and comes out."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fckpt.graph.graph import Graph

__all__ = [
    "DECLARED_PURE",
    "Backward",
    "Batch",
    "Call",
    "Layout",
    "Recorded",
    "Ref",
    "TensorSpec",
    "Trace",
    "arguments_of",
    "indices_of",
    "is_dense",
    "is_random",
    "is_tagged_random",
    "statistics_of",
    "text_of",
]

aten = torch.ops.aten


class Ref(NamedTuple):
    """Stands for a tensor of a trace, in the arguments of a call: its number."""

    tensor: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: int
    """The storage that it looks at, as a number of `Graph.values`; -1 if the graph has no use for it."""
    offset: int = 0
    """Where in the storage it begins, in elements."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of the trace, on tensors that are refs."""

    op: Any
    """A `torch._ops.OpOverload`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    """The tensors that it returns, flat; None for what is none."""
    node: int | None
    """The node of the graph; None for a view, which makes no storage. Calls of one node run one after the other."""
    replaced: tuple[tuple[int, int], ...] = ()
    """What it writes over: tensors that are whole storages, and what they are after it. The call's arguments see the
    latter."""


class Layout(NamedTuple):
    """A tensor to be traced: enough to make a fake one of it, and part of the key under which plans are kept."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    accumulates: bool
    """Whether its gradient goes to `.grad`: a leaf of autograd."""
    computed: bool = False
    """Whether autocast casts it anew for each operation: of leaves that are no views it remembers the cast."""


class Backward(NamedTuple):
    """A backward pass, as far as a trace depends on it."""

    outputs: tuple[int, ...] | None = None
    """The outputs that get a cotangent; None for those that are likely to."""
    autocast: Any = None
    """What autocast does while it runs, see `ambient.autocast`: nothing, as a rule."""
    strides: tuple[tuple[int, ...], ...] | None = None
    """Those of the cotangents, see `strides_of`; None for those of the outputs."""
    chosen: tuple[int | str, ...] | None = None
    """In the place of `outputs`: tensors of the result, by position or name."""


_LIKELY = Backward()


class Batch(NamedTuple):
    """A `vmap` around the transform that differentiates a call."""

    dims: tuple[int | None, ...]
    """By operand: which dimension of its memory is the batch; None where it has none."""
    size: int
    randomness: str


@dataclass(frozen=True)
class Trace:
    """The graph, the operations behind its nodes, and what goes in and comes out, as numbers of tensors."""

    graph: Graph
    calls: tuple[Call, ...]
    tensors: tuple[TensorSpec, ...]
    operands: tuple[int, ...] = ()
    """The arguments' tensors, then those closed over."""
    constants: tuple[tuple[int, torch.Tensor], ...] = ()
    """Tensors that the function makes of Python numbers, with their data."""
    spec: Any = None
    """The structure of the result."""
    leaves: tuple[Any, ...] = ()
    """Its leaves: ('out', i), ('in', i) for the i-th argument, or what is no tensor."""
    outputs: tuple[int, ...] = ()
    flags: tuple[bool, ...] = ()
    """By output: whether it requires grad."""
    cotangents: tuple[int | None, ...] = ()
    """By output; None where it does not require grad."""
    gradients: tuple[int | None, ...] = ()
    """By operand; None where it does not require grad, or nothing depends on it."""
    regions: tuple[tuple[frozenset[int], Any], ...] = ()
    """Rematerialised functions inside, inner ones first: the nodes whose results stay inside, and the policy."""
    backward: Backward = _LIKELY
    """The backward pass; its `outputs` are known."""
    out_dims: tuple[int | None, ...] = ()
    """By output: its batch dimension, if the call is under a `Batch`."""
    grad_dims: tuple[int | None, ...] = ()
    """By operand: the batch dimension of its gradient."""
    versions: tuple[tuple[int, int], ...] = ()
    """Tensors that are an operand (its position) after the forward pass has written over it."""
    given: tuple[weakref.ref[torch.Tensor], ...] = ()
    """By operand: the tensor of the call, as long as the caller has it."""

    def producers(self) -> dict[int, Call]:
        """Returns the call that makes each tensor."""
        made = {new: call for call in self.calls for _, new in call.replaced}
        return made | {t: call for call in self.calls for t in call.outputs if t is not None}


_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
_STATISTICS = dict.fromkeys(_NORMS, (3, 4))


class Recorded(NamedTuple):
    """A call as it was recorded, before anything is known of the graph."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    is_view: bool
    source: str
    replaced: tuple[tuple[int, int], ...] = ()
    module: str = ""
    accumulates: bool = False
    """Whether autograd's engine adds a gradient to what it has here, over that if nobody else holds it."""


def statistics_of(op: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """The positions of running statistics that a call writes (and does not read), unknown to its schema.

    The same operation without them computes the same: so it is run again.
    """
    positions = _STATISTICS.get(op, ())
    training = bool(positions) and args[5] is True
    return tuple(i for i in positions if training and args[i] is not None)


# The namespaces of operations that are known to say whether they draw random numbers.
_BUILT_IN = {"aten", "prims", "prim", "fckpt", "quantized", "inductor", "mkldnn", "onednn", "_c10d_functional"}
DECLARED_PURE: set[str] = set()
"""Names of other operations whose author says that they compute and do nothing else (`fckpt.cost.register_pure`)."""


def is_random(op: Any) -> bool:
    """Whether an operation draws random numbers, or may: a user's does not always say so."""
    if is_tagged_random(op) or getattr(op, "namespace", "aten") in _BUILT_IN:
        return is_tagged_random(op)
    return DECLARED_PURE.isdisjoint((str(op), str(op.overloadpacket)))


def is_tagged_random(op: Any) -> bool:
    """Whether an operation says that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def indices_of(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.tensor
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from indices_of(inner)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements with these strides fill memory without gaps or repetitions, in any order of dimensions."""
    extent = 1
    for step, size in sorted((st, n) for n, st in zip(shape, stride, strict=True) if n != 1):
        if step != extent:
            return False
        extent *= size
    return True


def strides_of(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides that matter: 0 for those of dimensions in which no step is taken."""
    if 0 in shape:
        return (0,) * len(stride)
    return tuple([0 if size == 1 else step for size, step in zip(shape, stride, strict=True)])


def is_expanded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of a tensor repeat others, as those of the gradient of a sum do."""
    return any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)) and 0 not in shape


def text_of(
    value: Any,
    specs: Sequence[TensorSpec],
    seen: dict[int, int],
    *,
    devices: bool = True,
    cotangents: Collection[int] = (),
) -> str:
    """Writes an argument of a call, the same in every process: a tensor as its layout, a generator as nothing.

    Args:
        value: the argument.
        specs: the tensors that its refs stand for.
        seen: the tensors of the call so far, and their numbers: one that comes again is written as its number.
        devices: whether layouts name their device.
        cotangents: values whose strides are left out.
    """
    again = functools.partial(text_of, specs=specs, seen=seen, devices=devices, cotangents=cotangents)
    if isinstance(value, Ref):
        if value.tensor in seen:
            return f"%{seen[value.tensor]}"
        spec = specs[value.tensor]
        base = next((n for t, n in seen.items() if specs[t].value == spec.value >= 0), None)
        number = seen[value.tensor] = len(seen)
        shape, stride = (",".join(map(str, numbers)) for numbers in (spec.shape, spec.stride))
        stride = "" if spec.value in cotangents else f"({stride})"
        layout = f"{str(spec.dtype).removeprefix('torch.')}[{shape}]{stride}"
        shared = "" if base is None else f" in %{base}"
        return f"%{number}={layout}{spec.device if devices else ''}{shared}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(again, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {again(v)}' for k, v in value.items())}}}"
    if isinstance(value, torch.Generator):
        return "None"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    return str(value)  # dtypes, devices, layouts, memory formats


_POSITIONS = {"start", "end", "index", "shifts", "storage_offset"}
_NORMS_OF = {"p", "ord", "norm_type"}
"""Which norm is taken: that of order 2 may be computed in another way than the others, in other memory."""


def arguments_of(call: Call, specs: Sequence[TensorSpec], cotangents: Collection[int]) -> str:
    """Writes what memory that an operation takes depends on besides its name: `self=%0=float32[2,3](3,1), dim=[1]`.

    Left out are devices, the strides of these `cotangents`, and numbers that no memory depends on: floats but for the
    order of a norm, ints of pointwise and of random operations, and where in a tensor a slice begins. So a number that
    changes from step to step, a rate or a temperature, leaves a plan valid.
    """
    schema = getattr(call.op, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else [str(i) for i in range(len(call.args))]
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    tags = getattr(call.op, "tags", ())
    free = torch.Tag.pointwise in tags or torch.Tag.nondeterministic_seeded in tags
    seen: dict[int, int] = {}
    texts = []
    for name, value in given.items():
        if isinstance(value, (torch.device, torch.Generator)):
            continue
        number = type(value) in (int, float, complex) and (free or name in _POSITIONS)
        number |= type(value) in (float, complex) and name not in _NORMS_OF
        texts.append(
            f"{name}={'a number' if number else text_of(value, specs, seen, devices=False, cotangents=cotangents)}"
        )
    return ", ".join(texts)
