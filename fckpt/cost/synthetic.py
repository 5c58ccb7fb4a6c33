"""Synthetic arguments for an operation: tensors with the right layouts, and with values that the operation accepts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fckpt._trace.operations import Call, Ref, TensorSpec, indices_of, tensors_of
from fckpt.cost.calls import extent, named, packet

__all__ = ["EXTREMES", "FILLS", "PRODUCTS", "arguments", "made_up"]

FILLS = ("usual", "zeros", "ones")
"""Ways to fill tensors, tried in this order until an operation accepts its arguments.

* Floats are always from [0, 1). "zeros" adds n to the diagonals of n by n matrices, which makes them positive definite.
* Integers: "usual" gives valid indices for operations that index, otherwise 0; "zeros" gives 0, "ones" gives 1.
* Masks: "usual" is half true, "zeros" is false, "ones" is true.
"""
EXTREMES = ("full", "zeros")
"""Ways to fill tensors for kernels whose allocations depend on data. "full": masks are true, and indices are random
valid ones. "zeros": masks are false, and indices are all 0."""
_BLOCK = 2**16  # the number of random numbers to draw; larger tensors repeat them


def made_up(
    call: Call, specs: Sequence[TensorSpec], fill: str, given: Mapping[int, torch.Tensor] | None = None
) -> dict[int, torch.Tensor]:
    """Makes the tensors that `call` reads, by number.

    Args:
        call: the operation.
        specs: the specs of the tensors, by number.
        fill: one of `FILLS` or `EXTREMES`.
        given: existing tensors, by number.
    """
    given = given or {}
    bounds = _index_bounds(call, specs) if fill in ("usual", "full") else {}
    fixed = _fitting(call, specs, fill) if fill in ("usual", "full") else {}
    indices = dict.fromkeys(tensors_of(call))
    missing = [i for i in indices if i not in given]
    alone = [i for i in missing if not _is_shared(specs, missing, i)]
    made = {i: fixed[i] if i in fixed else _tensor(specs[i], bounds.get(i, 0), fill) for i in alone}
    made |= _views(specs, [i for i in missing if i not in made], fill)
    return {i: given[i] if i in given else made[i] for i in indices}


def _is_shared(specs: Sequence[TensorSpec], indices: Sequence[int], index: int) -> bool:
    """Whether a tensor shares memory with another one. A kernel may detect that, and copy one of the two."""
    spec = specs[index]
    kin = [specs[i] for i in indices if specs[i].value == spec.value >= 0]
    return (
        len(kin) > 1
        and (spec.dtype.is_floating_point or spec.dtype.is_complex)
        and {s.dtype for s in kin} == {spec.dtype}
    )


def _views(specs: Sequence[TensorSpec], indices: Sequence[int], fill: str) -> dict[int, torch.Tensor]:
    """Makes tensors that share memory as in the trace."""
    made: dict[int, torch.Tensor] = {}
    for value in {specs[i].value for i in indices}:
        kin = [i for i in indices if specs[i].value == value]
        first = min(specs[i].offset for i in kin)
        count = max(specs[i].offset - first + extent(specs[i]) for i in kin)
        whole = _tensor(dataclasses.replace(specs[kin[0]], shape=(count,), stride=(1,), conj=False, neg=False), 0, fill)
        for i in kin:
            made[i] = _lazy(whole.as_strided(specs[i].shape, specs[i].stride, specs[i].offset - first), specs[i])
    return made


def arguments(
    call: Call, specs: Sequence[TensorSpec], fill: str, given: Mapping[int, torch.Tensor] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes the arguments of `call`, deterministically; equal refs become one tensor.

    Args:
        call: see `made_up`.
        specs: see `made_up`.
        fill: see `made_up`.
        given: see `made_up`.

    Returns:
        args and kwargs, with new generators.
    """
    tensors = made_up(call, specs, fill, given)
    return tuple([_substituted(value, tensors) for value in call.args]), _substituted(call.kwargs, tensors)


