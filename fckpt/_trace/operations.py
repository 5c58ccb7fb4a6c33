"""Data types of a trace: operations on numbered tensors, and the inputs and outputs of both passes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fckpt._call.data_writes import written_tensors
from fckpt.graph.graph import Graph

__all__ = [
    "DECLARED_PURE",
    "EMPTY",
    "OPAQUE",
    "RESIZES",
    "Backward",
    "Batch",
    "Call",
    "General",
    "Layout",
    "Observed",
    "Recorded",
    "Ref",
    "TensorSpec",
    "Trace",
    "arguments_of",
    "count_writes",
    "draws",
    "flat",
    "generators_in",
    "indices_of",
    "is_built_in",
    "is_dense",
    "is_random",
    "is_tagged_random",
    "mapped",
    "places_of",
    "plain_cotangents",
    "statistics_of",
    "tensors_of",
    "text_of",
    "unflat",
    "written_by",
]

aten = torch.ops.aten

EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operations that do not read the data of their operand."""
RESIZES = {
    op for packet in (aten.resize_, aten.resize_as_, aten.set_) for op in map(packet.__getattr__, packet.overloads())
}
"""Operations that change the memory of a tensor in place."""


class Ref(NamedTuple):
    """A reference to a tensor of a trace by its number, in the arguments of a call."""

    tensor: int


@dataclass(frozen=True)
class TensorSpec:
    """The layout of a tensor of a trace, and its place in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: int
    """The storage of the tensor, as an index of `Graph.values`; -1 if the graph does not contain the storage."""
    offset: int = 0
    """The position of the first element in the storage, in elements."""
    conj: bool = False
    """Whether the tensor is a lazy conjugate: kernels that cannot read one copy it first, which takes memory."""
    neg: bool = False
    """Whether the tensor is a lazy negative, likewise."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements. The storage of the tensor may have more or, if it is expanded, fewer."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One operation of a trace, with refs in place of tensors."""

    op: Any
    """A `torch._ops.OpOverload`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    """The numbers of the tensors that the operation returns, flat; None for a result that is not a tensor."""
    node: int | None
    """The node of the graph; None for a view, which makes no storage. Calls of one node run one after the other."""
    replaced: tuple[tuple[int, int], ...] = ()
    """The storages that the operation writes: tensors that span them before the call and after it, in pairs. The
    arguments of the call refer to the latter."""


