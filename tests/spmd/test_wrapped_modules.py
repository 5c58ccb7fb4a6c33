"""Modules that communicate beside what they compute (DDP, DataParallel, FSDP), with regions around and inside them."""

from __future__ import annotations

from typing import Any

import pytest
import wrapped_programs
from torch import nn

import fckpt


def test_data_parallel_training_in_two_processes() -> None:
    for found in fckpt.launch(wrapped_programs.replicated, 2):
        assert len(found) == 2 * len(wrapped_programs.REPLICATED)
        assert all(found.values()), found


@pytest.mark.parametrize("processes", [1, 2])
def test_sharded_training(processes: int) -> None:
    for found in fckpt.launch(wrapped_programs.sharded, processes):
        refused = found.pop("refused")
        assert list(found) == wrapped_programs.ORDERS
        assert all(found.values()), found
        assert "cannot plan this FSDPSequential" in refused and "leave out budget" in refused


def test_a_budget_or_a_policy_around_a_replicated_module_is_refused() -> None:
    (found,) = fckpt.launch(wrapped_programs.refused_steps, 1)
    for name in ("with a budget", "with a policy"):
        assert "remat cannot plan this DistributedDataParallel" in found[name], found
        assert "put it around the planned module: DDP(remat(model, budget=...))" in found[name]


@pytest.mark.parametrize("options", [{"budget": 0.5}, {"policy": fckpt.policies.dots_saveable}])
def test_a_plan_of_what_no_trace_shows_is_refused(options: dict[str, Any]) -> None:
    """A plan would run the tensors' part of the forward alone: DDP's later steps were not reduced."""
    replicated = nn.DataParallel(nn.Linear(3, 3))
    for module, what in ((replicated, "it is"), (nn.Sequential(nn.ReLU(), replicated), "'1' is")):
        with pytest.raises(fckpt.ArgumentTypeError, match=rf"{what} a DataParallel.*DataParallel\(remat\(model"):
            fckpt.remat(module, **options)
        fckpt.remat(module)
    fckpt.remat(nn.Linear(3, 3), **options)
