"""The public `step`: one training step as one planned call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from fckpt import _tree as tree
from fckpt._call import ambient
from fckpt._call.arguments import Arguments
from fckpt._call.conditions import Observation
from fckpt._call.levels import below_autograd, has_forward_mode, is_recorded, transforms_active
from fckpt._capture.function import GraphFunction
from fckpt._fuse.option import Kernels, check_kernels
from fckpt._module import check_plannable
from fckpt._planned.making import check_budget
from fckpt._planned.optimizers import Updates
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.program import Program
from fckpt._planned.raised import RaisedError, errors_marked
from fckpt._planned.stepping import StepPlanner, assembled, carried_by, loss_of
from fckpt._planned.tiling import Tile, check_tile
from fckpt._planned.tracing import TRACING, CapturedTensors, graph_tracer
from fckpt._trace.layouts import layouts_below
from fckpt._trace.trace import is_tracing
from fckpt._trace.untraceable import HigherOrderError
from fckpt._trace.updates import Ending, running
from fckpt.errors import ArgumentTypeError, ArgumentValueError, BudgetError, TraceError, name_of
from fckpt.solve._known_orders import remembering
from fckpt.spmd.mesh import mesh_in_use

__all__ = ["TrainingStep", "step"]


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    *,
    budget: Budget | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    solver: str = "auto",
    tile: Tile = False,
    kernels: Kernels = "aten",
) -> TrainingStep:
    """Returns a function that does one training step in place: forward, backward and the optimizer's update.

    `step(batch)` leaves parameters, buffers, the optimizer's state and the random generator as these lines do, bit for
    bit, and returns the loss without its graph::

        loss = loss_fn(model, batch); loss.backward(); optimizer.step(); optimizer.zero_grad()

    But the gradients are never all alive: each parameter is updated as soon as its gradient and the last computation
    that reads the old parameter allow. With a `budget`, activations are recomputed as in `remat`, and the budget is
    that of the whole step.

    Args:
        model: the module to train.
        optimizer: an optimizer of `torch.optim` that updates its parameters one by one (SGD, Adam, AdamW and most
            others). Its groups, `state_dict` and learning rate schedules work as usual.
        loss_fn: maps the model and a batch to a loss, a tensor with one element.
        budget: the most bytes that a step may hold at once, above parameters, state and batch: an int, a string such as
            "4GiB", or a float for a fraction of the plain step's peak. Without a budget nothing is recomputed.
        accumulate: the number of microbatches. The leaves of the batch are split along their first dimension, as
            `torch.Tensor.chunk` does; the losses of the parts are divided by the number of parts, and their gradients
            are summed in order.
        clip_norm: the largest norm of all gradients together, as for
            `torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)`. All gradients are alive at once then.
        clip_value: the largest absolute value of an element of a gradient, as for
            `torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)`.
        solver: see `fckpt.solve.names()`.
        tile: whether to cut operations that are independent by rows into tiles; see `remat`.
        kernels: the kernels that run the step, see `remat`; also without a budget.

    Returns:
        A callable that takes a batch (a pytree) and returns the loss; for several microbatches the sum of their scaled
        losses. Its method `plan(batch)` returns the `Plan`.

    Raises:
        ArgumentTypeError: an argument has a wrong type, or the optimizer's updates are not independent.
        ArgumentValueError: an option of the optimizer is not supported, or an argument is out of range.

    A call may raise `BudgetError` (no plan fits), `TraceError` (the loss function cannot be traced), or
    `ArgumentValueError` (a parameter already has a `.grad`, a hook, or an alias; the loss has no gradient). Parameters
    that require grad but belong to no group of the optimizer are not differentiated.

    Example:
        >>> import torch, fckpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> loss_fn = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
        >>> train_step = fckpt.step(model, optimizer, loss_fn, budget=1.0)
        >>> batch = torch.randn(16, 8), torch.randn(16, 1)
        >>> losses = [train_step(batch).item() for _ in range(20)]
        >>> losses[-1] < losses[0]
        True

    References:
        K. Lv, Y. Yang, T. Liu, Q. Gao, Q. Guo, X. Qiu, "Full Parameter Fine-tuning for Large Language Models with
        Limited Resources" (2023), https://arxiv.org/abs/2306.09782, for updates within the backward pass.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be an nn.Module, not {type(model).__name__}.")
    if not callable(loss_fn):
        raise ArgumentTypeError(f"loss_fn must be a function of the model and a batch, not {type(loss_fn).__name__}.")
    if type(accumulate) is not int or accumulate < 1:
        raise ArgumentValueError(f"accumulate is a number of microbatches, at least 1, not {accumulate!r}.")
    for name, most in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if most is not None and not (
            isinstance(most, (int, float)) and not isinstance(most, bool) and 0 < most < math.inf
        ):
            raise ArgumentValueError(f"{name} must be a number above 0, not {most!r}.")
    if clip_norm is not None and clip_value is not None:
        raise ArgumentValueError("clip_norm and clip_value together: it is unclear which clips first. Give one.")
    if solver != "auto" and budget is None:
        raise ArgumentValueError(f"solver={solver!r} needs a budget: pass budget=...")
    kernels = check_kernels(kernels, planned=True)
    check_plannable(model, step=True)
    return TrainingStep(
        model,
        optimizer,
        loss_fn,
        None if budget is None else check_budget(budget),
        accumulate,
        None if clip_norm is None else float(clip_norm),
        None if clip_value is None else float(clip_value),
        solver,
        check_tile(tile, budget),
        kernels,
    )


