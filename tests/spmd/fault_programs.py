"""What processes run in `test_faults.py`: they import it by name. All goes well in the first step, but not later."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fckpt
from fckpt import P

F64 = torch.float64


def _raise() -> None:
    raise ValueError("user bug")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, tuple[int, str, Callable[[], None]]] = {
    "raise in a recompute": (1, "recompute", _raise),
    "kill in a recompute": (0, "recompute", _kill),
    "freeze in backward": (1, "backward", _freeze),
}
"""By name: which rank does something, where, and what."""


class Pulled(torch.autograd.Function):
    """The identity, which calls something when it is pulled back through."""

    @staticmethod
    def forward(x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        ctx.call()
        return cotangents[0], None


def faulty(name: str, folder: str, timeout_seconds: float) -> None:
    """ZeRO-3 training, in the second step of which one rank does something. The others write what they see."""
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=timeout_seconds)
    rank, (culprit, place, fault) = int(os.environ["RANK"]), FAULTS[name]
    armed, runs = False, 0

    def at(here: str) -> None:
        if armed and rank == culprit and here == place:
            fault()

    def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        if runs == 2:  # the first was in the forward pass
            at("recompute")
        return Pulled.apply(torch.tanh(x @ fckpt.all_gather(w, "data", tiled=True)), lambda: at("backward"))

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fckpt.remat(block)(w, x).square().mean() / fckpt.axis_size("data")

    @fckpt.shard_map(mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gradient = fckpt.grad(loss)(w, x)
        norm = fckpt.psum(gradient.square().sum(), "data").sqrt()
        return w - gradient / norm

    w = fckpt.shard(torch.eye(6, dtype=F64), P("data"), mesh)
    x = torch.ones(2, 6, dtype=F64)
    w = step(w, x)
    armed, runs, start = True, 0, time.monotonic()
    try:
        step(w, x)
    except fckpt.RankFailure as error:
        Path(folder, str(rank)).write_text(f"{time.monotonic() - start} {error.rank} {error}")
        raise


def differs(timeout_seconds: float) -> dict[str, str]:
    """What each rank sees where rank 1 brings something else; nobody dies of it, and what comes after is right."""
    mesh = fckpt.init_mesh({"a": -1, "b": 1}, timeout_seconds=timeout_seconds)
    rank, x, seen = int(os.environ["RANK"]), torch.ones(3), {}
    odd = rank == 1

    def unforeseen(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return fckpt.shard_map(fn, mesh, in_specs=P("a"), out_specs=P("a"), check="off")(x)

    def planned(check: str) -> Any:
        fn = lambda x: torch.tanh(x.cos() if odd else x.sin()).sum() * fckpt.psum(x, "a").sum()
        step = fckpt.grad(fckpt.remat(fn, budget=1.0))
        return fckpt.shard_map(step, mesh, in_specs=P("a"), out_specs=P("a"), check=check)(x)

    cases: dict[str, Callable[[], Any]] = {
        "unmapped": lambda: fckpt.psum(x.double() if odd else x, "a"),
        "dtype": lambda: unforeseen(lambda x: fckpt.psum(x.double() if odd else x, "a")),
        "shape": lambda: unforeseen(lambda x: fckpt.psum(x.reshape(3, 1) if odd else x, "a")),
        "longer": lambda: unforeseen(lambda x: fckpt.all_gather(x.repeat(2) if odd else x, "a")),
        "operation": lambda: unforeseen(lambda x: fckpt.pmax(x, "a") if odd else fckpt.psum(x, "a")),
        "pullback": lambda: unforeseen(torch.func.grad(lambda x: (fckpt.psum(x.double() if odd else x, "a")).sum())),
        "graph": lambda: planned("off"),
        "graph, checked": lambda: planned("static"),
    }
    for name, case in cases.items():
        with fckpt.use_mesh(mesh):
            try:
                seen[name] = f"nothing: {case()}"
            except fckpt.RankFailure as error:
                seen[name] = f"{error.rank} {error}"
    seen["then"] = str(unforeseen(lambda x: fckpt.psum(x, "a")).tolist())
    return seen


def uneven(folder: str, timeout_seconds: float) -> None:
    """In the second step rank 1 has a smaller batch."""
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=timeout_seconds)
    rank = int(os.environ["RANK"])

    @fckpt.shard_map(mesh, in_specs=P("data"), out_specs=P("data"))
    def step(x: torch.Tensor) -> torch.Tensor:
        return x - fckpt.pmean(x.mean(), "data")

    step(torch.ones(4))
    start = time.monotonic()
    try:
        step(torch.ones(3 if rank == 1 else 4))
    except fckpt.RankFailure as error:
        Path(folder, str(rank)).write_text(f"{time.monotonic() - start} {error.rank} {error}")
        raise
