"""The static check of `shard_map`: over which axes each value varies, found without computing anything.

The function runs on fake tensors. The result of every operation may vary over the axes of its inputs, minus the axes
over which the operation sums or gathers, plus the axes over which it scatters. The axes of each output are compared
with its spec. If an output varies over an axis along which its spec says that it is replicated, a psum, a pmean or a
pvary is missing. A sum over an axis along which the value is replicated is redundant. JAX's `check_vma` computes the
same axes (https://docs.jax.dev/en/latest/notebooks/shard_map.html), in the type of every value; here they are computed
once per signature.

Private in torch 2.11 and 2.13: `torch._subclasses.fake_tensor`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fckpt import _tree as trees
from fckpt._call.ambient import without_modes
from fckpt._call.levels import unseen, unwrapped
from fckpt._recompute.closed_over import unwatched
from fckpt._recompute.replay import recompute_mode
from fckpt._recompute.saved_tensors import without_hooks
from fckpt._trace.operations import is_dense, is_random, statistics_of
from fckpt._trace.trace import followed
from fckpt.errors import TraceError
from fckpt.spmd.collectives import sums_watched
from fckpt.spmd.isolated import Rehearsal
from fckpt.spmd.mesh import Along, Mesh, transport_of, use_mesh
from fckpt.spmd.specs import P

__all__ = ["Varying", "varying", "violations"]

Axes = frozenset[str]


class Varying(NamedTuple):
    """The result of the check of a function on a mesh."""

    paths: Sequence[str]
    """The paths of the outputs that are tensors."""
    axes: Sequence[Axes]
    """For each of these outputs, the axes over which it varies."""
    redundant: Sequence[str]
    """Axes of sums over replicated values."""
    collectives: list[str]
    """The collectives in order, each with a hash of the operations that compute its input: the same on all ranks."""
    output: Any
    closed_over: Sequence[str] = ()
    """Captured tensors that are replicated, but whose gradient from outside would not be summed over the ranks."""


def varying(
    fn: Callable[..., Any], mesh: Mesh, args: Sequence[Any], kwargs: dict[str, Any], specs: Sequence[P], about: str
) -> Varying:
    """Returns over which axes the outputs of a function vary.

    Args:
        fn: a function of local parts. Its control flow must not depend on tensor values.
        mesh: the mesh on which the function runs.
        args: the positional arguments.
        kwargs: the keyword arguments.
        specs: one spec for each leaf of (args, kwargs).
        about: describes the call, for errors about ranks that do not arrive.

    Raises:
        TraceError: the control flow of the function depends on tensor values.
    """
    flat, spec = trees.flatten((tuple(args), kwargs))
    with _apart(), FakeTensorMode(allow_non_fake_inputs=True) as mode, _Follower(mesh, about) as follower:
        fakes = [_without_data(x, mode) if isinstance(x, torch.Tensor) else x for x in flat]
        with unseen(), without_modes():
            rehearsal = Rehearsal(fn, functools.partial(_without_data, mode=mode))
            captured = [*rehearsal.tensors.values()]
            *differing, drawn = _differing(about, mesh, [_digest(x) for x, _ in captured])
        for i, ((_, fake), axes) in enumerate(zip(captured, differing, strict=True)):
            follower.note(fake, axes, f"captured {i}")
        follower.drawn = drawn
        for i, (fake, p) in enumerate(zip(fakes, specs, strict=True)):
            if isinstance(fake, torch.Tensor):
                follower.note(fake, frozenset(p.axes), f"argument {i}")
        faked_args, faked_kwargs = trees.unflatten(spec, fakes)
        try:
            with use_mesh(mesh), sums_watched(follower.sums), rehearsal.prepared() as prepared:
                output = prepared(*faked_args, **faked_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TraceError(
                "shard_map: the function's control flow depends on the data of tensors, so the axes over which its "
                'values vary are not known before it runs. Pass check="off" to run it unchecked.'
            ) from error
        leaves, out_spec = trees.flatten(output)
        tensors = [(path, x) for path, x in zip(out_spec.paths(), leaves, strict=True) if isinstance(x, torch.Tensor)]
        # Python numbers are part of the hash of a result: where the numbers differ between ranks, the result does
        with without_modes():
            *differing_numbers, _ = _differing(f"{about}, outputs", mesh, [follower.made_of(x) for _, x in tensors])
        paths = [path for path, _ in tensors]
        axes = [follower.of(x) | other for (_, x), other in zip(tensors, differing_numbers, strict=True)]
        replicated = {
            id(fake): frozenset(name for name in mesh.names if mesh.shape[name] > 1 and name not in axes)
            for (_, fake), axes in zip(captured, differing, strict=True)
        }
        closed_over = [trees.describe(x) for x in _apart_from_pvary([x for _, x in tensors], replicated)]
        return Varying(paths, axes, follower.redundant, follower.collectives, output, closed_over)


def _apart_from_pvary(outputs: Sequence[torch.Tensor], replicated: dict[int, Axes]) -> Iterator[torch.Tensor]:
    """Yields the captured tensors whose cotangents reach them without being summed over their replicated axes.

    `replicated` has the replicated axes of each captured tensor, by id. A pvary sums the cotangents. A tensor that
    already has a gradient was differentiated within the function, and is left out.
    """
    todo: list[tuple[Any, Axes]] = [(x.grad_fn, frozenset()) for x in outputs if x.grad_fn is not None]
    todo += [
        (torch.autograd.graph.get_gradient_edge(x).node, frozenset())
        for x in outputs
        if x.grad_fn is None and x.requires_grad
    ]
    seen: set[Any] = set()
    found: dict[int, torch.Tensor] = {}
    while todo:
        node, summed = todo.pop()
        if node is None or (node, summed) in seen:
            continue
        seen.add((node, summed))
        linear = getattr(node, "linear", None)
        if linear is not None and linear.kind == "pvary":
            summed |= frozenset(linear.along.axes)
        x = getattr(node, "variable", None)
        if x is not None and x.grad is None and replicated.get(id(x), frozenset()) - summed:
            found[id(x)] = x
        todo += [(below, summed) for below, _ in node.next_functions]
    yield from found.values()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Runs the body without the surrounding state: transforms of torch.func, saved-tensor hooks, modes."""
    grad = torch.is_grad_enabled()
    # A region around the mapped function must not record the tensors that the body saves.
    with recompute_mode(), torch.set_grad_enabled(grad), without_modes(), unwatched(), followed(), without_hooks():
        yield


