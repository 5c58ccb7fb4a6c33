"""Which values differ between the ranks along which axes, found without running anything.

A function runs on fake tensors, and every operation passes on which axes its result may vary over: those of its inputs,
less those over which it sums or gathers, plus those over which it scatters. What an output spec says is held against
it. A result that varies where the spec says that all ranks are alike has lost its psum, its pmean, or a pvary; a sum
over ranks that are alike is one too many. The axes are those of JAX's `check_vma`
(https://docs.jax.dev/en/latest/notebooks/shard_map.html), found once and not carried by every tensor.

Private in torch 2.11 and 2.13: `torch._subclasses.fake_tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fckpt import tree as trees
from fckpt.conditions import unwrapped
from fckpt.errors import TraceError
from fckpt.shard.collectives import sums_watched
from fckpt.shard.mesh import Mesh, use_mesh
from fckpt.shard.specs import P

__all__ = ["Varying", "varying", "violations"]

Axes = frozenset[str]


class Varying:
    """What comes of a function on a mesh."""

    def __init__(self, paths: Sequence[str], axes: Sequence[Axes], redundant: Sequence[str], output: Any):
        self.paths, self.axes, self.redundant, self.output = paths, axes, redundant, output
        """The leaves that are tensors and what they vary over; axes that were summed over in vain; the output."""


def varying(
    fn: Callable[..., Any], mesh: Mesh, args: Sequence[Any], kwargs: dict[str, Any], specs: Sequence[P]
) -> Varying:
    """Returns over which axes the outputs of a function vary.

    Args:
        fn: a function of local parts, whose course does not depend on data.
        mesh: on which it runs.
        args: its arguments.
        kwargs: those by keyword.
        specs: one for each leaf of (args, kwargs).

    Raises:
        TraceError: its course depends on data.
    """
    flat, spec = trees.flatten((tuple(args), kwargs))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _Follower(mesh) as follower:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in flat]
        for fake, p in zip(fakes, specs, strict=True):
            if isinstance(fake, torch.Tensor):
                follower.note(fake, frozenset(p.axes))
        faked_args, faked_kwargs = trees.unflatten(spec, fakes)
        try:
            with use_mesh(mesh), sums_watched(follower.sums):
                output = fn(*faked_args, **faked_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TraceError(
                "shard_map: the function's course depends on the data of tensors, so that what varies over which axis "
                'cannot be told before it runs. Pass check="off" to run it unchecked.'
            ) from error
        leaves, out_spec = trees.flatten(output)
        tensors = [(path, x) for path, x in zip(out_spec.paths(), leaves, strict=True) if isinstance(x, torch.Tensor)]
        return Varying([path for path, _ in tensors], [follower.of(x) for _, x in tensors], follower.redundant, output)


class _Follower(TorchDispatchMode):
    """Passes on, from operation to operation, what varies over which axes, by storage."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh = mesh
        self.known: dict[int, Axes] = {}
        self.alive: list[Any] = []
        """The storages, whose numbers must not be used again."""
        self.redundant: list[str] = []

    def of(self, x: torch.Tensor) -> Axes:
        return self.known.get(unwrapped(x).untyped_storage()._cdata, frozenset())

    def note(self, x: torch.Tensor, axes: Axes) -> None:
        storage = x.untyped_storage()
        self.alive.append(storage)
        self.known[storage._cdata] = axes

    def sums(self, x: torch.Tensor, axes: tuple[str, ...]) -> None:
        """Notes axes that a psum sums over, though all ranks along them have the same."""
        self.redundant += [name for name in axes if name not in self.of(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in trees.leaves((list(args), kwargs)) if isinstance(x, torch.Tensor)]
        axes: Axes = frozenset().union(*(self.of(x) for x in inputs))
        result = func(*args, **kwargs)
        if func.namespace == "fckpt":
            axes = self._after(func._schema.name.partition("::")[2], axes, args)
        outputs = [x for x in trees.leaves(result) if isinstance(x, torch.Tensor)]
        written = _mutated(func, args, kwargs) if func._schema.is_mutable else []
        for x in (*outputs, *written):
            self.note(x, axes)
        return result

    def _after(self, name: str, axes: Axes, args: Sequence[Any]) -> Axes:
        match name:
            case "all_reduce":
                return axes - {*args[2].split(",")}
            case "all_gather":
                return axes - {*args[1].split(",")}
            case "axis_index":
                return frozenset(args[0].split(","))
            case _:
                return axes | {*args[2 if name == "permute" else 1].split(",")}


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [named.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in trees.leaves(written) if isinstance(x, torch.Tensor)]


def violations(found: Varying, specs: Iterable[P]) -> list[str]:
    """Returns what is wrong with output specs: by path and axis."""
    return [
        f"output{path} varies over {name!r}, but its spec {spec} says that all ranks along it are alike"
        for path, axes, spec in zip(found.paths, found.axes, specs, strict=True)
        for name in sorted(axes - {*spec.axes})
    ]
