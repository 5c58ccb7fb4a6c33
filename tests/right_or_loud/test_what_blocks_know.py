"""What a block knows of itself and its surroundings: no calls are copied where another block knows other things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Block, Stack, check_same_captures, copies
from judge import Session, judge
from torch import Tensor, nn

REGISTERED: dict[Any, float] = {}
FIRST: list[nn.Module] = []
CALLS: list[int] = []
COUNT = {"now": 0}
SCALE = 1.0


class Registered(Block):
    """Finds a number by its own identity."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) * REGISTERED[self]


class RegisteredById(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) * REGISTERED[id(self)]


class RegisteredByName(Block):
    name = ""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) * REGISTERED[self.name]


class KnowsTheFirst(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) if self is FIRST[0] else super().forward(x) * 2


class KnowsThoseAfter(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) if self in FIRST else super().forward(x) * 2


class HoldsTheFirst(Block):
    first: Any = None

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return x + self.first[0].linear(super().forward(x))


class HoldsItself(Block):
    itself: Any = None

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.itself[0].linear(super().forward(x))


class KnowsItsIndex(Block):
    index = 0

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = super().forward(x)
        return x.sin() if self.index % 2 else x.cos()


class KnowsAList(Block):
    sizes: Any = (1,)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = super().forward(x)
        for size in self.sizes:
            x = x * size
        return x


class Counts(Block):
    """Counts its calls in an object that all blocks share."""

    counter: Any = None

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.counter["calls"] += 1
        return super().forward(x) * self.counter["calls"]


class CountsItself(Block):
    calls = 0

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class CountsGlobally(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        COUNT["now"] += 1
        return super().forward(x)


class Remembers(Block):
    """Leaves its result with the next block."""

    memory: Any = None

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        found = self.memory.get("x")
        x = super().forward(x) if found is None else super().forward(x) + found
        self.memory["x"] = x
        return x


class KeepsItsInput(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.seen = x.detach()
        return super().forward(x)


class ChangesTheGlobal(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        global SCALE
        SCALE = SCALE * 2
        return super().forward(x) * SCALE


class ByLookup(Block):
    def __getattr__(self, name: str) -> Any:
        return self.table["scale"] if name == "scale" else super().__getattr__(name)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) * self.scale


class ByProperty(Block):
    hidden = 1.0

    @property
    def scale(self) -> float:
        return self.hidden * 2

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) * self.scale


class BySlot(Block):
    __slots__ = ("slot",)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) * self.slot


class LooksAtItsBuffer(Block):
    flags: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.ones(2, dtype=torch.bool))

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = super().forward(x)
        return x * 2 if torch.all(self.flags) else x


class SharesAWeight(Block):
    shared: Any

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) @ self.shared


class ByClosure(Block):
    made: Any = None

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.made(super().forward(x))


def _scaling(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * scale


def _memories(kind: type, **shared: Any) -> Callable[[], list[Block]]:
    def make() -> list[Block]:
        held = {name: type(value)(value) for name, value in shared.items()}
        blocks = [kind() for _ in range(4)]
        for block in blocks:
            vars(block).update(held)
        return blocks

    return make


def _each(kind: type, name: str, values: Callable[[list[Any]], Any]) -> Callable[[], list[Block]]:
    def make() -> list[Block]:
        blocks = [kind() for _ in range(4)]
        for block, value in zip(blocks, values(blocks), strict=True):
            object.__setattr__(block, name, value)
        return blocks

    return make


def _flagged() -> list[Block]:
    blocks: list[Any] = [LooksAtItsBuffer() for _ in range(4)]
    blocks[2].flags[0] = False
    return [*blocks]


class Sharing(Stack):
    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        self.weight, other = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))
        for number, block in enumerate(blocks):
            block.shared = other if number == 2 else self.weight

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x @ self.weight)


def _registered(kind: type, key: Callable[[Any], Any]) -> Callable[[], list[Block]]:
    def make() -> list[Block]:
        REGISTERED.clear()
        FIRST.clear()
        blocks = [kind() for _ in range(4)]
        for number, block in enumerate(blocks):
            vars(block)["name"] = str(number)
            REGISTERED[key(block)] = 1.0 + number / 8
        FIRST.extend(blocks[:2])
        return blocks

    return make


PROGRAMS: dict[str, Callable[[], list[Block]]] = {
    "registered": _registered(Registered, lambda block: block),
    "registered by id": _registered(RegisteredById, id),
    "registered by name": _registered(RegisteredByName, lambda block: block.name),
    "knows the first": _registered(KnowsTheFirst, id),
    "knows those after": _registered(KnowsThoseAfter, id),
    "holds the first": _each(HoldsTheFirst, "first", lambda blocks: [[blocks[0]]] * 4),
    "holds itself": _each(HoldsItself, "itself", lambda blocks: [[b] for b in blocks]),
    "holds others": _each(HoldsItself, "itself", lambda blocks: [[b] for b in (*blocks[1:], blocks[0])]),
    "knows its index": _each(KnowsItsIndex, "index", lambda blocks: range(4)),
    "knows a list": _each(KnowsAList, "sizes", lambda blocks: [[1, 2], [1, 2], [1, 3], [1, 2, 1]]),
    "knows a tuple": _each(KnowsAList, "sizes", lambda blocks: [(1, 2), (1, 2), (1, 2.0), (True, 2)]),
    "looks up": _each(ByLookup, "table", lambda blocks: [{"scale": 1.0 + n // 2} for n in range(4)]),
    "by a property": _each(ByProperty, "hidden", lambda blocks: [1.0, 1.0, 2.0, 1.0]),
    "by a slot": _each(BySlot, "slot", lambda blocks: [1.0, 1.0, 2.0, 1.0]),
    "looks at its buffer": _flagged,
    "by a closure": _each(ByClosure, "made", lambda blocks: [_scaling(1.0 + n // 2) for n in range(4)]),
    "counts": _memories(Counts, counter={"calls": 0}),
    "counts itself": _memories(CountsItself),
    "counts globally": _memories(CountsGlobally),
    "remembers": _memories(Remembers, memory={}),
    "keeps its input": _memories(KeepsItsInput),
    "changes the global": _memories(ChangesTheGlobal),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_block_knows(program: str) -> None:
    def scenario(session: Session) -> None:
        global SCALE
        torch.manual_seed(0)
        SCALE, COUNT["now"] = 1.0, 0
        model = Stack(*PROGRAMS[program]())
        x = session.leaf(64, 16)
        session.watch(model=model, count=COUNT)
        f = session.region(model)
        session.step(lambda: f(x), times=2)
        session.step(lambda: f(x), times=1)

    judge(scenario, budget=0.95)  # equal, or refused


@copies
@pytest.mark.parametrize("program", [*PROGRAMS, "shares a weight"])
def test_copies_are_the_same(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    COUNT["now"] = 1
    shares = program == "shares a weight"
    model = Sharing(*(SharesAWeight() for _ in range(4))) if shares else Stack(*PROGRAMS[program]())
    check_same_captures(monkeypatch, model, torch.randn(64, 16, requires_grad=True))
