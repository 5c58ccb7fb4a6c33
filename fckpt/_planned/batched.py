"""A function under `vmap` as a function of batched tensors, which is planned if the innermost level is a `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fckpt import _tree as tree
from fckpt._call.arguments import Arguments
from fckpt._call.levels import add_batch_dim, innermost, restore_vmap, unbatched, unseen, vmap_around_grad
from fckpt._call.places import Slot, placed, replaced
from fckpt._trace.operations import Batch
from fckpt._trace.vmap_of_grad import batch_dim

__all__ = ["NOT_BATCHED", "Batching", "outer_batch", "run_batched"]


class Batching(NamedTuple):
    """The levels of `vmap` that were removed from a call."""

    sizes: tuple[int, ...]
    passed: tuple[torch.Tensor, ...]
    """The tensors of the call, which became arguments when a level was removed."""


NOT_BATCHED = Batching((), ())


@dataclass(frozen=True)
class _Key:
    """The properties of a batched call on which its trace depends, besides the layouts of the batched tensors."""

    dims: tuple[int | None, ...]
    size: int
    randomness: str
    signature: Any


@dataclass(frozen=True)
class _Result:
    """The result of a batched call without its tensors."""

    spec: tree.TreeSpec
    leaves: tuple[Any, ...]
    """The leaves of the result, with None in place of tensors."""
    dims: tuple[int | None, ...]

    def __hash__(self) -> int:
        return hash(self.dims)


def run_batched(
    fn: Callable[..., Any],
    arguments: Arguments,
    closure: Sequence[torch.Tensor],
    slots: Sequence[Slot],
    batching: Batching,
    run: Callable[[Callable[..., Any], Arguments, Batching], Any],
) -> Any:
    """Runs a call below its innermost level, which must be a `vmap`.

    Args:
        fn: the function.
        arguments: the arguments of the call, in that level.
        closure: the captured tensors of `fn`.
        slots: the places that hold the captured tensors.
        batching: the levels that were removed before.
        run: runs a function on arguments below the level.
    """
    interpreter = innermost()
    level = interpreter.level()
    tensors = [*arguments.tensors, *closure]
    with unseen():
        pairs = [unbatched(t, level) for t in tensors]
    dims = tuple(dim for _, dim in pairs)
    key = _Key(dims, interpreter.batch_size(), interpreter.randomness(), arguments.signature())
    count = len(arguments.tensors)

    def batched(key: _Key, *batches: torch.Tensor) -> tuple[list[torch.Tensor], _Result]:
        ends: list[tuple[tree.TreeSpec, list[Any]]] = []

        def tensors_of(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            new = {id(t): x for t, x in zip(tensors, xs, strict=True)}
            args, kwargs = arguments.rebuild(xs[:count])
            with placed([(holder, key, replaced(value, new)) for holder, key, value in slots]):
                leaves, spec = tree.flatten(fn(*args, **kwargs))
            ends.append((spec, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
            return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

        outputs, dims = restore_vmap(tensors_of, key.dims, key.size, key.randomness)(*batches)
        spec, leaves = ends[0]
        return list(outputs), _Result(spec, tuple(leaves), tuple(dims))

    with interpreter.lower():
        below = Arguments((key, *(value for value, _ in pairs)), {})
        taken = Batching((*batching.sizes, key.size), (*batching.passed, *tensors))
        outputs, result = run(batched, below, taken)
    found = iter(add_batch_dim(x, dim, level) for x, dim in zip(outputs, result.dims, strict=True))
    return tree.unflatten(result.spec, [next(found) if leaf is None else leaf for leaf in result.leaves])


def outer_batch(operands: Sequence[torch.Tensor]) -> tuple[int, Batch | None]:
    """Returns the level of a `vmap` outside of the differentiating transform (0 if there is none), and how it batches
    operands.
    """
    outer = vmap_around_grad()
    if outer is None:
        return 0, None
    level = outer.level()
    return level, Batch(tuple(batch_dim(t, level) for t in operands), outer.batch_size(), outer.randomness())
