"""`shard_map` and `pmap`: functions of local parts, which every rank of a mesh calls with its own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from fckpt import _tree as trees
from fckpt._call.levels import transforms_active
from fckpt._trace.trace import is_tracing
from fckpt.errors import ArgumentTypeError, ArgumentValueError, MeshWarning, users_stacklevel
from fckpt.spmd.collectives import handed_on, received
from fckpt.spmd.mesh import Mesh, transport_of, use_mesh
from fckpt.spmd.setup import init_mesh
from fckpt.spmd.specs import P, local, specs_of
from fckpt.spmd.varying import Varying, varying, violations

__all__ = ["pmap", "shard_map"]

Function = Callable[..., Any]
CHECKS = ("static", "off")


@overload
def shard_map(fn: Function, mesh: Mesh, /, *, in_specs: Any, out_specs: Any, check: str = "static") -> Function: ...


@overload
def shard_map(
    fn: Mesh, mesh: None = None, /, *, in_specs: Any, out_specs: Any, check: str = "static"
) -> Callable[[Function], Function]: ...


def shard_map(fn: Any, mesh: Mesh | None = None, /, *, in_specs: Any, out_specs: Any, check: str = "static") -> Any:
    """Returns a function of local parts: every rank calls it with its own, and collectives in it reach the others.

    Args:
        fn: a function of pytrees. The axes of the mesh have their names in it: `psum(x, "data")`.
        mesh: of `init_mesh`, `sim` or `fake_mesh`. `@shard_map(mesh, ...)` decorates.
        in_specs: how the arguments lie on the mesh: a tuple with a `P`, or a tree of them, for each positional
            argument. A tree may end before its argument does. Keyword arguments must be the same on all ranks.
        out_specs: the same for what is returned.
        check: "static" looks, at the first call with such arguments, what varies over which axis ("off" does not). A
            plan around the mapped function is compared between ranks instead.

    Returns:
        A function of local tensors, or of DTensors that are placed as `in_specs` says, which returns local tensors.
        `fckpt.shard` and `fckpt.unshard` make them of global ones, and the other way round.

        Differentiated from outside (`.backward()`, `fckpt.grad`, `torch.func.vjp`), it is one function of global
        tensors, as in JAX: the gradient of an argument is summed over the axes that its spec does not name, and the
        cotangent of a result counts once, however many ranks have the result. What the function closes over is each
        rank's own: pass parameters as arguments.

    Raises (when called):
        ArgumentTypeError, ArgumentValueError: specs do not fit the mesh, an argument or an output. An output varies
            over an axis over which its spec says that it does not: a psum, a pmean or a pvary is missing.
        TraceError: the static check cannot follow the function.

    Warns:
        MeshWarning: a psum or pmean sums what is the same on all ranks; or a `.backward()` outside reaches parameters
            that the function closes over, whose gradients differ by rank.

    Example:
        >>> import torch, fckpt
        >>> from fckpt import P
        >>> def program():
        ...     mesh = fckpt.init_mesh({"data": 2})
        ...     def step(w, x):
        ...         loss, gradient = torch.func.grad_and_value(lambda w: ((x * w) ** 2).mean())(w)[::-1]
        ...         return fckpt.pmean((loss, gradient), "data")
        ...     mapped = fckpt.shard_map(step, mesh, in_specs=(P(), P("data")), out_specs=P())
        ...     w, x = torch.tensor(3.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
        ...     return mapped(w, fckpt.shard(x, P("data"), mesh))
        >>> fckpt.sim({"data": 2}).run(program)[0]
        (tensor(67.5000), tensor(45.))

    References:
        `jax.shard_map`, https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """
    if isinstance(fn, Mesh):
        return functools.partial(_mapped, mesh=fn, in_specs=in_specs, out_specs=out_specs, check=check)
    return _mapped(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)


def pmap(
    fn: Function,
    *,
    axis_name: str = "data",
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    mesh: Mesh | None = None,
    check: str = "static",
) -> Function:
    """Returns a function that all ranks call with their parts of the batch: `shard_map` on a mesh of one axis.

    Args:
        fn: a function of pytrees, in which collectives over `axis_name` reach the other ranks.
        axis_name: what the axis is called.
        in_axes: the dimension along which an argument is divided among the ranks, or None for what is the same on all:
            an int, None, or a tuple of trees of them, by positional argument. Trees may end before the arguments do.
        out_axes: the same for what is returned. None is checked, not believed: JAX's pmap returns what the first
            device has.
        static_broadcasted_argnums: positions of arguments that are no tensors and the same on all ranks.
        mesh: default: all ranks, along `axis_name`.
        check: see `shard_map`.

    Returns:
        A function of local tensors. Unlike JAX's, it leaves the divided dimension where it is: a rank's part of a
        batch is a batch. Errors and warnings are those of `shard_map`.

    Example:
        >>> import torch, fckpt
        >>> def program():
        ...     mean = fckpt.pmap(lambda x: fckpt.pmean(x.mean(), "data"), out_axes=None)
        ...     return mean(torch.arange(3.0) + 10 * fckpt.axis_index("data"))
        >>> fckpt.sim({"data": 2}).run(program)
        [tensor(6.), tensor(6.)]

    References:
        `jax.pmap`, https://docs.jax.dev/en/latest/_autosummary/jax.pmap.html
    """
    static = (
        (static_broadcasted_argnums,) if isinstance(static_broadcasted_argnums, int) else static_broadcasted_argnums
    )
    spec = functools.partial(_spec_of, axis_name=axis_name)

    known: dict[Any, Function] = {}

    @functools.wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        here = mesh or init_mesh({axis_name: -1})
        if (here, len(args)) in known:
            return known[here, len(args)](*args, **kwargs)
        axes = list(in_axes) if isinstance(in_axes, (tuple, list)) else [in_axes] * len(args)
        if len(axes) != len(args):
            raise ArgumentValueError(f"pmap: in_axes has {len(axes)} entries for {len(args)} positional arguments.")
        positions = {position % len(args) for position in static}
        in_specs = tuple(P() if i in positions else spec("in_axes", axis) for i, axis in enumerate(axes))
        whole = _mapped(fn, mesh=here, in_specs=in_specs, out_specs=spec("out_axes", out_axes), check=check)
        known[here, len(args)] = whole
        return whole(*args, **kwargs)

    return mapped


def _spec_of(what: str, axes: Any, *, axis_name: str) -> Any:
    """Returns the tree of specs that a tree of dimensions stands for."""
    if axes is None:
        return P()
    if isinstance(axes, bool) or not isinstance(axes, (int, dict, tuple, list)):
        raise ArgumentTypeError(f"pmap: {what} holds dimensions, None, and trees of them, not {axes!r}.")
    if isinstance(axes, int):
        if axes < 0:
            raise ArgumentValueError(f"pmap: {what} counts dimensions from 0, not {axes}.")
        return P(*[None] * axes, axis_name)
    if isinstance(axes, dict):
        return {key: _spec_of(what, value, axis_name=axis_name) for key, value in axes.items()}
    return type(axes)(_spec_of(what, value, axis_name=axis_name) for value in axes)


# ---- one mapped function ---------------------------------------------------------------------------


def _mapped(fn: Function, *, mesh: Mesh | None, in_specs: Any, out_specs: Any, check: str) -> Function:
    if not callable(fn):
        raise ArgumentTypeError(f"shard_map maps a function, not {type(fn).__name__}: {fn!r}.")
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError(f"shard_map needs a mesh, of fckpt.init_mesh for one, not {mesh!r}.")
    if check not in CHECKS:
        raise ArgumentValueError(f"shard_map: check is 'static' or 'off', not {check!r}.")
    checked: dict[Any, Sequence[str]] = {}
    """By signature: the tensors that are closed over, if gradients of them are a rank's own."""

    @functools.wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        with transport_of(mesh.key).watch(foreseen=check == "static"):
            return run(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        specs = specs_of("shard_map", "args", _by_argument(in_specs, args), args, mesh)
        args = local("shard_map", args, specs, mesh, "args", fill_up=True)
        specs = [*specs, *[P()] * len(trees.leaves(kwargs))]
        closed_over: Sequence[str] = ()
        if check == "static" and not is_tracing():
            key = _signature(args, kwargs)
            if key not in checked:
                found = _check(fn, mesh, args, kwargs, specs, out_specs)
                transport_of(mesh.key).agree(_named(fn, args), found.collectives)
                checked[key] = found.closed_over
            closed_over = checked[key]
        args, kwargs = _differentiable(received, (args, kwargs), specs, mesh)
        with use_mesh(mesh):
            output = fn(*args, **kwargs)
        if closed_over:
            _tell_of(closed_over, output)
        return _differentiable(handed_on, output, specs_of("shard_map", "output", out_specs, output, mesh), mesh)

    return mapped


def _differentiable(
    convey: Callable[[torch.Tensor, tuple[str, ...], Mesh], torch.Tensor], tree: Any, specs: Sequence[P], mesh: Mesh
) -> Any:
    """Sends what is replicated along axes, and may be differentiated from outside, through `received` or `handed_on`.

    So gradients that are taken outside are those of the whole function, the same on all ranks, as in JAX: the transpose
    of what all ranks are given is a sum over them.
    """
    levels = transforms_active()
    leaves, spec = trees.flatten(tree)
    for i, (leaf, p) in enumerate(zip(leaves, specs, strict=True)):
        axes = tuple(name for name in mesh.names if mesh.shape[name] > 1 and name not in p.axes)
        if not axes or not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        if levels or (leaf.requires_grad and torch.is_grad_enabled()):
            leaves[i] = convey(leaf, axes, mesh)
    return trees.unflatten(spec, leaves)


def _tell_of(closed_over: Sequence[str], output: Any) -> None:
    """Has a gradient that comes from outside warn of tensors that it reaches past the arguments."""
    more = ", ..." if len(closed_over) > 3 else ""
    text = (
        f"a gradient that is taken outside of the mapped function reaches {', '.join(closed_over[:3])}{more}, which it "
        "closes over, and all ranks have alike: each rank gets its own part of that gradient. Pass such a tensor as an "
        "argument, whose gradient is summed over the ranks, or let it in through fckpt.pvary."
    )
    if transforms_active():
        return  # hooks are not called there
    for leaf in trees.leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(lambda _: warnings.warn(text, MeshWarning, stacklevel=users_stacklevel()))


def _by_argument(in_specs: Any, args: tuple[Any, ...]) -> Any:
    if isinstance(in_specs, P):
        return in_specs
    if not isinstance(in_specs, (tuple, list)):
        raise ArgumentTypeError(f"shard_map: in_specs is a P or a tuple of trees of them, not {in_specs!r}.")
    if len(in_specs) != len(args):
        raise ArgumentValueError(
            f"shard_map: in_specs has {len(in_specs)} entries for {len(args)} positional arguments."
        )
    return tuple(in_specs)


def _named(fn: Function, args: Any) -> str:
    """Names a call, for errors; the end of a long list of arguments is left out."""
    shown = [trees.describe(x) for x in trees.leaves(args) if isinstance(x, torch.Tensor)]
    more = [f"and {len(shown) - 8} more"] if len(shown) > 8 else []
    return f"{getattr(fn, '__qualname__', fn)}({', '.join([*shown[:8], *more])})"


def _signature(args: Any, kwargs: Any) -> Any:
    leaves, spec = trees.flatten((args, kwargs))
    facts = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    return spec, tuple(facts)


def _check(fn: Function, mesh: Mesh, args: Any, kwargs: Any, specs: Sequence[P], out_specs: Any) -> Varying:
    """Returns what varies, and the collectives that will be called; see `shard_map` for errors."""
    found = varying(fn, mesh, args, kwargs, specs, _named(fn, args))
    outputs = specs_of("shard_map", "output", out_specs, found.output, mesh)
    leaves = trees.leaves(found.output)
    tensors = [spec for spec, x in zip(outputs, leaves, strict=True) if isinstance(x, torch.Tensor)]
    wrong = violations(found, tensors)
    if wrong:
        raise ArgumentValueError(
            f"shard_map: {'; '.join(wrong)}. Reduce it (fckpt.pmean, fckpt.psum), let parameters into what differs by "
            "rank through fckpt.pvary, or name the axis in out_specs."
        )
    for name in sorted(set(found.redundant)):
        warnings.warn(
            f"a psum or pmean over {name!r} sums what is the same on all ranks along it: a psum multiplies it by "
            f"{mesh.shape[name]}, a pmean does nothing.",
            MeshWarning,
            stacklevel=users_stacklevel(),
        )
    return found
