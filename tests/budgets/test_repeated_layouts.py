"""Operations that repeat in a trace: they get the layouts that torch computes, and torch computes them once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fckpt
from fckpt._trace import repeated
from fckpt._trace.repeated import RepeatedCalls

aten = torch.ops.aten


def layouts(result: Any) -> list[Any]:
    parts = result if isinstance(result, (list, tuple)) else [result]
    return [
        None
        if t is None
        else (
            type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes(),
            t.is_conj(), t.is_neg(),
        )
        for t in parts
    ]  # fmt: skip


def matrix(*shape: int, **options: Any) -> torch.Tensor:
    return torch.empty(*shape or (4, 6), **options)


CASES = {
    "product": lambda: (aten.mm.default, (matrix(), matrix(6, 3)), {}),
    "transposed": lambda: (aten.t.default, (matrix(),), {}),
    "part of a view": lambda: (aten.slice.Tensor, (matrix(8, 6)[2:], 1, 1, 5), {}),
    "copy of a row": lambda: (aten.copy.default, (matrix()[1], matrix(6)), {}),
    "several results": lambda: (aten.native_layer_norm.default, (matrix(), [6], matrix(6), None, 1e-5), {}),
    "a result that is left out": lambda: (
        aten.convolution_backward.default,
        (matrix(1, 2, 5, 5), matrix(1, 2, 5, 5), matrix(2, 2, 1, 1), [2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        + ([True, False, True],),
        {},
    ),
    "views": lambda: (aten.split.Tensor, (matrix(), 3, 1), {}),
    "conjugate view": lambda: (aten._conj.default, (matrix(dtype=torch.complex64),), {}),
    "a dtype": lambda: (aten._to_copy.default, (matrix(),), {"dtype": torch.float64}),
    "no tensor": lambda: (aten.arange.default, (5,), {"device": torch.device("cpu"), "pin_memory": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_layouts_are_those_that_torch_computes(case: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    calls = RepeatedCalls(mode)
    for _ in range(3):
        with mode:
            func, args, kwargs = CASES[case]()
            expected = func(*args, **kwargs)
        found = calls(func, args, kwargs)
        assert layouts(found) == layouts(expected)
        storages = lambda result: [t.untyped_storage()._cdata for t in result if isinstance(t, FakeTensor)]
        mine = set(storages(args))
        parts = lambda result: result if isinstance(result, (list, tuple)) else [result]
        assert [s in mine for s in storages(parts(found))] == [s in mine for s in storages(parts(expected))]


def test_layouts_are_computed_once_and_again_under_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    calls = RepeatedCalls(mode)
    made: list[Any] = []
    make = RepeatedCalls._made
    monkeypatch.setattr(RepeatedCalls, "_made", lambda *args: made.append(args) or make(*args))
    arange = lambda end: calls(aten.arange.default, (end,), {"device": torch.device("cpu"), "pin_memory": False}).dtype
    assert [arange(5.0) for _ in range(3)] == [torch.float32] * 3 and len(made) == 2
    torch.set_default_dtype(torch.float64)
    try:
        assert [arange(5.0) for _ in range(3)] == [torch.float64] * 3 and len(made) == 4
    finally:
        torch.set_default_dtype(torch.float32)
    assert arange(5) == torch.int64 and len(made) == 4  # a key of the number 5 equals a key of 5.0


def test_a_network_of_equal_layers_computes_the_layouts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    of = repeated._layouts
    monkeypatch.setattr(repeated, "_layouts", lambda *args: computed.append(1) or of(*args))
    counts, costs = [], fckpt.cost.Analytic(fckpt.cost.profiles["A100"])
    for layers in (2, 9):
        parts = [p for _ in range(layers) for p in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))]
        model, x = nn.Sequential(*parts), torch.ones(3, 8)
        computed.clear()
        plan = fckpt.plan(lambda model, x: model(x).sum(), model, x, budget=1.0, costs=costs)
        counts.append((len(computed), len(plan.graph.nodes)))
    assert counts[0][0] == counts[1][0] and counts[1][1] > 3 * counts[0][1]
