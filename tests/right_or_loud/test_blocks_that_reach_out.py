"""Blocks that reach objects outside of themselves: no calls are copied where another block would get something else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Block, Stack, check_same, check_same_captures, copies, parts, parts_without_copies
from torch import Tensor
from torch.overrides import TorchFunctionMode

SHARED: dict[str, Any] = {}
"""Each block and the model have it as an attribute."""
Forward = Callable[[Any, Tensor, tuple[Any, ...]], Any]
Step = Callable[[Any, Any, Tensor, int], Tensor]


class Reaching(Block):
    forward_with: Forward

    def __init__(self) -> None:
        super().__init__()
        self.shared = SHARED

    def body(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor, *args: Any) -> Any:
        return type(self).forward_with(self, x, args)


class Model(Stack):
    def __init__(self, forward: Forward, step: Step, before: Callable[[Any, Tensor], None]) -> None:
        kind = type("Kind", (Reaching,), {"forward_with": forward})
        super().__init__(*(kind() for _ in range(4)))
        self.shared, self.step, self.before = SHARED, step, before

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.stem(x)
        self.before(self, x)
        for number, block in enumerate(self.blocks):
            x = self.step(self, block, x, number)
        return x


class Scaling(TorchFunctionMode):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.scale if func is torch.nn.functional.gelu else result


plainly: Forward = lambda block, x, args: block.body(x)
call: Step = lambda model, block, x, number: block(x)
nothing: Callable[[Any, Tensor], None] = lambda model, x: None


def _with(**held: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], None]:
    def before(model: Any, x: Tensor) -> None:
        for name, make in held.items():
            model.shared[name] = make(model, x)

    return before


def _passing(make: Callable[[Any, int], tuple[Any, ...]]) -> Step:
    return lambda model, block, x, number: block(x, *make(model, number))


def _scaled(model: Any, block: Any, x: Tensor, number: int) -> Tensor:
    with Scaling(2.0 if number < 2 else 3.0):
        return block(x)


def _marked(block: Any, x: Tensor, args: Any) -> Tensor:
    y = block.body(x)
    y.scale = 2.0
    return y


def _drawing(block: Any, x: Tensor, args: Any) -> Tensor:
    return block.body(x) * next(block.shared["numbers"])


def _asked_before(model: Any, x: Tensor) -> None:
    for block in model.blocks:
        model.shared["special"] = block.linear is model.blocks[2].linear


own = lambda block, x, args: block.body(x) @ args[0]
PROGRAMS: dict[str, tuple[Forward, Step, Callable[[Any, Tensor], None]]] = {
    "a weight of the first one": (own, _passing(lambda m, n: (m.blocks[0].linear.weight,)), nothing),
    "a weight of the second one": (own, _passing(lambda m, n: (m.blocks[1].linear.weight,)), nothing),
    "a weight in a list": (
        lambda block, x, args: block.body(x) @ args[0][0],
        _passing(lambda m, n: ([m.blocks[1].linear.weight],)), nothing,
    ),
    "a module": (lambda block, x, args: args[0](block.body(x)), _passing(lambda m, n: (m.blocks[1].linear,)), nothing),
    "the first result": (lambda block, x, args: block.body(x) + block.shared["x"], call, _with(x=lambda m, x: x)),
    "is it the first result": (
        lambda block, x, args: block.body(x) * (2 if x is block.shared["x"] else 3), call, _with(x=lambda m, x: x)
    ),
    "is it this weight": (
        lambda block, x, args: block.body(x) * (2 if block.linear.weight is args[0] else 3),
        _passing(lambda m, n: (m.blocks[1].linear.weight,)), nothing,
    ),
    "is it this block": (
        lambda block, x, args: block.body(x) * (2 if block is args[0] else 3),
        _passing(lambda m, n: (m.blocks[1],)), nothing,
    ),
    "a key": (
        lambda block, x, args: block.body(x) * block.shared["by"].get(block.norm, 3),
        call, _with(by=lambda m, x: {m.blocks[1].norm: 2}),
    ),
    "compared before": (
        lambda block, x, args: block.body(x) * (2 if block.shared["special"] else 3), call, _asked_before
    ),
    "one list twice": (
        lambda block, x, args: block.body(x) * (2 if args[0] is args[1] else 3),
        _passing(lambda m, n: ((one := [1.0]), one if n < 2 else [1.0])), nothing,
    ),
    "function modes": (plainly, _scaled, nothing),
    "an attribute of the result": (
        _marked, lambda model, block, x, n: (y := block(x)) * getattr(y, "scale", 1.0), nothing
    ),
    "an iterator": (_drawing, call, _with(numbers=lambda m, x: iter([1.0, 2.0, 3.0, 4.0]))),
    "a cycle": (_drawing, call, _with(numbers=lambda m, x: itertools.cycle([1.0, 2.0, 3.0]))),
    "a generator": (_drawing, call, _with(numbers=lambda m, x: (1.0 + n for n in range(8)))),
    "a list that is replaced": (
        lambda block, x, args: block.body(x) * len(block.shared["l"]),
        lambda model, block, x, n: (model.shared.__setitem__("l", [0] * n), block(x))[1], nothing,
    ),
}  # fmt: skip


@copies
@pytest.mark.parametrize("name", PROGRAMS)
def test_captures_with_and_without_copies_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SHARED.clear()
    torch.manual_seed(0)
    model, x = Model(*PROGRAMS[name]), torch.randn(64, 16, requires_grad=True)
    short = parts(model, x)
    SHARED.clear()
    check_same(short, parts_without_copies(monkeypatch, model, x))


@copies
@pytest.mark.parametrize("first", [[8, 0], [1, 2]])
def test_sets_in_another_order(first: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(block: Any, x: Tensor, args: Any) -> Tensor:
        x = block.body(x)
        for number in block.numbers:
            x = (x + number).sin()
        return x

    model = Model(scaled, call, nothing)
    for number, block in enumerate(model.blocks):
        block.numbers = set(first if number < 2 else reversed(first))
    x = torch.randn(64, 16, requires_grad=True)
    check_same_captures(monkeypatch, model, x)


@copies
def test_an_empty_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Callable[[Tensor], Tensor]:
        def scale(x: Tensor) -> Tensor:
            return x if x.ndim == 2 else x * later

        return scale
        later = 2.0  # pyright: ignore[reportUnreachable]

    model = Model(lambda block, x, args: block.scale(block.body(x)), call, nothing)
    for block in model.blocks:
        with contextlib.suppress(AttributeError):
            block.scale = make()
    x = torch.randn(64, 16, requires_grad=True)
    check_same_captures(monkeypatch, model, x)
