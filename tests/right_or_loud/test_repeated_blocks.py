"""Blocks of one class: a capture evaluates the first one, and copies its calls for those that are like it only.

The plain call decides: planned results are equal to it, whichever block differs from the others, in whatever way.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from judge import Session, fresh, judge
from right_or_loud.test_stale import FILES, MAY_REFUSE, body
from torch import Tensor, nn
from torch._dynamo.convert_frame import GraphCaptureOutput

import fckpt
from fckpt._capture.block_copies import CHECKS, BlockCopy
from fckpt._capture.captured import CaptureError, Entry, capture
from fckpt._capture.repeated_blocks import Repeated
from fckpt._capture.wrapped import name_of

# Torch 2.11 has no functions that compare the guards of two places, so that nothing is copied there.
copies = pytest.mark.skipif(not CHECKS, reason="torch 2.11 evaluates each block")


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


# -- the same capture --------------------------------------------------------------------------------------------


def parts(fn: Any, *args: Any) -> Any:
    """Returns all that a capture records, with names that do not depend on the order of creation; or why it fails."""
    torch._dynamo.reset()
    guards: list[Any] = []
    check = GraphCaptureOutput.build_guards

    def build_guards(made: Any, *args: Any, **kwargs: Any) -> Any:
        guards.extend(made.output_graph.guards)
        return check(made, *args, **kwargs)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GraphCaptureOutput, "build_guards", build_guards)
            found = capture(Entry(), fn, args, {})
    except CaptureError as error:
        return str(error)
    graph = found.graph
    assert graph is not None
    for module in graph.module.modules():
        if isinstance(module, torch.fx.GraphModule):
            numbers = itertools.count()
            for node in module.graph.nodes:
                if node.op.startswith("call"):
                    node._rename(f"call_{next(numbers)}")
            module.recompile()
    calls = [node for node in graph.module.graph.nodes if node.op.startswith("call")]
    return {
        "code": [str(getattr(module, "code", "")) for module in graph.module.modules()],
        "guards": {(re.sub(r"_\d+_c\d+|___\d+", "", name_of(g)), g.create_fn_name()) for g in guards},
        "inputs": found.inputs,
        "numbers": (graph.numbers, graph.decisive),
        "held": {node.name: end.name for node, end in graph._held.items()},
        "sources": {node.name: node.meta["source"] for node in calls},
    }


def parts_without_copies(monkeypatch: pytest.MonkeyPatch, fn: Any, *args: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(Repeated, "recorded", lambda self: contextlib.nullcontext())
        return parts(fn, *args)


def check_same(short: Any, evaluated: Any) -> None:
    """Checks that copies leave out no guard, except for classes that all blocks share, and nothing else."""
    if isinstance(short, dict) and isinstance(evaluated, dict):
        missing = {guard for guard in evaluated.pop("guards") - short.pop("guards") if "type(" not in guard[0]}
        assert not missing
    assert evaluated == short


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


class Stack(nn.Module):
    """Blocks after a layer: all of them get a result, with a width that is no variable of the capture."""

    def __init__(self, *blocks: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(width, width), nn.ModuleList(blocks)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, *args)
        return x


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


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.1)
        self.act: Any = nn.GELU()

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return x + self.dropout(self.act(self.linear(self.norm(x))))


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


# -- what a block knows about itself and its surroundings --------------------------------------------------------

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


# -- how blocks are called ---------------------------------------------------------------------------------------


class Scaled(Block):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scale = args[0] if args else kwargs.get("scale", 1.0)
        x = super().forward(x)
        return x * scale if not isinstance(scale, (list, tuple)) else x * scale[0]


class Listed(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        args[0].append(x.mean())
        return super().forward(x) + args[0][0]


class AsksForSettings(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = super().forward(x)
        if not torch.is_grad_enabled():
            x = x * 2
        if torch.is_autocast_enabled("cpu"):
            x = x * 3
        return x if torch.get_default_dtype() == torch.float32 else x * 4


class Asks(Block):
    """Asks an object that all blocks share, and itself."""

    shared: Any = None
    scale = 1.0

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x) * self.scale * COUNT["now"]


class Passed(Block):
    def forward(self, x: Tensor, *args: Any) -> Any:
        return args[0] if args[0] is x else super().forward(x)


class Returns(Block):
    def forward(self, x: Tensor, *args: Any) -> Any:
        if args[0] == "input":
            return x
        x = super().forward(x)
        match args[0]:
            case "view":
                return x.view(-1, 4, 4).transpose(1, 2).flatten(1)
            case "in place":
                return x.mul_(2.0)
            case "written":
                made = torch.zeros_like(x)
                made[:, ::2] = x[:, ::2]
                return made
            case "tuple":
                return x, x.mean(), None, 2
            case "list":
                return [x, x.detach()]
            case "twice":
                return x, x
            case "dict":
                return {"x": x}
            case "parameter":
                return x, self.linear.weight
        return x


def _loop(step: Callable[[Any, Tensor, int, dict[str, Any]], Tensor]) -> Callable[..., nn.Module]:
    class Looping(Stack):
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            x = self.stem(x)
            memory: dict[str, Any] = {"first": x, "list": [], "blocks": self.blocks}
            for number, block in enumerate(self.blocks):
                x = step(block, x, number, memory)
            return x

    return Looping


def _in_turns(block: Any, x: Tensor, number: int, memory: Any) -> Tensor:
    with torch.no_grad() if number == 2 else contextlib.nullcontext():
        return block(x)


def _under_autocast(block: Any, x: Tensor, number: int, memory: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=number == 2):
        return block(x).float()


def _counting(block: Any, x: Tensor, number: int, memory: Any) -> Tensor:
    COUNT["now"] = number + 1
    return block(x)


def _scaling_all(block: Any, x: Tensor, number: int, memory: Any) -> Tensor:
    if number == 0:
        for place, each in enumerate(memory["blocks"]):
            each.scale = 1.0 + place
    return block(x)


def _scaling_the_first(block: Any, x: Tensor, number: int, memory: Any) -> Tensor:
    if number == 0:
        block.scale = 3.0
    return block(x)


def _scaling_the_third(block: Any, x: Tensor, number: int, memory: Any) -> Tensor:
    if number == 0:
        memory["blocks"][2].dropout.p = 0.5
    return block(x)


def _first_of(block: Any, x: Tensor, *args: Any) -> Tensor:
    result = block(x, *args)
    return result["x"] if isinstance(result, dict) else result[0] if isinstance(result, (tuple, list)) else result


LOOPS: dict[str, tuple[type, Callable[[Any, Tensor, int, dict[str, Any]], Tensor]]] = {
    "constants": (Scaled, lambda block, x, n, memory: block(x, 1.0 if n < 2 else 2.0)),
    "zeros": (Scaled, lambda block, x, n, memory: block(x, 0.0 if n < 2 else -0.0)),
    "types": (Scaled, lambda block, x, n, memory: block(x, 1 if n < 2 else True)),
    "keywords": (Scaled, lambda block, x, n, memory: block(x, scale=1.0) if n < 2 else block(x, scale=3.0)),
    "containers": (Scaled, lambda block, x, n, memory: block(x, [1.0, n])),
    "tensors": (Scaled, lambda block, x, n, memory: block(x, memory["first"] if n else x)),
    "detached": (Scaled, lambda block, x, n, memory: block(x.detach() if n == 2 else x)),
    "sizes": (Scaled, lambda block, x, n, memory: block(x[: 32 if n > 1 else 64])),
    "strides": (Scaled, lambda block, x, n, memory: block(x.T.contiguous().T if n == 2 else x)),
    "dtypes": (Scaled, lambda block, x, n, memory: block.double()(x.double()) if n > 2 else block(x)),
    "a list": (Listed, lambda block, x, n, memory: block(x, memory["list"])),
    "one tensor twice": (Passed, lambda block, x, n, memory: block(x, x if n == 2 else memory["first"])),
    "no gradients": (AsksForSettings, _in_turns),
    "autocast": (AsksForSettings, _under_autocast),
    "counted": (Asks, _counting),
    "all changed": (Asks, _scaling_all),
    "the first one changed": (Asks, _scaling_the_first),
    "the third one changed": (Block, _scaling_the_third),
    "called twice": (Block, lambda block, x, n, memory: block(block(x))),
    "checkpointed": (
        Block,
        lambda block, x, n, memory: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
    ),
    **{
        f"returns {kind}": (Returns, lambda block, x, n, memory, kind=kind: _first_of(block, x, kind))
        for kind in ("input", "view", "in place", "written", "tuple", "list", "twice", "dict", "parameter")
    },
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("loop", LOOPS)
def test_how_blocks_are_called(loop: str) -> None:
    kind, step = LOOPS[loop]

    def scenario(session: Session) -> None:
        torch.manual_seed(0)
        COUNT["now"] = 1
        model = _loop(step)(*(kind() for _ in range(4)))
        x = session.leaf(64, 16)
        session.watch(model=model)
        f = session.region(model)
        session.step(lambda: f(x), times=2)

    judge(scenario, budget=0.95)  # equal, or refused


# -- all of these programs, captured twice -------------------------------------------------------------------------


def _changed(change: str) -> nn.Module:
    model = Stack(*(Block() for _ in range(4)))
    CHANGES[change](model.blocks)
    return model


def _looped(loop: str) -> nn.Module:
    kind, step = LOOPS[loop]
    return _loop(step)(*(kind() for _ in range(4)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"changed: {name}": functools.partial(_changed, name) for name in CHANGES},
    **{f"knows: {name}": functools.partial(lambda make: Stack(*make()), make) for name, make in PROGRAMS.items()},
    "shares a weight": lambda: Sharing(*(SharesAWeight() for _ in range(4))),
    **{f"called: {name}": functools.partial(_looped, name) for name in LOOPS},
}


@copies
@pytest.mark.parametrize("name", MODELS)
def test_captures_with_and_without_copies_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    COUNT["now"] = 1
    model, x = MODELS[name](), torch.randn(64, 16, requires_grad=True)
    short = parts(model, x)
    check_same(short, parts_without_copies(monkeypatch, model, x))