def _substituted(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return tensors[value.tensor]
    if isinstance(value, (list, tuple)):
        return [_substituted(item, tensors) for item in value]
    if isinstance(value, dict):
        return {k: _substituted(v, tensors) for k, v in value.items()}
    return torch.Generator(value.device) if isinstance(value, torch.Generator) else value


def _fitting(call: Call, specs: Sequence[TensorSpec], fill: str) -> dict[int, torch.Tensor]:
    """Makes tensors whose contents matter or depend on other arguments: masks with one true element per row, offsets of
    bags and of groups, a zero among the factors of a product.
    """
    given = named(call)
    if packet(call) in _GROUPED and given.get("offs") is not None:
        spec = specs[given["offs"].tensor]
        ends = _rows_in_groups(given, specs) * torch.arange(1, 1 + spec.shape[0], device=spec.device) // spec.shape[0]
        return {given["offs"].tensor: ends.to(spec.dtype)}
    if packet(call) in _BAGS:
        spec, count = specs[given["offsets"].tensor], specs[given["indices"].tensor].shape[0]
        offsets = torch.arange(spec.shape[0], device=spec.device) * count // max(1, spec.shape[0])
        return {given["offsets"].tensor: offsets.to(spec.dtype)}
    if packet(call) in PRODUCTS and fill == "full":
        spec = specs[given["x"].tensor]
        x = _tensor(spec, 0, "usual")
        x[(0,) * x.dim()].zero_()
        return {given["x"].tensor: x}
    if packet(call) not in _PUTS:
        return {}
    indices = indices_of(given["indices"])
    spec = specs[indices[0]] if len(indices) == 1 else None
    rows, target = (specs[given[name].tensor].shape for name in ("values", "self"))
    if spec is None or spec.dtype is not torch.bool or len(rows) != 1 + len(target) - len(spec.shape) or rows[0] == 1:
        return {}
    mask = torch.zeros(math.prod(spec.shape), dtype=torch.bool, device=spec.device)
    mask[: rows[0]] = True
    empty = torch.empty_strided(spec.shape, spec.stride, dtype=torch.bool, device=spec.device)
    return {indices[0]: empty.copy_(mask.view(spec.shape))}


_PUTS = {"aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index_put"}
PRODUCTS = {"fckpt_formulas.prod_backward", "fckpt_formulas.prod_backward_dim"}
"""Operations that allocate most if there is one zero."""
_GROUPED = {"aten._grouped_mm", "transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback_backward"}


def _rows_in_groups(given: Mapping[str, Any], specs: Sequence[TensorSpec]) -> int:
    """Returns how many rows the groups of a product share out: of the dimension that the operand of groups lacks."""
    left, right = (
        specs[given[name].tensor].shape for name in (("self", "mat2") if "self" in given else ("input", "weight"))
    )
    if len(left) == 3:
        return right[-1]
    return left[0] if len(right) == 3 else left[-1]


_BAGS = {"aten._embedding_bag", "aten._embedding_bag_forward_only"}


def _tensor(spec: TensorSpec, bound: int, fill: str) -> torch.Tensor:
    count = extent(spec)
    flat = torch.empty(count, dtype=spec.dtype, device=spec.device)
    if count:
        done = min(count, _BLOCK)
        flat[:done].copy_(_numbers(spec.dtype, done, bound, fill))
        while done < count:
            more = min(done, count - done)
            flat[done : done + more].copy_(flat[:more])
            done += more
    tensor = flat.as_strided(spec.shape, spec.stride)
    rows, columns = (0, 0, *spec.shape)[-2:]
    if fill == "zeros" and rows == columns > 1 and spec.dtype.is_floating_point and 0 not in spec.stride:
        tensor.diagonal(dim1=-2, dim2=-1).add_(rows)
    return _lazy(tensor, spec)


def _lazy(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns a tensor as the lazy conjugate or negative that `spec` describes."""
    tensor = tensor.conj() if spec.conj else tensor
    return torch.ops.aten._neg_view(tensor) if spec.neg else tensor


@functools.cache
def _block() -> np.ndarray[Any, Any]:
    """Returns random numbers from [0, 1), drawn once, in memory that torch's allocator does not count."""
    return np.random.default_rng(0).random(_BLOCK, dtype=np.float32)


def _numbers(dtype: torch.dtype, count: int, bound: int, fill: str) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.from_numpy(_block()[:count])
    if fill == "usual" and dtype is torch.bool:
        return torch.from_numpy(_block()[:count]) < 0.5
    if fill in ("usual", "full") and bound > 1:
        generator = torch.Generator("cpu").manual_seed(0)
        return torch.randint(bound, (count,), generator=generator, device="cpu", dtype=torch.int64)
    true = fill == "ones" or (fill == "full" and dtype is torch.bool)
    return torch.full((count,), true, device="cpu", dtype=torch.bool)


def _index_bounds(call: Call, specs: Sequence[TensorSpec]) -> dict[int, int]:
    """Returns, by tensor of indices, the number of valid indices."""
    find = _BOUNDS.get(packet(call))
    if find is None:
        return {}
    found = find(named(call), lambda ref: specs[ref.tensor].shape)
    return {ref.tensor: bound for ref, bound in found if isinstance(ref, Ref)}


_Shape = Callable[[Ref], tuple[int, ...]]
_Bounds = list[tuple[Any, int]]


def _rows(call: dict[str, Any], shape: _Shape) -> _Bounds:
    return [(call["indices"], shape(call["weight"])[0])]


def _weights(call: dict[str, Any], shape: _Shape) -> _Bounds:
    return [(call["indices"], call["num_weights"])]


def _along(call: dict[str, Any], shape: _Shape) -> _Bounds:
    size = shape(call["self"])
    return [(call["index"], size[call["dim"]] if size else 1)]


def _anywhere(call: dict[str, Any], shape: _Shape) -> _Bounds:
    return [(call["index"], math.prod(shape(call["self"])))]


def _each(call: dict[str, Any], shape: _Shape) -> _Bounds:
    return list(zip(call["indices"], shape(call["self"]), strict=False))


def _classes(call: dict[str, Any], shape: _Shape) -> _Bounds:
    size = shape(call["self"])
    return [(call["target"], size[min(1, len(size) - 1)])]


def _plane(dims: int) -> Callable[[dict[str, Any], _Shape], _Bounds]:
    return lambda call, shape: [(call["indices"], math.prod(shape(call["self"])[-dims:]))]


_BOUNDS: dict[str, Callable[[dict[str, Any], _Shape], _Bounds]] = {
    "aten.embedding": _rows,
    "aten._embedding_bag": _rows,
    "aten._embedding_bag_forward_only": _rows,
    "aten.embedding_dense_backward": _weights,
    "aten.take": _anywhere,
    "aten.put": _anywhere,
    **dict.fromkeys(
        ["aten.gather", "aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_", "aten.scatter_reduce"]
        + ["aten.index_select", "aten.index_add", "aten.index_add_", "aten.index_copy", "aten.index_fill"],
        _along,
    ),
    **dict.fromkeys(
        ["aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"]
        + ["aten._unsafe_index", "aten._unsafe_index_put"],
        _each,
    ),
    "aten.nll_loss_forward": _classes,
    "aten.nll_loss_backward": _classes,
    "aten.nll_loss2d_forward": _classes,
    "aten.nll_loss2d_backward": _classes,
    "aten.max_pool2d_with_indices_backward": _plane(2),
    "aten.adaptive_max_pool2d_backward": _plane(2),
    "aten.max_pool3d_with_indices_backward": _plane(3),
    "aten.adaptive_max_pool3d_backward": _plane(3),
}
