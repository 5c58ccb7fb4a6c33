"""Trace, price, solve, lower: once per signature of a call, and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fckpt import solve
from fckpt._call import ambient
from fckpt._call.arguments import Arguments, outlived
from fckpt._call.closure import Snapshot
from fckpt._call.conditions import Observation
from fckpt._call.facts import SCRIPT, Unguarded
from fckpt._call.levels import below_all, is_wrapped, transforms_active, unseen, unwrapped
from fckpt._call.places import Slot, placed, replaced, tensors_in
from fckpt._call.rng import RandomState
from fckpt._capture.function import GraphFunction
from fckpt._capture.reads import Guards, Reads
from fckpt._capture.sources import Names, named
from fckpt._planned.agreement import agreed, mesh_of
from fckpt._planned.execution import Program
from fckpt._planned.ledger import Ledger
from fckpt._planned.plan import Budget, Plan, make_plan
from fckpt._recompute.closed_over import unwatched
from fckpt._trace.layouts import layouts_below
from fckpt._trace.operations import Backward, Batch, Layout, Trace
from fckpt._trace.recorder import WAY_OUT
from fckpt._trace.trace import check_dense, trace
from fckpt.cost import Measured, price
from fckpt.cost.calls import CostSource
from fckpt.cost.pricing import WARNINGS
from fckpt.errors import ArgumentTypeError, ArgumentValueError, PlanError, TraceError
from fckpt.graph.graph import Graph
from fckpt.graph.identity import difference, fingerprint
from fckpt.policies.named import PolicyLike, apply_policy, as_policy
from fckpt.spmd.mesh import mesh_in_use

__all__ = ["Planner", "Programs", "Reached", "graph_tracer", "traced_without_running"]


TRACING = threading.RLock()
"""Held while a function is traced, because fake tensors lie in its closure then and a stand-in for torch's generator in
its place; while a closure is looked at; and while operations are measured."""

_MOST_CAPTURES = 32  # of one function
_MOST = 128  # programs of one function: a number that changes at every call makes a new one each time


_MOST_BACKWARD = 32  # of those for one signature: of other outputs, or cotangents laid out in another way


class Reached:
    """What a call's function closes over: the distinct tensors that are no arguments, and all places."""

    def __init__(self, observation: Observation, inputs: Sequence[torch.Tensor], passed: Sequence[torch.Tensor] = ()):
        """Finds them.

        Args:
            observation: of the call.
            inputs: the arguments' tensors.
            passed: tensors that the function is given in other ways, wherever they lie.
        """
        buffers: list[Slot] = [(holder, name, tensor) for holder, name, _, tensor, _ in observation.buffers]
        self.slots = [*observation.slots, *observation.installed, *buffers]
        found = [t for _, _, value in observation.slots for t in tensors_in(value)]
        found += [tensor for _, _, tensor in (*observation.installed, *buffers)]
        numbers = {id(t): -1 for t in passed} | {id(t): i for i, t in enumerate(inputs)}
        count = len(numbers)
        self.tensors: list[torch.Tensor] = []
        order: list[int] = []
        for tensor in found:
            number = numbers.get(id(tensor))
            if number is None:
                number = numbers[id(tensor)] = count + len(self.tensors)
                self.tensors.append(tensor)
            order.append(number)
        self.state = Snapshot()
        """What the function may assign to: the attributes of modules, the containers and objects that it reaches."""
        modules = [d for m, _ in observation.modules for d in (m, m["_parameters"], m["_buffers"])]
        self.state.dicts = [(d, d) for d in modules]
        for snapshot in observation.state:
            if isinstance(snapshot, Snapshot):
                self.state.extend(snapshot)
        self.order = tuple(order)
        """Which tensor lies in each place."""
        self.random = observation.random
        """The states of the generators that are in reach, before the call."""


