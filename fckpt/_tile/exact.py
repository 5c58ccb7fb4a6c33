"""Tests of whether tiles compute the bits of the whole operation, on the real kernels.

An operation of a stretch runs whole, and tile by tile with the layouts that the tiles will have, on the same made-up
data, at its real size and with the current settings. If every operation of a stretch gives equal bits for equal
operands, so does the stretch. The control flow of kernels does not depend on data, so a kernel that cuts its work
differently for a tile differs in many elements, of which the test compares at least `SAMPLES`.

Such a test can miss one difference: kernels for pointwise operations compute the last few elements of an array one by
one, with another function than the vectors before them. So a second test finds out whether an element's result depends
on its position. If it does, tiles must be contiguous and begin where a vector begins.

Tensors without memory (on the meta device) cannot be tested. There, operations that are exact by definition count as
exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from fckpt._tile.gathered import gathered
from fckpt._tile.rewriting import INTO, Rewriting
from fckpt._tile.slices import Slices
from fckpt._tile.stretches import Gathered, Step
from fckpt._tile.surroundings import as_planned
from fckpt._tile.ways import SUM, is_pointwise
from fckpt._trace.operations import Call, Ref, TensorSpec, Trace, tensors_of
from fckpt.cost.calls import signature
from fckpt.cost.synthetic import arguments

__all__ = ["gathers_exactly", "inexact", "is_exact"]

aten = torch.ops.aten

SAMPLES = 200_000
DRAWS = 8
"""At most so many draws of random data, for operations with few elements."""
VECTOR = 64
"""A multiple of the number of elements that kernels compute at once, in all unrolled steps of a loop."""
ONE_THREAD = 32_768
"""Pointwise operations on at most so many elements run in one thread."""
_POSITIONS = 96
_BY_DEFINITION = {
    aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default, aten.gather.default,
    aten._log_softmax_backward_data.default, aten.nll_loss_backward.default, aten.embedding.default,
}  # fmt: skip


def inexact(rewriting: Rewriting) -> list[int]:
    """Returns the nodes of a stretch whose tiles do not compute the bits of the whole operation.

    Args:
        rewriting: the rewriting of the stretch, after it has made a trace.
    """
    return [node for node in rewriting.slices.ways if not _is_exact(rewriting, node)]


def is_exact(trace: Trace, steps: Sequence[Step]) -> bool:
    """Whether all steps of a rewriting keep the bits, with the kernels and settings of this process.

    Raises:
        Untileable: a step is impossible.
    """
    for step in steps:
        if isinstance(step, Gathered):
            if not gathers_exactly(trace, step.node):
                return False
            trace = gathered(trace, step.node)
        else:
            rewriting = Rewriting(Slices(trace, step))
            trace = rewriting.trace()
            if inexact(rewriting):
                return False
    return True


def gathers_exactly(trace: Trace, index: int) -> bool:
    """Whether the loss at a node keeps its bits if it reads gathered elements (`gathered`), ignored rows included."""
    call = next(call for call in trace.calls if call.node == index)
    rewritten = gathered(trace, index)
    calls = [c for c in rewritten.calls if c.node in range(index, index + 5) or c.op is aten.unsqueeze.default]
    last = next(c for c in rewritten.calls if c.outputs == call.outputs)
    calls = [c for c in calls if c not in trace.calls and c is not last] + [last]
    key = (signature(call, trace.tensors), "gathered", torch.get_num_threads(), _settings())
    if key not in _known:
        device = trace.tensors[call.args[0].tensor].device
        if device.type == "meta":
            _known[key] = True
        else:
            try:
                with as_planned():
                    _known[key] = all(_gathers(call, calls, trace.tensors, draw) for draw in range(DRAWS))
            except Exception:  # as above
                return False
    return _known[key]


def _gathers(call: Call, calls: Sequence[Call], specs: Sequence[TensorSpec], draw: int) -> bool:
    args, _ = arguments(call, specs, "usual")
    _randomise(args[0], draw)
    args[1][draw::DRAWS] = args[4]
    found = {call.args[0].tensor: args[0], call.args[1].tensor: args[1]}
    for step in calls:
        made = _results(step.op(*_given(step.args, found)))
        found |= {t: x for t, x in zip(step.outputs, made, strict=True) if t is not None}
    expected = _results(call.op(*args))
    return all(_equal(found[t], x) for t, x in zip(call.outputs, expected, strict=True) if t is not None)


_known: dict[Any, bool] = {}


def _is_exact(rewriting: Rewriting, node: int) -> bool:
    """Whether the tiles of a node are exact, from an earlier test of equal calls if there was one."""
    slices = rewriting.slices
    call, way = slices.calls[node], slices.ways[node]
    specs = [slices.specs[t] for t in (*tensors_of(call), *(t for t in call.outputs if t is not None))]
    layouts = [_layout(rewriting.specs[t]) for args, kwargs in rewriting.sent[node] for t in _tensors(args, kwargs)]
    inside = tuple(read.base is not None for read in slices.reads[node])
    key = (signature(call, slices.specs), way, tuple(layouts), inside, torch.get_num_threads(), _settings())
    if key not in _known:
        if any(spec.device.type == "meta" for spec in specs):
            _known[key] = not way.sums and (is_pointwise(call.op) or call.op in _BY_DEFINITION)
        else:
            try:
                with as_planned():
                    _known[key] = _agrees(rewriting, node)
            except Exception:  # a kernel may raise any exception on made-up data, or lack memory
                return False
    return _known[key]


def _settings() -> tuple[Any, ...]:
    cuda = torch.backends.cuda.matmul
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        cuda.allow_fp16_reduced_precision_reduction,
        cuda.allow_bf16_reduced_precision_reduction,
    )


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    return tensors_of(Call(None, tuple(args), kwargs, (), None))


def _layout(spec: TensorSpec) -> tuple[Any, ...]:
    return (spec.shape, spec.stride)


def _agrees(rewriting: Rewriting, node: int) -> bool:
    slices = rewriting.slices
    call, way = slices.calls[node], slices.ways[node]
    if way.sums and any(slices.specs[t].dtype.is_floating_point for t in tensors_of(call)):
        return False  # another order of the sum
    if is_pointwise(call.op) and not _is_aligned(slices, node) and _is_positional(call, slices.specs):
        return False
    elements = sum(math.prod(slices.specs[t].shape) for t in call.outputs if t is not None)
    for draw in range(min(DRAWS, max(1, math.ceil(SAMPLES / max(1, elements))))):
        args, kwargs = arguments(call, slices.specs, "usual")
        whole = dict(zip(tensors_of(call), _flat((args, kwargs)), strict=True))
        for tensor in whole.values():
            _randomise(tensor, draw)
        expected = _results(call.op(*args, **kwargs))
        found: list[Any] = [None] * len(expected)
        for tile, sent in enumerate(rewriting.sent[node]):
            parts = _tile(rewriting, node, tile, whole)
            tile_args, tile_kwargs = _given(sent[0], parts), {k: _given(v, parts) for k, v in sent[1].items()}
            if way.makes == (SUM,) and tile and call.op in INTO:
                INTO[call.op](found[0], *tile_args)
                continue
            for i, part in enumerate(_results(call.op(*tile_args, **tile_kwargs))):
                if way.makes[i] == SUM:
                    found[i] = part if tile == 0 else found[i].add_(part)
                elif not _equal(part, expected[i].narrow(way.makes[i], *_span(slices, call.outputs[i], way, i, tile))):
                    return False
        if not all(_equal(f, e) for f, e in zip(found, expected, strict=True) if f is not None):
            return False
    return True


def _span(slices: Slices, tensor: Any, way: Any, i: int, tile: int) -> tuple[int, int]:
    first, end = slices.slice_of(tensor, way.makes[i], tile)
    return first, end - first


def _tile(rewriting: Rewriting, node: int, tile: int, whole: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns the tensors of a tile, with the layouts that they will have, by number."""
    slices, sent = rewriting.slices, rewriting.sent[node][tile]
    found: dict[int, torch.Tensor] = {}
    for read, number in zip(slices.reads[node], _tensors(*sent), strict=True):
        data = whole[read.tensor]
        if read.dim is not None:
            first, end = slices.slice_of(read.tensor, read.dim, tile)
            data = data.narrow(read.dim, first, end - first)
        if read.base is not None:
            spec = rewriting.specs[number]
            data = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(data)
        found[number] = data
    return found


