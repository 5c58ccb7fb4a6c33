"""What a plan sends to kernels is what plain PyTorch sends there, operation by operation: on any machine equal bits.

Equal results on one machine prove less: kernels differ by processor, and whether two ways to compute a number agree
depends on them. Compared are the operations below autograd, with the sizes, strides, dtypes and lazy conjugation of
their tensors, over the samples of PyTorch's op database: each day of one dtype for each operation, or of both if
`FCKPT_DAY=all`.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatched import Call, differences, dispatched
from opinfo_harness import Case, _case_maker, _probe, differentiable_ops, dtypes_of
from sampling import WHOLE, todays
from torch import Tensor

import fckpt

SAMPLES = 1
CHECKING = {"nn_functional_gaussian_nll_loss"}
"""Functions that raise an error for some data: a plan has one more operation for it."""


@pytest.fixture(autouse=True)
def comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a plan write nothing over operands where the plain function does not: the one liberty that it takes.

    The plain function runs below the dispatch mode that watches its operations, where autograd uses the formulas that
    read no data; here plans use them too. Their counterparts are compared by their bits (tests/bits/test_formulas.py).
    """
    monkeypatch.setattr("fckpt._trace.assemble.overwritable", lambda *args: [])
    monkeypatch.setattr("fckpt._trace.formulas._PLAIN", {})


@cache
def differing() -> tuple[int, dict[str, tuple[Counter[Call], Counter[Call]]]]:
    """How many samples were compared, and by op and dtype what differed."""
    found: dict[str, tuple[Counter[Call], Counter[Call]]] = {}
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in _samples():
            try:
                only_planned, only_plain = differences(case)
            except (fckpt.TraceError, fckpt.MutationError):
                continue
            except NotImplementedError as error:
                assert "Sparse" in str(error)  # the counter cannot look at sparse tensors inside of an operation
                continue
            compared += 1
            if only_planned and name.partition(" ")[0] not in CHECKING:
                found[name] = only_planned, only_plain
    return compared, found


def _samples() -> Iterator[tuple[str, Case]]:
    for i, op in enumerate(differentiable_ops()):
        dtypes = dtypes_of(op)
        for dtype in todays(dtypes, len(dtypes), i):
            torch.manual_seed(0)
            pool = op.sample_inputs("cpu", dtype, requires_grad=True)
            cases = filter(None, map(_case_maker(op), itertools.islice(pool, 4)))
            dense = (case for case in cases if all(map(_is_dense, case.leaves)))
            for case in itertools.islice(dense, SAMPLES):
                if _probe(case) and all(_is_dense(t) for t in case.call(case.program, case.fresh(True))):
                    yield f"{op.formatted_name} {case.leaves[case.active[0]].dtype}", case


def _is_dense(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or leaf.layout == torch.strided


@pytest.mark.sweep(1)  # takes turns inside
def test_every_op_dispatches_by_a_plan_what_it_dispatches_itself() -> None:
    compared, found = differing()
    assert compared >= (700 if WHOLE else 430)
    assert not found, "\n".join(f"{name}: {more} for {less}" for name, (more, less) in list(found.items())[:10])


def test_the_comparison_sees_another_layout() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    case = lambda fn: _one(fn, x)
    assert dispatched(case(lambda x: x @ x.t()), lambda x: x @ x.t()) == dispatched(
        case(lambda x: x @ x.t()), lambda x: torch.mm(x, x.t())
    )
    assert dispatched(case(lambda x: x @ x.t()), lambda x: x @ x.t()) != dispatched(
        case(lambda x: x @ x.t()), lambda x: x @ x.t().contiguous()
    )


PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], torch.dtype]] = {
    "dropout of a transpose": (lambda x: F.dropout((x @ x.mT).mT, 0.3).sin(), (4, 4), torch.float32),
    "dropout of channels_last": (
        lambda x: F.dropout(x.contiguous(memory_format=torch.channels_last).sin(), 0.3).exp(),
        (2, 3, 4, 4),
        torch.float32,
    ),
    "in place on a view": (lambda x: _in_place(x), (4, 4), torch.float32),
    "a product of conjugates": (lambda x: (x.mH @ x.conj()).abs(), (4, 4), torch.complex64),
    "the imaginary part": (lambda x: (x.conj().imag @ x.real).sin(), (4, 4), torch.complex64),
    "folded matmul": (lambda x: torch.matmul(x, x[0].mT).sin(), (2, 3, 4), torch.float32),
    "GRUCell's arithmetic": (lambda x: (x * 2).add_(x).sigmoid_(), (4, 4), torch.float32),
    "eig": (lambda x: torch.linalg.eig(x)[1].abs(), (4, 4), torch.float64),
}


def _in_place(x: Tensor) -> Tensor:
    h = x.sin()
    h[1:3].mul_(2)
    h.t()[0].add_(x[0])
    return h * x


def _one(program: Callable[..., Any], x: Tensor) -> Case:
    case = Case(lambda x: program(x), None, [x, {}], None, [0])
    from torch.utils import _pytree as pytree

    case.leaves, case.spec = pytree.tree_flatten(((x,), {}))
    assert _probe(case)
    return case


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_dispatch_by_a_plan_what_they_dispatch_themselves(name: str) -> None:
    program, shape, dtype = PROGRAMS[name]
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
    only_planned, only_plain = differences(_one(program, x))
    assert not only_planned, (only_planned, only_plain)
