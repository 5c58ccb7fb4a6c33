"""What processes run that have uneven parts."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fckpt
from fckpt import P


def from_fsdp(folder: str) -> Any:
    """Saves a module of FSDP2, loads its parts, and maps a function over them."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else -1
    mesh = fckpt.init_mesh({"data": ranks})
    torch.manual_seed(0)
    layer = fully_shard(torch.nn.Linear(3, 4), mesh=init_device_mesh("cpu", (mesh.size,), mesh_dim_names=("data",)))
    state: Any = {**layer.state_dict()}
    fckpt.save(folder + "/fsdp", state, P("data"), mesh)
    loaded = fckpt.load(folder + "/fsdp", {"weight": state["weight"]}, P("data"), mesh)["weight"]

    weight, bias = (dict(layer.named_parameters())[name] for name in ("weight", "bias"))
    specs = fckpt.specs_for([weight, bias], P("data"))

    def value(w: Any, b: Any) -> Any:
        w, b = fckpt.unshard([w, b], specs)
        return (torch.ones(2, 3) @ w.T + b).sum()

    mapped = fckpt.shard_map(lambda w, b: fckpt.pmean(value(w, b), "data"), mesh, in_specs=tuple(specs), out_specs=P())
    found = mapped(weight, bias)
    found.backward()
    return loaded.detach(), found.detach(), weight.grad.to_local()
