"""`clip_grad_norm`: clips gradients, of which each rank has a part, by their global norm."""

from __future__ import annotations

import math
from typing import Any

import torch

from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError
from fckpt.spmd.collectives import pmax, psum
from fckpt.spmd.mesh import Mesh, current_mesh, use_mesh
from fckpt.spmd.specs import part_mask, specs_of

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    grads: Any, max_norm: float, specs: Any, mesh: Mesh | None = None, *, norm_type: float = 2.0
) -> tuple[Any, torch.Tensor]:
    """Scales gradients so that their total norm is at most `max_norm`; returns them and the norm before scaling.

    The norm is the norm of the whole tensors, of which each rank has a part. It equals the result of
    `torch.nn.utils.clip_grad_norm_` on the whole tensors in one process. All ranks call `clip_grad_norm`, inside or
    outside of a mapped function. Nothing is changed in place.

    Args:
        grads: a pytree of tensors, this rank's parts. None and other leaves are returned unchanged.
        max_norm: the largest allowed norm.
        specs: as for `shard`: how each gradient is divided. Along axes that a spec does not name, it is replicated.
        mesh: default: the mesh in use.
        norm_type: p of the p-norm; `math.inf` for the maximum norm.

    Returns:
        The scaled tree, and the norm as a scalar tensor that is the same on all ranks.

    Raises:
        ArgumentTypeError, ArgumentValueError: the specs do not fit; the tree has no tensor; `max_norm` or `norm_type`
            is not above 0.

    Example:
        >>> import torch, fckpt
        >>> from fckpt import P
        >>> def program():
        ...     part = fckpt.shard(torch.tensor([3.0, 4.0]), P("data"))
        ...     clipped, norm = fckpt.clip_grad_norm({"w": part}, 1.0, P("data"))
        ...     return norm, clipped["w"]
        >>> fckpt.sim({"data": 2}).run(program)
        [(tensor(5.), tensor([0.6000])), (tensor(5.), tensor([0.8000]))]
    """
    if not (max_norm > 0 and norm_type > 0):
        raise ArgumentValueError(
            f"clip_grad_norm: max_norm and norm_type must be above 0, not {max_norm} and {norm_type}."
        )
    mesh = mesh or current_mesh("clip_grad_norm")
    leaves, spec = trees.flatten(grads)
    for leaf, path in zip(leaves, spec.paths(), strict=True):
        if isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
            raise ArgumentTypeError(
                f"clip_grad_norm: grads{path} is {trees.describe(leaf)}, not a gradient. Remove it from the tree."
            )
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for leaf, p in zip(leaves, specs_of("clip_grad_norm", "grads", specs, grads, mesh), strict=True):
        if isinstance(leaf, torch.Tensor):
            axes = tuple(name for name in mesh.names if name in p.axes)
            if p.shape is not None:
                leaf = leaf.where(part_mask(p, mesh, device=leaf.device), 0)
            by_axes.setdefault(axes, []).append(torch.linalg.vector_norm(leaf, norm_type))
    if not by_axes:
        raise ArgumentValueError("clip_grad_norm: the tree of gradients contains no tensor.")
    with use_mesh(mesh):
        norm = _norm([_over_ranks(parts, axes, norm_type) for axes, parts in by_axes.items()], norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
    clipped = [leaf * factor.to(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return trees.unflatten(spec, clipped), norm


def _over_ranks(parts: list[torch.Tensor], axes: tuple[str, ...], norm_type: float) -> torch.Tensor:
    """Combines the norms of this rank's parts, and of the ranks along `axes`, to the norm of the whole tensors."""
    mine = _norm(parts, norm_type)
    if not axes:
        return mine
    if math.isinf(norm_type):
        return pmax(mine, axes)
    return psum(mine**norm_type, axes, out="invariant") ** (1 / norm_type)


def _norm(parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]), norm_type)
