"""Blocks of one class: a capture evaluates the first one, and copies its calls for those that are like it only.

The plain call decides: planned results are equal to it, whichever block differs from the others, in whatever way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from blocks import Block, Stack, check_same, check_same_captures, copies, parts, parts_without_copies
from judge import Session, fresh, judge
from right_or_loud.test_stale import FILES, MAY_REFUSE, body
from torch import Tensor, nn

import fckpt
from fckpt._capture.block_copies import BlockCopy
from fckpt._capture.wrapped import name_of


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the paths of the blocks whose calls were copied."""
    found: list[str] = []
    make = BlockCopy.made

    def made(self: Any, frames: Any) -> Any:
        found.append(name_of(self.place))
        return make(self, frames)

    monkeypatch.setattr(BlockCopy, "made", made)
    return found


LAYERS = {"vit": 1, "bert": 1, "albert": 1, "clip": 2, "t5": 1, "bart": 1}
"""By model: at least how many blocks are copied."""


@copies
@pytest.mark.parametrize("name", LAYERS)
def test_copies_are_what_the_evaluation_of_each_block_gives(
    name: str, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = zoo.make(name, "padding")
    call = lambda model, batch: model(**batch)
    short = parts(call, model, batch)
    assert len(copied) >= LAYERS[name]
    check_same(short, parts_without_copies(monkeypatch, call, model, batch))


# -- numbers that blocks read ------------------------------------------------------------------------------------


class Reader(nn.Module):
    def __init__(self, place: Any) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(32, 32)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return body(self.linear(x), w, self.place.read())


@pytest.fixture
def places(request: pytest.FixtureRequest) -> Iterator[Callable[[], list[Any]]]:
    """Makes four places of a kind, with the classes and globals of one file."""
    modules = []

    def make() -> list[Any]:
        modules.append(fresh(FILES[request.param]))
        made = modules[-1].__enter__().PLACES[request.param]
        return [made() for _ in range(4)]

    yield make
    for module in modules:
        module.__exit__(None, None, None)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("places", FILES, indirect=True)
def test_a_number_that_one_block_reads_differs(places: Callable[[], list[Any]], request: pytest.FixtureRequest) -> None:
    def scenario(session: Session) -> None:
        made = places()
        for place in made:
            session.undo(getattr(place, "close", lambda: None))
        made[2].write(3)
        x, w = session.leaf(96, 32), session.leaf(32, 32)
        model = Stack(*map(Reader, made), width=32)
        session.watch(model=model)
        f = session.region(model)
        session.step(lambda: f(x, w), times=2)
        made[1].write(4)
        session.step(lambda: f(x, w), times=2)

    verdict = judge(scenario, budget=0.8)
    if request.node.callspec.params["places"] not in MAY_REFUSE:
        assert verdict.outcome == "equal", verdict.error
    assert not verdict.over


# -- blocks that differ in other ways ----------------------------------------------------------------------------


Change = Callable[[Any], Any]


def _tie(blocks: Any) -> None:
    blocks[2].linear.weight = blocks[1].linear.weight


def _tie_inside(blocks: Any) -> None:
    blocks[2].norm.bias = blocks[2].linear.bias


def _replace_by_function(blocks: Any) -> None:
    del blocks[2].act
    blocks[2].act = F.relu


def _replace_forward(blocks: Any) -> None:
    block = blocks[2]
    block.forward = lambda x, *args: x - block.linear(x)


def _double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _set(path: str, value: Any) -> Change:
    def change(blocks: nn.ModuleList) -> None:
        holder, _, name = path.rpartition(".")
        setattr(blocks[2].get_submodule(holder), name, value)

    return change


CHANGES: dict[str, Change] = {
    "probability": _set("dropout.p", 0.5),
    "no probability": _set("dropout.p", 0.0),
    "evaluation": lambda blocks: blocks[2].eval(),
    "evaluation inside": lambda blocks: blocks[2].dropout.eval(),
    "activation": _set("act", nn.ReLU()),
    "argument of activation": _set("act", nn.GELU("tanh")),
    "function": _replace_by_function,
    "in place": _set("act", nn.ReLU(inplace=True)),
    "nothing": _set("act", nn.Identity()),
    "epsilon": _set("norm.eps", 0.1),
    "frozen": lambda blocks: blocks[2].linear.requires_grad_(False),
    "no bias": _set("linear.bias", None),
    "a block of two": lambda blocks: blocks.insert(2, nn.Sequential(Block(), Block())),
    "another width": _set("linear", nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))),
    "tied": _tie,
    "tied inside": _tie_inside,
    "one block twice": lambda blocks: blocks.append(blocks[1]),
    "forward hook": lambda blocks: blocks[2].register_forward_hook(_double_output),
    "hook inside": lambda blocks: blocks[2].linear.register_forward_hook(_double_output),
    "pre-hook": lambda blocks: blocks[2].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:])),
    "forward": _replace_forward,
    "another dtype": lambda blocks: blocks[2].norm.register_buffer("unread", torch.ones(2)),
    "deleted": lambda blocks: blocks.__delitem__(2),
    "swapped": lambda blocks: blocks.insert(0, blocks.pop(2)),
}
MAY_BE_REFUSED = {"forward"}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("change", CHANGES)
def test_one_block_differs(change: str, when: str) -> None:
    def scenario(session: Session) -> None:
        torch.manual_seed(0)
        model = Stack(*(Block() for _ in range(4)))
        x = session.leaf(64, 16)
        session.watch(model=model)
        if when == "before":
            CHANGES[change](model.blocks)
        f = session.region(model)
        session.step(lambda: f(x), times=2)
        if when == "between":
            CHANGES[change](model.blocks)
            session.step(lambda: f(x), times=2)

    verdict = judge(scenario, budget=0.9)
    if change not in MAY_BE_REFUSED:
        assert verdict.outcome == "equal", verdict.error


@copies
def test_blocks_that_are_alike_are_copied(copied: list[str]) -> None:
    model, x = Stack(*(Block() for _ in range(6))), torch.randn(64, 16)
    fckpt.remat(model, budget=0.9)(x).sum().backward()
    assert len(copied) == 5


@copies
@pytest.mark.parametrize("change", CHANGES)
def test_copies_are_the_same_where_one_block_differs(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(*(Block() for _ in range(4))), torch.randn(64, 16, requires_grad=True)
    CHANGES[change](model.blocks)
    check_same_captures(monkeypatch, model, x)
