"""Donated operands in a trace: results of a call are written over operands that the caller gives away.

Each result is written over the donated operand of the same layout from which the fewest operations lead to the result:
the new value of a parameter over the parameter. The write is the last operation that may read the operand; the copy
follows on the function's own operations, and `with_early_updates` moves it to the first place at which it may run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from fckpt import _tree as tree
from fckpt._call.levels import below_all
from fckpt._trace.operations import Recorded, is_dense, tensors_of
from fckpt._trace.recorder import Recorder

__all__ = ["written_over_donated"]

_FURTHEST = 24
"""Operations between an operand and the result that is written over it, if nothing else decides."""


def written_over_donated(
    result: Any, operands: Sequence[torch.Tensor], donated: Sequence[int], recorder: Recorder
) -> Any:
    """Records the writes of results over donated operands; returns the result with these operands in their places.

    Args:
        result: the return value of the function, a pytree.
        operands: the tensors that stand for the operands.
        donated: the positions of donated operands.
        recorder: the recorder of the trace.
    """
    leaves, spec = tree.flatten(result)
    own = [storage for t in leaves if isinstance(t, torch.Tensor) and (storage := _storage(t))]
    taken = {_storage(t) for t in operands}
    free = [
        i
        for i, t in enumerate(leaves)
        if isinstance(t, torch.Tensor) and _storage(t) not in taken and own.count(_storage(t)) == 1
    ]
    # An operand that is returned, or a view of it, keeps its value; one that the function has written has its result.
    waiting = [
        n
        for n in donated
        if _storage(operands[n]) not in own and recorder.version(operands[n]) not in recorder.written.values()
    ]
    recorder.start_ending()
    held = list(leaves)  # the plain function holds all results to its end
    with below_all(), torch.no_grad():
        for position, number in _pairs(leaves, free, operands, waiting, recorder):
            operands[number].copy_(leaves[position])
            leaves[position] = operands[number]
    del held
    return tree.unflatten(spec, leaves)


def _pairs(
    leaves: Sequence[Any],
    free: Sequence[int],
    operands: Sequence[torch.Tensor],
    waiting: Sequence[int],
    recorder: Recorder,
) -> list[tuple[int, int]]:
    """Returns pairs of a result and the operand that it is written over, in the order of the results."""
    wanted = {recorder.number(operands[n]): n for n in waiting}
    producers = {t: call for call in recorder.calls for t in call.outputs if t is not None}
    found = []
    for place, i in enumerate(free):
        distances = _distances(recorder.number(leaves[i]), wanted, producers, recorder)
        for rank, number in enumerate(waiting):
            if _layout(leaves[i]) == _layout(operands[number]) and is_dense(leaves[i].shape, leaves[i].stride()):
                found.append((distances.get(number, _FURTHEST + abs(rank - place)), i, number))
    pairs: dict[int, int] = {}
    for _, i, number in sorted(found):
        if i not in pairs and number not in pairs.values():
            pairs[i] = number
    return sorted(pairs.items())


def _distances(
    tensor: int, wanted: dict[int, int], producers: dict[int, Recorded], recorder: Recorder
) -> dict[int, int]:
    """Returns, by operand, the number of operations on tensors of one shape that lead from the operand to `tensor`."""
    shape = recorder.tensors[tensor].shape
    found, todo, seen = {}, deque([(tensor, 0)]), {tensor}
    while todo:
        t, distance = todo.popleft()
        if t in wanted:
            found[wanted[t]] = distance
        if t not in producers or distance >= _FURTHEST:
            continue
        call = producers[t]
        for other in tensors_of(call):
            if other not in seen and recorder.tensors[other].shape == shape:
                seen.add(other)
                todo.append((other, distance + 1))
    return found


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
