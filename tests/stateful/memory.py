"""Pieces that remember: counters, caches, hooks, patched methods, places that a test writes. See `pieces.py`."""

from __future__ import annotations

import collections
import functools
import random
from typing import Any

import torch
from torch import Tensor, nn

Mask = Tensor | None
PIECES: dict[str, type[nn.Module]] = {}
FACTORS: Any = {"all": 1.0}
CALLS = 0


class Piece(nn.Module):
    """A part of a program; see `pieces.Piece`."""

    def __init_subclass__(cls) -> None:
        """Registers a piece by its name."""
        if not cls.__name__.startswith("_"):
            PIECES[cls.__name__] = cls

    def changes(self) -> list[Any]:
        """What may be done to it between calls."""
        return [getattr(self, name) for name in sorted(dir(type(self))) if name.startswith("change_")]


class _Reads(Piece):
    """Reads a number in one of the places of `places`."""

    def __init__(self, place: Any, way: str) -> None:
        super().__init__()
        self.place, self.way, self.written = place, way, 2
        self.inner = nn.Identity()
        if way == "hook":
            self.inner.register_forward_hook(lambda module, args, out: out * self.place.read())

    @property
    def number(self) -> Any:
        return self.place.read()

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        h = self.inner(torch.tanh(x).exp())
        if self.way == "hook":
            return h.sin()
        return ((h * (self.number if self.way == "property" else self.place.read())).to(x.dtype)).sin()

    def change_number(self) -> None:
        self.written += 1
        self.place.write(self.written)

    def change_back(self) -> None:
        self.place.write(2)

    def close(self) -> None:
        getattr(self.place, "close", lambda: None)()


class Counted(Piece):
    """A counter that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        self.calls += 1
        return torch.tanh(x).exp()


class Alternating(Counted):
    """A counter that decides."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        self.calls += 1
        return torch.tanh(x) * self.calls if self.calls % 2 else torch.sin(x)


class CountedGlobally(Piece):
    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        global CALLS
        CALLS += 1
        return torch.tanh(x).exp() * FACTORS["all"]

    def change_factor(self) -> None:
        FACTORS["all"] += 0.5


class CountedInBuffer(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        self.calls += 1
        return torch.tanh(x) / self.calls


class Recorded(Piece):
    """A list of what came by."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.kinds: collections.Counter[str] = collections.Counter()

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        self.sizes.append(len(x))
        self.kinds["masked" if mask is not None else "open"] += 1
        return torch.tanh(x).exp()


class LastSeen(Piece):
    """The last activation, which the next call may read."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.read = False

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        h = torch.tanh(x).exp()
        if self.read and self.last is not None:
            h = h + self.last.mean()
        self.last = h.detach()
        return h.sin()

    def change_read(self) -> None:
        self.read = not self.read


class Cached(Piece):
    """Tables in a dictionary, by size."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = {}

    def table(self, size: int) -> Tensor:
        if size not in self.cache:
            self.cache[size] = torch.arange(size, dtype=torch.float32).cos()
        return self.cache[size]

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.tanh(x * self.table(32)).exp()

    def change_clear(self) -> None:
        self.cache.clear()

    def change_entry(self) -> None:
        self.cache[32] = torch.arange(32, dtype=torch.float32).sin()


class CachedInOrder(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.cache = collections.OrderedDict()


class CachedInClass(Cached):
    shared: dict[int, Tensor] = {}  # noqa: RUF012  what is tested

    def __init__(self) -> None:
        super().__init__()
        self.cache = type(self).shared


class CachedLately(Piece):
    """An attribute that the first call sets."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        if self.kept is None or self.kept.shape[0] != len(x):
            self.kept = torch.arange(len(x), dtype=x.dtype).cos()[:, None]
        return torch.tanh(x * self.kept).exp()

    def change_forget(self) -> None:
        self.kept = None


@functools.lru_cache(maxsize=8)
def cosines(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32).cos()


class CachedByFunction(Piece):
    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.tanh(x * cosines(32)).exp()

    def change_clear(self) -> None:
        cosines.cache_clear()


class Hooked(Piece):
    """Hooks come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen, self.handles = nn.Linear(32, 32), 0, []

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.tanh(self.linear(x)).sin()

    def change_forward(self) -> None:
        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            self.seen += 1
            return out * 1.5

        self.handles.append(self.linear.register_forward_hook(hook))

    def change_pre(self) -> None:
        self.handles.append(self.linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)))

    def change_backward(self) -> None:
        self.handles.append(self.linear.register_full_backward_hook(lambda module, grads, out: (grads[0] * 2,)))

    def change_parameter(self) -> None:
        if self.linear.weight.requires_grad:  # otherwise torch refuses the hook
            self.handles.append(self.linear.weight.register_hook(lambda grad: grad * 2))

    def change_everywhere(self) -> None:
        everywhere = nn.modules.module.register_module_forward_hook
        mine = self.linear
        self.handles.append(everywhere(lambda module, args, out: out * 3 if module is mine else out))

    def change_remove(self) -> None:
        if self.handles:
            self.handles.pop().remove()

    def close(self) -> None:
        while self.handles:
            self.handles.pop().remove()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def scaled(self, x: Tensor) -> Tensor:
        return x * 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(torch.tanh(self.linear(x)))


class Patched(Piece):
    """Methods that a user replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return self.block(x).exp()

    def change_method(self) -> None:
        Block.scaled = lambda self, x: x * 0.75  # type: ignore[method-assign]

    def change_forward(self) -> None:
        Block.forward = lambda self, x: torch.sin(self.linear(x))  # type: ignore[method-assign]

    def change_on_instance(self) -> None:
        self.block.scaled = lambda x: x * 0.25  # type: ignore[method-assign]

    def change_wrapped(self) -> None:
        inner = self.block.forward
        self.block.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]


class Drawing(Piece):
    """Draws from a generator of its own, or from Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.of_python = torch.Generator().manual_seed(3), False

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        if self.of_python:
            return torch.tanh(x) * random.random()
        return torch.tanh(x) * torch.rand(32, generator=self.generator, dtype=x.dtype)

    def change_source(self) -> None:
        self.of_python = not self.of_python


class Deciding(Piece):
    """Data decides: never traceable, always to be refused."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.tanh(x).exp() if x.sum() > 0 else torch.sin(x)
