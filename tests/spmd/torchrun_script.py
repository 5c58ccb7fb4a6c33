"""What torchrun starts in `test_torchrun.py`: two steps of training, in whose last backward pass rank 1 may fail."""

from __future__ import annotations

import sys

import torch
from fault_programs import Pulled

import fckpt
from fckpt import P


def main(fault: str) -> None:
    mesh = fckpt.init_mesh({"data": -1}, timeout_seconds=20)
    with fckpt.use_mesh(mesh):
        rank = int(fckpt.axis_index("data"))
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    x = fckpt.shard(torch.randn(4, 8, generator=generator, dtype=torch.float64), P("data"), mesh)
    faulty = False

    def pulled() -> None:
        if faulty:
            raise ValueError("user bug")

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return Pulled.apply(torch.tanh(x @ w), pulled).square().mean()

    @fckpt.shard_map(mesh, in_specs=(P(), P("data")), out_specs=P())
    def step(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gradient, value = fckpt.grad_and_value(fckpt.remat(loss))(w, x)
        return w - 0.1 * fckpt.pmean(gradient, "data"), fckpt.pmean(value, "data")

    for number in range(2):
        faulty = fault == "raise" and rank == 1 and number == 1
        w, value = step(w, x)
        print(f"rank {rank} of {mesh.size}, step {number}: loss {value.item().hex()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
