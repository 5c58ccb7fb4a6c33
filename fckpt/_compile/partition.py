"""The partitioner of the backend "fckpt": a plan decides what the forward half saves and what the backward repeats.

Inductor calls it with the joint graph of a compiled function. Without a plan it is torch's own partitioner.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import (
    cleanup_recompute_tags,
    force_save_collectives,
    min_cut_rematerialization_partition,
)
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.utils import get_donated_idxs

from fckpt._call.ambient import without_modes
from fckpt._compile.halves import halves
from fckpt._compile.joint import Joint, copied, joint_graph, reads_overwritten, saved_nbytes
from fckpt._planned.making import make_plan
from fckpt._planned.plan import Plan
from fckpt.errors import BudgetError
from fckpt.policies.decisions import Policy
from fckpt.policies.named import apply_policy

__all__ = ["Partitioner"]


class Partitioner(CustomPartitionerFn):
    """Partitions one joint graph.

    Args:
        nbytes: the bytes to plan for; None for torch's own partition.
        policy: the policy; None for none.
        solver: the name of a solver.
        torch_budget: the `activation_memory_budget` for torch's own partition, which is taken unless what it saves is
            more than `nbytes` already; None for a plan.
    """

    def __init__(self, nbytes: int | None, policy: Policy | None, solver: str, torch_budget: float | None = None):
        self.nbytes = nbytes
        self.policy = policy
        self.solver = solver
        if nbytes is None and policy is None:  # without a request, torch's partition for its default budget is taken
            torch_budget = 1.0
        self.torch_budget = torch_budget
        self.plan: Plan | None = None
        """The plan; None if torch's partition was taken."""
        self.is_least = False
        """Whether no plan fits, so that the plan with the least known peak was taken."""
        self.trains = False
        """Whether a joint graph was partitioned: without gradients, there is none."""

    def uuid(self) -> Any | None:
        """Returns the key under which Inductor stores compiled graphs; None if they cannot be stored."""
        if self.policy is not None and type(self.policy).__name__ == "_Function":
            return None  # the code of a policy may change
        # Inductor's own key leaves out whether kernels of the backward half may write over what the forward half saved.
        donates = functorch.donated_buffer, get_donated_idxs()
        return hashlib.sha256(
            repr((_sources(), self.nbytes, repr(self.policy), self.solver, self.torch_budget, donates)).encode()
        ).hexdigest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Returns the forward half and the backward half of a joint graph."""
        self.trains = True
        if self.torch_budget is not None:
            share = min(self.torch_budget, functorch.activation_memory_budget)
            with functorch.patch(activation_memory_budget=share):
                forward, backward = min_cut_rematerialization_partition(copied(gm), joint_inputs, **kwargs)
            fits = self.nbytes is None or saved_nbytes(backward) <= self.nbytes
            # Torch's partition may recompute from an input after it was overwritten, which gives wrong gradients:
            # https://github.com/pytorch/pytorch/pull/197039
            if fits and not reads_overwritten(backward, gm.graph):
                return forward, backward
        count = kwargs["num_fwd_outputs"]
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)
        if any("recompute" in n.meta for n in gm.graph.nodes):
            gm = cleanup_recompute_tags(gm, is_default_partition=False)
        force_save_collectives(gm)
        outputs = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        with without_modes():  # operations are timed on real tensors
            joint = joint_graph(gm, outputs[:count], outputs)
            self.plan = self._planned(joint)
        joint.graph = self.plan.graph
        gm.recompile()
        return halves(gm, joint, self.plan.schedule, count)

    def _planned(self, joint: Joint) -> Plan:
        graph = joint.graph
        if self.policy is not None:
            graph = apply_policy(graph, self.policy, budgeted=self.nbytes is not None)
        version = torch.__version__
        if self.nbytes is None:
            return make_plan(graph, None, self.solver, version)
        try:
            return make_plan(graph, self.nbytes, self.solver, version)
        except BudgetError as error:
            # The sizes of kernels are not known before Inductor has made them: the measured peak decides.
            self.is_least = True
            return make_plan(graph, error.least_bytes, self.solver, version)


@functools.cache
def _sources() -> str:
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))).hexdigest()
