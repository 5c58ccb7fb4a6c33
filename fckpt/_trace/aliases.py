"""Outputs of a traced function that share memory with an argument or with each other.

A plan computes outputs that do not share memory. An output that is a view in the plain function is created again after
every call, as a view of the same argument or output. So in-place changes are visible to the other tensors and to
autograd (or raise an error) as in the plain function, and gradients are summed in the same places.

Private in torch 2.11 and 2.13: `torch._C._autograd._get_creation_meta`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._autograd import CreationMeta, _get_creation_meta
from torch.autograd.graph import get_gradient_edge

from fckpt._call.levels import unwrapped
from fckpt._call.modules import storage_of
from fckpt._call.results import Rebuilt
from fckpt._trace.lifetimes import nodes_behind
from fckpt._trace.recorder import Recorder
from fckpt._trace.stand_ins import WAY_OUT
from fckpt.errors import TraceError

NEW_LEAF = (
    "the function returns a parameter that it makes, or another new leaf that requires grad: a plan would return a "
    f"tensor without `.grad`. Make it outside, and pass it as an argument. {WAY_OUT}"
)

__all__ = ["NEW_LEAF", "apart", "is_unrecorded"]


def apart(
    leaves: list[Any], results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], count: int, recorder: Recorder
) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Returns the outputs that a plan must compute, and replaces the other outputs in `leaves` by view descriptions.

    Also returns the positions, among these outputs, of those with views whose gradients plain autograd adds up in
    another order, see `_adds_otherwise`.

    Args:
        leaves: the leaves of the result, in which ('out', i) and ('in', i) stand for tensors.
        results: the tensors for which ('out', i) stands.
        operands: the arguments, then the captured tensors.
        count: the number of operands that are arguments.
        recorder: the recorder of the trace.

    A view stays among the outputs if its gradient passes the user's code on the way to what it views: a hook, or a
    custom `autograd.Function`.
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
            base = operands[owner]
            members = [i for i in members if not _passes_users_code(results[i], base)]
            views |= _of(base, ("in", owner), members, results, recorder) or {}
    stay = [i for i in range(len(results)) if i not in views or i in bases]
    for storage, members in groups.items():
        if storage not in owners and _are_apart([i for i in members if i in stay], results, storage, recorder):
            for i in members:
                view = views.get(i) or Rebuilt(("out", i), results[i].requires_grad, ())
                views[i] = view._replace(refuses_writes=view.tracked)
    new = {("out", old): ("out", i) for i, old in enumerate(stay)}
    views = {i: view._replace(source=new.get(view.source, view.source)) for i, view in views.items()}
    for position, leaf in enumerate(leaves):
        if type(leaf) is tuple and leaf[:1] == ("out",):
            leaves[position] = views.get(leaf[1]) or new[leaf]
    regrouped = [i for i, base in bases.items() if _adds_otherwise(base, groups[storage_of(unwrapped(base))], results)]
    return [bases.get(i, results[i]) for i in stay], tuple(map(stay.index, regrouped))


def _of(
    base: torch.Tensor, source: tuple[str, int], members: list[int], results: Sequence[torch.Tensor], recorder: Recorder
) -> dict[int, Rebuilt] | None:
    """Returns the view steps from `base` to each output; None if they are unknown for one of the outputs."""
    found = {}
    if storage_of(unwrapped(base)) in recorder.hooked:
        return None
    for i in members:
        steps = recorder.steps(base, results[i])
        if steps is None:
            return None
        if results[i] is not base:
            unrecorded = is_unrecorded(results[i])
            tracked = results[i].requires_grad and not unrecorded
            if tracked and unwrapped(base) is base and not _leads_to(results[i], base):
                raise TraceError(NEW_LEAF)
            found[i] = Rebuilt(source, results[i].requires_grad, steps, unrecorded)
    return found


def _leads_to(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the gradient of a view reaches the base, and not only a leaf that was made of detached memory."""
    if not base.requires_grad:
        return False
    target = get_gradient_edge(base).node
    node = view.grad_fn
    while node is not None and node is not target:  # most views have one way
        node = next((node for node, _ in node.next_functions if node is not None), None)
    if node is target:
        return True
    behind = list(nodes_behind([view]))
    return any(node is target or any(n is target for n, _ in node.next_functions) for node in behind)


def _of_one_another(
    members: list[int], results: Sequence[torch.Tensor], recorder: Recorder
) -> tuple[torch.Tensor | None, dict[int, Rebuilt]]:
    """Returns the common base of outputs that share memory, and their view steps; (None, {}) if none are needed."""
    members = [i for i in members if not _passes_users_code(results[i], _base_of(results[i]))]
    bases = [_base_of(results[i]) for i in members if results[i].requires_grad]
    if not bases or any(base is not bases[0] for base in bases):
        return None, {}
    source = ("out", _place(bases[0], members, results))
    found = _of(bases[0], source, members, results, recorder) or {}
    # A single view whose base is not visible is equivalent to a separate tensor, if autograd allows writing to it.
    calls = [view.op for rebuilt in found.values() for view in rebuilt.steps]
    several = any(isinstance(op._schema.returns[0].type, torch.ListType) for op in calls)
    several |= any(rebuilt.unrecorded for rebuilt in found.values())
    return (bases[0], found) if found and (len(members) > 1 or several) else (None, {})


def _adds_otherwise(base: torch.Tensor, members: list[int], results: Sequence[torch.Tensor]) -> bool:
    """Whether plain autograd adds up the gradient of the base in another order than with views made after the call.

    Autograd adds the contributions of later operations first. Views that are made after the call are later than all
    operations of the call, and each of them starts from the base itself.
    """
    maker = base.grad_fn
    reads = lambda node: any(other is maker and i == base.output_nr for other, i in node.next_functions)
    behind = [node for node in nodes_behind(results) if reads(node)]
    ways = []
    for view in (results[i] for i in members if results[i] is not base):
        node = view.grad_fn
        while node is not None and node not in behind:
            node = node.next_functions[0][0] if node.next_functions else None
        ways += [] if node is None else [node]
    views, inside = set(ways), set(behind) - set(ways)
    if len(ways) > len(views) > 1:  # views of a view, whose gradients autograd adds up first
        return True
    if not views or not inside or len(members) + len(inside) < 3:
        return False
    return min(node._sequence_nr() for node in views) < max(node._sequence_nr() for node in inside)


def _are_apart(members: list[int], results: Sequence[torch.Tensor], storage: int, recorder: Recorder) -> bool:
    """Whether outputs with one storage are computed apart from each other, so that autograd cannot follow writes."""
    tracked = [results[i] for i in members if results[i].requires_grad]
    users = storage in recorder.hooked or any(_passes_users_code(t, _base_of(t)) for t in tracked)
    return users and (len(tracked) > 1 or any(t._is_view() for t in tracked))


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def _passes_users_code(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the gradient of a view passes a custom `autograd.Function` on its way to the base.

    Such a function may return its argument or a view of it, and compute another gradient, as for gradient reversal.
    """
    node = view.grad_fn
    while node is not None and node is not base.grad_fn:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        node = next((node for node, _ in node.next_functions if node is not None), None)
    return False


def is_unrecorded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view that was made under `no_grad`."""
    return tensor._is_view() and _get_creation_meta(tensor) == CreationMeta.NO_GRAD_MODE


def _place(base: torch.Tensor, members: Sequence[int], results: Sequence[torch.Tensor]) -> int:
    """Returns the output that a plan computes for a group: the base if the function returns it, or the first view."""
    return next((i for i in members if results[i] is base), members[0])
