"""What processes run in `test_processes.py`: they import it by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import fckpt
from fckpt import P

F64 = torch.float64


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=F64, generator=generator)
    return {"a": draw(8, 16), "b": draw(16, 8), "x": draw(8, 8), "y": draw(8, 8)}


def block(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ w["a"]) @ w["b"]


def loss(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((fckpt.remat(block)(w, x) - y) ** 2).mean()


def reference() -> dict[str, torch.Tensor]:
    """The gradients of one process."""
    tensors = parameters()
    w = {name: tensors[name] for name in "ab"}
    return torch.func.grad(loss)(w, tensors["x"], tensors["y"])


def _gradients(axes: dict[str, int], step: Any, specs: Any, data: P) -> dict[str, torch.Tensor]:
    mesh = fckpt.init_mesh(axes, timeout_seconds=30)
    tensors = parameters()
    w = fckpt.shard({name: tensors[name] for name in "ab"}, specs, mesh)
    batch = fckpt.shard((tensors["x"], tensors["y"]), data, mesh)
    mapped = fckpt.shard_map(step, mesh, in_specs=(specs, data, data), out_specs=specs)
    return fckpt.unshard(mapped(w, *batch), specs, mesh)


def data_parallel() -> dict[str, torch.Tensor]:
    step = lambda w, x, y: fckpt.pmean(fckpt.grad(loss)(w, x, y), "data")
    return _gradients({"data": -1}, step, P(), P("data"))


def zero3() -> dict[str, torch.Tensor]:
    def gathered(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return block(fckpt.all_gather(w, "data", tiled=True), x)

    def local(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((fckpt.remat(gathered)(w, x) - y) ** 2).mean() / fckpt.axis_size("data")

    return _gradients({"data": -1}, lambda w, x, y: fckpt.grad(local)(w, x, y), P("data"), P("data"))


def _parallel_block(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Columns of a and rows of b by rank: tensor parallelism as Megatron-LM has it (Shoeybi et al., 2019)."""
    hidden = torch.tanh(fckpt.pvary(x, "model") @ w["a"])
    return x + fckpt.psum(hidden @ w["b"], "model", out="invariant")


def tensor_parallel() -> dict[str, torch.Tensor]:
    local = lambda w, x, y: ((fckpt.remat(_parallel_block)(w, x) - y) ** 2).mean()
    specs = {"a": P(None, "model"), "b": P("model")}
    return _gradients({"model": -1}, lambda w, x, y: fckpt.grad(local)(w, x, y), specs, P())