class Layout(NamedTuple):
    """A description of an operand, from which a trace makes a fake tensor; part of the key of stored plans."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    accumulates: bool
    """Whether the gradient of the tensor is stored in `.grad`: whether the tensor is a leaf of autograd."""
    computed: bool = False
    """Whether autocast casts the tensor for each operation. Autocast caches only the casts of leaves that are not
    views."""
    transformed: bool = False
    """Whether a level of torch.func differentiates with respect to the tensor."""
    at_level: bool = False
    """Whether a level of torch.func wraps all tensors during the call."""
    unrecorded: bool = False
    """Whether the tensor requires grad in a call with grad mode off. `torch.matmul` chooses its kernel by that."""
    conj: bool = False
    """Whether the tensor is a lazy conjugate, see `TensorSpec`."""
    neg: bool = False
    """Whether the tensor is a lazy negative."""

    @property
    def is_tracked(self) -> bool:
        """Whether the tensor requires grad."""
        return self.requires_grad or self.unrecorded


class Backward(NamedTuple):
    """The properties of a backward pass on which a trace depends."""

    outputs: tuple[int, ...] | None = None
    """The outputs that get a cotangent; None to guess them."""
    autocast: Any = None
    """The state of autocast during the backward pass, see `ambient.autocast`; usually None. If autocast is on, the
    block of the forward pass is taken to be still open, otherwise to have ended, which frees the casts in its cache."""
    strides: tuple[tuple[int, ...], ...] | None = None
    """The strides of the cotangents, see `strides_of`; None for the strides of the outputs."""
    chosen: tuple[int | str, ...] | None = None
    """An alternative to `outputs`: tensors of the result, by position or name."""
    then: Any = None
    """An `updates.Ending`: what follows on the backward pass, a gradient being no result of the call then."""
    recorded: bool | None = None
    """Whether autograd records the backward pass (`create_graph=True`), which changes derivative formulas; None to
    guess it."""
    wrapped: bool | None = None
    """Whether the backward pass runs at a level of torch.func, which changes derivative formulas; None to guess it. In
    a trace, None means that the operations do not depend on it."""
    stored: bool | None = None
    """Whether autograd stores the gradients of leaves in `.grad`, which it lays out like the leaf, rather than to
    return them or to show them to hooks. None to assume that it does; in a trace, None means that this makes no
    difference."""
    observed: tuple[Observed, ...] = ()
    """Backward passes of earlier calls to guess from, the latest first."""


class Observed(NamedTuple):
    """A backward pass that has run, with the outputs of its call."""

    flags: tuple[bool, ...]
    """By output: whether it requires grad."""
    shapes: tuple[tuple[int, ...], ...]
    """By output."""
    backward: Backward

    def expected(self, shapes: Sequence[tuple[int, ...]], strides: Sequence[tuple[int, ...]]) -> Backward:
        """Returns the backward pass to expect of a call whose outputs have these shapes and strides.

        Where a shape has changed, the gradient is taken to be laid out like the output, or expanded if it was that
        before, like the gradient of a sum. The call itself tells how autograd runs the pass (`recorded`, `wrapped`).
        """

        def stride(output: int, then: tuple[int, ...]) -> tuple[int, ...]:
            if shapes[output] == self.shapes[output]:
                return then
            return strides[output] if any(then) else (0,) * len(shapes[output])

        pairs = zip(self.backward.outputs or (), self.backward.strides or (), strict=True)
        found = tuple([stride(output, then) for output, then in pairs])
        return self.backward._replace(strides=found, recorded=None, wrapped=None)


_LIKELY = Backward()


class Batch(NamedTuple):
    """A `vmap` outside of the transform that differentiates a call."""

    dims: tuple[int | None, ...]
    """By operand: its batch dimension; None if it has none."""
    size: int
    randomness: str


class General(NamedTuple):
    """A trace with symbols, and the calls that it made for some sizes."""

    trace: Any
    """The trace with symbols (`_trace.sized.SizedTrace`). All traces that it makes have the same calls, except for
    numbers in arguments that are not tensors."""
    sizes: tuple[int, ...]
    """The values of the symbols."""
    calls: tuple[Call, ...]
    """A trace with other calls was changed afterwards."""
    nbytes: tuple[int, ...]
    """By value of the graph: its bytes."""


@dataclass(frozen=True)
class Trace:
    """The graph, the operations of its nodes, and the inputs and outputs of both passes as numbers of tensors."""

    graph: Graph
    calls: tuple[Call, ...]
    tensors: tuple[TensorSpec, ...]
    operands: tuple[int, ...] = ()
    """The tensors of the arguments, then the captured tensors."""
    constants: tuple[tuple[int, torch.Tensor], ...] = ()
    """The tensors that the function makes of Python numbers, with the data that each call copies (`held_data`)."""
    spec: Any = None
    """The tree structure of the result."""
    leaves: tuple[Any, ...] = ()
    """The leaves of the result: ('out', i) for output i, ('in', i) for argument i, otherwise the leaf itself."""
    outputs: tuple[int, ...] = ()
    flags: tuple[bool, ...] = ()
    """By output: whether it requires grad."""
    cotangents: tuple[int | None, ...] = ()
    """By output: its cotangent; None if the output gets none."""
    gradients: tuple[int | None, ...] = ()
    """By operand: its gradient; None if it does not require grad, or no differentiated output depends on it."""
    delivered: tuple[int, ...] = ()
    """The operands that are leaves, in the order in which autograd gives them their gradients; empty if not known."""
    differentiable: tuple[bool, ...] | None = None
    """By operand: whether autograd leads from a result to it; None if that is not known."""
    regrouped: tuple[int, ...] = ()
    """The outputs with views, made after the call, whose gradients plain autograd adds up in another order."""
    regions: tuple[tuple[frozenset[int], Any], ...] = ()
    """The rematerialised regions inside, inner ones first: the nodes whose results stay inside, and the policy."""
    backward: Backward = _LIKELY
    """The backward pass, with `outputs` set."""
    out_dims: tuple[int | None, ...] = ()
    """By output: its batch dimension, if the call is under a `Batch`."""
    grad_dims: tuple[int | None, ...] = ()
    """By operand: the batch dimension of its gradient."""
    versions: tuple[tuple[int, int], ...] = ()
    """Pairs of a tensor and the position of the operand whose memory it is, after a write of the forward pass."""
    given: tuple[Callable[[], torch.Tensor | None], ...] = ()
    """By operand: the memory of the tensor of the traced call, see `memories`."""
    late: tuple[Any, ...] = ()
    """What Python code of the backward pass may have read (`late.LateReads`), if any has run."""
    general: General | None = None
    """What made the calls, if other sizes have the same calls."""
    other_sizes: Any = None
    """The costs of calls with other sizes (`cost.by_size.CostsBySize`), if there may be any."""

    @property
    def sized(self) -> Any:
        """The trace with symbols that made exactly these calls; None if there is none, or the calls were changed."""
        return self.general.trace if self.general is not None and self.general.calls is self.calls else None

    def producers(self) -> dict[int, Call]:
        """Returns the call that makes each tensor."""
        made = {new: call for call in self.calls for _, new in call.replaced}
        return made | {t: call for call in self.calls for t in call.outputs if t is not None}


_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
_STATISTICS = dict.fromkeys(_NORMS, (3, 4))


class Recorded(NamedTuple):
    """A call as the recorder writes it down, before the graph is assembled."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    is_view: bool
    source: str
    replaced: tuple[tuple[int, int], ...] = ()
    module: str = ""
    accumulates: bool = False
    """Whether this call is an addition of gradients by autograd's engine, in place if nothing else holds the sum."""
    differentiates: bool = False
    """Whether autograd's engine made this call, in a backward pass of its own or in one inside of the function."""


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an operation changes in place."""
    return [*written_tensors(func, args, kwargs), *(args[i] for i in statistics_of(func, args))]


def count_writes(func: Any, written: Sequence[torch.Tensor]) -> None:
    """Increases the versions of tensors that `torch._foreach_…_` functions write, as their kernels do.

    Autograd does it itself for all other operations.
    """
    if func.overloadpacket.__name__.startswith("_foreach_"):
        for tensor in written:
            torch.autograd.graph.increment_version(tensor)


def statistics_of(op: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Returns the positions of running statistics that a call writes but does not read; its schema omits this write.

    Without running statistics, the operation computes the same result. A recompute runs it that way.
    """
    positions = _STATISTICS.get(op, ())
    training = bool(positions) and args[5] is True
    return tuple(i for i in positions if training and args[i] is not None)


