"""The planner of training steps: forward, backward and updates as one graph, within one budget."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fckpt import _tree as tree
from fckpt._call import ambient
from fckpt._call.results import Rebuilt, is_number
from fckpt._fuse.option import Kernels
from fckpt._planned.late_writes import without_recomputation
from fckpt._planned.making import identity, priced
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.planner import Planner
from fckpt._planned.program import Program
from fckpt._planned.tiling import Tile, tiled_or_hinted
from fckpt._trace.operations import Backward, TensorSpec, Trace
from fckpt._trace.updates import UPDATE, Ending, runs
from fckpt.graph.graph import Graph

__all__ = ["StepPlanner", "assembled", "carried_by", "loss_of"]


def _with_updates(traced: Trace) -> Graph:
    """Returns the graph of a trace with the costs of updates, and of no other operations."""
    nodes = list(traced.graph.nodes)
    for call in traced.calls:
        if call.op is UPDATE and call.node is not None:
            nbytes = runs().cost(call.args[-1]).temporary_nbytes
            nodes[call.node] = dataclasses.replace(nodes[call.node], temporary_nbytes=nbytes)
    return dataclasses.replace(traced.graph, nodes=tuple(nodes))


def _with_first_updates(graph: Graph, trace: Trace) -> Graph:
    """Returns a graph with the temporaries of the next updates, which may be the first ones."""
    nodes = list(graph.nodes)
    for call in trace.calls:
        if call.op is UPDATE and call.node is not None:
            nbytes = runs().first_nbytes(call.args[-1])
            nodes[call.node] = dataclasses.replace(nodes[call.node], temporary_nbytes=nbytes)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _costs_of_updates(trace: Trace, first: bool) -> tuple[int, ...]:
    """Returns the temporaries of the updates: they change with options of the optimizer, where no operation changes."""
    numbers = [call.args[-1] for call in trace.calls if call.op is UPDATE]
    costs = [runs().cost(number).temporary_nbytes for number in numbers]
    return (*costs, *(runs().first_nbytes(number) for number in numbers if first))


class StepPlanner(Planner):
    """Planner of the microbatches of a training step."""

    def __init__(self, budget: Budget | None, solver: str, tile: Tile, kernels: Kernels):
        super().__init__(budget=budget, solver=solver, tile=tile, kernels=kernels)
        self.then: Ending | None = None
        """What follows on the backward pass of the calls to plan now."""
        self._exact: weakref.WeakKeyDictionary[Program, Plan] = weakref.WeakKeyDictionary()

    def _make(self, call: Callable[[Backward], Trace], *rest: Any) -> Program:  # type: ignore[override]  # narrower arguments
        then, autocast = self.then, ambient.autocast()

        def completed(backward: Backward) -> Trace:
            return call(backward._replace(then=then, autocast=autocast))

        return super()._make(completed, *rest)

    def exact_plan(self, program: Program) -> Plan:
        """Returns the plan of a program with all temporaries, which are measured now if there is no budget."""
        plan = program.plan
        if plan.budget_bytes is not None:
            return plan
        if program not in self._exact:
            graph = priced(program.trace, None, self.costs, budgeted=True)
            self._exact[program] = dataclasses.replace(plan, graph=graph)
        return self._exact[program]

    def plan(self, traced: Trace, *rest: Any) -> Plan:  # type: ignore[override]  # narrower arguments
        """Prices and solves a trace of one microbatch."""
        first = self.then is not None and self.then.first
        key = (identity(traced), self.budget, first, _costs_of_updates(traced, first))
        if key not in self.plans:
            version = str(torch.__version__)
            if self.budget is None:
                graph = _with_updates(traced)
                graph = _with_first_updates(graph, traced) if first else graph
                plan = Plan(graph, without_recomputation(graph), "save_all", None, version)
                self.ledger.count("plans")
            else:
                with self.ledger.timed("price"):
                    graph, stored = self._priced_step(traced, first), self._stored(traced)
                price = functools.partial(self._priced_step, first=first)
                make = functools.partial(self._solved, stored)
                solve = lambda: tiled_or_hinted(traced, graph, price, self.budget, make, self.tile)
                with self.ledger.timed("solve"):
                    plan = self._of_family(graph, self.budget, solve, stored)
            self._remember(key, plan)
        return self.plans[key]

    def _priced_step(self, traced: Trace, first: bool) -> Graph:
        graph = self._priced(traced, ())
        return _with_first_updates(graph, traced) if first else graph

    def fits_first(self, program: Program) -> bool:
        """Whether the first updates of the parameters, which may take more memory than later ones, fit the plan."""
        plan = program.plan
        if plan.budget_bytes is None:
            return True
        graph = _with_first_updates(plan.graph, program.trace)
        return dataclasses.replace(plan, graph=graph).peak_bytes <= plan.budget_bytes


def carried_by(program: Program, ending: Ending) -> tuple[int, ...]:
    """Returns the numbers of the parameters that get a gradient, in the order of the operands."""
    return tuple(number for operand, number in ending.numbers if program.trace.gradients[operand] is not None)


def loss_of(program: Program) -> TensorSpec:
    """Returns the spec of the loss."""
    assert program.backward.outputs is not None
    return program.trace.tensors[program.trace.outputs[program.backward.outputs[0]]]


def assembled(program: Program, outputs: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> Any:
    """Returns the result of a traced function from its tensors."""
    sources: dict[str, Sequence[torch.Tensor]] = {"out": outputs, "in": arguments}
    made: dict[Any, Any] = {}
    leaves = []
    for leaf in program.trace.leaves:
        if isinstance(leaf, Rebuilt):
            leaves.append(leaf.of(sources[leaf.source[0]][leaf.source[1]], made).detach())
        else:
            leaves.append(sources[leaf[0]][leaf[1]] if is_number(leaf) else leaf)
    return tree.unflatten(program.trace.spec, leaves)
