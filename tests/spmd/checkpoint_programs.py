"""What processes run in `test_checkpoint.py`: they import it by name."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter

import fckpt
from fckpt import P

F64 = torch.float64
Moments = namedtuple("Moments", ["mean", "square"])
SPEC = {"up": P("data"), "down": P(None, "data"), "scale": P()}
STATE = {"params": SPEC, "moments": Moments(SPEC, SPEC), "step": P(), "done": P()}


def tree(seed: int) -> dict[str, Any]:
    """A training state, whole: nested dicts, lists, a named tuple, tensors of several dtypes, and a count."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, dtype=F64, generator=generator)
    weights = lambda: {"up": draw(8, 16), "down": draw(16, 8), "scale": draw()}
    return {"params": weights(), "moments": Moments(weights(), weights()), "step": seed, "done": [True, "warm"]}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    up = fckpt.all_gather(params["up"], "data", tiled=True)
    down = fckpt.all_gather(params["down"], "data", dim=1, tiled=True)
    out = torch.tanh(x @ up) @ down * fckpt.pvary(params["scale"], "data")
    return (out**2).mean() / fckpt.axis_size("data")


def step(state: dict[str, Any], x: torch.Tensor) -> dict[str, Any]:
    """One step of Adam (D. Kingma, J. Ba, 2015, https://arxiv.org/abs/1412.6980), without its corrections."""
    gradients = fckpt.grad(fckpt.remat(loss))(state["params"], x)
    params, mean, square = {}, {}, {}
    for name, gradient in gradients.items():
        mean[name] = 0.9 * state["moments"].mean[name] + 0.1 * gradient
        square[name] = 0.999 * state["moments"].square[name].abs() + 0.001 * gradient**2
        params[name] = state["params"][name] - 0.01 * mean[name] / (square[name].sqrt() + 1e-8)
    return {**state, "params": params, "moments": Moments(mean, square), "step": state["step"] + 1}


def trained(state: dict[str, Any], mesh: fckpt.Mesh, steps: int) -> dict[str, Any]:
    x = fckpt.shard(torch.linspace(-1, 1, 64, dtype=F64).reshape(8, 8), P("data"), mesh)
    mapped = fckpt.shard_map(step, mesh, in_specs=(STATE, P("data")), out_specs=STATE)
    for _ in range(steps):
        state = mapped(state, x)
    return state


def writes(folder: str) -> dict[str, Any]:
    """Trains, saves, goes on, and goes on again from what was saved; returns all that, whole."""
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=30)
    state = trained(fckpt.shard(tree(0), STATE, mesh), mesh, 2)
    fckpt.save(f"{folder}/flat", state, STATE, mesh)
    on = trained(state, mesh, 2)
    again = trained(fckpt.load(f"{folder}/flat", fckpt.shard(tree(1), STATE, mesh), STATE, mesh), mesh, 2)
    parameters = [parameter.clone() for parameter in state["params"].values()]
    adam = torch.optim.Adam([{"params": parameters, "betas": (0.8, 0.9)}], lr=0.5)
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = parameter.clone()
    adam.step()
    fckpt.save(f"{folder}/adam", adam.state_dict(), adam_specs(), mesh)
    grid = fckpt.init_mesh({"data": 2, "model": 2})
    x = torch.arange(32.0, dtype=torch.bfloat16).reshape(8, 4)
    turned = P(("model", "data"), None)
    fckpt.save(f"{folder}/grid", (fckpt.shard(x, turned, grid), torch.arange(3)), (turned, P()), grid)
    whole = lambda state: fckpt.unshard(state, STATE, mesh)
    return {
        "saved": whole(state),
        "on": whole(on),
        "again": whole(again),
        "adam": fckpt.unshard(adam.state_dict(), adam_specs(), mesh),
    }


def adam_specs() -> dict[str, Any]:
    return {
        "state": {i: {"step": P(), "exp_avg": p, "exp_avg_sq": p} for i, p in enumerate(SPEC.values())},
        "param_groups": P(),
    }


