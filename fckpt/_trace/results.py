"""The results of a traced forward pass, and the gradients that autograd computes from them."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fckpt import _tree as tree
from fckpt._call import ambient
from fckpt._call.levels import unwrapped
from fckpt._call.places import content
from fckpt._call.results import number_of, numbered
from fckpt._trace import formulas
from fckpt._trace.aliases import apart, is_unrecorded
from fckpt._trace.assemble import Interface
from fckpt._trace.lifetimes import nodes_behind
from fckpt._trace.operations import Backward, Layout, Observed, is_dense, places_of, strides_of
from fckpt._trace.recorder import Recorder
from fckpt._trace.stand_ins import WAY_OUT
from fckpt._trace.vmap_of_grad import Levels
from fckpt.errors import ArgumentValueError, TraceError

__all__ = ["Results", "likely_differentiated"]


def likely_differentiated(results: Sequence[torch.Tensor]) -> list[int]:
    """Returns the outputs that are probably the loss: the only scalar among them, otherwise all that require grad.

    The result decides which backward pass is planned before the first one has been observed. A model that returns its
    loss beside logits and hidden states is differentiated for the loss.
    """
    tracked = [i for i, t in enumerate(results) if t.requires_grad]
    numbers = [i for i in tracked if results[i].dim() == 0]
    return numbers if len(numbers) == 1 else tracked


class Results:
    """The results of a traced call, and after `differentiate` its gradients, as tensors and as their numbers."""

    def __init__(
        self,
        result: Any,
        operands: list[torch.Tensor],
        numbers: list[int],
        layouts: Sequence[Layout],
        count: int,
        recorder: Recorder,
        levels: Levels | None,
    ):
        """Numbers the tensors that the function returned.

        Args:
            result: the return value of the function.
            operands: the tensors that stand for the arguments, then for the captured tensors.
            numbers: the operands' numbers in the trace.
            layouts: the operands' layouts.
            count: the number of operands that are arguments.
            recorder: the recorder of the trace.
            levels: the levels of torch.func in the trace, if any.
        """
        self.recorder = recorder
        self.levels = levels
        self.operands = operands
        self.operand_numbers = numbers
        self.layouts = layouts
        self.leaves, self.spec = tree.flatten(result)
        _refuse_iterators(self.leaves)
        _refuse_hidden(self.leaves, recorder)
        known = {id(t): ("in", i) for i, t in enumerate(operands[:count])}
        results: list[torch.Tensor] = numbered(self.leaves, known)
        # Under vmap, results are separate batches even where they share memory with others.
        self.results, self.regrouped = results, ()
        if levels is None:
            self.results, self.regrouped = apart(self.leaves, results, operands, count, recorder)
        recorded, given = torch.is_grad_enabled(), set(map(id, operands))
        # With grad mode off, operands that require grad, and views of them, are returned as tensors that do not.
        self.flags = tuple(
            [t.requires_grad and (recorded or not (id(t) in given or is_unrecorded(t))) for t in self.results]
        )
        found = [self._below(t) for t in self.results]
        self.outputs = tuple(recorder.number(t) for t, _ in found)
        self.out_dims = tuple(dim for _, dim in found)
        self.grad_dims: tuple[int | None, ...] = ()
        self.cotangents: tuple[int | None, ...] = ()
        self.gradients: tuple[int | None, ...] = ()
        self.delivered: list[int] = []
        """The operands that are leaves, in the order in which autograd gives them their gradients."""
        self.laid_out = False
        """Whether autograd stores a gradient otherwise than the backward pass computes it."""
        self.differentiable = self._differentiable()

    def _differentiable(self) -> tuple[bool, ...] | None:
        """Returns, by operand, whether autograd leads from a result to it; None within levels of torch.func."""
        if self.levels is not None or any(layout.transformed for layout in self.layouts):
            return None
        nodes = set(nodes_behind(self.results))
        leaves = {node for behind in nodes for node, _ in behind.next_functions} - nodes
        variables = {id(getattr(node, "variable", None)) for node in leaves} | {id(t) for t in self.results}
        return tuple([id(t) in variables or (t.grad_fn is not None and t.grad_fn in nodes) for t in self.operands])

    def made(self) -> list[torch.Tensor]:
        """Returns the results that require grad and are not operands."""
        given = set(map(id, self.operands))
        return [t for t, flag in zip(self.results, self.flags, strict=True) if flag and id(t) not in given]

    def interface(self) -> Interface:
        """Returns the inputs and outputs of both passes; call `differentiate` first."""
        return Interface(
            operands=tuple(self.operand_numbers),
            spec=self.spec,
            leaves=tuple(self.leaves),
            outputs=self.outputs,
            flags=self.flags,
            cotangents=self.cotangents,
            gradients=self.gradients,
            delivered=tuple(self.delivered),
            differentiable=self.differentiable,
            regrouped=self.regrouped,
            backward=self.backward,
            out_dims=self.out_dims,
            grad_dims=self.grad_dims,
        )

    def _below(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Returns a tensor below the levels of the trace, and its batch dimension."""
        return (tensor, None) if self.levels is None else self.levels.below(tensor)

    def differentiate(self, backward: Backward, carried: dict[int, torch.Tensor] | None = None) -> None:
        """Runs a backward pass, and what follows on it.

        Args:
            backward: the backward pass.
            carried: what was carried from earlier microbatches, see `Ending.begun`.
        """
        recorder = self.recorder
        observed = next((o for o in backward.observed if o.flags == self.flags), None)
        if observed is not None:
            backward = self._expected(observed)
        differentiated = backward.outputs if backward.chosen is None else self._chosen(backward.chosen)
        if differentiated is None:
            differentiated = tuple([i for i in likely_differentiated(self.results) if self.flags[i]])
        cotangents, strides = self._cotangents(differentiated, backward.strides or ())
        wanted = [t for t in self.operands if t.requires_grad]
        pairs = [(y, ct) for y, ct in zip(self.results, cotangents, strict=True) if ct is not None]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        guess = self.levels is not None or any(layout.transformed for layout in self.layouts)
        recorded = guess if backward.recorded is None else backward.recorded
        wrapped = guess if backward.wrapped is None else backward.wrapped
        dependent: list[Any] = []

        def prepare(node: Any) -> None:
            dependent.extend([True] * formulas.depends_on_wrapping(node))
            formulas.choose(node, wrapped=wrapped, saved=guess, recorded=recorded, last=True)

        if wanted and pairs:
            ys, cts = [y for y, _ in pairs], [ct for _, ct in pairs]
            recorder.sums.mark(ys, prepare)
            self.results.clear()
            pairs.clear()
            recorder.in_last_backward = True
            self._note_delivery()
            with ambient.autocast_as(backward.autocast):
                found = torch.autograd.grad(ys, wanted, cts, allow_unused=True)
            recorder.release()
            del ys
        inside = guess and backward.recorded is None  # torch.func differentiates before the function's caller goes on
        if backward.autocast is None and not inside:
            recorder.lifetimes.end_casts()
        differentiable = self.differentiable or [True] * len(self.operands)
        tracked = [flag for t, flag in zip(self.operands, differentiable, strict=True) if t.requires_grad]
        assert all(flag for grad, flag in zip(found, tracked, strict=True) if grad is not None)
        grads = list(reversed(found))
        found = ()  # a gradient that is copied is freed before the next one is copied
        added = backward.then is not None and backward.then.loss is not None
        stored = backward.stored is not False
        ends = self._leaf_gradients(grads, added, stored)
        how = {"recorded": recorded, "wrapped": wrapped if dependent else None}
        how["stored"] = stored if self.laid_out else None
        self.backward = Backward(differentiated, backward.autocast, strides, then=backward.then, **how)
        if backward.then is not None:
            ends = self._ended(backward.then, ends, [ct for ct in cotangents if ct is not None], carried or {})
        self.gradients = tuple(None if grad is None else recorder.number(grad) for grad in ends)

    def _note_delivery(self) -> None:
        """Makes the next backward pass note the order in which leaves get their gradients."""
        if self.levels is not None or any(layout.transformed for layout in self.layouts):
            return
        delivered = self.delivered  # using `self` in a hook would make a reference cycle
        for i, operand in enumerate(self.operands):
            if operand.requires_grad and operand.is_leaf:
                operand.register_hook(lambda _, i=i: delivered.append(i))

    def _expected(self, observed: Observed) -> Backward:
        """Returns the backward pass to expect after one of another call."""
        below = [t for t, _ in map(self._below, self.results)]
        return observed.expected([tuple(t.shape) for t in below], [strides_of(t.shape, t.stride()) for t in below])

    def _cotangents(
        self, differentiated: Sequence[int], known: Sequence[tuple[int, ...]]
    ) -> tuple[list[torch.Tensor | None], tuple[tuple[int, ...], ...]]:
        """Returns a cotangent for each result that is differentiated, None for the others, and their strides.

        Args:
            differentiated: numbers of results.
            known: the strides of the cotangents where they are known; otherwise those of the results.
        """
        given = dict(zip(differentiated, known, strict=False))
        strides: list[tuple[int, ...]] = []
        cotangents: list[torch.Tensor | None] = []
        for i, (t, _) in enumerate(map(self._below, self.results)):
            own = strides_of(t.shape, t.stride())
            same = given.get(i, own) == own
            layout = Layout(tuple(t.shape), t.stride() if same else given[i], t.dtype, t.device, False, False)
            cotangents.append(self.recorder.stand_in(layout) if i in differentiated else None)
            strides += [given.get(i, own)] if i in differentiated else []
        self.cotangents = tuple(None if ct is None else self.recorder.number(ct) for ct in cotangents)
        if self.levels is not None:
            pairs = zip(cotangents, self.out_dims, strict=True)
            cotangents = [None if ct is None else self.levels.batched(ct, dim) for ct, dim in pairs]
        return cotangents, tuple(strides)

    def _leaf_gradients(self, grads: list[torch.Tensor | None], added: bool, stored: bool) -> list[torch.Tensor | None]:
        """Returns the gradient of each operand, None where there is none.

        Args:
            grads: the gradients of the operands that require grad, the last one first. The list is emptied.
            added: whether autograd adds the gradients to those of earlier microbatches.
            stored: whether the gradients of leaves are to be as autograd stores them.
        """
        taken = {self.recorder.values[t] for t in self.outputs}
        gradients: list[torch.Tensor | None] = []
        dims: list[int | None] = []
        for operand, layout in zip(self.operands, self.layouts, strict=True):
            grad, dim = grads.pop() if operand.requires_grad else None, None
            if grad is not None:
                grad, dim = self._below(grad)
            dims.append(dim)
            if grad is not None and layout.accumulates and self.levels is None and not added:
                grad = self._own(grad, layout, taken, stored)
            gradients.append(grad)
        self.grad_dims = tuple(dims)
        return gradients

    def _ended(
        self, then: Any, gradients: list[Any], cotangents: list[torch.Tensor], carried: dict[int, torch.Tensor]
    ) -> list[Any]:
        """Records what follows on the backward pass; returns its results, by operand.

        Raises:
            TraceError: the backward pass is not that of a loss alone.
            ArgumentValueError: the loss does not require grad, or is not a single number.
        """
        if not any(self.flags):
            raise ArgumentValueError(
                "the loss does not require grad: it depends on no parameter that does, or loss_fn detaches it."
            )
        if sum(self.flags) != 1 or len(cotangents) != 1:
            raise TraceError(
                f"a step differentiates one loss, and the function has {sum(self.flags)} results that require grad. "
                "Return the loss alone; detach what the function stores elsewhere."
            )
        if cotangents[0].numel() != 1:
            raise ArgumentValueError(
                f"the loss must be one number, and has shape {list(cotangents[0].shape)}: return its mean, for example."
            )
        self.recorder.start_ending()
        with torch.no_grad():
            return then.finished(self.operands, gradients, cotangents[0], carried)

    def _chosen(self, chosen: Sequence[int | str]) -> tuple[int, ...]:
        """Returns the outputs that the user selected as the loss. A view counts as what it views."""
        named = [(name, number_of(leaf)) for name, leaf in zip(self.spec.names(), self.leaves, strict=True)]
        pairs = [(name, number) for name, number in named if number is not None]
        try:
            leaves = [pairs[i] for i in tree.selected(chosen, [name for name, _ in pairs])]
        except LookupError as error:
            raise ArgumentValueError(f"outputs: {error}.") from error
        for name, (kind, number, tracked) in leaves:
            if kind != "out" or not tracked or not self.results[number].requires_grad:
                raise ArgumentValueError(f"outputs: {name or 'the result'!r} depends on nothing that requires grad.")
        return tuple(sorted({number for _, (_, number, _) in leaves}))

    def _own(self, grad: torch.Tensor, layout: Layout, taken: set[int], stored: bool) -> torch.Tensor:
        """Returns the gradient in a separate storage, laid out like the leaf, so that autograd stores it in `.grad`.

        A gradient that is not `stored` is returned as it is.
        Autograd would copy any other gradient, and the plan would not account for the copy.
        """
        recorder = self.recorder
        storage = recorder.version(grad)
        given = [*self.operand_numbers, *(ct for ct in self.cotangents if ct is not None)]
        shared = storage in taken or storage in {recorder.values[t] for t in given}
        stride = _strides_of_grad(layout)
        other = places_of(layout.shape, grad.stride()) != places_of(layout.shape, stride)
        if shared or other or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size():
            self.laid_out = True
            if not stored:
                return grad
            grad = torch.empty_strided(layout.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
            storage = recorder.version(grad)
        taken.add(storage)
        return grad


def _refuse_iterators(leaves: Iterable[Any]) -> None:
    found = next((leaf for leaf in leaves if isinstance(leaf, Iterator)), None)
    if found is not None:
        raise TraceError(
            f"the function returns a {type(found).__name__}, and a plan would return the same one at each call, which "
            f"ends only once. Return a list or a tuple. {WAY_OUT}"
        )


def _refuse_hidden(leaves: Iterable[Any], recorder: Recorder) -> None:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and any(map(recorder.owns, map(unwrapped, _held(leaf)))):
            raise TraceError(
                f"the function returns a {type(leaf).__name__} that holds a tensor, which a plan would not compute "
                f"again. Return the tensor in a tuple, a list or a dict. {WAY_OUT}"
            )


def _held(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yields the tensors in an output that is no tree for `_tree`: a partial, a closure, a subclass of a container."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, functools.partial):
        parts: Iterable[Any] = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType | types.BuiltinMethodType):
        parts = (value.__self__,)
    elif isinstance(value, types.FunctionType):
        parts = [content(cell, None) for cell in value.__closure__ or ()]
    elif isinstance(value, dict):
        parts = value.values()
    else:
        parts = value if isinstance(value, list | tuple | set | frozenset | collections.deque) else ()
    for part in parts if depth else ():
        yield from _held(part, depth - 1)


def _strides_of_grad(layout: Layout) -> tuple[int, ...]:
    """Returns the leaf's strides if its elements fill its memory, otherwise those of a contiguous tensor."""
    if not is_dense(layout.shape, layout.stride):
        return tuple(torch._prims_common.make_contiguous_strides_for(layout.shape))
    return tuple(layout.stride)