class Programs:
    """The programs for calls alike: one for each set of outputs whose backward pass is taken."""

    def __init__(self, make: Callable[[Backward], Program]):
        self._make = make
        self._last: Program | None = None
        self._made: dict[Backward, Program] = {}
        self.certain = False
        """Whether a backward pass has been seen."""

    def seen(self) -> None:
        """Notes that a backward pass has come."""
        self.certain = True

    def likely(self) -> Program:
        """The program for the backward pass that was seen last; before any, for one that is likely."""
        if self._last is None:
            with TRACING:
                if self._last is None:
                    made = self._make(Backward())
                    self._made[made.backward] = self._last = made
        return self._last

    def differentiating(self, backward: Backward) -> Program:
        """The program for a backward pass, which is the likely one from now on."""
        if backward not in self._made:
            with TRACING:
                if backward not in self._made:
                    while len(self._made) >= _MOST_BACKWARD:
                        del self._made[next(iter(self._made))]
                    self._made[backward] = self._make(backward)
        self._last = self._made[backward]
        return self._last


class Planner:
    """Plans the calls of one function and keeps what it planned."""

    def __init__(
        self,
        policy: PolicyLike | None = None,
        budget: Budget | None = None,
        plan: Plan | None = None,
        solver: str = "auto",
        costs: CostSource | None = None,
    ):
        if plan is not None and not isinstance(plan, Plan):
            raise ArgumentTypeError(
                f"plan must be what fckpt.plan made or fckpt.Plan.load read, not {type(plan).__name__}: {plan!r}."
            )
        if plan is not None and (policy is not None or budget is not None):
            raise ArgumentValueError("a plan has its policy and budget in it: give a plan, or a policy or a budget.")
        solve.get(solver)  # that there is one
        self.policy = None if policy is None else as_policy(policy)
        self.budget = budget
        self.given = plan
        self.solver = solver
        self.costs = costs
        self.ledger = Ledger()
        self.ledger.promised = budget if plan is None else plan.budget_bytes
        self.traced: dict[Any, list[tuple[Guards, Programs]]] = {}
        """What was made of functions that Dynamo refuses: by all that the walk of their closures finds, and with
        guards for what else their code may have read."""
        self.captures: list[tuple[Any, dict[Any, Programs]]] = []
        """What was captured, with the programs made of it."""
        self.refusals: dict[bool, str] = {}
        """Why captures failed; below levels of torch.func, and elsewhere."""
        self.plans: dict[Any, Plan] = {}
        """By what costs, decisions and so plans depend on."""
        self.ledger.expected = lambda: max([plan.baseline_peak_bytes for plan in self.plans.values()], default=None)

    # -- captures

    def captured(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[Any, Programs]] | None:
        """Returns a capture that is valid for a call and its programs, made now if there was none; None if Dynamo
        cannot capture the function.
        """
        if mesh_in_use() is not None:  # a program of one rank among many: its Python code is traced
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
                return entry
        return None

    def _captured_now(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], below: bool
    ) -> tuple[Any, dict[Any, Programs]] | None:
        from fckpt._capture.captured import CaptureError, Entry, capture  # imports Dynamo, which takes a second

        if self._entry is None:
            self._entry = Entry()
        why = next((c.why(fn, args, kwargs) for c, _ in self.captures if c.below == below), "")
        with self.ledger.timed("capture"):
            try:
                with below_levels(fn, args, kwargs) if below else contextlib.nullcontext((args, kwargs)) as (a, k):
                    made = capture(self._entry, fn, a, k, below=below)
            except CaptureError as error:
                self.refusals[below] = str(error)
                return None
        if below:
            made.guard_wrapped(fn, args, kwargs)
        self.ledger.count("captures")
        self.ledger.captured_again(why)
        programs = next((known for other, known in self.captures if other.same_graph(made)), {})
        # Newest first, but a capture for one number before those for any: they share no programs.
        found = (made, programs)
        self.captures = sorted([found, *self.captures[: _MOST_CAPTURES - 1]], key=lambda entry: entry[0].is_general)
        return found

    _entry: Any = None

    # -- programs

    def programs_of(
        self,
        known: dict[Any, Programs],
        key: Any,
        tracer: Callable[[], Callable[[Backward], Trace]],
        count: int,
        batches: tuple[int, ...] = (),
    ) -> Programs:
        """Returns the programs for calls with a key.

        Args:
            known: the programs made before.
            key: all that a trace depends on.
            tracer: returns what traces such calls, for a backward pass of some outputs.
            count: how many of its operands are arguments.
            batches: the sizes of the `vmap`s around it.

        Raises:
            TraceError: it cannot be traced.
            BudgetError: nothing fits the budget.
            PlanError: the plan that was given is another function's.
        """
        programs = known.get(key)
        if programs is None:
            with TRACING:
                programs = known.get(key)
                if programs is None:
                    while len(known) >= _MOST:
                        del known[next(iter(known))]
                    programs = Programs(functools.partial(self._make, tracer(), count, batches))
                    known[key] = programs
        return programs

    def _make(
        self,
        call: Callable[[Backward], Trace],
        count: int,
        batches: tuple[int, ...],
        backward: Backward,
    ) -> Program:
        with TRACING, ambient.unobserved():
            with self.ledger.timed("trace"):
                traced = call(backward)
            plan = self.plan(traced, batches)
            self.ledger.count("programs")
            return Program(traced, plan.schedule, plan.graph, count)

    def traced_programs(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        observation: Observation,
        reached: Reached,
        layouts: Sequence[Layout],
        batches: tuple[int, ...] = (),
    ) -> Programs:
        """Returns the programs for a call that Dynamo cannot capture: the function's Python code is traced."""
        unguarded = next((fact for fact in observation.facts if isinstance(fact, Unguarded)), None)
        if any(part.scripted for part in observation.parts):
            unguarded = Unguarded(SCRIPT)
        if unguarded is not None:
            raise _unguarded(unguarded)
        key = (arguments.signature(), tuple(layouts), reached.order, observation.ambient, observation.settings())
        for other in [key for key in self.traced if outlived(key[0])]:
            del self.traced[other]
        with TRACING:
            known = self.traced.setdefault(key, [])
            found = next((programs for guards, programs in known if guards.hold()), None)
            if found is not None:
                return found
            if known:
                self.ledger.captured_again(known[0][0].changed())
            elif any(other[:-1] == key[:-1] for other, made in self.traced.items() if made):
                self.ledger.captured_again("what the function closes over, or its arguments hold")
            facts = [*observation.facts, *(kind for part in observation.parts for kind in part.kinds)]
            return self._traced_now(known, fn, arguments, facts, reached, layouts, batches)

    def _traced_now(
        self,
        known: list[tuple[Guards, Programs]],
        fn: Callable[..., Any],
        arguments: Arguments,
        facts: Sequence[Any],
        reached: Reached,
        layouts: Sequence[Layout],
        batches: tuple[int, ...],
    ) -> Programs:
        """Traces the Python code of a call, and notes what it may have read."""
        count, reads = len(arguments.tensors), Reads()

        def traced(backward: Backward) -> Trace:
            if len(arguments.tensors) != count:  # the call is over: its Python code may read something else by now
                raise TraceError(
                    "a backward pass came of other outputs than the plan was made for, and the function's Python code "
                    "cannot be traced again, as its call is over. Return the loss alone from the planned function: "
                    f"remat(lambda *args: fn(*args).loss, budget=...). {WAY_OUT}"
                )
            return traced_call(fn, arguments, reached, layouts, backward, reads)

        programs = Programs(functools.partial(self._make, traced, count, batches))
        programs.likely()
        guards = reads.guards(facts)
        if guards.unguarded is not None:
            raise _unguarded(guards.unguarded)
        known[:] = [(guards, programs), *known[: _MOST_CAPTURES - 1]]
        while len(self.traced) > _MOST:
            del self.traced[next(iter(self.traced))]
        return programs

    def refuse(self, captured: Any, why: str) -> None:
        """Notes that what was captured cannot be traced."""
        self.captures = [entry for entry in self.captures if entry[0] is not captured]
        self.refusals[captured.below] = why

    def refused(self) -> str:
        """Says why the function was not captured, as the end of a message; empty if it was."""
        reasons = list(self.refusals.values())
        return f" (Nor could it be captured: {reasons[-1]}.)" if reasons else ""

    # -- plans

    def plan(self, traced: Trace, batches: tuple[int, ...] = ()) -> Plan:
        """Prices and solves a trace, which `vmap`s of these sizes batched."""
        if self.given is not None:
            return self._fitting(self.given, traced)
        version = str(torch.__version__)
        mesh = mesh_of(traced, self.budget is not None)
        if mesh is None:
            key = (_identity(traced), batches)
            if key not in self.plans:
                graph = self.priced(traced, batches)
                with self.ledger.timed("solve"):
                    self.plans[key] = make_plan(graph, self.budget, self.solver, version)
                self.ledger.count("plans")
            return self.plans[key]
        make = lambda least: make_plan(self.priced(traced, batches), least, self.solver, version)
        with _released(TRACING), self.ledger.timed("solve"):  # other ranks may be threads
            self.ledger.count("plans")
            return agreed(traced, mesh, self.budget, make)

    def priced(self, traced: Trace, batches: tuple[int, ...] = ()) -> Graph:
        """The graph with costs and decisions."""
        graph = traced.graph
        if self.budget is not None:
            with TRACING, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=WARNINGS)  # operations that had to be estimated
                graph = price(traced, self.costs or Measured(), progress=sys.stderr.isatty())
        budgeted = self.budget is not None
        for nodes, policy in traced.regions:
            graph = apply_policy(graph, policy, nodes=nodes, budgeted=budgeted)
        if self.policy is not None:
            batching = {node.id: batches for node in graph.nodes} if batches else None
            graph = apply_policy(graph, self.policy, batching=batching, budgeted=budgeted)
        return graph

    @staticmethod
    def _fitting(plan: Plan, traced: Trace) -> Plan:
        how = difference(plan.graph, traced.graph)
        if how is not None:
            raise PlanError(
                f"the plan was made for another computation: {how} (plan: torch {plan.torch_version}, here: torch "
                f"{torch.__version__}). Make one for these arguments with fckpt.plan, or give a budget instead."
            )
        return plan


