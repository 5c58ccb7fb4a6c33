"""What several test files share: comparing trees bit for bit, and running things from the same seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import optree
import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""The version of torch: (2, 13)."""
DEVICE = torch.device(os.environ.get("FCKPT_TEST_DEVICE", "cpu"))
"""Where the random programs and the op database run: `FCKPT_TEST_DEVICE=cuda pytest tests/stateful tests/opinfo`."""
if DEVICE.type == "cuda":
    # Otherwise not even two plain runs are bitwise equal.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def generator_state() -> torch.Tensor:
    """Returns the state of the device's generator."""
    return torch.get_rng_state() if DEVICE.type == "cpu" else torch.get_device_module(DEVICE).get_rng_state(DEVICE)


def assert_equal(actual: Any, expected: Any) -> None:
    """Asserts that two trees hold the same tensors, bit for bit (NaN equals NaN)."""
    got, want = optree.tree_leaves(actual), optree.tree_leaves(expected)
    assert len(got) == len(want), f"{len(got)} leaves, expected {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        a, b = a.detach(), b.detach()
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"leaf {i}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
        same = torch.equal(torch.nan_to_num(a, nan=0.5), torch.nan_to_num(b, nan=0.5)) and torch.equal(
            a.isnan(), b.isnan()
        )
        assert same, f"leaf {i} differs by {(a - b).abs().max()}"


def seeded(run: Callable[[], Any], seed: int = 1) -> tuple[Any, torch.Tensor]:
    """Runs from a seed; returns the result and the generator's state afterwards."""
    torch.manual_seed(seed)
    result = run()
    return result, torch.get_rng_state()


def leaf(tree: Any) -> Any:
    """Copies a tree of tensors into leaves that require grad."""
    return optree.tree_map(lambda t: t.detach().clone().requires_grad_(), tree)


def gradients(tree: Any) -> Any:
    """The `.grad` of every leaf."""
    return optree.tree_map(lambda t: t.grad, tree, none_is_leaf=False)