# Namespaces whose operations carry the tag `nondeterministic_seeded` whenever they draw random numbers.
_BUILT_IN = {
    "aten",
    "prims",
    "prim",
    "fckpt",
    "fckpt_step",
    "quantized",
    "inductor",
    "mkldnn",
    "onednn",
    "_c10d_functional",
}
DECLARED_PURE = {"transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback_backward"}
"""Names of other operations that have been declared free of side effects (`fckpt.cost.register_pure`).

The first ones are the products of a mixture of experts in the library transformers, which loop over `torch.mm`.
"""


OPAQUE = {
    "workspace", "reserve", "reserveSpace", "reservedSpace", "rng_state", "philox_seed", "philox_offset", "cum_seq_q",
    "cum_seq_k", "offset2bag", "bag_size", "maximum_indices",
}  # fmt: skip
"""Names of arguments, in the schemas of operations, that are opaque tensors with a private format."""


def is_built_in(op: Any) -> bool:
    """Whether an operation belongs to torch or fckpt."""
    name = getattr(op, "_qualified_op_name", None) or op.name()
    return name.partition("::")[0] in _BUILT_IN


def is_random(op: Any) -> bool:
    """Whether an operation draws random numbers, or may do so: custom operations do not always have the tag."""
    if is_tagged_random(op) or getattr(op, "namespace", "aten") in _BUILT_IN:
        return is_tagged_random(op)
    return DECLARED_PURE.isdisjoint((str(op), str(op.overloadpacket)))


@functools.lru_cache(1024)
def is_tagged_random(op: Any) -> bool:
    """Whether an operation is tagged as drawing random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def draws(call: Call | Recorded) -> bool:
    """Whether a call may draw random numbers. Attention without dropout does not."""
    if not is_random(call.op):
        return False
    named = enumerate(call.op._schema.arguments)
    given = [(i, a.default_value if a.has_default_value() else None) for i, a in named if a.name == "dropout_p"]
    return all(call.args[i] if i < len(call.args) else call.kwargs.get("dropout_p", default) for i, default in given)


def indices_of(value: Any) -> list[int]:
    """Returns the tensors in an argument or several, in order, each as often as it occurs."""
    if isinstance(value, Ref):
        return [value.tensor]
    found: list[int] = []
    for inner in value if isinstance(value, (list, tuple)) else ():
        if isinstance(inner, Ref):  # without another call, since most arguments are tensors
            found.append(inner.tensor)
        elif isinstance(inner, (list, tuple)):
            found += indices_of(inner)
    return found


def generators_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[torch.Generator]:
    """Returns the generators among the arguments of an operation."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]