def _without_data(x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Returns a fake tensor with the shape, strides, dtype and device that the function sees."""
    if nn.parameter.is_lazy(x) or type(x).__module__.startswith("torch.distributed"):
        return x
    if x.layout is not torch.strided or type(x) not in (torch.Tensor, nn.Parameter):
        return mode.from_tensor(x)
    with mode:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)


def _differing(about: str, mesh: Mesh, digests: Sequence[str]) -> list[Axes]:
    """Returns, for each digest and finally for the random generators, the axes of the mesh along which ranks differ."""
    states = [torch.random.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    mine = json.dumps([*digests, "".join(map(_digest, states))])
    rows = [json.loads(said) for said in transport_of(mesh.key).exchange(about, mine)]
    if len({len(row) for row in rows}) > 1:  # the ranks captured different tensors
        return [frozenset(mesh.names)] * (len(digests) + 1)
    chains = {name: {mesh.peers(rank, Along((name,))) for rank in range(len(rows))} for name in mesh.names}
    equal = lambda ranks, column: len({column[rank] for rank in ranks if rank < len(rows)}) == 1
    return [
        frozenset(name for name in mesh.names if not all(equal(ranks, column) for ranks in chains[name]))
        for column in zip(*rows, strict=True)
    ]


def _digest(x: torch.Tensor) -> str:
    """Returns a hash of the data of a tensor, computed on its device."""
    x = unwrapped(x).detach()
    if x.layout is not torch.strided or type(x) is not torch.Tensor or x.device.type == "meta" or not x.numel():
        return ""
    data = x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    words = data[: len(data) // 8 * 8]
    words = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)
    total = 0
    for part in (*words.split(_CHUNK), data[len(words) * 8 :].to(torch.int64)):
        number = torch.arange(1, len(part) + 1, device=part.device, dtype=torch.int64)
        total = (total * 1_000_003 + int(((part + 1) * (number * number + 7)).sum())) % 2**61  # products may wrap
    return f"{x.dtype} {tuple(x.shape)} {total}"


_CHUNK = 1 << 20


class _Follower(TorchDispatchMode):
    """Propagates the axes over which values vary through operations, by storage."""

    def __init__(self, mesh: Mesh, about: str):
        super().__init__()
        self.mesh, self.about = mesh, about
        self.known: dict[int, tuple[Axes, str]] = {}
        """By storage: the axes over which it varies, and a hash of the operations that made it."""
        self.alive: list[Any] = []
        """The storages, held so that their addresses are not reused."""
        self.redundant: list[str] = []
        self.collectives: list[str] = []
        self.drawn: Axes = frozenset()
        """The axes over which random numbers vary: the axes along which the ranks' default generators differ."""
        self.generators: dict[int, tuple[torch.Generator, Axes]] = {}
        """The same for generators that are passed to operations, by id."""

    def _drawn(self, given: Any) -> Axes:
        """Returns the axes over which the random numbers of an operation vary."""
        generators = [x for x in trees.leaves(given) if isinstance(x, torch.Generator)]
        for generator in generators:
            if id(generator) not in self.generators:
                about = f"{self.about}, generator {len(self.generators)}"
                with without_modes():
                    axes, _ = _differing(about, self.mesh, [_digest(generator.get_state())])
                self.generators[id(generator)] = generator, axes
        return frozenset().union(*(self.generators[id(g)][1] for g in generators)) if generators else self.drawn

    def of(self, x: torch.Tensor) -> Axes:
        """Returns the axes over which a tensor varies, without axes of a single rank."""
        return frozenset(name for name in self._known(unwrapped(x))[0] if self.mesh.shape[name] > 1)

    def made_of(self, x: torch.Tensor) -> str:
        """Returns a hash of the operations that made a tensor."""
        return self._known(unwrapped(x))[1]

    def _known(self, x: torch.Tensor) -> tuple[Axes, str]:
        return self.known.get(x.untyped_storage()._cdata, (frozenset(), "constant"))

    def note(self, x: torch.Tensor, axes: Axes, made: str) -> None:
        storage = x.untyped_storage()
        self.alive.append(storage)
        self.known[storage._cdata] = axes, made

    def sums(self, x: torch.Tensor, axes: tuple[str, ...]) -> None:
        """Records the axes of a psum along which its input is replicated."""
        self.redundant += [name for name in axes if self.mesh.shape[name] > 1 and name not in self.of(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        overwritten = _overwritten(func)
        read = _tensors([x for name, x in _arguments(func, args, kwargs) if name not in overwritten])
        axes: Axes = frozenset().union(*(self._known(x)[0] for x in read))
        if is_random(func):
            axes |= self._drawn((args, kwargs))
        result = func(*args, **kwargs)
        made = self._made(func, args, kwargs)
        if func.namespace == "fckpt":
            name = func._schema.name.partition("::")[2]
            axes = self._after(name, axes, args)
            if read:
                rest = ", ".join(str(a) for a in args[1:-1])
                call = f"{name} ({rest}) of {trees.describe(read[0])}"
                self.collectives.append(f"{call}, computed by operations with hash {made}")
                if not any(self.mesh.shape[name] > 1 for name in self._after(name, frozenset(self.mesh.names), args)):
                    made = f"collective {len(self.collectives)}"  # the result is replicated, whatever the input
        of_each = self._of_each(func, args, kwargs)
        written = self._written(func, args, kwargs, axes, of_each)
        for i, x in enumerate(_tensors(result)):
            if x.untyped_storage()._cdata not in written:
                self.note(x, of_each[i % len(of_each)] if of_each else axes, made)
        for x, varies in written.values():
            self.note(x, varies, made)
        return result

    def _of_each(self, func: Any, args: Any, kwargs: Any) -> list[Axes]:
        """Returns the axes over which each result of a `_foreach_` operation varies, by index in its tensor lists."""
        if not func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
            return []
        overwritten = _overwritten(func)
        values = [x for name, x in _arguments(func, args, kwargs) if name not in overwritten]
        lists = [x for x in values if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
        rest: Axes = frozenset().union(*(self._known(x)[0] for x in values if isinstance(x, torch.Tensor)))
        if not lists or len({*map(len, lists)}) > 1:
            return []
        return [rest.union(*(self._known(x)[0] for x in row)) for row in zip(*lists, strict=True)]

    def _written(
        self, func: Any, args: Any, kwargs: Any, axes: Axes, of_each: list[Axes]
    ) -> dict[int, tuple[torch.Tensor, Axes]]:
        """Returns, by storage, the tensors that an operation writes, and the axes over which they vary afterwards."""
        overwritten, found = _overwritten(func), {}
        named = [(name, x) for name, x in _arguments(func, args, kwargs) if name in _mutated(func)]
        named += [("", args[position]) for position in statistics_of(func, args)]
        for name, value in named:
            for i, x in enumerate(_tensors(value)):
                now = of_each[i] if of_each and isinstance(value, (list, tuple)) else axes
                whole = x.numel() * x.element_size() == x.untyped_storage().nbytes() and is_dense(x.shape, x.stride())
                rest: Axes = frozenset() if whole and name in overwritten else self._known(x)[0]
                found[x.untyped_storage()._cdata] = x, now | rest
        return found

    def _made(self, func: Any, args: Any, kwargs: Any) -> str:
        leaves, spec = trees.flatten((list(args), kwargs))
        parts = [self._known(x)[1] if isinstance(x, torch.Tensor) else _said(x) for x in leaves]
        return hashlib.sha256("\n".join([str(func), repr(spec), *parts]).encode()).hexdigest()[:8]

    def _after(self, name: str, axes: Axes, args: Sequence[Any]) -> Axes:
        if name == "axis_index":
            return frozenset(args[0].split(","))
        along = Along.of(args[2 if name in ("all_reduce", "permute") else 1])
        if name in ("all_reduce", "all_gather") and not along.groups:
            return axes - {*along.axes}
        return axes | {*along.axes}


def _said(value: Any) -> str:
    """Describes an argument that is not a tensor. The text is the same on all ranks, whatever their device index."""
    if isinstance(value, torch.device):
        return value.type
    return type(value).__name__ if isinstance(value, torch.Generator) else repr(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in trees.leaves(value) if isinstance(x, torch.Tensor)]


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the arguments that are passed to an operation, by name."""
    return [*zip((a.name for a in func._schema.arguments), args, strict=False), *kwargs.items()]


@functools.cache
def _mutated(func: Any) -> frozenset[str]:
    """Returns the arguments that an operation writes, according to its schema."""
    return frozenset(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def _overwritten(func: Any) -> frozenset[str]:
    """Returns the arguments whose data an operation does not read: it reads only their shape, or overwrites them."""
    name, overload = func._schema.name.removeprefix("aten::"), func._schema.overload_name
    found = frozenset(a.name for a in func._schema.arguments if a.is_out)
    return found if _SELF_UNREAD.isdisjoint((name, f"{name}.{overload}")) else found | {"self"}


_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_NEW = ("empty", "empty_strided", "zeros", "ones", "full")
_DRAWN = ("normal", "uniform", "random", "exponential", "geometric", "log_normal", "cauchy")
_SELF_UNREAD = {
    *(f"{name}_like" for name in _LIKE),
    *(f"new_{name}" for name in _NEW),
    *(name + in_place for name in (*_DRAWN, "zero", "fill", "copy") for in_place in ("", "_")),
    *("_foreach_zero_", "_foreach_zero", "_foreach_copy_", "_foreach_copy", "bernoulli_", "bernoulli.p"),
} - {"normal"}  # torch.normal draws around its first argument
"""ATen operations that do not read the data of `self`."""


def violations(found: Varying, specs: Iterable[P]) -> list[str]:
    """Returns a message for each output that varies over an axis along which its spec says it is replicated."""
    return [
        f"output{path} varies over {name!r}, but its spec {spec} says that it is replicated along this axis"
        for path, axes, spec in zip(found.paths, found.axes, specs, strict=True)
        for name in sorted(axes - {*spec.axes})
    ]
