"""Blocks whose code asks in unusual ways what another block would be told otherwise: their calls are not copied."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Block, Stack, check_same_captures, copies
from judge import Session, judge
from torch import Tensor, nn

HELD: list[Any] = []
"""Something of the last block, which the model reads before it calls a block."""
COUNTER: list[Callable[[], int]] = []


class Asking(Block):
    ask: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2, dtype=torch.long))

    def forward(self, x: Tensor, *args: Any) -> Any:
        factor = type(self).ask(self, x, *args)
        return super().forward(x) * factor


class Model(Stack):
    def __init__(self, ask: Callable[..., Any], call: Callable[[Any, Tensor, int], Tensor]) -> None:
        kind = type("Kind", (Asking,), {"ask": ask})
        super().__init__(*(kind() for _ in range(4)))
        self.call = call

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.stem(x)
        for held in HELD:
            x = held(x) if isinstance(held, nn.Module) else x @ held
        for number, block in enumerate(self.blocks):
            x = self.call(block, x, number)
        return x * 2 if self.blocks[2].count[0] > 1 else x  # type: ignore[index, operator]


def _plainly(block: Any, x: Tensor, number: int) -> Tensor:
    return block(x)


def _in_except(block: Any, x: Tensor, number: int) -> Tensor:
    try:
        if number == 2:
            raise ValueError
    except ValueError:
        return block(x)
    return block(x)


def _under_autocast(block: Any, x: Tensor, number: int) -> Tensor:
    with torch.autocast("xpu", torch.float16, enabled=number == 2):
        return block(x)


def _with_tuples(block: Any, x: Tensor, number: int) -> Tensor:
    pair = (1.0, x)
    return block(x, pair, pair if number < 2 else (1.0, x))


def _with_tensors(block: Any, x: Tensor, number: int) -> Tensor:
    y = x.sum()
    return block(x, y, y if number < 2 else x.sum())


def _counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def _counted(block: Any, x: Tensor) -> int:
    return COUNTER[0]()


def _marked(mark: Callable[[Any, int], None]) -> Callable[[Any, Tensor, int], Tensor]:
    def call(block: Any, x: Tensor, number: int) -> Tensor:
        y = x * 2
        mark(y, number)
        return block(x, y)

    return call


def _passing(make: Callable[[int], Any]) -> Callable[[Any, Tensor, int], Tensor]:
    return lambda block, x, number: block(x, make(number))


def _scale(y: Any, number: int) -> None:
    y.scale = float(number)


def _scale_third(y: Any, number: int) -> None:
    if number == 2:
        y.scale = 2.0


def _log(y: Any, number: int) -> None:
    y.log = [1.0] * number


def _logged(block: Any, x: Tensor, y: Any) -> int:
    y.log.append(1.0)
    return len(y.log)


def _count(write: Callable[[Any], Any]) -> Callable[..., int]:
    def ask(block: Any, x: Tensor) -> int:
        write(block.count)
        return 1

    return ask


layer, weight = (lambda model: model.blocks[3].linear), (lambda model: model.blocks[3].linear.weight)
Hold = Callable[[Any], Any] | None
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[Any, Tensor, int], Tensor], Hold]] = {
    "is_": (lambda b, x: 2 if operator.is_(HELD[0], b.linear) else 3, _plainly, layer),
    "is_not": (lambda b, x: 2 if operator.is_not(HELD[0], b.linear) else 3, _plainly, layer),
    "is_ of a weight": (lambda b, x: 2 if operator.is_(HELD[0], b.linear.weight) else 3, _plainly, weight),
    "eq": (lambda b, x: 2 if operator.eq(HELD[0], b.linear) else 3, _plainly, layer),
    "__eq__": (lambda b, x: 2 if HELD[0].__eq__(b.linear) is True else 3, _plainly, layer),
    "eq of lists": (lambda b, x: 2 if HELD == [b.linear] else 3, _plainly, layer),  # noqa: SIM300
    "contains": (lambda b, x: 2 if operator.contains(HELD, b.linear) else 3, _plainly, layer),
    "__contains__": (lambda b, x: 2 if HELD.__contains__(b.linear) else 3, _plainly, layer),
    "index": (lambda b, x: 2 if b.linear in HELD and HELD.index(b.linear) == 0 else 3, _plainly, layer),
    "count": (lambda b, x: 2 + HELD.count(b.linear), _plainly, layer),
    "a key": (lambda b, x: dict.fromkeys(HELD, 2).get(b.linear, 3), _plainly, layer),
    "id": (lambda b, x: 2 if id(b.linear) in [id(m) for m in HELD] else 3, _plainly, layer),
    "tuples": (lambda b, x, p, q: 2 if operator.is_(p, q) else 3, _with_tuples, None),
    "is_ of tensors": (lambda b, x, y, z: 2 if operator.is_(y, z) else 3, _with_tensors, None),
    "lists of tensors": (lambda b, x, y, z: 2 if [y] == [z] else 3, _with_tensors, None),
    "a variable outside": (_counted, _plainly, None),
    "in an except": (lambda b, x: 2 if sys.exc_info()[0] is None else 3, _in_except, None),
    "autocast": (lambda b, x: 2 if torch.is_autocast_enabled("xpu") else 3, _under_autocast, None),
    "an attribute": (lambda b, x, y: y.scale, _marked(_scale), None),
    "an attribute of one": (lambda b, x, y: getattr(y, "scale", 1.0), _marked(_scale_third), None),
    "has it an attribute": (lambda b, x, y: 2 if hasattr(y, "scale") else 3, _marked(_scale_third), None),
    "a list in an attribute": (_logged, _marked(_log), None),
    "int": (lambda b, x, n: int(n), _passing(lambda n: torch.tensor(4 + n)), None),
    "item": (lambda b, x, n: n.item(), _passing(lambda n: torch.tensor(4 + n)), None),
    "sizes": (lambda b, x, n: torch.zeros(n).shape[0], _passing(lambda n: torch.tensor(4 + n)), None),
    "drawn": (lambda b, x, r: 2 if r >= 0 else 3, _passing(lambda n: torch.rand(1) - (n > 1)), None),
    "writes data": (_count(lambda count: count.data.add_(1)), _plainly, None),
    "writes an item": (_count(lambda count: count[0].add_(1)), _plainly, None),
    "writes a slice": (_count(lambda count: count[:1].add_(1)), _plainly, None),
    "writes a view": (_count(lambda count: count.view(2).add_(1)), _plainly, None),
}


def _made(program: str) -> Model:
    ask, call, hold = PROGRAMS[program]
    torch.manual_seed(0)
    model = Model(ask, call)
    COUNTER[:] = [_counter()]
    HELD[:] = [] if hold is None else [hold(model)]
    return model


@pytest.mark.sweep(8)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_block_asks(program: str) -> None:
    def scenario(session: Session) -> None:
        model, x = _made(program), session.leaf(64, 16)
        session.watch(model=model)
        f = session.region(model)
        session.step(lambda: f(x), times=3)

    judge(scenario, budget=0.95)  # equal, or refused


@copies
@pytest.mark.sweep(8)
@pytest.mark.parametrize("program", PROGRAMS)
def test_copies_are_the_same(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same_captures(monkeypatch, _made(program), torch.randn(64, 16, requires_grad=True))
