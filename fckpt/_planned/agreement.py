"""One plan for all ranks: rank 0 makes it, for the smallest budget of all, and every rank compares what it is for."""

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
    """Returns the key of the mesh whose ranks must have one plan, if there is such a mesh.

    Args:
        traced: what is planned. If it sends messages, it is the mesh over which it does.
        budgeted: whether times decide, which each rank would measure differently. Then it is the mesh in use at least:
            were their plans different, `shard_map` would find that the ranks run different programs.
    """
    messages = (call.args[-1] for call in traced.calls if str(call.op).startswith("fckpt.") and call.node is not None)
    used = mesh_in_use() if budgeted else None
    return next(messages, None if used is None else used.key)


def agreed(traced: Trace, key: str, budget: Budget | None, make: Callable[[Budget | None], Plan]) -> Plan:
    """Returns the plan that rank 0 makes.

    Args:
        traced: what is planned, the same on all ranks.
        key: of the mesh.
        budget: what this rank has, in bytes or as a fraction, as all do; None to follow the decisions of a policy.
        make: makes a plan for a budget.

    Raises:
        RankFailure: a rank is to plan something else, has failed, or does not come.
        BudgetError: nothing fits the smallest budget.
    """
    budget = parse_bytes(budget) if isinstance(budget, str) else budget
    mine = json.dumps({"fingerprint": fingerprint(traced.graph, arguments=False), "budget": budget})

    def answer(said: Sequence[str]) -> str:
        parts = [json.loads(text) for text in said]
        odd = odd_one({rank: part["fingerprint"] for rank, part in enumerate(parts)})
        if odd is not None:
            text = f"rank {odd[0]} is to plan another function than others: its operations or sizes differ."
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
    return Plan.from_json(json.dumps(found["plan"]), "the plan of rank 0")
