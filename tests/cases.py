"""Cases of Python code, each of which runs beside a plain twin, whose objects are its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fckpt

OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
"""Whether torch is a version whose Dynamo refuses more functions, which may then be refused as a whole."""


@dataclasses.dataclass
class Case:
    """A function, what happens before each call, and what can be observed after it."""

    fn: Callable[[Tensor], Tensor]
    change: Callable[[int], Any] = lambda i: None
    seen: Callable[[], Any] = lambda: None
    refused: bool = False
    """Whether the function is refused, because its Python code has side effects and Dynamo cannot capture it."""
    most: int = 4
    """The most captures in four calls."""


class Cases(dict[str, Callable[[], Case]]):
    """The cases of a file by their names; as a decorator, it takes up another one."""

    def __call__(self, make: Callable[[], Case]) -> Callable[[], Case]:
        self[make.__name__] = make
        return make


def outcome(case: Case, wrap: Callable[[Any], Any]) -> list[Any]:
    run, found = wrap(case.fn), []
    for i in range(4):
        case.change(i)
        x = torch.linspace(0.5, 1.5, 4).requires_grad_()
        y = run(x)
        before = case.seen()
        y.sum().backward()
        assert x.grad is not None
        found.append((y.tolist(), x.grad.tolist(), before, case.seen()))
    return found


def check(make: Callable[[], Case]) -> None:
    """Compares what can be observed of a planned function with its plain twin, or finds it refused as expected."""
    planned, plain = make(), make()
    want = outcome(plain, lambda fn: fn)
    regions: list[Any] = []

    def wrap(fn: Any) -> Any:
        regions.append(fckpt.remat(fn, budget=1.0))
        return regions[0]

    if planned.refused:
        with pytest.raises(fckpt.TraceError, match="while it runs"):
            outcome(planned, wrap)
        assert planned.seen() == make().seen()  # nothing stays of the attempt
        return
    try:
        got = outcome(planned, wrap)
    except fckpt.TraceError:
        assert OLD
        return
    assert got == want
    assert fckpt.stats(regions[0]).captures <= planned.most
