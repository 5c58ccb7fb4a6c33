"""Every differentiable op of PyTorch's own op database, `remat(op)` against `op`, to the last bit.

Each day, every op is compared on one half of its samples. `FCKPT_DAY=all` compares all, and
`FCKPT_OPINFO_SAMPLES=50 pytest tests/opinfo -n 2` more samples per op.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from opinfo_harness import (
    DEFAULT_SAMPLES,
    MODES,
    SAMPLES,
    Difference,
    Program,
    Remat,
    compare,
    differentiable_ops,
)
from sampling import WHOLE

import fckpt


@dataclass(frozen=True)
class Known:
    """A difference that is understood and allowed: which ops, where, how large, and why."""

    ops: tuple[str, ...]
    modes: tuple[str, ...]
    parts: tuple[str, ...]
    tolerance: float
    """Largest absolute difference; infinite for an error."""
    cause: str
    error: str = ""
    """Part of the text of the error."""

    def covers(self, op: str, difference: Difference) -> bool:
        return (
            op in self.ops
            and difference.mode in self.modes
            and difference.part in self.parts
            and difference.size <= self.tolerance
            and self.error in difference.detail
        )


KNOWN_DIFFERENCES = [
    Known(
        ops=("nn_functional_instance_norm",),
        modes=("backward", "vjp", "grad", "jvp", "grad_grad", "double_backward"),
        parts=("error",),
        tolerance=float("inf"),
        cause="writes into its arguments `running_mean` and `running_var`; a recompute would write again",
        error="MutationError",
    ),
]
PARTS = 2
"""Each day every op runs every other case of its."""
LEAST_SHARE = {  # of all differentiable ops, compared in each mode; the rest plain PyTorch refuses
    "backward": 1.0,
    "vjp": 0.99,
    "grad": 0.99,
    "vmap_grad": 0.97,
    "jvp": 0.95,
    "grad_grad": 0.97,
    "double_backward": 0.97,
    "inplace": 0.2,
}

OPS = {op.formatted_name: op for op in differentiable_ops()}
Outcome = tuple[Counter[str], list[Difference]]


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What was compared for an op: read from a folder all workers share, else found by running it."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "opinfo"
    folder.mkdir(exist_ok=True)

    @cache
    def of(name: str) -> Outcome:
        path = folder / f"{name}.json"
        if not path.exists():
            listed = any(name in known.ops for known in KNOWN_DIFFERENCES)  # all cases, as each must still differ
            report = compare(OPS[name], fckpt.remat, parts=1 if listed or SAMPLES > DEFAULT_SAMPLES else PARTS)
            _write(path, {"compared": report.compared, "differences": [vars(d) for d in report.differences]})
        record = json.loads(path.read_text())
        return Counter(record["compared"]), [Difference(**entry) for entry in record["differences"]]

    return of


def _write(path: Path, record: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(record))
    draft.replace(path)  # atomic: another worker may be reading


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", OPS)
def test_remat_of_an_op_is_bitwise_the_op(name: str, outcome: Callable[[str], Outcome]) -> None:
    compared, differences = outcome(name)
    unknown = [d for d in differences if not any(known.covers(name, d) for known in KNOWN_DIFFERENCES)]
    assert compared["backward"] > 0, "no sample of this op was compared"
    assert not unknown, "\n".join(f"{d.mode}: {d.part} differ by {d.size:.2g}; {d.detail}" for d in unknown[:5])


def _off_by_one_bit(program: Program) -> Program:
    return lambda x: program(x) * (1 + 2**-52)


def _draws_once_more(program: Program) -> Program:
    return lambda x: program(x) + 0 * torch.rand(())


def _warns(program: Program) -> Program:
    def wrapped(x: Any) -> Any:
        warnings.warn("slow", stacklevel=1)
        return program(x)

    return wrapped


def _fails(program: Program) -> Program:
    raise NotImplementedError(program)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (_off_by_one_bit, "gradients"),
        (_draws_once_more, "generator"),
        (_warns, "warnings"),
        (_fails, "error"),
    ],
)
def test_the_comparison_sees(wrong: Remat, part: str) -> None:
    report = compare(OPS["sin"], wrong)
    differing = {difference.mode for difference in report.differences if difference.part == part}
    assert differing == set(MODES)
    assert not compare(OPS["sin"], lambda program: program).differences


@pytest.mark.parametrize("mode", MODES)
def test_nearly_every_op_was_compared_under(mode: str, outcome: Callable[[str], Outcome]) -> None:
    compared = sum(outcome(name)[0][mode] > 0 for name in OPS)
    cases = sum(outcome(name)[0][mode] for name in OPS)
    print(f"{mode}: {compared} of {len(OPS)} ops, {cases} cases")
    assert len(OPS) >= 500
    assert compared >= LEAST_SHARE[mode] * len(OPS)
    assert cases >= (2 if WHOLE else 1.5) * compared


@pytest.mark.skipif(SAMPLES < DEFAULT_SAMPLES, reason="fewer samples than the list was made with")
@pytest.mark.parametrize("known", KNOWN_DIFFERENCES, ids=lambda known: known.ops[0])
def test_a_known_difference_still_exists(known: Known, outcome: Callable[[str], Outcome]) -> None:
    found = [d for name in known.ops for d in outcome(name)[1] if known.covers(name, d)]
    assert {difference.mode for difference in found} == set(known.modes)
