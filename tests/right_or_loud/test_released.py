"""What ends with a region: captures leave nothing behind in torch's caches, in finalizers or in cycles through C++."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fckpt

KEPT = {"Captured", "_Substitute", "ShapeEnv", "FakeTensorMode", "FakeTensor", "OutputGraph", "CheckFunctionManager"}


def alive() -> Counter[str]:
    """Counts what captures are made of."""
    gc.collect()
    return Counter(name for thing in gc.get_objects() if (name := type(thing).__name__) in KEPT)


def of_module() -> Callable[..., Any]:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def of_closure() -> Callable[..., Any]:
    layer, scale = nn.Linear(4, 4), torch.ones(4)
    return lambda x: layer(x).sin() * scale


def refused() -> Callable[..., Any]:
    """A function that Dynamo cannot capture, so that another tracer does."""
    layer = nn.Linear(4, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        exec("pass")
        return layer(x).sin()

    return fn


@pytest.mark.parametrize("make", [of_module, of_closure, refused])
def test_captures_end_with_their_region(make: Callable[[], Callable[..., Any]]) -> None:
    def run() -> None:
        region = fckpt.remat(make(), budget=1.0)
        for rows in (2, 3, 5, 7):  # the later ones by a trace with symbols
            region(torch.ones(rows, 4)).sum().backward()

    run()  # fills the caches of classes and modules
    before = alive()
    for _ in range(3):
        run()
    assert alive() == before


def test_a_capture_keeps_no_parameters() -> None:
    net = of_module()
    kept = [weakref.ref(p) for p in net.parameters()]
    fckpt.remat(net, budget=1.0)(torch.ones(2, 4)).sum().backward()
    del net
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_an_object_that_guards_know_by_its_address_is_deleted() -> None:
    table: dict[Any, float] = {}
    fn = fckpt.remat(lambda x: x.sin() * sum(table.values()), budget=1.0)
    x = torch.ones(3, requires_grad=True)
    for scale in (2.0, 3.0):
        table.clear()
        table[object.__new__(type("Key", (), {}))] = scale
        assert torch.equal(fn(x), x.sin() * scale)