def _given(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return tensors[value.tensor]
    return type(value)([_given(v, tensors) for v in value]) if isinstance(value, (list, tuple)) else value


def _randomise(tensor: torch.Tensor, draw: int) -> None:
    """Fills a floating point tensor with numbers from [0, 1) or, in every other draw, of both signs."""
    if tensor.dtype.is_floating_point:
        generator = torch.Generator(tensor.device).manual_seed(draw)
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        low, high = ((-2.0, 2.0), (0.0, 1.0))[draw % 2]
        tensor.as_strided((count,), (1,), 0).uniform_(low, high, generator=generator)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal bits; all NaN are alike."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    if torch.equal(one.view(bits), other.view(bits)):
        return True
    number = ~(one.isnan() & other.isnan())
    return torch.equal(one.view(bits)[number], other.view(bits)[number])


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [t for v in value for t in _flat(v)] if isinstance(value, (list, tuple)) else []


def _results(result: Any) -> list[torch.Tensor]:
    return _flat(result)


def _is_aligned(slices: Slices, node: int) -> bool:
    """Whether all operands of a pointwise operation are contiguous, and tiles begin where a vector begins."""
    call, way = slices.calls[node], slices.ways[node]
    out = slices.specs[call.outputs[0]]  # type: ignore[index]  # a call of a node has a result
    threads = out.device.type == "cpu" and torch.get_num_threads() > 1 and math.prod(out.shape) > ONE_THREAD
    dim, row = way.makes[0], math.prod(out.shape[way.makes[0] + 1 :])
    if threads or math.prod(out.shape[:dim]) != 1:
        return False
    for t in tensors_of(call):
        spec = slices.specs[t]
        if spec.shape != () and (spec.shape, spec.stride) != (out.shape, out.stride):
            return False
    times = out.shape[dim] // slices.unit
    contiguous = torch.empty(out.shape, device="meta").stride() == out.stride
    return contiguous and all(b * times * row % VECTOR == 0 for b in slices.bounds[1:-1])


def _is_positional(call: Call, specs: Sequence[TensorSpec]) -> bool:
    """Whether the result of an element depends on its position in an array, by a test of the kernel."""
    used = tensors_of(call)
    types = tuple((specs[t].dtype, specs[t].shape == ()) for t in used)
    key = (call.op, types, _scalars(call), specs[used[0]].device, _settings())
    if key not in _positional:
        try:
            _positional[key] = _differs_by_position(call, specs)
        except Exception:  # it takes no vectors
            return True
    return _positional[key]


_positional: dict[Any, bool] = {}


def _scalars(call: Call) -> str:
    return signature(call, _Vectors())  # type: ignore[arg-type]  # only indexed


class _Vectors:
    """Specs that are all alike, so that a signature consists of the other arguments."""

    def __getitem__(self, tensor: int) -> TensorSpec:
        return TensorSpec((1,), (1,), torch.float32, torch.device("cpu"), tensor)


def _differs_by_position(call: Call, specs: Sequence[TensorSpec]) -> bool:
    for draw in range(2):
        data: dict[int, torch.Tensor] = {}
        for t in dict.fromkeys(tensors_of(call)):
            shape = () if specs[t].shape == () else (4 * _POSITIONS,)
            spec = TensorSpec(shape, (1,) * len(shape), specs[t].dtype, specs[t].device, t)
            args, _ = arguments(Call(call.op, (Ref(0),), {}, (), None), [spec], "usual")
            data[t] = args[0]
            _randomise(data[t], draw)
        run = functools.partial(_on, call)
        whole = run(data)
        for i in range(_POSITIONS):
            alone = run({t: x if x.ndim == 0 else x[i : i + 1] for t, x in data.items()})
            if not all(_equal(a, w[i : i + 1]) for a, w in zip(alone, whole, strict=True)):
                return True
    return False


def _on(call: Call, data: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    return _results(call.op(*_given(call.args, data), **{k: _given(v, data) for k, v in call.kwargs.items()}))
