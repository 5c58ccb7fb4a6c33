"""The planner of one function: captures, traces, solves and lowers once per signature of a call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from fckpt import _tree as tree
from fckpt import solve
from fckpt._call import ambient
from fckpt._call.arguments import Arguments, DonatedArguments, outlived
from fckpt._call.closure import closure_of
from fckpt._call.conditions import Observation
from fckpt._call.facts import SCRIPT, Unguarded
from fckpt._call.levels import transforms_active
from fckpt._call.places import PLAIN
from fckpt._capture.output_hooks import output_hooks_registered
from fckpt._capture.reads import Guards, Reads
from fckpt._fuse.option import Kernels
from fckpt._memory import collector_paused
from fckpt._planned.agreement import agreed, mesh_of
from fckpt._planned.cuda_graphs import CudaGraphs, check_recordable, drawing_once
from fckpt._planned.families import Families, is_shared
from fckpt._planned.ledger import Ledger
from fckpt._planned.lower import Lowered
from fckpt._planned.making import identity, make_plan, nbytes_of, priced
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.program import Program
from fckpt._planned.programs import Experience, Programs
from fckpt._planned.refusals import explaining, latest
from fckpt._planned.resized import Resized
from fckpt._planned.sized_traces import SizedTraces
from fckpt._planned.stored import StoredPlans, stored_plans
from fckpt._planned.tiling import Tile, tiled_as_planned, tiled_or_hinted
from fckpt._planned.tracing import (
    TRACING,
    CapturedTensors,
    as_on_cpu,
    below_levels,
    graph_tracer,
    released,
    traced_call,
    unguarded_error,
)
from fckpt._recompute.closed_over import unwatched
from fckpt._tile.rewriting import rewritten
from fckpt._trace.layouts import layouts_below
from fckpt._trace.named_device import NamedDevice
from fckpt._trace.operations import Backward, Layout, Trace
from fckpt._trace.stand_ins import WAY_OUT
from fckpt.cost import Measured
from fckpt.cost.calls import CostSource
from fckpt.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BudgetError,
    MeasurementError,
    PlanError,
    TraceError,
)
from fckpt.graph.graph import Graph
from fckpt.graph.identity import difference
from fckpt.policies.decisions import PolicyLike, as_policy
from fckpt.spmd.mesh import mesh_in_use

__all__ = ["LazyModules", "Planner", "traced_without_running"]


_MOST_CAPTURES = 32  # per function
_MOST_ALONE = 3  # outputs that are tried alone if no plan fits for all of them together
_MOST = 128  # signatures per function: a number that changes at every call makes a new signature each time


class LazyModules(TraceError):
    """The call creates the parameters of a lazy module, so it cannot be planned."""


def _has_lazy_modules(fn: Callable[..., Any], given: Any) -> bool:
    modules = closure_of([fn], [leaf for leaf in tree.leaves(given) if not isinstance(leaf, torch.Tensor)]).modules
    lazy = [m for module in modules for m in module.modules() if isinstance(m, LazyModuleMixin)]
    return any(module.has_uninitialized_params() for module in lazy)  # type: ignore[misc]  # only lazy modules are in the list


class Planner:
    """Planner of the calls of one function, with a cache of captures, traces, plans and planned programs."""

    def __init__(
        self,
        policy: PolicyLike | None = None,
        budget: Budget | None = None,
        plan: Plan | None = None,
        solver: str = "auto",
        costs: CostSource | None = None,
        tile: Tile = False,
        kernels: Kernels = "aten",
        cuda_graphs: bool = False,
    ):
        if plan is not None and not isinstance(plan, Plan):
            raise ArgumentTypeError(
                "plan must be a Plan that fckpt.plan made or fckpt.Plan.load read, not "
                f"{type(plan).__name__}: {plan!r}."
            )
        if plan is not None and (policy is not None or budget is not None):
            raise ArgumentValueError("a plan includes its policy and budget: give a plan, or a policy or a budget.")
        solve.get(solver)  # raises if there is no such solver
        self.policy = None if policy is None else as_policy(policy)
        self.budget = budget
        self.given = plan
        self.solver = solver
        self.costs = costs
        self.tile: Tile = tile
        self.kernels: Kernels = kernels if plan is None or kernels != "aten" else plan.kernels
        self.graphs = CudaGraphs(self._with_less) if cuda_graphs else None
        self.ledger = Ledger()
        self.ledger.promised = budget if plan is None else plan.budget_bytes
        self.traced: dict[Any, list[tuple[Guards, Programs]]] = {}
        """Programs for calls that Dynamo cannot capture: by signature, settings and the result of the walk of the
        closure, and with guards on everything else that the Python code may have read."""
        self.captures: list[tuple[Any, dict[Any, Programs]]] = []
        """Captures, with the programs made from each."""
        self.refusals: dict[bool, str] = {}
        """The reasons of failed captures, by whether the capture was below levels of torch.func."""
        self.experience = Experience()
        self.sizes = SizedTraces(functools.partial(self.ledger.count, "sized"))
        self.families = Families()
        self.resized = Resized()
        self.plans: dict[Any, Plan] = {}
        """The latest plans, by everything on which a plan depends, see `identity`."""
        self.ledger.expected = lambda: max([plan.baseline_peak_bytes for plan in self.plans.values()], default=None)

    @property
    def is_idle(self) -> bool:
        """Whether the planner has nothing to plan in a call that nothing differentiates: policies choose residuals."""
        return self.budget is None and self.given is None

    # -- captures

    def captured(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[Any, Programs]] | None:
        """Returns a capture that is valid for a call, with its programs; None if Dynamo cannot capture the function.

        If there is no valid capture, the call is captured now.
        """
        if mesh_in_use() is not None:  # one rank of several: the Python code is traced instead
            return None
        if ambient.has_function_modes():
            with unwatched():
                return self._captured(fn, args, kwargs)
        return self._captured(fn, args, kwargs)

    def _captured(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[Any, Programs]] | None:
        below = transforms_active()
        found = self._known(fn, args, kwargs, below)
        if found is not None or below in self.refusals:
            return found
        with TRACING:
            found = self._known(fn, args, kwargs, below)
            if found is None:
                with ambient.unobserved():
                    found = self._captured_now(fn, args, kwargs, below)
            return found

    def _known(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], below: bool
    ) -> tuple[Any, dict[Any, Programs]] | None:
        for entry in self.captures:
            if entry[0].below == below and entry[0].holds(fn, args, kwargs):
                self.ledger.reused = True
                return entry
        return None

    def _captured_now(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], below: bool
    ) -> tuple[Any, dict[Any, Programs]] | None:
        from fckpt._capture.captured import CaptureError, Entry  # imports Dynamo, which takes a second

        if _has_lazy_modules(fn, (args, kwargs)):
            raise LazyModules(
                "the function uses a lazy module (nn.LazyLinear, for example), which creates its parameters in its "
                "first call. Call the function once before a plan is made."
            )
        self._check_no_cuda_graph()
        if self._entry is None:
            self._entry = Entry()
        earlier = sorted(self.captures, key=lambda entry: entry[0] is not self._latest)
        whys = [known.why(fn, args, kwargs) for known, _ in earlier if known.below == below]
        with self.ledger.timed("capture"):
            try:
                made = self._capture(fn, args, kwargs, below)
            except CaptureError as error:
                self.refusals[below] = str(error)
                return None
        if below:
            made.guard_wrapped(fn, args, kwargs)
        self.ledger.count("captures")
        self.ledger.told_compiled(made.told_compiled)
        if isinstance(self.budget, float) and made.graph is not None and made.graph.checkpoints_draw:
            self.ledger.plans_without_checkpoint(self.budget)
        self.ledger.captured_again(*whys)
        programs = next((known for other, known in self.captures if other.same_graph(made)), {})
        # Newest first, but captures that hold for one number only come before those that take any such number.
        found, self._latest = (made, programs), made
        self.captures = sorted([found, *self.captures[: _MOST_CAPTURES - 1]], key=lambda entry: entry[0].generality)
        return found

    _entry: Any = None
    _latest: Any = None

    def _capture(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], below: bool) -> Any:
        from fckpt._capture.captured import CaptureError, capture

        with below_levels(fn, args, kwargs) if below else contextlib.nullcontext((args, kwargs)) as (a, k):
            attempt = functools.partial(capture, self._entry, fn, a, k, below=below, data=(args, kwargs))
            try:
                return attempt()
            except CaptureError as error:
                if not output_hooks_registered(fn, str(error)):
                    raise
            return attempt()

    def share_captures(self, other: Planner) -> None:
        """Takes the captures of another planner of the same function, without the programs made from them."""
        self._entry = other._entry
        self.captures = [(captured, {}) for captured, _ in other.captures]
        self.refusals = dict(other.refusals)

    def _check_no_cuda_graph(self) -> None:
        """Raises an error while a CUDA graph is captured: work that waits for the GPU would break that capture."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise MeasurementError(
                f"{self.ledger.name} has no plan for this call yet, and cannot be planned while a CUDA graph is "
                "captured: operations are measured for a plan. Before the capture, run forward and backward once with "
                "arguments of the same kind and sizes (torch recommends a few such steps on a side stream)."
            )

    # -- programs

    def programs_of(
        self,
        known: dict[Any, Programs],
        key: Any,
        tracer: Callable[[], Callable[[Backward], Trace]],
        count: int,
        batches: tuple[int, ...] = (),
        of_training: Callable[[], Callable[[Backward], Trace]] | None = None,
    ) -> Programs:
        """Returns the programs for calls with the given key, and makes them if needed.

        Args:
            known: the existing programs, by key.
            key: everything on which a trace depends.
            tracer: returns a function that traces such calls with a given backward pass.
            count: the number of operands that are arguments.
            batches: the sizes of the `vmap`s around the call.
            of_training: for a call with grad mode off, returns a function that traces the call with grad mode on. A
                float budget is a fraction of the peak of that call.

        Raises:
            TraceError: the call cannot be traced.
            BudgetError: no plan fits the budget.
            PlanError: the given plan belongs to another function.
        """
        programs = known.get(key)
        if programs is None:
            with TRACING:
                programs = known.get(key)
                if programs is None:
                    while len(known) >= _MOST:
                        del known[next(iter(known))]
                    whole = None if of_training is None or not isinstance(self.budget, float) else of_training()
                    programs = Programs(
                        functools.partial(self._make, tracer(), count, batches, whole), self.improved, self.experience
                    )
                    known[key] = programs
        return programs

    def _make(
        self,
        call: Callable[[Backward], Trace],
        count: int,
        batches: tuple[int, ...],
        whole: Callable[[Backward], Trace] | None,
        backward: Backward,
    ) -> Program:
        self._check_no_cuda_graph()
        with TRACING, ambient.unobserved(), collector_paused():  # it would take a tenth of the time
            with self.ledger.timed("trace"):
                traced = call(backward)
                of_training = None
                if whole is not None:
                    with contextlib.suppress(TraceError, RuntimeError):  # fused operations have no derivative
                        of_training = whole(self.experience.likely())
            program = None if batches or whole is not None else self._resized(traced)
            if program is not None:
                return program
            try:
                plan = self.plan(traced, batches, of_training)
            except BudgetError as error:
                several = traced.backward.outputs or ()
                if backward.outputs is not None or len(several) < 2:
                    raise
                for i in several[
                    : -_MOST_ALONE - 1 : -1
                ]:  # the backward pass may show that one is differentiated alone
                    with contextlib.suppress(BudgetError):
                        return self._make(call, count, batches, whole, backward._replace(outputs=(i,)))
                raise error.adding(
                    f" The plan is for a gradient of {len(several)} outputs together, which is expected until the "
                    "backward pass shows which outputs are differentiated: return only those."
                ) from None
            self.ledger.count("programs")
            return self._program(rewritten(traced, plan.tiles), plan, count)

    def _program(self, traced: Trace, plan: Plan, count: int) -> Program:
        kernels: Kernels = "aten" if mesh_in_use() is not None else self.kernels
        within = None if self.given is not None else plan.budget_bytes
        with self.ledger.timed("lower" if kernels == "aten" else "compile"):
            program = Program(traced, plan, count, kernels, within)
        if self.graphs is not None:
            check_recordable(program)
        if self._resizes:
            self.resized.add(program)
        return program

    @property
    def _resizes(self) -> bool:
        """Whether a program of one size may become a program of another size."""
        if self.policy is not None or self.given is not None or self.graphs is not None:
            return False
        is_measured = self.costs is None or isinstance(self.costs, Measured)
        return is_measured and is_shared(self.solver, self.tile)

    def _resized(self, traced: Trace) -> Program | None:
        """Returns a program made from a program of another size, if there is one that is good enough."""
        if self.budget is None or not self.resized.knows(traced) or mesh_in_use() is not None:
            return None
        key = identity(traced), (), None
        if key in self.plans:
            return None
        with self.ledger.timed("price"):
            program = self.resized.program(traced, self.budget, self.costs or Measured())
        if program is not None:
            for counted in ("adapted", "plans", "programs"):
                self.ledger.count(counted)
            self._remember(key, program.plan)
            self.families.solve_later(program.plan, self._stored(traced), if_used_again=True)
        return program

    def _with_less(self, program: Program, nbytes: int) -> Lowered:
        """Returns the lowered functions of a program with a plan for fewer bytes."""
        if self.given is not None:
            raise BudgetError("A given plan has its peak.", program.timeline.peak_nbytes)
        with TRACING, ambient.unobserved():
            with self.ledger.timed("solve"):
                plan = self._solved(self._stored(program.trace), program.plan.graph, nbytes)
            return self._program(program.trace, plan, program.count).lowered

    def traced_programs(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        observation: Observation,
        captured: CapturedTensors,
        layouts: Sequence[Layout],
        batches: tuple[int, ...] = (),
        donated: tuple[int, ...] = (),
    ) -> Programs:
        """Returns the programs for a call that Dynamo cannot capture, from a trace of the function's Python code."""
        unguarded = next((fact for fact in observation.facts if isinstance(fact, Unguarded)), None)
        if any(part.scripted for part in observation.parts):
            unguarded = Unguarded(SCRIPT)
        modes = ambient.users_function_modes()
        states = [(type(mode), name, value) for mode in modes for name, value in vars(mode).items()]
        hidden = next((kind for kind, _, value in states if type(value) not in PLAIN), None)
        if hidden is not None:
            unguarded = Unguarded(f"the state of the torch function mode {hidden.__name__}, which is active")
        if unguarded is not None:
            raise unguarded_error(unguarded)
        settings = (
            observation.ambient,
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        ambient_now = (*settings, tuple(map(type, modes)), tuple(states))
        key = (
            arguments.signature(), tuple(layouts), captured.order, donated, ambient_now, observation.settings(),
        )  # fmt: skip
        for other in [key for key in self.traced if outlived(key[0])]:
            del self.traced[other]
        with TRACING:
            known = self.traced.setdefault(key, [])
            found = next((programs for guards, programs in known if guards.hold()), None)
            if found is not None:
                self.ledger.reused = True
                return found
            if known:
                self.ledger.captured_again(known[0][0].changed())
            elif any(other[:-1] == key[:-1] for other, made in self.traced.items() if made):
                self.ledger.captured_again("the function's closure, or the contents of its arguments")
            facts = [*observation.facts, *(kind for part in observation.parts for kind in part.kinds)]
            return self._traced_now(known, fn, arguments, facts, captured, layouts, batches, donated)

    def _traced_now(
        self,
        known: list[tuple[Guards, Programs]],
        fn: Callable[..., Any],
        arguments: Arguments,
        facts: Sequence[Any],
        captured: CapturedTensors,
        layouts: Sequence[Layout],
        batches: tuple[int, ...],
        donated: tuple[int, ...],
    ) -> Programs:
        """Traces the Python code of a call, and stores guards on everything that the code may have read."""
        count, reads = len(arguments.tensors), Reads()

        def traced(backward: Backward) -> Trace:
            if len(arguments.tensors) != count:  # the call has ended: its Python code might read other values now
                raise TraceError(
                    "a backward pass runs for other outputs than the plan was made for, and the function's Python code "
                    "cannot be traced again after its call has ended. Return only the loss from the planned function: "
                    f"remat(lambda *args: fn(*args).loss, budget=...). {WAY_OUT}"
                )
            return traced_call(fn, arguments, captured, layouts, backward, reads, donated)

        programs = Programs(functools.partial(self._make, traced, count, batches, None), self.improved, self.experience)
        programs.likely()
        guards = reads.guards(facts)
        if guards.unguarded is not None:
            raise unguarded_error(guards.unguarded)
        known[:] = [(guards, programs), *known[: _MOST_CAPTURES - 1]]
        while len(self.traced) > _MOST:
            del self.traced[next(iter(self.traced))]
        return programs

    def refuse(self, captured: Any, why: str) -> None:
        """Notes that a captured graph cannot be traced, and removes the capture."""
        self.captures = [entry for entry in self.captures if entry[0] is not captured]
        self.refusals[captured.below] = why

    def explaining(self) -> contextlib.AbstractContextManager[None]:
        """Adds to a `TraceError` of the body, which traces Python code, why the function was not captured."""
        return explaining(self.refusals)

    def refused(self) -> str:
        """Returns why the function was not captured; empty if it was captured."""
        return latest(self.refusals)

    # -- plans

    def plan(self, traced: Trace, batches: tuple[int, ...] = (), of_training: Trace | None = None) -> Plan:
        """Prices and solves a trace of a call that `vmap`s of these sizes batched, or returns the given plan.

        A float budget is a fraction of the plain peak of `of_training`, if that is given.
        """
        if self.given is not None:
            return self._fitting(self.given, traced)
        mesh = mesh_of(traced, self.budget is not None)
        if mesh is None:
            key = (identity(traced), batches, None if of_training is None else identity(of_training))
            if key not in self.plans:
                with self.ledger.timed("price"):
                    graph, budget = self._priced(traced, batches), self.budget
                    if of_training is not None and budget is not None:
                        budget = nbytes_of(budget, self._priced(of_training, batches))
                with self.ledger.timed("solve"):
                    stored = self._stored(traced)
                    make = functools.partial(self._solved, stored)
                    price = functools.partial(self._priced, batches=batches)
                    solve = lambda: tiled_or_hinted(traced, graph, price, budget, make, self.tile)
                    self._remember(key, self._of_family(graph, budget, solve, stored))
            return self.plans[key]
        if self.tile:
            raise ArgumentValueError(f"tile={self.tile!r} does not work on one rank of a mesh. Leave it out.")
        stored = self._stored(traced)
        make = lambda least: self._solved(stored, self._priced(traced, batches), least)
        with released(TRACING), self.ledger.timed("solve"):  # other ranks may be threads
            plan = agreed(traced, mesh, self.budget, make)
            self._count(stored)
            return plan

    def _remember(self, key: Any, plan: Plan) -> None:
        while len(self.plans) >= _MOST:  # sizes that change at every call make a plan each time
            del self.plans[next(iter(self.plans))]
        self.plans[key] = plan

    def _stored(self, traced: Trace) -> StoredPlans:
        """Returns the plans on disk for a trace."""
        own_costs = self.costs is None and self.budget is not None
        return stored_plans(self.solver, traced, own_costs=own_costs)

    def _solved(self, stored: StoredPlans, graph: Graph, budget: Budget | None) -> Plan:
        """Returns the plan on disk for a priced graph, if there is one, or else the solver's."""
        make = functools.partial(make_plan, graph, budget, self.solver, str(torch.__version__))
        return make() if budget is None else stored.made(graph, nbytes_of(budget, graph), make)

    def _of_family(self, graph: Graph, budget: Budget | None, solve: Callable[[], Plan], stored: StoredPlans) -> Plan:
        """Returns a plan: read, or adapted from plans of other sizes, or found quickly, or solved."""
        if budget is None or not is_shared(self.solver, self.tile):
            plan = solve()
        else:
            quickly = self.kernels == "aten"  # otherwise the kernels of both plans would be compiled
            plan, origin = self.families.plan(graph, nbytes_of(budget, graph), solve, stored, quickly=quickly)
            if origin in ("adapted", "quick"):
                self.ledger.count(origin)
                self.families.solve_later(plan, stored)
        self._count(stored)
        return plan

    def _count(self, stored: StoredPlans) -> None:
        self.ledger.count("plans")
        if stored.read and not stored.solved:
            self.ledger.count("read")

    def improved(self, program: Program) -> Program:
        """Returns a planned program with a faster plan, if one was solved in the background; else the same program."""
        plan = self.families.improved(program.plan)
        if plan is None:
            return program
        replaced = {key: plan for key, known in list(self.plans.items()) if known is program.plan}
        if replaced:  # not yet for another program of the plan
            self.ledger.count("improved")
            self.plans.update(replaced)
        with TRACING:
            return self._program(program.trace, plan, program.count)

    def _priced(self, traced: Trace, batches: tuple[int, ...]) -> Graph:
        graph = priced(traced, self.policy, self.costs, budgeted=self.budget is not None, batches=batches)
        return graph if self.graphs is None else drawing_once(graph)

    @staticmethod
    def _fitting(plan: Plan, traced: Trace) -> Plan:
        how = difference(plan.graph if plan.untiled is None else plan.untiled, traced.graph)
        if how is None and plan.tiles:
            tiled_as_planned(plan, traced)
        if how is not None:
            raise PlanError(
                f"the plan was made for another computation: {how} (plan: torch {plan.torch_version}, here: torch "
                f"{torch.__version__}). Make a plan for these arguments with fckpt.plan, or give a budget instead."
            )
        return plan


def traced_without_running(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: Sequence[int | str] | None = None,
    donated: DonatedArguments | None = None,
    target: NamedDevice | None = None,
) -> tuple[Trace, Sequence[torch.Tensor]]:
    """Returns the trace of a call, which does not run, with a backward pass for the chosen outputs; and the tensors.

    If outputs are `chosen`, the Python code is traced, because the results of a captured graph have no names.
    """
    if target is not None:
        with as_on_cpu(fn, args, kwargs) as (a, k):
            return _traced_without_running(fn, a, k, chosen, donated, target)
    return _traced_without_running(fn, args, kwargs, chosen, donated, None)


def _traced_without_running(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: Sequence[int | str] | None,
    donated: DonatedArguments | None,
    target: NamedDevice | None,
) -> tuple[Trace, Sequence[torch.Tensor]]:
    planner, paths = Planner(), donated.tensors(args, kwargs) if donated else {}
    places_in = lambda tensors: [i for i, t in enumerate(tensors) if id(t) in paths]
    backward = Backward(chosen=None if chosen is None else tuple(chosen))
    found = planner.captured(fn, args, kwargs) if chosen is None else None
    if found is not None and found[0].graph is not None:
        function = found[0].bound(fn, args, kwargs)
        tensors = [*function.arguments, *function.held.values()]
        with TRACING, contextlib.suppress(TraceError):  # see `PlannedRegion`
            names = [i.name for i in found[0].inputs]
            places = places_in(function.arguments)
            call = graph_tracer(function, names, layouts_below(tensors), donated=places, target=target)
            return call(backward), tensors
    arguments = Arguments(args, kwargs)
    with TRACING:
        observation = Observation([fn], arguments.statics, arguments.tensors, {})
        captured = CapturedTensors(observation, arguments.tensors)
        tensors = [*arguments.tensors, *captured.tensors]
        places = places_in(arguments.tensors)
        layouts = layouts_below(tensors)
        return traced_call(fn, arguments, captured, layouts, backward, donated=places, target=target), tensors