def grid() -> dict[str, torch.Tensor]:
    def gathered(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        a, b = fckpt.all_gather(w["a"], "data", tiled=True), fckpt.all_gather(w["b"], "data", dim=1, tiled=True)
        return _parallel_block({"a": a, "b": b}, x)

    def local(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((fckpt.remat(gathered)(w, x) - y) ** 2).mean() / fckpt.axis_size("data")

    specs = {"a": P("data", "model"), "b": P("model", "data")}
    return _gradients({"data": 2, "model": -1}, lambda w, x, y: fckpt.grad(local)(w, x, y), specs, P("data"))


def zero3_within_a_budget() -> dict[str, torch.Tensor]:
    def local(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = block(fckpt.all_gather(w, "data", tiled=True), x) / 4
        return ((x - y) ** 2).mean() / fckpt.axis_size("data")

    planned = fckpt.remat(local, budget=0.8)
    found = _gradients({"data": -1}, lambda w, x, y: fckpt.grad(planned)(w, x, y), P("data"), P("data"))
    plain = _gradients({"data": -1}, lambda w, x, y: fckpt.grad(local)(w, x, y), P("data"), P("data"))
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    return reference()


PROGRAMS = {f.__name__: f for f in (data_parallel, zero3, zero3_within_a_budget, tensor_parallel, grid)}


def collectives() -> list[torch.Tensor]:
    """All of them, over axes alone and together."""
    fckpt.init_mesh({"a": 2, "b": -1}, timeout_seconds=30)
    found: list[torch.Tensor] = []
    with fckpt.use_mesh(fckpt.init_mesh({"a": 2, "b": -1})):
        x = torch.arange(8.0) + 10 * fckpt.axis_index(("a", "b"))
        for axis in ("a", "b", ("a", "b"), ("b", "a")):
            size = fckpt.axis_size(axis)
            found += [fckpt.psum(x, axis), fckpt.pmax(x, axis), fckpt.pmin(x, axis), fckpt.all_gather(x, axis)]
            found += [fckpt.psum_scatter(x, axis, tiled=True)]
            found += [fckpt.all_to_all(x, axis, split=0, concat=0, tiled=True)]
            found += [fckpt.ppermute(x, axis, [(i, i + 1) for i in range(size - 1)])]
            found += [torch.func.grad(lambda x, axis=axis: (fckpt.psum(x**2, axis) * x).sum())(x)]
            found += [torch.func.vmap(lambda x, axis=axis: fckpt.psum(x, axis))(x)]
            found += _of_other_numbers(axis)
    return found


def _of_other_numbers(axis: Any) -> list[torch.Tensor]:
    """NaN, complex numbers, booleans and short numbers, which not every backend takes."""
    mine, size = fckpt.axis_index(axis), fckpt.axis_size(axis)
    gaps = torch.arange(8.0).masked_fill(torch.arange(8) % size == mine, torch.nan)
    gaps = torch.cat([gaps, torch.tensor([torch.inf, -torch.inf]) * (1 - 2 * (mine % 2))])
    found = [fckpt.pmax(gaps, axis), fckpt.pmin(gaps, axis), fckpt.pmax(gaps.bfloat16(), axis)]
    z = torch.complex(torch.arange(8.0), mine + torch.arange(8.0)).conj()
    found += [fckpt.psum(z, axis), fckpt.all_gather(z, axis), fckpt.psum_scatter(z, axis, tiled=True)]
    found += [fckpt.all_to_all(z, axis, split=0, concat=0, tiled=True), fckpt.ppermute(z, axis, [(0, size - 1)])]
    flags = torch.arange(8) % size == mine
    found += [fckpt.psum(flags, axis), fckpt.pmean(flags, axis), fckpt.psum_scatter(flags, axis, tiled=True)]
    short = (torch.arange(8) * 5000 - 300 * mine).short()  # its sums wrap around
    found += [fckpt.psum(short, axis), fckpt.pmax(short, axis), fckpt.psum_scatter(short, axis, tiled=True)]
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn):
        x = (torch.arange(8) + mine).to(dtype)
        moved = [fckpt.all_gather(x, axis), fckpt.all_gather(x[0], axis), fckpt.ppermute(x, axis, [(0, size - 1)])]
        moved += [fckpt.all_to_all(x.view(2, 4), axis, split=1, concat=0, tiled=True)]
        assert all(y.dtype == dtype for y in moved)
        found += [y.float() for y in moved]
    return found


def everything() -> dict[str, Any]:
    """All programs, in one start of the processes."""
    return {"collectives": collectives(), **{name: program() for name, program in PROGRAMS.items()}}


# ---- gradients from outside ------------------------------------------------------------------------


def rows(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).exp().square().sum(1)


def total(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return rows(w, x).sum()


def outside() -> dict[str, torch.Tensor]:
    """Gradients that are taken outside of a mapped function, in several ways."""
    mesh = fckpt.init_mesh({"a": 2}, timeout_seconds=30)
    with fckpt.use_mesh(mesh):
        rank = int(fckpt.axis_index("a"))
    part = (torch.arange(8, dtype=torch.float64) / 7).reshape(4, 2).chunk(2)[rank]
    w = torch.tensor([[0.3, -0.2], [0.1, 0.5]], dtype=torch.float64)
    body = lambda w, x: fckpt.psum(total(w, x), "a")
    step = fckpt.shard_map(body, mesh, in_specs=(P(), P("a")), out_specs=P())
    generator = torch.Generator().manual_seed(7)  # each rank's is another object, and draws the same
    drawn = fckpt.shard_map(
        lambda x: fckpt.psum(x * torch.rand(2, generator=generator), "a"), mesh, in_specs=P("a"), out_specs=P()
    )
    assert torch.equal(drawn(torch.ones(2)), 2 * torch.rand(2, generator=torch.Generator().manual_seed(7)))
    one = w.clone().requires_grad_()
    step(one, part).backward()
    assert one.grad is not None
    region = fckpt.remat(step)
    found = {"backward": one.grad, "grad": torch.func.grad(lambda w: step(w, part))(w)}
    found["remat"] = fckpt.grad(lambda w: region(w, part))(w)
    found["vjp"] = torch.func.vjp(lambda w: step(w, part), w)[1](torch.ones((), dtype=torch.float64))[0]
    return found


# ---- faults ----------------------------------------------------------------------------------------


def faulty(kind: str, folder: str, timeout_seconds: float) -> None:
    """Rank 1 does something; the others write what they see."""
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=timeout_seconds)
    rank = int(os.environ["RANK"])

    def twice(x: torch.Tensor) -> torch.Tensor:
        once = fckpt.psum(x, "data")
        if rank == 1:
            match kind:
                case "raise":
                    raise ValueError("user bug")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "shape":
                    return fckpt.psum(x[:1], "data")
                case "skip":
                    return once
                case "sleep":
                    time.sleep(60)  # alive, and elsewhere
        return fckpt.psum(once, "data")

    def swapped(x: torch.Tensor) -> torch.Tensor:
        order = reversed((1, 2)) if rank == 1 else (1, 2)
        found = {factor: fckpt.psum(factor * x, "data") for factor in order}
        return found[1] - found[2]

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            two, one = fckpt.psum(2 * x, "data"), fckpt.psum(x, "data")
        else:
            one, two = fckpt.psum(x, "data"), fckpt.psum(2 * x, "data")
        return one - two

    function = {"swap": swapped, "elsewhere": elsewhere}.get(kind, twice)
    check = "static" if kind in ("swap", "graph") else "off"
    mapped = fckpt.shard_map(function, mesh, in_specs=P("data"), out_specs=P("data"), check=check)
    start = time.monotonic()
    if kind == "end" and rank == 1:
        return
    try:
        mapped(torch.ones(3))
    except fckpt.RankFailure as error:
        said = str(error)
        Path(folder, str(rank)).write_text(f"{time.monotonic() - start} {error.rank} {said}")
        raise
    Path(folder, str(rank)).write_text("0 -1 no error")


def without_mapping() -> list[float]:
    """Calls collectives outside of mapped functions."""
    mesh = fckpt.init_mesh({"a": -1})
    x = torch.full((2,), float(fckpt.axis_index("a")), requires_grad=True)
    loss = fckpt.psum(x * x, "a").sum()
    loss.backward()
    assert x.grad is not None
    return [
        float(loss.detach()),
        *x.grad.tolist(),
        float(mesh.size),
        *fckpt.shard(torch.arange(4.0), fckpt.P("a")).tolist(),
    ]