def _identity(traced: Trace) -> tuple[Any, ...]:
    """All that the plan of a trace depends on, times apart."""
    graph = traced.graph
    return (
        fingerprint(graph),
        tuple([(v.names, v.held_to) for v in graph.values]),
        tuple([(n.overwrites, n.accumulates) for n in graph.nodes]),
        tuple([(nodes, id(policy)) for nodes, policy in traced.regions]),
        tuple([traced.tensors[t].device for t in traced.operands]),
        ambient.capture(),
    )


@contextlib.contextmanager
def _released(lock: Any) -> Iterator[None]:
    """Lets go of a lock that may be held, several times over, as `Condition.wait` does."""
    state = lock._release_save() if lock._is_owned() else None
    try:
        yield
    finally:
        if state is not None:
            lock._acquire_restore(state)


def _unguarded(value: Unguarded) -> TraceError:
    return TraceError(
        f"the function reaches {value.what}, and a plan cannot tell whether it has changed. Pass what the function "
        f"needs of it as an argument, or as a tensor. {WAY_OUT}"
    )


def traced_call(
    fn: Callable[..., Any],
    arguments: Arguments,
    reached: Reached,
    layouts: Sequence[Layout],
    backward: Backward,
    reads: Reads | None = None,
) -> Trace:
    """Traces a call, below the levels of torch.func that are in force, and a backward pass."""
    _check_traceable((*arguments.tensors, *reached.tensors))
    names = Names(fn, arguments.statics)
    origins = [arguments.path(i) for i in range(len(arguments.tensors))]
    origins += [names.tensors.get(id(t)) or _origin(reached.slots, t) for t in reached.tensors]
    with named(names):
        where = (reached.tensors, reached.slots, layouts, origins, reached.state)
        traced = trace(fn, arguments, *where, backward, reads=reads)
    _check_random(reached.random)
    _check_generators(traced, reached.random)
    return traced