def reads(folder: str) -> dict[str, Any]:
    """Loads what `writes` has written, on any number of ranks."""
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=30)
    like = fckpt.shard(tree(1), STATE, mesh)
    state = fckpt.load(f"{folder}/flat", like, STATE, mesh)
    rows = {"params": {"down": P("data"), "up": P(), "scale": P()}}
    part = fckpt.load(f"{folder}/flat", {"params": fckpt.shard(tree(1)["params"], rows["params"], mesh)}, rows, mesh)
    adam = torch.optim.Adam(fckpt.shard([*tree(1)["params"].values()], [*SPEC.values()], mesh))
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    adam.step()  # the state of an optimizer is there from its first step on
    adam.load_state_dict(fckpt.load(f"{folder}/adam", adam.state_dict(), adam_specs(), mesh))
    columns = P(None, "data")
    grid = fckpt.load(f"{folder}/grid", (torch.empty(8, 4 // mesh.size, dtype=torch.bfloat16),), (columns,), mesh)
    return {
        "saved": fckpt.unshard(state, STATE, mesh),
        "on": fckpt.unshard(trained(state, mesh, 2), STATE, mesh),
        "part": fckpt.unshard(part, rows, mesh),
        "adam": fckpt.unshard(adam.state_dict(), adam_specs(), mesh),
        "grid": fckpt.unshard(grid[0], columns, mesh),
    }


def goes_wrong(folder: str) -> None:
    """Rank 1 has another tree, then all want a leaf that is not there, then rank 1 is killed while it writes."""
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=3)
    rank, start = int(os.environ["RANK"]), 0.0

    def attempt(name: str, fn: Any) -> None:
        try:
            fn()
        except fckpt.FckptError as error:
            seen = [type(error).__name__, str(error), time.monotonic() - start]
            Path(folder, f"{name} {rank}").write_text(json.dumps(seen))

    other = torch.ones(3 if rank == 1 else 2)
    attempt("tree", lambda: fckpt.save(f"{folder}/other", {"x": other}, P("data"), mesh))
    missing = {"params": {"left": torch.ones(2)}}
    attempt("leaf", lambda: fckpt.load(f"{folder}/flat", missing, P(), mesh))
    if rank == 1:
        FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    attempt("death", lambda: fckpt.save(f"{folder}/cut", {"x": torch.ones(2)}, P("data"), mesh))


def saves_meanwhile(folder: str) -> dict[str, bool]:
    """Exchanges messages while files are written; then rank 1 cannot write."""
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=20)
    rank, write = int(os.environ["RANK"]), FileSystemWriter.write_data

    def slow(self: Any, plan: Any, planner: Any) -> Any:
        time.sleep(1 + 0.2 * rank)
        if rank == 1 and str(self.path).endswith("3"):
            raise OSError("no space left on device")
        return write(self, plan, planner)

    FileSystemWriter.write_data = slow
    x = torch.ones(1000)
    total = fckpt.shard_map(lambda x: fckpt.psum(x, "data"), mesh, in_specs=(P("data"),), out_specs=P())
    total(x)
    saving = fckpt.save(f"{folder}/1", x, P("data"), mesh, wait=False)
    for _ in range(5):
        found = total(x)
    going = not saving.done()
    fckpt.save(f"{folder}/2", x + 1, P("data"), mesh, wait=False)
    failing = fckpt.save(f"{folder}/3", x + 2, P("data"), mesh, wait=False)
    try:
        failing.wait()
    except fckpt.RankFailure as error:
        failed = error.rank == 1 and rank != 1 and "no space left on device" in str(error)
    except OSError:
        failed = rank == 1
    fckpt.save(f"{folder}/4", x, P("data"), mesh, wait=False)
    return {"going": going, "same": torch.equal(found, x * mesh.size) and failed}


def opened(folder: Path) -> None:
    """Reads a checkpoint as torch does."""
    like = {"x": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            checkpoint.load(like, checkpoint_id=folder, no_dist=True)
        except BaseException as error:  # a CheckpointException is one
            print(error)
