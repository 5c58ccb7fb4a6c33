"""Compiled exact kernels as the default, with which tests of plans run once more.

`FCKPT_KERNELS=exact .venv/bin/python -m pytest tests/bits tests/budgets/test_plan{s,ned_functions}.py` runs any tests
with them, and compiles for an hour. `FCKPT_KERNELS=one-by-one` stands in for the compiler with the operations of each
kernel, which takes no longer than the tests alone: it tests blocks, lifetimes and peaks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import fckpt._inspect
import fckpt._remat
import fckpt._step
from fckpt._fuse import inductor, trial
from fckpt._fuse.kernel import Kernel
from fckpt._fuse.option import check_kernels

MODES = ("exact", "one-by-one")


def use_every_kernel(patch: pytest.MonkeyPatch) -> None:
    """Uses every kernel that passes its trial, however slow it is."""
    for name in ("_FASTER", "_NOT_SLOWER"):
        patch.setattr(trial, name, math.inf)
    patch.setattr(trial, "_SECONDS", 0.0)


def one_by_one(kernel: Kernel) -> Callable[[list[Tensor]], list[Tensor]]:
    """A stand-in for compilation, which takes about a second: it runs the operations of the kernel one by one."""

    def run(given: list[Tensor]) -> list[Tensor]:
        inputs, _ = list(given), given.clear()
        return kernel.run(inputs)

    return run


def compile_by(patch: pytest.MonkeyPatch, compiled: Callable[[Kernel], Any]) -> None:
    """Has a function make all compiled kernels."""
    patch.setattr(inductor, "compilation", lambda kernel, workers=None: functools.partial(compiled, kernel))


def do_not_compile(patch: pytest.MonkeyPatch) -> None:
    """Has the stand-in run instead of compiled kernels."""
    compile_by(patch, one_by_one)
    patch.setattr(trial, "_has_compiler", {"cpu": True})


def use_exact_kernels(patch: pytest.MonkeyPatch, mode: str) -> None:
    """Makes `kernels="exact"` the default of plans.

    Args:
        patch: what undoes it.
        mode: "exact" to compile, "one-by-one" for the stand-in.
    """
    if mode not in MODES:
        raise ValueError(f"FCKPT_KERNELS is one of {', '.join(MODES)}, not {mode!r}")

    def exact(kernels: Any, *, planned: bool) -> Any:
        return check_kernels("exact" if planned and kernels == "aten" else kernels, planned=planned)

    for module in (fckpt._remat, fckpt._inspect, fckpt._step):
        patch.setattr(module, "check_kernels", exact)
    use_every_kernel(patch)
    if mode == "one-by-one":
        do_not_compile(patch)