class TrainingStep:
    """A training step that `step` made. Call it with a batch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        budget: Budget | None,
        accumulate: int,
        clip_norm: float | None,
        clip_value: float | None,
        solver: str,
        tile: Tile,
        kernels: Kernels,
    ):
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.budget = budget
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self._updates = Updates(optimizer)
        self._planner = StepPlanner(budget, solver, tile, kernels)
        self._planner.ledger.name = f"the step of {name_of(loss_fn)}"
        self._fckpt_planner = self._planner
        self._traced: dict[Any, Any] = {}
        self._budgets: dict[Any, tuple[Any, _Limits]] = {}
        """By layout of the microbatches: the capture for which their budgets were found, and these budgets."""
        self._layout: Any = None
        self._losses: dict[int, Callable[[nn.Module, Any], torch.Tensor]] = {}
        self._lock = threading.RLock()

    def __call__(self, batch: Any) -> torch.Tensor:
        """Does one training step, and returns the loss, which has no graph. It breaks the graph of `torch.compile`."""
        if torch.compiler.is_compiling():
            from fckpt._recompute import compiled  # imports Dynamo, which takes about a second

            return compiled.called_eagerly(self, batch)
        with self._lock, running(self._updates):
            ledger = self._planner.ledger
            ledger.count("calls")
            before = ledger.stats
            ran: list[Any] = []
            total = raised = None
            try:
                total = self._stepped(batch, ran)
            except RaisedError as error:
                raised = error
            if raised is not None:  # outside of the `except`, so that the traceback is that of a plain call
                self._run_to_error(batch, len(ran), raised)
            if before.captures == ledger.stats.captures and before.programs == ledger.stats.programs:
                ledger.count("hits")
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules of learning rates look at it
            assert total is not None
            return total

    def _stepped(self, batch: Any, ran: list[Any]) -> torch.Tensor:
        """Does a step; returns the loss. Microbatches that have run are added to `ran`."""
        parts, limits = self._begun(batch)
        total: torch.Tensor | None = None
        carried, loss_dtype = (), None
        try:
            for i, part in enumerate(parts):
                last = i + 1 == len(parts)
                place = _Place(len(parts), last, carried, loss_dtype, limits[last])
                loss, carried = self._run(part, place)
                total = loss if total is None else total + loss
                loss_dtype = total.dtype
                self._updates.sums.append(total)
                ran.append(part)
                del loss  # the next microbatch would hold it
        finally:
            self._updates.sums = []
        assert total is not None
        return total

    def _run_to_error(self, batch: Any, ran: int, raised: RaisedError) -> NoReturn:
        """Computes the losses of the microbatches that have not run, of which one raised an error while it was traced.

        So the error comes from a plain call, and after all that the call does before (random numbers, buffers).
        """
        self._planner.ledger.falls_back("raises an error", quiet=True)
        for part in self._parts(batch)[ran:]:
            self.loss_fn(self.model, part)
            if raised.in_backward:  # of this microbatch
                raise raised.error
        raised.only_here()

    def plan(self, batch: Any) -> Plan:
        """Returns the plan for a batch, without a step; for several microbatches, the plan with the largest peak.

        Raises:
            BudgetError: no plan fits the budget.
            TraceError: the loss function cannot be traced.
        """
        with self._lock, running(self._updates):
            try:
                programs, _ = self._programs(*self._begun(batch))
            except RaisedError as error:
                raise error.error from None
            plans = [self._planner.exact_plan(program) for program in programs]
            return max(plans, key=lambda plan: plan.peak_bytes)

    def within(self, budget: Budget | None, optimizer: torch.optim.Optimizer | None = None) -> TrainingStep:
        """Returns the same step within another budget, which need not capture the loss function again.

        Args:
            budget: see `step`.
            optimizer: another optimizer for the same model; None for the same one.

        Raises:
            ArgumentTypeError: see `step`.
            ArgumentValueError: see `step`.
        """
        other = step(
            self.model,
            self.optimizer if optimizer is None else optimizer,
            self.loss_fn,
            budget=budget,
            accumulate=self.accumulate,
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            solver=self._planner.solver if budget is not None else "auto",
            tile=self._planner.tile if budget is not None else False,
            kernels=self._planner.kernels,
        )
        with self._lock:
            other._losses = self._losses  # a capture is of one function
            other._planner.share_captures(self._planner)
        return other

    # -- before a call

    def _begun(self, batch: Any) -> tuple[list[Any], _Limits]:
        """Checks that a step may run now, and returns the microbatches and their budgets."""
        if not torch.is_grad_enabled():
            raise ArgumentValueError("a step differentiates its loss: call it outside of torch.no_grad().")
        if transforms_active() or has_forward_mode() or is_recorded() or is_tracing():
            raise ArgumentValueError("a step runs outside of torch.func's transforms, torch.compile and other traces.")
        if mesh_in_use() is not None:
            raise ArgumentValueError(
                "a step of a module does not run inside of shard_map or pmap. Write it there as a pure function of "
                "parameters, state and batch that reduces its gradients (fckpt.pmean, fckpt.psum_scatter), and plan "
                "that: fckpt.remat(train_step, budget=..., donate_argnums=(0, 1))."
            )
        self._updates.refresh()
        self._check_parameters()
        parts = self._parts(batch)
        self._layout = self._updates.key()
        limits: _Limits = (None, self.budget)
        if len(parts) > 1:
            leaves = [t for part in (parts[0], parts[-1]) for t in tree.leaves(part) if isinstance(t, torch.Tensor)]
            frozen = tuple([not p.requires_grad for p in self.model.parameters()])
            settings = (ambient.of_plans(), self.model.training, frozen)
            key = (len(parts), tuple(layouts_below(leaves)), self._layout, settings)
            found = self._planner.captured(self._scaled(len(parts)), (self.model, parts[0]), {})
            capture, limits = self._budgets.get(key, (None, limits))
            if capture is None or found is None or capture is not found[0]:  # the loss is another one than before
                limits = self._programs(parts)[1]
                self._budgets[key] = (None if found is None else found[0]), limits
        return parts, limits

    def _check_parameters(self) -> None:
        for i, parameter in enumerate(self._updates.parameters):
            if parameter.grad is not None:
                raise ArgumentValueError(
                    f"parameter {self._name(i)} has a gradient already, which a step would have to add to. Call "
                    "optimizer.zero_grad() first, or use accumulate=... for several microbatches."
                )
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ArgumentValueError(
                    f"parameter {self._name(i)} has a hook on its gradient, which a step would not call. Remove the "
                    "hook, or use fckpt.remat for forward and backward."
                )
        if self.clip_norm is not None:  # each gradient is clipped by value on its own
            others = [
                n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in self._updates.numbers
            ]
            if others:
                raise ArgumentValueError(
                    f"parameter {others[0]} requires grad, but is in no group of the optimizer: it is unclear whether "
                    "its gradient counts in clip_norm. Freeze it with requires_grad_(False), or add it to a group."
                )

    def _name(self, number: int) -> str:
        parameter = self._updates.parameters[number]
        names = [name for name, p in self.model.named_parameters() if p is parameter]
        return names[0] if names else f"number {number} of the optimizer"

    def _parts(self, batch: Any) -> list[Any]:
        """Returns the microbatches."""
        leaves = tree.leaves(batch)
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        if any(t.requires_grad for t in tensors):
            raise ArgumentValueError(
                "a tensor of the batch requires grad, and a step returns no gradient for it: detach it."
            )
        if self.accumulate == 1:
            return [batch]
        spec = tree.flatten(batch)[1]
        for path, t in zip(spec.paths(), leaves, strict=True):
            if isinstance(t, torch.Tensor) and (not t.dim() or len(t) != len(tensors[0])):
                raise ArgumentValueError(
                    f"accumulate={self.accumulate} splits the batch along the first dimension of its tensors, which "
                    f"must be the same: batch{path} has shape {list(t.shape)}, the first one {list(tensors[0].shape)}."
                )
        if not tensors:
            raise ArgumentValueError("accumulate splits the tensors of the batch, and the batch has none.")
        split = [t.chunk(self.accumulate) if isinstance(t, torch.Tensor) else None for t in leaves]
        count = len(tensors[0].chunk(self.accumulate))
        return [
            tree.unflatten(spec, [leaf if s is None else s[i] for leaf, s in zip(leaves, split, strict=True)])
            for i in range(count)
        ]

    def _programs(self, parts: list[Any], limits: _Limits | None = None) -> tuple[list[Program], _Limits]:
        """Returns a program for each microbatch, and their budgets. A float budget is a fraction for the last one.

        Args:
            parts: the microbatches.
            limits: the budgets, if they are known. Finding them again may find others, because more plans are known.
        """
        count = len(parts)
        if count == 1:
            return [self._program(parts[0], _Place(1, True, budget=self.budget))[0]], (None, self.budget)
        first, ending = self._program(parts[0], _Place(count, False))  # without a budget, for what it carries
        carried, dtype = carried_by(first, ending), loss_of(first).dtype
        last_place = _Place(count, True, carried, dtype, self.budget)
        pairs = [(parts[0], _Place(count, False))]
        pairs += [(part, _Place(count, False, carried, dtype)) for part in parts[1:-1]]
        within = lambda limit: [self._program(part, place._replace(budget=limit))[0] for part, place in pairs]
        try:
            last = self._program(parts[-1], last_place)[0]
        except BudgetError as error:
            limit = _in_bytes(self.budget, error)
            self._raise_largest([error], [lambda: within(limit)])
        if self.budget is None:
            limits = None, None
        if limits is not None:
            return [*within(limits[False]), last], limits
        plan = last.plan
        try:  # so that the peak of the step is that of the last microbatch
            return [*within(plan.peak_bytes), last], (plan.peak_bytes, self.budget)
        except BudgetError:
            pass
        try:
            return [*within(plan.budget_bytes), last], (plan.budget_bytes, self.budget)
        except BudgetError as error:
            enough = last_place._replace(budget=error.least_bytes)
            self._raise_largest([error], [lambda: self._program(parts[-1], enough)])

    # -- one microbatch

    def _scaled(self, count: int) -> Callable[[nn.Module, Any], torch.Tensor]:
        """Returns the loss function of one of `count` microbatches, which checks its result before anything runs."""
        if count not in self._losses:
            loss_fn = self.loss_fn

            def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
                loss = loss_fn(model, batch)
                if not isinstance(loss, torch.Tensor):
                    raise ArgumentTypeError(
                        f"loss_fn must return the loss alone, a tensor, not a {type(loss).__name__}."
                    )
                return loss if count == 1 else loss / count

            self._losses[count] = scaled
        return self._losses[count]

    def _captured(self, part: Any, place: _Place, use: Callable[[Any, dict[Any, Any]], Any]) -> Any:
        """Returns `use(capture, its programs)`; None if the loss function cannot be captured."""
        fn = self._scaled(place.parts)
        found = self._planner.captured(fn, (self.model, part), {})
        if found is None or found[0].graph is None:
            return None
        try:
            return use(*found)
        except HigherOrderError:
            raise
        except TraceError as error:  # tracing the Python code may work; if not, its error names the line
            self._planner.refuse(found[0], str(error))
        return None

    def _program(self, part: Any, place: _Place) -> tuple[Program, Ending]:
        """Returns the program of a microbatch, which does not run."""
        fn = self._scaled(place.parts)

        def of_graph(captured: Any, programs: dict[Any, Any]) -> tuple[Program, Ending]:
            function = captured.bound(fn, (self.model, part), {})
            return checked(lambda place: self._of_graph(captured, programs, function, place))

        def checked(make: Callable[[_Place], tuple[Program, Ending]]) -> tuple[Program, Ending]:
            self._fitting(make, place)  # the first updates must fit, too
            return make(place)

        arguments = Arguments((self.model, part), {})
        found = self._captured(part, place, of_graph)
        return checked(lambda place: self._of_python(arguments, place)[:2]) if found is None else found

    @remembering()
    def _fitting(self, make: Callable[[_Place], tuple[Program, Ending]], place: _Place) -> tuple[Program, Ending]:
        """Returns the program of a microbatch that runs next; another one than later if the first updates need it.

        Raises:
            BudgetError: no plan fits. Its `least_bytes` are enough for the first updates, too.
        """
        if not place.last or place.budget is None or not self._updates.is_first:
            return make(place)
        try:
            found = make(place)
        except BudgetError as error:
            limit = _in_bytes(place.budget, error)
            self._raise_largest([error], [lambda: make(place._replace(first=True, budget=limit))])
        return found if self._planner.fits_first(found[0]) else make(place._replace(first=True))

    @staticmethod
    def _raise_largest(errors: list[BudgetError], others: Iterable[Callable[[], Any]]) -> NoReturn:
        """Raises the error with the largest least budget, also among those that `others` raise."""
        for other in others:
            try:
                other()
            except BudgetError as error:
                errors.append(error)
        raise max(errors, key=lambda error: error.least_bytes) from None

    def _run(self, part: Any, place: _Place) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Runs a microbatch; returns its loss, and the numbers of the parameters for which it leaves gradients."""
        fn = self._scaled(place.parts)
        left: list[tuple[int, ...]] = []

        def of_graph(captured: Any, programs: dict[Any, Any]) -> Any:
            def run(inputs: tuple[Any, ...]) -> list[Any]:
                function = captured.function(inputs)
                make = lambda place: self._of_graph(captured, programs, function, place)
                program, ending = self._fitting(make, place)
                given = function.arguments
                outputs = self._execute(program, ending, [*given, *function.held.values()])
                left.append(carried_by(program, ending))
                return function.finished(assembled(program, outputs, given))

            return captured.call(run, fn, (self.model, part), {})

        loss = self._captured(part, place, of_graph)
        if loss is None:
            arguments = Arguments((self.model, part), {})
            operands: list[torch.Tensor] = []

            def of_python(place: _Place) -> tuple[Program, Ending]:
                program, ending, operands[:] = self._of_python(arguments, place)
                return program, ending

            program, ending = self._fitting(of_python, place)
            outputs = self._execute(program, ending, operands)
            left.append(carried_by(program, ending))
            loss = assembled(program, outputs, arguments.tensors)
        return loss, left[0]

    def _ending(self, operands: Sequence[torch.Tensor], place: _Place) -> Ending:
        """Returns what follows on the backward pass of a microbatch.

        Raises:
            ArgumentValueError: a parameter is used under an alias, or a tensor with a graph is used.
        """
        numbers = self._updates.numbers
        mine = {t.untyped_storage()._cdata for t in self._updates.parameters}
        found = []
        for i, operand in enumerate(operands):
            number = numbers.get(id(operand))
            if number is not None:
                found.append((i, number))
            elif operand.requires_grad and not operand.is_leaf:
                raise ArgumentValueError(
                    f"the loss function uses a tensor of shape {list(operand.shape)} that other code computed from "
                    "something that requires grad. Compute it within the loss function, or detach it."
                )
            elif operand.layout is torch.strided and operand.untyped_storage()._cdata in mine and operand.numel():
                raise ArgumentValueError(
                    f"the loss function uses a tensor of shape {list(operand.shape)} that shares memory with a "
                    "parameter of the optimizer, so that an update would change it too. Use the parameter itself."
                )
        if self.clip_norm is not None:  # `clip_grad_norm_(model.parameters(), ...)` adds up norms in this order
            rank = {id(p): i for i, p in enumerate(self.model.parameters())}
            found.sort(key=lambda pair: rank.get(id(operands[pair[0]]), len(rank)))
        if not place.last:
            return Ending(tuple(found), False, place.carried, place.loss)
        clips = self.clip_norm, self.clip_value
        return Ending(tuple(found), True, place.carried, place.loss, *clips, self._layout, place.first)

    def _of_graph(
        self, captured: Any, programs: dict[Any, Any], function: GraphFunction, place: _Place
    ) -> tuple[Program, Ending]:
        operands = [*function.arguments, *function.held.values()]
        ending, layouts = self._ending(operands, place), layouts_below(operands)
        planner, names = self._planner, [i.name for i in captured.inputs]
        planner.then, planner.budget = ending, place.budget
        decisive = tuple(function.inputs[i] for i in captured.graph.decisive)
        key = (decisive, ambient.of_plans(), tuple(layouts), ending, planner.budget)
        tracer = lambda: graph_tracer(function, names, layouts)
        with errors_marked(planner.refusals):
            return planner.programs_of(programs, key, tracer, len(function.arguments)).likely(), ending

    def _of_python(self, arguments: Arguments, place: _Place) -> tuple[Program, Ending, list[torch.Tensor]]:
        fn, planner = self._scaled(place.parts), self._planner
        with TRACING:
            observation = Observation([fn], arguments.statics, arguments.tensors, {}, facts=True)
            reached = CapturedTensors(observation, arguments.tensors)
            operands = [*arguments.tensors, *reached.tensors]
            planner.then, planner.budget = self._ending(operands, place), place.budget
            planner.traced = self._traced.setdefault((planner.then, planner.budget), {})
            with planner.explaining(), errors_marked(planner.refusals):
                programs = planner.traced_programs(fn, arguments, observation, reached, layouts_below(operands))
        return programs.likely(), planner.then, operands

    def _execute(self, program: Program, ending: Ending, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        """Runs a program; returns the outputs of the loss function. Leaves gradients in `Updates.sums`."""
        if ending.updates:
            self._updates.prepare(carried_by(program, ending))
        given = [*operands, *program.constants]
        with below_autograd():
            outputs, residuals = program.lowered.forward(given)
            assert program.backward.outputs is not None
            cotangents = [torch.ones_like(outputs[i]) for i in program.backward.outputs]
            gradients = program.lowered.backward(given, residuals, cotangents)
        torch.autograd.graph.increment_version([operands[i] for i in program.written])
        if not ending.updates:
            self._updates.sums = [g for i, _ in ending.numbers if (g := gradients[i]) is not None]
        return outputs


_Limits = tuple[Budget | None, Budget | None]
"""The budgets of the last microbatch (the second one) and of the others (the first one)."""


class _Place(NamedTuple):
    """The place of a microbatch in its step."""

    parts: int
    """The number of microbatches."""
    last: bool
    carried: tuple[int, ...] = ()
    """The numbers of the parameters for which earlier microbatches left a gradient."""
    loss: torch.dtype | None = None
    """The dtype of the loss of earlier microbatches; None if there are none."""
    budget: Budget | None = None
    first: bool = False
    """See `Ending.first`."""


def _in_bytes(budget: Budget | None, error: BudgetError) -> Budget | None:
    """Returns the budget within which the other microbatches are planned to find the least budget of all.

    A fraction would be one of another plain peak there, so the least bytes of the microbatch that failed replace it.
    """
    return error.least_bytes if isinstance(budget, float) else budget