def traced_without_running(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Sequence[int | str] | None = None
) -> tuple[Trace, Sequence[torch.Tensor]]:
    """Returns the trace of a call that is not made, for a backward pass of some outputs, and the call's tensors.

    What a capture returns has no names before it runs: where outputs are `chosen`, Python code is traced.
    """
    planner = Planner()
    backward = Backward(chosen=None if chosen is None else tuple(chosen))
    found = planner.captured(fn, args, kwargs) if chosen is None else None
    if found is not None and found[0].graph is not None:
        function = found[0].bound(fn, args, kwargs)
        tensors = [*function.arguments, *function.held.values()]
        with TRACING, contextlib.suppress(TraceError):  # see `_PlannedRegion`
            trace = graph_tracer(function, [i.name for i in found[0].inputs], layouts_below(tensors))
            return trace(backward), tensors
    arguments = Arguments(args, kwargs)
    with TRACING:
        observation = Observation([fn], arguments.statics, arguments.tensors, {})
        reached = Reached(observation, arguments.tensors)
        tensors = [*arguments.tensors, *reached.tensors]
        return traced_call(fn, arguments, reached, layouts_below(tensors), backward), tensors


def graph_tracer(
    function: GraphFunction, names: Sequence[str], layouts: Sequence[Layout], batch: Batch | None = None
) -> Callable[[Backward], Trace]:
    """Returns what traces calls of a captured graph, for a backward pass of some outputs; it keeps no tensor alive.

    Args:
        function: the graph with the inputs of a call.
        names: of the inputs.
        layouts: of the operands: arguments, then the others.
        batch: the `vmap` outside of the transform that differentiates, if there is one.
    """
    tensors = [*function.arguments, *function.held.values()]
    _check_traceable(tensors)
    given = tuple(map(weakref.ref, tensors))
    blueprint = function.blueprint()
    arguments, closure = Arguments(tuple(blueprint.arguments), {}), list(blueprint.held.values())
    origins = [names[i] if i < len(names) else "a constant" for i in (*function.passed, *function.held)]

    def traced(backward: Backward) -> Trace:
        made = trace(blueprint, arguments, closure, blueprint.slots, layouts, origins, None, backward, batch)
        return dataclasses.replace(made, given=given)

    return traced


