"""Agreement of all ranks on one plan: rank 0 makes the plan, for the smallest of the ranks' budgets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from fckpt._planned.plan import Budget, Plan
from fckpt._trace.operations import Trace
from fckpt._units import parse_bytes
from fckpt.errors import BudgetError, RankFailure
from fckpt.graph.identity import fingerprint
from fckpt.spmd.mesh import mesh_in_use, odd_one, transport_of

__all__ = ["agreed", "mesh_of"]


def mesh_of(traced: Trace, budgeted: bool) -> str | None:
    """Returns the key of the mesh whose ranks must share one plan; None if there is no such mesh.

    Args:
        traced: the trace. If it contains collectives, the mesh is theirs.
        budgeted: whether there is a budget, so that the plan depends on measured times, which differ between ranks.
            Then the ranks of the mesh in use share one plan even without collectives: with different plans, `shard_map`
            would report that the ranks run different programs.
    """
    collectives = (call for call in traced.calls if getattr(call.op, "namespace", "") == "fckpt")
    messages = (call.args[-1] for call in collectives if call.node is not None)
    used = mesh_in_use() if budgeted else None
    return next(messages, None if used is None else used.key)


def agreed(traced: Trace, key: str, budget: Budget | None, make: Callable[[Budget | None], Plan]) -> Plan:
    """Returns the plan that rank 0 makes.

    Args:
        traced: the trace, the same on all ranks.
        key: the key of the mesh.
        budget: the budget of this rank: on all ranks in bytes, or on all ranks a fraction. None to follow a policy.
        make: makes a plan for a budget.

    Raises:
        RankFailure: a rank plans another function, has failed, or does not take part.
        BudgetError: no plan fits the smallest budget.
    """
    budget = parse_bytes(budget) if isinstance(budget, str) else budget
    mine = json.dumps({"fingerprint": fingerprint(traced.graph, arguments=False), "budget": budget})

    def answer(said: Sequence[str]) -> str:
        parts = [json.loads(text) for text in said]
        odd = odd_one({rank: part["fingerprint"] for rank, part in enumerate(parts)})
        if odd is not None:
            text = f"rank {odd[0]} plans another function than the other ranks: its operations or sizes differ."
            return json.dumps({"failure": text, "rank": odd[0]})
        budgets = [part["budget"] for part in parts if part["budget"] is not None]
        try:
            return json.dumps({"plan": make(min(budgets, default=None)).to_json()})
        except BudgetError as error:
            return json.dumps({"over": str(error), "least_bytes": error.least_bytes})

    found = json.loads(transport_of(key).share("a plan", mine, answer))
    if "failure" in found:
        raise RankFailure(found["failure"], found["rank"])
    if "over" in found:
        raise BudgetError(found["over"], found["least_bytes"])
    return Plan.from_json(found["plan"], "the plan of rank 0")
