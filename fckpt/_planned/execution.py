"""Execution of planned calls: the forward pass, the residuals that it saves, and the backward pass that reads them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fckpt._call import ambient
from fckpt._call.contents import contents
from fckpt._call.levels import add_batch_dim, below_autograd, innermost, is_legacy_batch, is_wrapped, unbatched
from fckpt._planned.cuda_graphs import CudaGraphs, Halves
from fckpt._planned.ledger import Ledger
from fckpt._planned.program import Program
from fckpt._recompute.saved_tensors import keeps_graph
from fckpt._recompute.stored import are_stored, is_seen
from fckpt._trace.formulas import FormulaError
from fckpt._trace.operations import Backward, strides_of
from fckpt.errors import MutationError

__all__ = ["NOT_AGAIN", "Execution"]


_NOW: Any = object()


NOT_AGAIN = (
    "the forward pass of a planned function would have to run again (for a second backward pass, a second derivative, "
    "or a backward pass of other outputs than before), but it changed a buffer that its results depend on, and the "
    "plan saved no copy of it. Call the function again before this backward pass, or return the new value of the "
    "buffer instead of changing it."
)


class Execution:
    """One call by a plan: it runs the forward pass of a `Program`, holds the residuals, and runs the backward pass."""

    def __init__(
        self,
        program: Program,
        closure: Sequence[torch.Tensor],
        replan: Callable[[Backward], Program],
        ledger: Ledger,
        certain: bool,
        seen: Callable[[], None],
        level: int = 0,
        *,
        retraceable: bool = True,
        graphs: CudaGraphs | None = None,
    ):
        """Prepares a call.

        Args:
            program: the planned program to run. Another one replaces it if the backward pass is for other outputs.
            closure: the captured tensors, in the order of the trace.
            replan: returns the planned program for a backward pass.
            ledger: counts the backward passes that cannot run by a plan or exceed it, and warns of them.
            certain: whether a backward pass like the planned one has been observed. Until then the forward pass may
                have to run again, so buffers that it changes are copied first, if the budget has room for the copies.
            seen: called when a backward pass has run.
            level: the level of the `vmap` under which the program was traced; 0 if there was none.
            retraceable: whether `replan` can trace the function again.
            graphs: records the program as CUDA graphs; None to run it operation by operation.
        """
        self.program = program
        self.level = level
        self.retraceable = retraceable
        self.read_only = program.read_only
        self.replan = replan
        self.ledger = ledger
        self.seen = seen
        self.statistics = [(i, self._batch(closure[i - program.count])[0]) for i in program.statistics]
        """The written captured tensors: operands of the trace, but not operands of the call for autograd."""
        known = dict(self.statistics)
        copies = bool(program.remembered) and not certain
        copies = copies and program.has_room_for(sum([known[i].nbytes for i in program.remembered]))
        self.before = {i: known[i].detach().clone() if copies else None for i in program.remembered}
        """By written captured tensor whose previous value matters: a copy of that value, or None if not copied."""
        self.residuals: list[Any] | None = None
        self.graphs = graphs if certain and not level else None
        self.halves: Halves | None = None
        """The CUDA graphs that run the call, whose memory the residuals lie in; None if operations run one by one."""
        self.certain = certain
        self.contents: list[tuple[int, int, Any]] = []
        """For operands from which values may be recomputed: the place, a number of words, and a sample of that size.

        The sample is that of the forward pass.
        """
        self.shared: list[tuple[torch.Tensor, int]] = []
        """The outputs that are also residuals, with their versions: the caller may change them in place."""
        self.written: list[tuple[torch.Tensor, int]] = []
        """The captured tensors that the forward pass wrote and the backward pass reads, with their versions."""
        self.has_run = False
        self.over = False
        """Whether a backward pass has run."""
        self.returned: dict[Any, int] = {}
        """The sizes of the gradients of earlier backward passes, by a weak reference to their storage."""
        self.lock = threading.Lock()
        self.restored: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Returns a context manager that restores the conditions of the forward pass, for running it again."""

    def forward(self, operands: Sequence[torch.Tensor]) -> list[Any] | None:
        """Runs the forward pass at the first call; later calls return None."""
        with self.lock:
            if self.has_run:
                return None
            self.has_run = True
        with self._below_level(), below_autograd():
            operands = [t for t, _ in map(self._batch, operands)]
            sampled = self.program.sampled_again if self.certain else self.program.sampled
            self.contents = [(i, number, contents(operands[i], number)) for i, number in sampled.items()]
            outputs, self.residuals = self._outputs(self._given(self.program, operands, self.statistics))
            kept = {t.untyped_storage()._cdata for t in self.residuals if isinstance(t, torch.Tensor)}
            self.shared = [(t, t._version) for t in outputs if t.untyped_storage()._cdata in kept]
        self.written = [(t, t._version) for i, t in self.statistics if i in self.program.reread]
        return self._batched(outputs, self.program.trace.out_dims)

    def _outputs(self, given: list[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the forward pass; returns its outputs and residuals."""
        self.halves = None if self.graphs is None else self.graphs.halves(self.program, given, self)
        if self.halves is None:
            return self.program.lowered.forward(given)
        self.ledger.count("replayed")
        return self.halves.forward(given), []

    # -- under a vmap

    def _below_level(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that leaves the level of the `vmap`, if there is one."""
        if not self.level:
            return contextlib.nullcontext()
        return innermost().lower()

    def _batch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return unbatched(tensor, self.level) if self.level else (tensor, None)

    def _batched(self, tensors: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        if not self.level:
            return list(tensors)
        pairs = zip(tensors, dims, strict=True)
        return [t if t is None else add_batch_dim(t, dim, self.level) for t, dim in pairs]

    def _cotangents(self, given: Sequence[int], cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Returns the cotangents with the batch dimensions of the trace.

        Returns None if the cotangent of an output without a batch dimension has one.
        """
        found = []
        for i, ct in zip(given, cotangents, strict=True):
            value, dim = self._batch(ct)
            wanted = self.program.trace.out_dims[i]
            if wanted is None and dim is not None:
                return None
            if wanted is not None and dim is None:
                spec = self.program.trace.tensors[self.program.trace.outputs[i]]
                value, dim = value.unsqueeze(wanted).expand(spec.shape), wanted
            moved = dim is not None and wanted is not None and dim != wanted
            found.append(value.movedim(dim or 0, wanted or 0) if moved else value)
        return found

    def backward(
        self,
        operands: Sequence[torch.Tensor],
        given: Sequence[int],
        cotangents: Sequence[torch.Tensor],
        *,
        recorded: bool,
        wrapped: bool,
        receivers: Sequence[torch.Tensor],
    ) -> list[Any] | None:
        """Runs the backward pass by a plan; returns None if that is not possible.

        See `Backward` for `recorded` and `wrapped`, and `Pullback` for `receivers`.

        A backward pass for other outputs than planned, or a second backward pass, has no residuals: the saved ones are
        freed, and the forward pass of the matching plan runs again.
        """
        brought = self._cotangents(given, cotangents)
        operands = [t for t, _ in map(self._batch, operands)]
        tensors = (*operands, *(brought or ()))
        records = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        reason = ""
        if brought is None or any(map(is_wrapped, tensors)):
            reason = "batched backward"
        elif records or not (self.retraceable or self._formulas_match(recorded, wrapped)):
            reason = "second derivative"
        elif self.program.writes_late and any(map(is_legacy_batch, tensors)):
            reason = "batched backward"
        elif ambient.interfering_mode() is not None:
            reason = "dispatch mode"
        elif not self.retraceable and self.program.backward.stored not in (None, are_stored(receivers)):
            reason = "layout of gradients"
        elif ambient.of_backward(self.program.ambient) != ambient.of_backward(ambient.capture()):
            reason = "settings"
        if brought is None or reason:
            self.give_up(reason)
            return None
        try:
            with self._below_level():
                grads = self._grads(operands, tuple(given), brought, recorded, wrapped, receivers)
        except FormulaError:
            self.give_up("second derivative")
            return None
        except RuntimeError as error:
            # Autograd has formulas for batches of cotangents that write nothing in place; the plan has the usual ones.
            if not (any(map(is_legacy_batch, tensors)) and str(error).startswith("vmap: ")):
                raise
            self.give_up("batched backward")
            return None
        self.over = True
        if keeps_graph():
            known = (g for g in grads if g is not None and not is_legacy_batch(g))
            self.returned |= {StorageWeakRef(g.untyped_storage()): g.nbytes for g in known}
        self.seen()
        return self._batched(grads, [self.program.trace.grad_dims[i] for i in self._gradients()])

    @property
    def summed(self) -> Mapping[int, bool]:
        """See `Program.summed`; empty once the warning has been given."""
        return {} if self.ledger.warned_of_sums else self.program.summed

    @property
    def as_computed(self) -> bool:
        """Whether gradients of leaves are not laid out as autograd stores them, see `Backward.stored`."""
        return self.program.backward.stored is False

    def used_elsewhere(self, operand: int) -> None:
        """Warns that contributions of others have changed the order of the sum that is the gradient of an operand."""
        self.ledger.adds_later(self.program.origin(self._gradients()[operand]))

    def _formulas_match(self, recorded: bool, wrapped: bool) -> bool:
        """Whether the plan was made with the derivative formulas of this backward pass."""
        planned = self.program.backward
        return recorded == planned.recorded and planned.wrapped in (None, wrapped)

    def give_up(self, reason: str) -> None:
        """Frees the residuals of a forward pass whose planned backward pass will not run, and says why."""
        self.residuals = None
        self._release()
        self.ledger.falls_back(reason)

    def _release(self) -> None:
        """Gives the CUDA graphs back to other calls."""
        if self.halves is not None:
            self.halves.release()
        self.halves = None

    def _gradients(self) -> list[int]:
        """Returns the operands of the trace that are operands of the call for autograd."""
        return [*range(self.program.count), *self.read_only]

    def _grads(
        self,
        operands: Sequence[torch.Tensor],
        given: tuple[int, ...],
        cotangents: list[torch.Tensor],
        recorded: bool,
        wrapped: bool,
        receivers: Sequence[torch.Tensor],
    ) -> list[Any]:
        for reads in self.program.trace.late:
            reads.check()
        if not set(given).isdisjoint(self.program.trace.regrouped):
            self.ledger.adds_views_first()
        with self.lock:
            residuals, self.residuals = self.residuals, None
        # Lazy conjugation and negation are views above the recorded operations.
        cotangents = [ct.resolve_conj().resolve_neg() for ct in cotangents]
        functional = any(map(is_legacy_batch, cotangents))
        planned = self.program.backward
        strides = tuple([strides_of(ct.shape, ct.stride()) for ct in cotangents])
        stored = None if planned.stored is None else are_stored(receivers)
        asked = Backward(given, ambient.autocast(), strides, recorded=recorded, wrapped=wrapped, stored=stored)
        backward = asked if planned.wrapped is not None else asked._replace(wrapped=None)
        if backward != planned and backward._replace(strides=planned.strides) == planned:
            if not functional and not self.program.takes(strides) and not self.retraceable:
                self.ledger.falls_back("other strides")
                functional = True  # without overwriting, operations accept operands with any strides
            if functional or self.program.takes(strides):
                backward = planned
        plans = self.ledger.stats.plans
        if backward != planned and not self._replanned(asked._replace(stored=are_stored(receivers))):
            residuals = None
        program, statistics = self.program, self.statistics
        if self.halves is not None and (functional or backward != planned or strides != planned.strides):
            self._release()  # it has residuals for the planned backward pass only
            residuals = None
        self._check_contents(operands)
        if residuals is None:
            if self.ledger.stats.plans == plans:  # the first backward pass of a kind shows what to plan for
                self._check_again()
            residuals, statistics = self._again(operands)
        else:
            self._check_statistics()
        self._check_outputs()
        elsewhere = program.ambient != ambient.capture()
        with ambient.restored(program.ambient) if elsewhere else contextlib.nullcontext(), below_autograd():
            if self.halves is not None:
                grads = self.halves.backward(cotangents)
                self._release()
            else:
                lowered = program.functional if functional else program.lowered_for(strides)
                grads = lowered.backward(self._given(program, operands, statistics), residuals, cotangents)
        if program.backward.stored is False:
            self._check_copies(receivers, grads)
        return [grads[i] for i in self._gradients()]

    def _check_copies(self, receivers: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        """Says if the budget does not allow for copies of gradients that autograd stores after hooks have seen them."""
        pairs = zip(receivers, self._gradients(), strict=False)
        found = [(tensor, grad, grad.untyped_storage()) for tensor, i in pairs if (grad := grads[i]) is not None]
        left = Counter([storage._cdata for _, _, storage in found])
        held = most = sum({storage._cdata: storage.nbytes() for _, _, storage in found}.values())
        for tensor, grad, storage in found:
            if is_seen(tensor):
                held += grad.nbytes
                most = max(most, held)
                left[storage._cdata] -= 1
                held -= 0 if left[storage._cdata] else storage.nbytes()
        budget = self.program.plan.budget_bytes
        if budget is not None and most > budget:
            self.ledger.falls_back("copies for hooks", nbytes=most)

    def _replanned(self, asked: Backward) -> bool:
        """Changes to the program for another backward pass; returns whether it can use the same residuals."""
        before = self.program
        with ambient.restored(before.ambient):
            self.program = self.replan(asked)
        same = self.program.lowered.is_same(before.lowered)
        if not same:
            self.shared = []
        return same

    def _check_again(self) -> None:
        """Says if the budget does not allow for a forward pass that runs again while earlier gradients are held."""
        held = sum(nbytes for storage, nbytes in self.returned.items() if not storage.expired())
        budget, nbytes = self.program.plan.budget_bytes, self.program.again_nbytes + held
        if budget is not None and nbytes > budget:
            self.ledger.falls_back("forward again", nbytes=nbytes)

    def _again(self, operands: Sequence[torch.Tensor]) -> tuple[list[Any], list[tuple[int, torch.Tensor]]]:
        """Runs the forward pass again, with all side effects on copies; returns its residuals and the copies."""
        program = self.program
        with self.restored(), torch.no_grad():
            copies = [(i, self._before(i).clone()) for i in program.statistics]
            with below_autograd():
                return program.lowered.forward(self._given(program, operands, copies))[1], copies

    def _before(self, operand: int) -> torch.Tensor:
        """Returns a written captured tensor as it was before the call, or as it is now if its value does not matter."""
        known = self.before.get(operand, _NOW)
        if known is _NOW:
            return next(t for i, t in self.statistics if i == operand).detach()
        if known is None:
            raise MutationError(NOT_AGAIN)
        return known

    def _check_contents(self, operands: Sequence[torch.Tensor]) -> None:
        """Raises an error if operands from which values are recomputed have other contents than in the forward pass."""
        for place, number, then in self.contents:
            if contents(operands[place], number) != then:
                name = self.program.origin(self._gradients()[place])
                raise MutationError(
                    f"{name} has been overwritten between forward and backward, in a way that autograd does not count "
                    "(through .data or a NumPy array, for example). The plan recomputes values from it. Run backward "
                    "before changing it, or call the function with a copy."
                )

    def _check_outputs(self) -> None:
        for tensor, then in self.shared:
            if tensor._version != then:
                raise MutationError(
                    f"an output of a rematerialised function (shape {list(tensor.shape)}, {tensor.dtype}) was changed "
                    f"in place between forward and backward (version {then} -> {tensor._version}), and its plan saves "
                    "that output for backward. Change a copy instead."
                )
        self.shared = []

    def _check_statistics(self) -> None:
        for tensor, then in self.written:
            if tensor._version != then:
                raise MutationError(
                    f"a buffer that a planned function writes and its backward pass reads (shape {list(tensor.shape)}, "
                    f"{tensor.dtype}) was changed in place between forward and backward (version {then} -> "
                    f"{tensor._version}), for example by another call of the function. Run backward before that call."
                )

    def _given(
        self, program: Program, operands: Sequence[torch.Tensor], statistics: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        own: list[Any] = [None] * len(program.trace.operands)
        own[: program.count] = operands[: program.count]
        for i, tensor in zip(self.read_only, operands[program.count :], strict=True):
            own[i] = tensor
        for i, tensor in statistics:
            own[i] = tensor
        return own + program.constants
