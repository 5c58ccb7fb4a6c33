"""Outputs of a traced function that share memory with an argument or with one another.

A plan computes tensors that stand apart. What is a view in the plain function is made anew at every call, as a view of
the argument or of the output that it looks at: so writing to one of them is seen by the others and by autograd, or
raises, as in the plain function, and their gradients meet where they meet there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fckpt._call.levels import unwrapped
from fckpt._call.modules import storage_of
from fckpt._call.results import Rebuilt
from fckpt._trace.recorder import Recorder

__all__ = ["apart"]


def apart(
    leaves: list[Any], results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], count: int, recorder: Recorder
) -> list[torch.Tensor]:
    """Returns the outputs that a plan has to compute, and puts into `leaves` how the others are made of them.

    Args:
        leaves: of the result; ('out', i) and ('in', i) stand for tensors.
        results: the tensors ('out', i).
        operands: the arguments and what is closed over.
        count: how many of the operands are arguments.
        recorder: of the trace.
    """
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(results):
        groups.setdefault(storage_of(unwrapped(tensor)), []).append(i)
    owners = {storage_of(unwrapped(t)): i for i, t in enumerate(operands)}
    bases: dict[int, torch.Tensor] = {}
    views: dict[int, Rebuilt] = {}
    for storage, members in groups.items():
        owner = owners.get(storage)
        if owner is None:
            base, found = _of_one_another(members, results, recorder)
            if base is not None:
                bases[_place(base, members, results)] = base
            views |= found
        elif owner < count:
            views |= _of(operands[owner], ("in", owner), members, results, recorder) or {}
    stay = [i for i in range(len(results)) if i not in views or i in bases]
    new = {("out", old): ("out", i) for i, old in enumerate(stay)}
    views = {i: view._replace(source=new.get(view.source, view.source)) for i, view in views.items()}
    for position, leaf in enumerate(leaves):
        if type(leaf) is tuple and leaf[:1] == ("out",):
            leaves[position] = views.get(leaf[1]) or new[leaf]
    return [bases.get(i, results[i]) for i in stay]


def _of(
    base: torch.Tensor, source: tuple[str, int], members: list[int], results: Sequence[torch.Tensor], recorder: Recorder
) -> dict[int, Rebuilt] | None:
    """How outputs are made of `base`; None if that is unknown for one of them."""
    found = {}
    for i in members:
        steps = recorder.steps(base, results[i])
        if steps is None:
            return None
        if results[i] is not base:
            found[i] = Rebuilt(source, results[i].requires_grad, steps)
    return found


def _of_one_another(
    members: list[int], results: Sequence[torch.Tensor], recorder: Recorder
) -> tuple[torch.Tensor | None, dict[int, Rebuilt]]:
    """What outputs in the same memory are views of, and how they are made of it; nothing if they need not be."""
    tracked = [results[i] for i in members if results[i].requires_grad]
    bases = [t._base if t._is_view() and t._base is not None else t for t in tracked]
    if not bases or any(base is not bases[0] for base in bases):
        return None, {}
    source = ("out", _place(bases[0], members, results))
    found = _of(bases[0], source, members, results, recorder) or {}
    # One view of something that nobody else sees is as good as a tensor of its own, if it may be written.
    calls = [view.op for rebuilt in found.values() for view in rebuilt.steps]
    several = any(isinstance(op._schema.returns[0].type, torch.ListType) for op in calls)
    return (bases[0], found) if found and (len(members) > 1 or several) else (None, {})


def _place(base: torch.Tensor, members: Sequence[int], results: Sequence[torch.Tensor]) -> int:
    """Which output a plan computes for a group: the base, if it is returned itself, or else the first of its views."""
    return next((i for i in members if results[i] is base), members[0])
