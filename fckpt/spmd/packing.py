"""Pytrees in one message, and dimensions that are divided among ranks."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable
from typing import Any

import torch

from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.spmd.mesh import Along

__all__ = ["dimension", "divided", "filled_up", "joined", "packed", "with_padding", "without_padding"]


def dimension(function: str, dim: int, dims: int) -> int:
    """Returns a dimension counted from the front.

    Raises:
        ArgumentTypeError, ArgumentValueError: there is none. `function` is who is asked.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ArgumentTypeError(f"{function}: a dimension is a number, such as 0 or -1, not {dim!r}.")
    if not -dims <= dim < dims:
        raise ArgumentValueError(f"{function}: there is no dimension {dim} among {dims}.")
    return dim % dims


def divided(function: str, x: torch.Tensor, dim: int, size: int, along: Along, tiled: bool) -> torch.Tensor:
    """Returns `x` with the ranks in front, of whose parts dimension `dim` consists."""
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
            "tiled=True to give each a part of it."
        )
    return (x.unflatten(at, (size, length // size)) if tiled else x).movedim(at, 0)


def joined(function: str, x: torch.Tensor, dim: int, dims: int, tiled: bool) -> torch.Tensor:
    """Returns `x`, the ranks of which are in front, with them at dimension `dim` of `dims`."""
    at = dimension(function, dim, dims)
    moved = x.movedim(0, at)
    return moved.flatten(at, at + 1) if tiled else moved


def filled_up(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Returns `x` with zeros at the end of dimension `dim`, which is then so long."""
    missing = length - x.shape[dim]
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def with_padding(function: str, x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Returns `x` with zeros at the end of dimension `dim`, so that it can be divided into `size` equal parts."""
    at = dimension(function, dim, x.dim())
    return filled_up(x, at, x.shape[at] + -x.shape[at] % size)


def without_padding(function: str, x: torch.Tensor, dim: int, size: int, ranks: int) -> torch.Tensor:
    """Returns what `with_padding` has made of a tensor with dimension `dim` of length `size`, as it was before.

    Raises:
        ArgumentValueError: equal parts of so many ranks do not come of this size.
    """
    at = dimension(function, dim, x.dim())
    if x.shape[at] != size + -size % ranks:
        raise ArgumentValueError(
            f"{function}: {ranks} parts of {x.shape[at] // ranks} each are no parts of a dimension of length {size}: "
            f"they would have {-(-size // ranks)} each, the last ones filled up with zeros."
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
    """Sends the leaves of a tree, those of one dtype and device together, if all of them require grad or none does.

    Args:
        function: who is asked, for errors.
        tree: a pytree of tensors.
        send: takes and returns a tensor; dimensions after the first are left alone.
        ranks: how many dimensions in front of what `send` takes are ranks.
        begin: what to do with a leaf before.
        finish: what to do with what comes of a leaf, and the shape that was sent for one rank.
        scalar: what becomes of a number; None if there must not be one.
    """
    leaves, spec = trees.flatten(tree)
    results: list[Any] = [*leaves]
    sent: dict[int, torch.Tensor] = {}
    for i, (path, leaf) in enumerate(zip(spec.paths(), leaves, strict=True)):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                where = f"tree{path}" if path else "it"
                raise ArgumentTypeError(
                    f"{function} takes dense tensors, but {where} is sparse ({leaf.layout}): pass its to_dense()."
                )
            sent[i] = begin(leaf)
        elif scalar is not None and isinstance(leaf, numbers.Number):
            results[i] = scalar(leaf)
        else:
            where = f"tree{path}" if path else "it"
            raise ArgumentTypeError(f"{function} takes tensors, but {where} is {type(leaf).__name__}: {leaf!r}.")
    kind = lambda i: (str(sent[i].dtype), str(sent[i].device), sent[i].requires_grad)
    for _, group in itertools.groupby(sorted(sent, key=kind), key=kind):
        numbers_ = [*group]
        shapes = [sent[i].shape[ranks:] for i in numbers_]
        if len(numbers_) == 1:
            results[numbers_[0]] = finish(send(sent[numbers_[0]]), shapes[0])
            continue
        whole = send(
            torch.cat(
                [sent[i].flatten(ranks) if sent[i].dim() > ranks else sent[i].unsqueeze(-1) for i in numbers_], -1
            )
        )
        for i, part, shape in zip(numbers_, whole.split([s.numel() for s in shapes], -1), shapes, strict=True):
            results[i] = finish(part.unflatten(-1, shape) if shape else part.squeeze(-1), shape)
    return trees.unflatten(spec, results)
