"""Rematerialised functions and modules: for each call, a region decides which engine runs it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

import torch
from torch import nn

from fckpt._call import ambient, casts
from fckpt._call.arguments import Arguments, DonatedArguments, StaticArguments, check_donated, check_returned
from fckpt._call.closure import closure_of
from fckpt._call.conditions import BufferWrites, Conditions, Observation, Written
from fckpt._call.levels import (
    has_forward_mode,
    innermost,
    innermost_is_vmap,
    is_recorded,
    transforms_active,
    transforms_in_the_way,
    unwrapped,
    version,
    vmap_around_grad,
)
from fckpt._call.rng import RandomState
from fckpt._capture import marks
from fckpt._capture.function import BatchedGraph
from fckpt._fuse.option import Kernels
from fckpt._module import remat_module
from fckpt._planned.batched import NOT_BATCHED, Batching, outer_batch, run_batched
from fckpt._planned.execution import NOT_AGAIN, Execution
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.planner import LazyModules, Planner
from fckpt._planned.program import Program
from fckpt._planned.programs import Programs
from fckpt._planned.raised import RaisedError, errors_marked
from fckpt._planned.tiling import Tile
from fckpt._planned.tracing import TRACING, CapturedTensors, graph_tracer
from fckpt._recompute import saved_tensors
from fckpt._recompute.attached import run_nodes, run_planned
from fckpt._recompute.hooked import run_segment
from fckpt._recompute.primitives import UserCall
from fckpt._recompute.registrations import Registrations
from fckpt._recompute.saved_tensors import HooksUnavailable
from fckpt._repeats import repeated_blocks, replace_modules
from fckpt._trace.layouts import as_differentiated, layouts_below
from fckpt._trace.operations import Layout
from fckpt._trace.trace import inlined, is_followed, is_tracing
from fckpt._trace.untraceable import HigherOrderError
from fckpt.errors import TraceError
from fckpt.policies.decisions import PolicyLike, as_policy
from fckpt.policies.named import reductions_saveable

__all__ = ["PlannedRegion", "Region", "Untraceable", "plain_of", "planner_of"]

Untraceable = Literal["raise", "remat"]


class Region:
    """A rematerialised function without a plan, with what earlier calls have shown about it."""

    __slots__ = ("__weakref__", "buffer_writes", "differentiates", "key", "options", "policy", "static")

    def __new__(cls, *options: Any) -> Self:
        made = super().__new__(cls)
        made.options = options
        """The arguments that make another such region."""
        return made

    def __init__(self, static: StaticArguments, policy: PolicyLike | None = reductions_saveable):
        self.key = marks.register(self)
        self.policy = policy
        """Which of its intermediates an enclosing plan may save."""
        self.static = static if static else None
        self.buffer_writes: BufferWrites = {}
        self.differentiates = False
        """Whether a call of `fn` has used a reverse-mode transform inside."""

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            from fckpt._recompute import compiled  # imports Dynamo, which takes about a second

            return compiled.call(self, fn, args, kwargs)
        if is_tracing():
            return inlined(fn, args, kwargs, self.policy)
        if not (torch.is_grad_enabled() or self.plans_calls) or is_followed():
            return fn(*args, **kwargs)
        if is_recorded():
            return self.run_recorded(fn, args, kwargs)
        return self.run(fn, args, kwargs)

    def run_recorded(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `fn` while `torch.jit.trace` or the like records a graph, of which it becomes a part."""
        return fn(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.options  # a copy has seen no calls

    is_planned = False
    """Whether calls run by a plan."""
    plans_calls = False
    """Whether calls are planned that nothing outside differentiates, for example with grad mode off."""

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `fn` unchanged; it runs again in the backward pass."""
        arguments = Arguments(args, kwargs, self.static)
        if not self.differentiates:
            hooks = Registrations()
            try:
                with hooks:
                    if transforms_active():
                        return run_nodes(fn, arguments, self.buffer_writes)
                    return run_segment(fn, arguments, self.buffer_writes)
            except HooksUnavailable:
                hooks.remove()
                self.differentiates = True
        return run_nodes(fn, arguments, self.buffer_writes, discard=False)


class PlannedRegion(Region):
    """A rematerialised function that is captured, traced and planned once per signature."""

    __slots__ = ("compiled_options", "donated", "planner", "plans_calls", "untraceable", "without_plan")

    is_planned = True

    def __init__(
        self,
        static: StaticArguments,
        donated: DonatedArguments,
        policy: PolicyLike | None,
        budget: Budget | None,
        plan: Plan | None,
        solver: str,
        tile: Tile,
        kernels: Kernels,
        cuda_graphs: bool,
        untraceable: Untraceable,
        name: str,
        is_module: bool,
    ):
        super().__init__(static, policy)
        self.donated = donated if donated else None
        # With grad mode off, a module is evaluated or generates text: every length would need a plan.
        self.plans_calls = not is_module and (budget is not None or plan is not None)
        self.untraceable = untraceable
        self.without_plan: Callable[..., Any] | None = None
        """The function that runs instead of a plan, once the function is known to be untraceable."""
        self.planner = Planner(policy, budget, plan, solver, tile=tile, kernels=kernels, cuda_graphs=cuda_graphs)
        self.planner.ledger.name = name
        nbytes = plan.budget_bytes or plan.peak_bytes if plan is not None else budget
        named = policy is not None and as_policy(policy).mentioned
        self.compiled_options = None if donated or tile or named or cuda_graphs else (nbytes, policy, solver)
        """Budget, policy and solver for a compiler; None if it cannot follow the other options."""

    def run_recorded(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.planner.ledger.falls_back("recorded")
        return super().run_recorded(fn, args, kwargs)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ledger = self.planner.ledger
        ledger.count("calls")
        reason = _why_not_planned()
        if reason:
            ledger.falls_back(reason)
            return super().run(fn, args, kwargs)
        if self.without_plan is not None:
            ledger.falls_back("untraceable")
            return self.without_plan(fn, args, kwargs)
        before = ledger.stats
        donated = self.donated.tensors(args, kwargs) if self.donated else {}
        result = raised = None
        try:
            result = self._run_planned_or_raise(fn, args, kwargs, donated)
        except LazyModules:
            ledger.falls_back("lazy module")
            return fn(*args, **kwargs)
        except RaisedError as error:
            raised = error
        except TraceError as error:
            if self.untraceable == "raise":
                raise
            ledger.falls_back("untraceable", detail=str(error).partition(". ")[0])
            blocks = _rematerialised_blocks(fn)
            self.without_plan = (lambda fn, args, kwargs: fn(*args, **kwargs)) if blocks else super().run
            return self.without_plan(fn, args, kwargs)
        if raised is not None:  # outside of the `except`, so that the traceback is that of a plain call
            try:
                return self._run_to_error(fn, args, kwargs, raised)
            finally:
                del raised  # its traceback holds this frame: a cycle would keep the arguments
        if before.captures == ledger.stats.captures and before.programs == ledger.stats.programs:
            ledger.count("hits")
        return result

    def _run_to_error(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], raised: RaisedError
    ) -> Any:
        """Runs a call that raised an error while it was traced without a plan, which raises that error itself.

        What the function does before it raises (random numbers, attributes, buffers) is then done as in a plain call.
        If the backward pass raised the error, the call returns, and its backward pass raises it again.

        Raises:
            TraceError: it raises no error without a plan.
        """
        # A backward pass that raises no error after all needs more memory than its plan would have: that is a warning.
        self.planner.ledger.falls_back("raises an error", str(raised), quiet=not raised.in_backward)
        result = super().run(fn, args, kwargs)
        if not raised.in_backward and (raised.is_urgent or self.untraceable == "raise"):
            raised.only_here()
        return result

    def _run_planned_or_raise(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], donated: dict[int, str]
    ) -> Any:
        found = self.planner.captured(fn, args, kwargs)
        if found is not None:
            captured, programs = found
            try:
                written: list[int] = []
                run = functools.partial(self.run_captured, captured, programs, donated, written)
                result = captured.call(run, fn, args, kwargs)
                if written:
                    check_returned(result, written, donated)
                return result
            except HigherOrderError:  # if it ran as Python, torch would compile it, and would remember that it failed
                raise
            except TraceError as error:  # tracing the Python code may work; if not, its error names the line
                self.planner.refuse(captured, str(error))
        with self.planner.explaining():
            return self.run_traced(fn, Arguments(args, kwargs, self.static), donated=donated)

    def run_captured(
        self,
        captured: Any,
        known: dict[Any, Programs],
        donated: dict[int, str],
        written: list[int],
        inputs: tuple[Any, ...],
    ) -> list[Any]:
        """Runs a captured graph by its plan; returns its outputs. Adds the ids of donated ones to `written`."""
        function = captured.function(inputs)
        key = (tuple(inputs[i] for i in captured.graph.decisive), *ambient.of_plans())
        places = tuple([i for i, t in enumerate(function.arguments) if id(t) in donated])
        check_donated([function.arguments[i] for i in places], function.held.values(), donated)
        finished = function.finished(self._run_graph(captured, known, function, key, (), places))
        function.release()
        written += [id(t) for t in finished if id(t) in donated]
        return finished

    def _run_graph(
        self,
        captured: Any,
        known: dict[Any, Programs],
        function: Any,
        key: tuple[Any, ...],
        sizes: tuple[int, ...],
        donated: tuple[int, ...],
    ) -> list[Any]:
        """Runs a captured graph below the `vmap`s with batch sizes `sizes`, which have been taken off it."""
        closure = list(function.held.values())
        operands = [*function.arguments, *closure]
        layouts, of_training = as_differentiated(layouts_below(operands))
        if self._runs_plainly(layouts):
            return function(*function.arguments)
        if innermost_is_vmap():
            interpreter = innermost()
            level, size = interpreter.level(), interpreter.batch_size()
            below = BatchedGraph(function, level, size, interpreter.randomness())
            with interpreter.lower():
                results = self._run_graph(captured, known, below, (*key, below.key), (*sizes, size), ())
            return BatchedGraph.wrapped(results, level)
        level, batch = outer_batch(operands)
        names = [i.name for i in captured.inputs]
        with errors_marked(self.planner.refusals):
            programs = self.planner.programs_of(
                known,
                (*key, tuple(layouts), batch, donated),
                lambda: self.planner.sizes.tracer(
                    function, key[1:], layouts, graph_tracer(function, names, layouts, batch, donated), batch, donated
                ),
                len(function.arguments),
                (*sizes, *(() if batch is None else (batch.size,))),
                None
                if of_training is None or captured.graph.differentiates
                else lambda: graph_tracer(function, names, of_training, batch),
            )
            program = programs.likely()
        self.planner.ledger.computes_before(captured.branches.nbytes, program.plan.peak_bytes)
        call = UserCall(function, Arguments(tuple(function.arguments), {}), self.buffer_writes)
        conditions = _GraphConditions(call, program, function, closure, layouts, key[1])
        return self._run_planned(call, programs, program, closure, conditions, level)

    def run_traced(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        batching: Batching = NOT_BATCHED,
        donated: dict[int, str] | None = None,
    ) -> Any:
        """Runs a call by tracing the function's Python code, below the `vmap`s of `batching`."""
        if vmap_around_grad() is not None:
            self.planner.ledger.falls_back("vmap")
            return super().run(fn, *arguments.rebuild(arguments.tensors))
        call = UserCall(fn, arguments, self.buffer_writes)
        with TRACING:
            observation = Observation(call.fn, arguments.statics, call.inputs, self.buffer_writes, facts=True)
            reached = CapturedTensors(observation, call.inputs, batching.passed)
            layouts, _ = as_differentiated(layouts_below((*call.inputs, *reached.tensors)))
            plainly = self._runs_plainly(layouts)
            programs = None
            places = tuple([i for i, t in enumerate(call.inputs) if id(t) in (donated or {})])
            check_donated([call.inputs[i] for i in places], reached.tensors, donated or {})
            if not plainly and not innermost_is_vmap():
                with errors_marked(self.planner.refusals):
                    programs = self.planner.traced_programs(
                        fn, arguments, observation, reached, layouts, batching.sizes, places
                    )
        if plainly:
            args, kwargs = arguments.rebuild(call.inputs)
            return fn(*args, **kwargs)
        if programs is None:
            return run_batched(fn, arguments, reached.tensors, reached.slots, batching, self.run_traced)
        program = programs.likely()
        conditions = lambda: observation.conditions(program.draws, NOT_AGAIN)
        return self._run_planned(call, programs, program, reached.tensors, conditions)

    def _runs_plainly(self, layouts: Sequence[Layout]) -> bool:
        """Whether a call has nothing to plan; counts it then. Tensors on the device meta have no memory."""
        on_meta = {device.type == "meta" for device in {layout.device for layout in layouts}}  # of each device once
        if any(on_meta):
            self.planner.ledger.falls_back("meta tensors", quiet=all(on_meta))
        elif self.planner.is_idle and not any(layout.requires_grad for layout in layouts):
            self.planner.ledger.falls_back("nothing to differentiate", quiet=True)
        else:
            return False
        return True

    def _run_planned(
        self,
        call: UserCall,
        programs: Programs,
        program: Program,
        closure: Sequence[torch.Tensor],
        conditions: Callable[[], Conditions],
        level: int = 0,
    ) -> Any:
        call.plan(program.closed_over(closure), program.returned, program.delivered)

        execution = Execution(
            program,
            closure,
            programs.differentiating,
            self.planner.ledger,
            programs.certain or not any(program.trace.flags),
            programs.seen,
            level,
            retraceable=isinstance(conditions, _GraphConditions) and self.planner.given is None,
            graphs=self.planner.graphs,
        )
        call.planned = execution
        if program.casts:
            operands = [*call.inputs, *closure]
            again = casts.shared([operands[i] for i in program.casts], execution)
            if again:
                self.planner.ledger.shares_casts([program.origin(program.casts[i]) for i in again])
        result = run_planned(call, program.trace.flags, conditions, level, program.dependents, program.constant)
        whose = weakref.ref(call)  # weak: in a cycle, residuals would outlive the results
        execution.restored = lambda: _settings_restored(whose)
        return result


@contextlib.contextmanager
def _settings_restored(whose: weakref.ref[UserCall]) -> Iterator[None]:
    """Restores the settings and generators of a call, whose captured tensors must be unchanged."""
    call = whose()
    assert call is not None
    call.conditions.check()
    with call.conditions.settings_restored(lambda: True):
        yield


class _GraphConditions:
    """The conditions of a call of a captured graph, which reads only its inputs."""

    def __init__(
        self,
        call: UserCall,
        program: Program,
        function: Any,
        closure: Sequence[torch.Tensor],
        layouts: Sequence[Layout],
        ambient_then: ambient.Ambient,
    ):
        self.call, self.function, self.ambient = call, function, ambient_then
        self.random = RandomState([])
        if program.draws:
            devices = {layout.device for layout in layouts if layout.device.type not in ("cpu", "meta")}
            self.random = RandomState.capture(devices).assumed(True)
        written = {n - program.count for n in program.statistics}
        self.slots = [slot for i, slot in enumerate(function.slots) if i not in written]
        lost = {n - program.count: NOT_AGAIN for n in program.remembered}
        slots = [(i, *slot) for i, slot in enumerate(function.slots) if i in written]
        self.written = [Written(held, key, t, t, lost.get(i, "")) for i, held, key, t in slots]
        bases = (unwrapped(t) for i, t in enumerate(closure) if i not in written)
        self.watched = [(t, version(t)) for t in bases]

    def __call__(self) -> Conditions:
        return Conditions(
            self.function, self.call.fn, (), self.ambient, self.random, self.watched, self.written, self.slots, [], []
        )


def _rematerialised_blocks(fn: Callable[..., Any]) -> int:
    """Rematerialises the repeated blocks of all models in a function's closure, in place; returns their number."""
    count = 0
    for model in closure_of([fn]).modules:
        blocks = [block for block in repeated_blocks(model).values() if planner_of(block) is None]
        replace_modules(model, {id(block): remat_module(block, _made_for(block)) for block in blocks})
        count += len(blocks)
    return count


def _made_for(module: nn.Module) -> Callable[[], Region]:
    return functools.partial(Region, StaticArguments(module.forward, (), ()))


def planner_of(fn: Callable[..., Any]) -> Planner | None:
    """Returns the planner of a rematerialised function or module; None if `fn` is plain."""
    region = getattr(fn, "_fckpt_region", None)
    if region is None:
        return None
    return region.planner if isinstance(region, PlannedRegion) else Planner()


def plain_of(fn: Callable[..., Any]) -> Any:
    """Returns the function or module that was passed to `remat` to make `fn`; `fn` itself if it is plain."""
    if not hasattr(fn, "_fckpt_region"):
        return fn
    return getattr(fn, "_fckpt_inner", None) or fn.__wrapped__  # type: ignore[attr-defined]  # functools.wraps sets it


def _why_not_planned() -> str:
    """Returns the reason why no plan can run here, as a key for `Ledger.falls_back`; empty if a plan can run.

    A plan cannot run inside another region, which would have to save the plan's residuals; under forward mode; or if a
    `vmap` is outside of the differentiating transform. Under a dispatch mode of the user it does not run either,
    because the mode would see other operations than in the plain function: in-place variants and recomputations.
    """
    if has_forward_mode():
        return "forward mode"
    if saved_tensors.top() is not None:
        return "saved-tensor hooks"
    if ambient.interfering_mode() is not None:
        return "dispatch mode"
    return transforms_in_the_way()
