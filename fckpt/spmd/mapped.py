"""`shard_map` and `pmap`: functions of local parts, which every rank of a mesh calls with its own parts."""

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
from fckpt.spmd.collectives import replicated_argument, replicated_output
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
    """Returns a function of local parts. Every rank calls it with its own parts; collectives in `fn` reach other ranks.

    Args:
        fn: a function of pytrees. In it, collectives name the axes of the mesh: `psum(x, "data")`.
        mesh: made by `init_mesh`, `sim` or `fake_mesh`. `@shard_map(mesh, ...)` is a decorator.
        in_specs: how the arguments are divided over the mesh: a tuple with one `P`, or one tree of `P`s, for each
            positional argument. A tree may be a tree prefix of its argument. Keyword arguments must be the same on all
            ranks.
        out_specs: how the output is divided: a `P`, or a tree prefix of the output.
        check: "static" determines, at the first call with arguments of the same shapes, over which axes each value
            varies; "off" does not. While a surrounding function is planned, the ranks compare the plans instead.

    Returns:
        A function of local tensors, or of DTensors with the placements of `in_specs`, which returns local tensors.
        `fckpt.shard` makes local tensors of global ones, and `fckpt.unshard` the reverse.

        Differentiated from outside (`.backward()`, `fckpt.grad`, `torch.func.vjp`), it is one function of global
        tensors, as in JAX: the gradient of an argument is summed over the axes that its spec does not name, and the
        cotangent of an output counts once, no matter how many ranks have the output. The gradient of a captured tensor
        is not summed: pass parameters as arguments.

    Raises (when called):
        ArgumentTypeError, ArgumentValueError: specs do not fit the mesh, an argument or an output; or an output varies
            over an axis along which its spec says that it is replicated, so a psum, a pmean or a pvary is missing.
        TraceError: the static check cannot follow the function.

    Warns:
        MeshWarning: a psum or pmean sums replicated values; or a `.backward()` outside of the function reaches captured
            parameters, whose gradients then differ by rank.

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
    """Returns a function that every rank calls with its part of the batch: `shard_map` on a mesh with one axis.

    Args:
        fn: a function of pytrees, in which collectives over `axis_name` reach the other ranks.
        axis_name: the name of the axis.
        in_axes: the dimension along which each argument is divided among the ranks, or None for a replicated argument:
            an int, None, or a tuple with a tree of these for each positional argument, which may be a tree prefix.
        out_axes: the same for the output. None is checked: an output that varies is an error, whereas JAX's pmap
            returns the output of the first device.
        static_broadcasted_argnums: positions of arguments that are not tensors and are the same on all ranks.
        mesh: default: all ranks, along `axis_name`.
        check: see `shard_map`.

    Returns:
        A function of local tensors. Unlike JAX's pmap, it keeps the divided dimension: a rank's part of a batch is a
        batch. It raises the errors and warnings of `shard_map`.

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
    """Converts a tree of dimensions to a tree of specs."""
    if axes is None:
        return P()
    if isinstance(axes, bool) or not isinstance(axes, (int, dict, tuple, list)):
        raise ArgumentTypeError(f"pmap: {what} must be an int, None, or a tree of these, not {axes!r}.")
    if isinstance(axes, int):
        if axes < 0:
            raise ArgumentValueError(f"pmap: {what} counts dimensions from 0, so {axes} is not allowed.")
        return P(*[None] * axes, axis_name)
    if isinstance(axes, dict):
        return {key: _spec_of(what, value, axis_name=axis_name) for key, value in axes.items()}
    return type(axes)(_spec_of(what, value, axis_name=axis_name) for value in axes)


# ---- one mapped function ---------------------------------------------------------------------------