def _check_traceable(tensors: Iterable[torch.Tensor]) -> None:
    """Raises `TraceError` for tensors that no plan can deal with."""
    for tensor in tensors:
        check_dense(tensor)


def _check_random(random: RandomState) -> None:
    """Raises `TraceError` if the traced function drew from a generator that is not torch's, or seeded one."""
    drawn = random.drawn()
    states = [state for state in drawn.states if getattr(state[0], "generator", None) is not torch.default_generator]
    if states and not drawn.disturbed:
        RandomState(states).rewind()
        raise TraceError(
            "the function draws from Python's or NumPy's random generators, or seeds a torch.Generator: a plan would "
            "repeat what came out when it was traced. Do it before the call and pass the result, or draw with "
            "torch.rand and its like. fckpt.remat without policy and budget takes any function; nothing is traced then."
        )


def _check_generators(traced: Trace, random: RandomState) -> None:
    """Raises `TraceError` if the traced function drew from a generator that it made."""
    known = {getattr(getattr(state[0], "generator", None), "_cdata", None) for state in random.states}
    for call in traced.calls:
        used = [g for g in (*call.args, *call.kwargs.values()) if isinstance(g, torch.Generator)]
        if any(g._cdata not in known for g in used):
            raise TraceError(
                "the function draws from a torch.Generator that it makes: a plan would go on drawing from the one of "
                f"its trace. Make the generator outside, and pass it or close over it. {WAY_OUT}"
            )


def _origin(slots: list[Slot], tensor: torch.Tensor) -> str:
    for holder, key, value in slots:
        if any(t is tensor for t in tensors_in(value)):
            return f"closed-over {key!r}" if isinstance(holder, dict) else "a closed-over tensor"
    return ""


@contextlib.contextmanager
def below_levels(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields arguments without the wrappers of torch.func, which also leave the function's closure for the body.

    In the place of each wrapper stands a view of the tensor at the bottom, with the shape that the function sees. It
    has data, but not the right data: a capture looks at none.
    """
    arguments = Arguments(args, kwargs)
    observation = Observation([fn], arguments.statics, arguments.tensors, {})
    reached = Reached(observation, arguments.tensors)
    tensors = [*arguments.tensors, *reached.tensors]
    with below_all(), unseen():
        new = {id(t): _without_levels(t) for t in tensors if is_wrapped(t)}
    moved: list[Slot] = []
    for holder, key, value in reached.slots:
        other = replaced(value, new)
        if other is not value:
            moved.append((holder, key, other))
    with placed(moved):
        yield arguments.rebuild([new.get(id(t), t) for t in arguments.tensors])


def _without_levels(tensor: torch.Tensor) -> torch.Tensor:
    from fckpt._capture.wrapped import mark_static  # imports Dynamo, as the capture will

    bottom = unwrapped(tensor).detach()
    view = bottom.as_strided(tensor.shape, tensor.stride()) if bottom.layout is torch.strided else bottom
    bare = view.data  # which is no view: the sizes of a base would be guarded
    mark_static(bare)  # other sizes are another capture, as `WrappedTensors` has it
    return bare.requires_grad_(tensor.requires_grad)
