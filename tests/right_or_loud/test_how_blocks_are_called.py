"""How blocks are called: no calls are copied where another block has other arguments or other settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Block, Stack, check_same_captures, copies
from judge import Session, judge
from torch import Tensor, nn

COUNT = {"now": 0}


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


@copies
@pytest.mark.parametrize("loop", LOOPS)
def test_copies_are_the_same(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    COUNT["now"] = 1
    kind, step = LOOPS[loop]
    model = _loop(step)(*(kind() for _ in range(4)))
    check_same_captures(monkeypatch, model, torch.randn(64, 16, requires_grad=True))