def tensors_of(call: Any) -> list[int]:
    """Returns the tensors among the arguments of a call, in order, each as often as it occurs."""
    return [*indices_of(call.args), *indices_of(tuple(call.kwargs.values()))]


def flat(result: Any) -> list[Any]:
    """Returns the results of an operation, without the lists among them."""
    if isinstance(result, (list, tuple)):
        return [inner for part in result for inner in flat(part)]
    return [result]


def unflat(like: Any, leaves: Iterator[Any]) -> Any:
    """Puts results into lists as in `like`."""
    if isinstance(like, (list, tuple)):
        return type(like)(unflat(part, leaves) for part in like)
    return next(leaves)


def mapped(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Returns an argument or a result with `fn(tensor)` in place of each tensor, also in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, fn) for v in value)
    return value


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill memory without gaps or repetitions, in any order of the dimensions."""
    extent = 1
    for step, size in sorted((st, n) for n, st in zip(shape, stride, strict=True) if n != 1):
        if step != extent:
            return False
        extent *= size
    return True


def places_of(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides that place elements: those of dimensions of size 1, and all of an empty tensor, become 0."""
    if 0 in shape:
        return (0,) * len(stride)
    return tuple([0 if size == 1 else step for size, step in zip(shape, stride, strict=True)])


def strides_of(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides on which results depend: those of `places_of`, but all strides of images (4 or 5 dimensions).

    Kernels for images choose the memory format of their result by all strides.
    """
    return tuple(stride) if len(shape) in (4, 5) and 0 not in shape else places_of(shape, stride)


def is_expanded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of a tensor share memory, as in the gradient of a sum."""
    return any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)) and 0 not in shape


def text_of(
    value: Any,
    specs: Sequence[TensorSpec],
    seen: dict[int, int],
    *,
    devices: bool = True,
    cotangents: Collection[int] = (),
) -> str:
    """Formats an argument of a call, the same in every process: a tensor as its layout, a generator as None.

    Args:
        value: the argument.
        specs: the specs of the tensors, by number.
        seen: the tensors of the call so far, with their numbers in the text. A repeated tensor is written as a number.
        devices: whether layouts include the device.
        cotangents: values whose strides are omitted.
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
        shared += " conj" * spec.conj + " neg" * spec.neg
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


def plain_cotangents(specs: Sequence[TensorSpec], outputs: Sequence[int], cotangents: Sequence[int | None]) -> set[int]:
    """Returns the values of the cotangents that have the strides of their output, or are expanded.

    Args:
        specs: the specs of the tensors, by number.
        outputs: the outputs of the trace.
        cotangents: by output: its cotangent, if it has one.
    """
    pairs = [(specs[t], specs[ct]) for t, ct in zip(outputs, cotangents, strict=True) if ct is not None]
    return {
        ct.value
        for output, ct in pairs
        if is_expanded(ct.shape, ct.stride)
        or strides_of(ct.shape, ct.stride) == strides_of(output.shape, output.stride)
    }


_POSITIONS = {"start", "end", "index", "shifts", "storage_offset"}
_NORMS_OF = {"p", "ord", "norm_type"}
"""Arguments that select a norm. Kernels may compute the norm of order 2 differently, with different temporaries."""


def arguments_of(call: Call, specs: Sequence[TensorSpec], cotangents: Collection[int]) -> str:
    """Formats the arguments on which the memory of an operation depends: `self=%0=float32[2,3](3,1), dim=[1]`.

    The text omits devices, the strides of these `cotangents`, and numbers that do not affect memory: floats other than
    the order of a norm, ints of pointwise and random operations, and the start of a slice. So a plan stays valid when
    such a number (a rate or a temperature, for example) changes from step to step.
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
        number = isinstance(value, (int, float, complex)) and not isinstance(value, bool)
        number = number and (free or name in _POSITIONS or (name not in _NORMS_OF and not isinstance(value, int)))
        texts.append(
            f"{name}={'a number' if number else text_of(value, specs, seen, devices=False, cotangents=cotangents)}"
        )
    return ", ".join(texts)