def _mapped(fn: Function, *, mesh: Mesh | None, in_specs: Any, out_specs: Any, check: str) -> Function:
    if not callable(fn):
        raise ArgumentTypeError(f"shard_map: the first argument must be a function, not {type(fn).__name__}: {fn!r}.")
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError(f"shard_map: mesh must be a mesh, for example from fckpt.init_mesh, not {mesh!r}.")
    if check not in CHECKS:
        raise ArgumentValueError(f"shard_map: check must be 'static' or 'off', not {check!r}.")
    checked: dict[Any, Sequence[str]] = {}
    """By signature: the captured tensors whose gradients would differ by rank."""

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
        args, kwargs = _differentiable(replicated_argument, (args, kwargs), specs, mesh)
        with use_mesh(mesh):
            output = fn(*args, **kwargs)
        if closed_over:
            _warn_of_captured(closed_over, output)
        return _differentiable(
            replicated_output, output, specs_of("shard_map", "output", out_specs, output, mesh), mesh
        )

    return mapped


def _differentiable(
    convey: Callable[[torch.Tensor, tuple[str, ...], Mesh], torch.Tensor], tree: Any, specs: Sequence[P], mesh: Mesh
) -> Any:
    """Applies `convey` to tensors that are replicated along axes and may be differentiated from outside.

    `convey` is `replicated_argument` or `replicated_output`. With it, gradients taken outside of the mapped function
    are gradients of the whole function, the same on all ranks, as in JAX: the transpose of replicating an argument is a
    sum over the ranks.
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


def _warn_of_captured(closed_over: Sequence[str], output: Any) -> None:
    """Makes a backward pass from outside warn of the captured tensors that it reaches."""
    more = ", ..." if len(closed_over) > 3 else ""
    text = (
        f"a backward pass outside of the mapped function reaches {', '.join(closed_over[:3])}{more}, which the mapped "
        "function closes over and which is replicated. Its gradient is not summed over the ranks, so each rank has "
        "another one. Pass the tensor as an argument, whose gradient is summed, or use fckpt.pvary(tensor) in the "
        "function."
    )
    if transforms_active():
        return  # torch.func does not call tensor hooks
    for leaf in trees.leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(lambda _: warnings.warn(text, MeshWarning, stacklevel=users_stacklevel()))


def _by_argument(in_specs: Any, args: tuple[Any, ...]) -> Any:
    if isinstance(in_specs, P):
        return in_specs
    if not isinstance(in_specs, (tuple, list)):
        raise ArgumentTypeError(
            f"shard_map: in_specs must be a P, or a tuple with a tree of Ps for each argument, not {in_specs!r}."
        )
    if len(in_specs) != len(args):
        raise ArgumentValueError(
            f"shard_map: in_specs has {len(in_specs)} entries for {len(args)} positional arguments."
        )
    return tuple(in_specs)


def _named(fn: Function, args: Any) -> str:
    """Describes a call for error messages, with the first arguments."""
    shown = [trees.describe(x) for x in trees.leaves(args) if isinstance(x, torch.Tensor)]
    more = [f"and {len(shown) - 8} more"] if len(shown) > 8 else []
    return f"{getattr(fn, '__qualname__', fn)}({', '.join([*shown[:8], *more])})"


def _signature(args: Any, kwargs: Any) -> Any:
    leaves, spec = trees.flatten((args, kwargs))
    facts = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    return spec, tuple(facts)


def _check(fn: Function, mesh: Mesh, args: Any, kwargs: Any, specs: Sequence[P], out_specs: Any) -> Varying:
    """Returns which values vary and the collectives that `fn` will call. Raises the errors of `shard_map`."""
    found = varying(fn, mesh, args, kwargs, specs, _named(fn, args))
    outputs = specs_of("shard_map", "output", out_specs, found.output, mesh)
    leaves = trees.leaves(found.output)
    tensors = [spec for spec, x in zip(outputs, leaves, strict=True) if isinstance(x, torch.Tensor)]
    wrong = violations(found, tensors)
    if wrong:
        raise ArgumentValueError(
            f"shard_map: {'; '.join(wrong)}. Reduce the output (fckpt.pmean, fckpt.psum), use fckpt.pvary on "
            "parameters whose gradient is the output, or name the axis in out_specs."
        )
    for name in sorted(set(found.redundant)):
        warnings.warn(
            f"a psum or pmean over {name!r} sums a value that is the same on all ranks along that axis: a psum "
            f"multiplies the value by {mesh.shape[name]}, a pmean does not change it.",
            MeshWarning,
            stacklevel=users_stacklevel(),
        )
    return found
