"""Trace, price, solve, lower: once per signature of a call, and kept."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from fckpt import solve
from fckpt.arguments import Arguments, outlived
from fckpt.closure import Slot, tensors_in
from fckpt.conditions import Observation, unseen
from fckpt.cost import Measured, price
from fckpt.cost.calls import CostSource
from fckpt.errors import ArgumentTypeError, ArgumentValueError, PlanError, TraceError
from fckpt.graph import Graph
from fckpt.operations import Layout, Trace
from fckpt.plans import Budget, Plan, fingerprint, make_plan
from fckpt.policies import PolicyLike, apply_policy, as_policy
from fckpt.rng import RandomState
from fckpt.run import Program
from fckpt.spmd.agreement import agreed, mesh_of
from fckpt.trace import check_dense, trace

__all__ = ["Planner", "Reached"]


TRACING = threading.RLock()
"""Held while a function is traced, because fake tensors lie in its closure then and a stand-in for torch's generator in
its place; while a closure is looked at; and while operations are measured."""

_MOST = 128  # programs of one function: a number that changes at every call makes a new one each time


class Reached:
    """What a call's function closes over: the distinct tensors that are no arguments, and all places."""

    def __init__(self, observation: Observation, inputs: Sequence[torch.Tensor], passed: Sequence[torch.Tensor] = ()):
        """Finds them.

        Args:
            observation: of the call.
            inputs: the arguments' tensors.
            passed: tensors that the function is given in other ways, wherever they lie.
        """
        buffers: list[Slot] = [(b[0], b[1], b[3]) for b in observation.buffers]
        self.slots = [*observation.slots, *observation.installed, *buffers]
        found = [t for slot in observation.slots for t in tensors_in(slot[2])]
        found += [slot[2] for slot in (*observation.installed, *buffers)]
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
        self.state = [d for m, _ in observation.modules for d in (m, m["_parameters"], m["_buffers"])]
        self.state += observation.containers
        """The dicts of the modules, and other dicts and lists."""
        self.order = tuple(order)
        """Which tensor lies in each place."""
        self.random = observation.random
        """The states of the generators that are in reach, before the call."""


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
        self.programs: dict[Any, Program] = {}

    def program(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        observation: Observation,
        reached: Reached,
        layouts: Sequence[Layout],
        batches: tuple[int, ...] = (),
    ) -> Program:
        """Returns the program for a call, made now if there was none like it.

        Raises:
            TraceError: `fn` cannot be traced.
            BudgetError: nothing fits the budget.
            PlanError: the plan that was given is another function's.
        """
        call = (arguments.signature(), tuple(layouts), reached.order, observation.ambient)
        key = (*call, observation.settings())
        program = self.programs.get(key)
        if program is None:
            with TRACING:
                program = self.programs.get(key)
                if program is None:
                    self._make_room()
                    traced = traced_call(fn, arguments, reached, layouts)
                    plan = self.plan(traced, batches)
                    program = Program(traced, plan.schedule, plan.graph, len(arguments.tensors))
                    # A counter that the function moves has moved, and will not move again.
                    after = Observation([fn], arguments.statics, arguments.tensors, {}, facts=True)
                    for known in (key, (*call, after.settings())):
                        self.programs[known] = program
        return program

    def _make_room(self) -> None:
        for key in [key for key in self.programs if outlived(key[0])]:
            del self.programs[key]
        while len(self.programs) >= _MOST:
            del self.programs[next(iter(self.programs))]

    def plan(self, traced: Trace, batches: tuple[int, ...] = ()) -> Plan:
        """Prices and solves a trace, which `vmap`s of these sizes batched."""
        if self.given is not None:
            return self._fitting(self.given, traced)
        version = str(torch.__version__)
        mesh = mesh_of(traced, self.budget is not None)
        if mesh is None:
            return make_plan(self.priced(traced, batches), self.budget, self.solver, version)
        make = lambda least: make_plan(self.priced(traced, batches), least, self.solver, version)
        with _released(TRACING):  # other ranks may be threads
            return agreed(traced, mesh, self.budget, make)

    def priced(self, traced: Trace, batches: tuple[int, ...] = ()) -> Graph:
        """The graph with costs and decisions."""
        graph = traced.graph
        if self.budget is not None:
            with TRACING, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # operations that had to be estimated
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
        nodes = zip(plan.graph.nodes, traced.graph.nodes, strict=False)
        if plan.fingerprint != fingerprint(traced.graph) or any(
            {*a.overwrites}.difference(b.overwrites) for a, b in nodes
        ):
            counts = len(plan.graph.nodes), len(traced.graph.nodes)
            how = "it has {} operations, this call has {}".format(*counts) if counts[0] != counts[1] else "sizes differ"
            raise PlanError(
                f"the plan was made for another computation: {how} (plan: torch {plan.torch_version}, here: torch "
                f"{torch.__version__}). Make one for these arguments with fckpt.plan, or give a budget instead."
            )
        return plan


@contextlib.contextmanager
def _released(lock: Any) -> Iterator[None]:
    """Lets go of a lock that may be held, several times over, as `Condition.wait` does."""
    state = lock._release_save() if lock._is_owned() else None
    try:
        yield
    finally:
        if state is not None:
            lock._acquire_restore(state)


def traced_call(fn: Callable[..., Any], arguments: Arguments, reached: Reached, layouts: Sequence[Layout]) -> Trace:
    """Traces a call, below the levels of torch.func that are in force."""
    for tensor in (*arguments.tensors, *reached.tensors):
        check_dense(tensor)
    origins = [arguments.path(i) for i in range(len(arguments.tensors))]
    origins += [_origin(reached.slots, t) for t in reached.tensors]
    traced = trace(fn, arguments, reached.tensors, reached.slots, layouts, origins, reached.state)
    _check_random(reached.random)
    return traced


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


def _origin(slots: list[Slot], tensor: torch.Tensor) -> str:
    for holder, key, value in slots:
        if any(t is tensor for t in tensors_in(value)):
            return f"closed-over {key!r}" if isinstance(holder, dict) else "a closed-over tensor"
    return ""


def layouts_below(tensors: Iterable[torch.Tensor]) -> list[Layout]:
    """The layouts below all levels of torch.func; a tensor that any level tracks requires grad."""
    if not torch._C._are_functorch_transforms_active():
        # There may be a thousand, at every call, and the constructor of a named tuple takes most of the time.
        new, strided = functools.partial(tuple.__new__, Layout), torch.strided
        return [
            new((t.shape, t.stride() if t.layout is strided else (), t.dtype, t.device, t.requires_grad, t.is_leaf))
            for t in tensors
        ]
    with unseen():
        return [_layout_below(t) for t in tensors]


def _layout_below(tensor: torch.Tensor) -> Layout:
    tracked = tensor.requires_grad
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
        tracked = tracked or tensor.requires_grad
    return Layout(
        tensor.shape, _stride(tensor), tensor.dtype, tensor.device, tracked, tensor.is_leaf and tensor.requires_grad
    )


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()
