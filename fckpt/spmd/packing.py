"""Packs pytrees into messages, and divides, concatenates and pads dimensions over ranks."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.spmd.mesh import Along

__all__ = ["dimension", "divided", "filled_up", "joined", "packed", "with_padding", "without_padding"]


def dimension(function: str, dim: int, dims: int) -> int:
    """Returns the non-negative number of a dimension.

    Raises:
        ArgumentTypeError, ArgumentValueError: the dimension does not exist. The error names `function`.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ArgumentTypeError(f"{function}: a dimension must be an int, such as 0 or -1, not {dim!r}.")
    if not -dims <= dim < dims:
        raise ArgumentValueError(f"{function}: dimension {dim} does not exist in a tensor with {dims} dimensions.")
    return dim % dims


def divided(function: str, x: torch.Tensor, dim: int, size: int, along: Along, tiled: bool) -> torch.Tensor:
    """Splits dimension `dim` of `x` into one part per rank, stacked along a new first dimension."""
    at = dimension(function, dim, x.dim())
    length = x.shape[at]
    if tiled and length % size:
        raise ArgumentValueError(
            f"{function}: dimension {dim} of length {length} cannot be divided among the {size} ranks along "
            f"{along.said}. Pad it to a multiple{' (pad=True)' if function == 'psum_scatter' else ''}."
        )
    if not tiled and length != size:
        raise ArgumentValueError(
            f"{function}: dimension {dim} is {length} long, but there are {size} ranks along {along.said}. Pass "
            "tiled=True to divide the dimension among the ranks."
        )
    return (x.unflatten(at, (size, length // size)) if tiled else x).movedim(at, 0)


def joined(function: str, x: torch.Tensor, dim: int, dims: int, tiled: bool) -> torch.Tensor:
    """Moves the first dimension of `x`, which runs over the ranks, to `dim`; with `tiled`, merges it into `dim`."""
    at = dimension(function, dim, dims)
    moved = x.movedim(0, at)
    return moved.flatten(at, at + 1) if tiled else moved


def filled_up(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Pads dimension `dim` of `x` with zeros at its end to `length`."""
    missing = length - x.shape[dim]
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def with_padding(function: str, x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Pads dimension `dim` of `x` with zeros at its end, so that it can be divided into `size` equal parts."""
    at = dimension(function, dim, x.dim())
    return filled_up(x, at, x.shape[at] + -x.shape[at] % size)


def without_padding(function: str, x: torch.Tensor, dim: int, size: int, ranks: int) -> torch.Tensor:
    """Undoes `with_padding`: removes the padding from dimension `dim`, whose length was `size` before.

    Raises:
        ArgumentValueError: a dimension of this size, padded for this number of ranks, has another length.
    """
    at = dimension(function, dim, x.dim())
    if x.shape[at] != size + -size % ranks:
        raise ArgumentValueError(
            f"{function}: {ranks} parts of length {x.shape[at] // ranks} do not make a dimension of length {size}: its "
            f"padded parts have length {-(-size // ranks)}."
        )
    return x.narrow(at, 0, size)


def packed(
    function: str,
    tree: Any,
    send: Callable[[torch.Tensor], torch.Tensor],
    ranks: int,
    *,
    begin: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    finish: Callable[[torch.Tensor, torch.Size], torch.Tensor] = lambda x, shape: x,
    scalar: Callable[[Any], Any] | None = None,
) -> Any:
    """Sends the leaves of a tree. Leaves with the same dtype, device and requires_grad are sent in one message.

    Args:
        function: the name of the public function, for errors.
        tree: a pytree of tensors.
        send: sends a tensor and returns the result. Its last dimension may run over the elements of several leaves.
        ranks: the number of leading dimensions of the argument of `send` that run over ranks.
        begin: applied to a leaf before it is sent.
        finish: applied to the result for a leaf, and the shape that was sent for one rank.
        scalar: applied to a leaf that is a number. None if numbers are an error.
    """
    leaves, spec = trees.flatten(tree)
    results: list[Any] = [*leaves]
    sent: dict[int, torch.Tensor] = {}
    for i, (path, leaf) in enumerate(zip(spec.paths(), leaves, strict=True)):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            sent[i] = begin(leaf)
        elif scalar is not None and isinstance(leaf, numbers.Number):
            results[i] = scalar(leaf)
        else:
            raise _not_sendable(function, f"tree{path}" if path else "it", leaf)
    kind = lambda i: (str(sent[i].dtype), str(sent[i].device), sent[i].requires_grad)
    for _, group in itertools.groupby(sorted(sent, key=kind), key=kind):
        members = [*group]
        shapes = [sent[i].shape[ranks:] for i in members]
        received = _sent_together([sent[i] for i in members], shapes, send, ranks)
        for i, part, shape in zip(members, received, shapes, strict=True):
            results[i] = finish(part, shape)
    return trees.unflatten(spec, results)


def _not_sendable(function: str, where: str, leaf: Any) -> ArgumentTypeError:
    if isinstance(leaf, torch.Tensor):
        said = f"dense tensors, but {where} is sparse ({leaf.layout}): pass its to_dense()"
    else:
        said = f"tensors, but {where} is {type(leaf).__name__}: {leaf!r}"
    return ArgumentTypeError(f"{function} takes {said}.")


def _sent_together(
    tensors: Sequence[torch.Tensor],
    shapes: Sequence[torch.Size],
    send: Callable[[torch.Tensor], torch.Tensor],
    ranks: int,
) -> list[torch.Tensor]:
    """Sends tensors in one message, and returns each one's result; `shapes` are the shapes for one rank."""
    if len(tensors) == 1:
        return [send(tensors[0])]
    whole = send(torch.cat([t.flatten(ranks) if t.dim() > ranks else t.unsqueeze(-1) for t in tensors], -1))
    parts = whole.split([shape.numel() for shape in shapes], -1)
    return [part.unflatten(-1, shape) if shape else part.squeeze(-1) for part, shape in zip(parts, shapes, strict=True)]
