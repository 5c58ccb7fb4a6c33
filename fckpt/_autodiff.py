"""`grad`, `grad_and_value` and `vjp`: the transforms of torch.func, in the memory of `.backward()`.

torch.func records every backward pass so that it can be differentiated again (`create_graph=True`). It therefore holds
everything that the forward saved and everything that the backward pass computes until the end. The functions here run
plain autograd instead, which frees memory as it goes, if nothing outside differentiates the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fckpt import _tree as tree
from fckpt._call.levels import transforms_active
from fckpt.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["grad", "grad_and_value", "vjp"]


def grad(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """Returns the function that computes the gradient of `fn`: `torch.func.grad` in the memory of `.backward()`.

    Args:
        fn: a function of pytrees that returns a scalar tensor (with `has_aux`, a pair: the scalar and anything).
        argnums: the positional arguments to differentiate. All their leaves must be floating point tensors.
        has_aux: whether `fn` returns a pair.

    Returns:
        A function of the same arguments that returns the gradient, which has the structure of the argument (a tuple for
        several arguments); with `has_aux`, (gradient, aux).

    Raises (when called):
        ArgumentTypeError, ArgumentValueError: an argument or the output is not as described above.

    Under an outer transform, or if an argument or a captured tensor requires grad, the result is differentiable and
    takes as much memory as in torch.func. Otherwise gradients are bitwise equal to those of `torch.autograd.grad`.
    They are also bitwise equal to torch.func's, except for operations for which torch uses another formula when a
    backward pass is recorded (`silu` and `mish`, for example); these may differ in the last bit.

    Example:
        >>> import torch, fckpt
        >>> fckpt.grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        {'w': tensor([2., 4.])}
    """

    @functools.wraps(fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if _differentiated_outside(args, kwargs):
            return torch.func.grad(fn, _argnums(argnums), has_aux)(*args, **kwargs)
        grads, (_, aux) = _grad(fn, argnums, has_aux, args, kwargs)
        return (grads, aux) if has_aux else grads

    return gradient


def grad_and_value(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns the function that computes gradient and value of `fn`: (gradient, value), or (gradient, (value, aux)).

    The arguments and errors are the same as for `grad`.

    Example:
        >>> import torch, fckpt
        >>> fckpt.grad_and_value(torch.sin)(torch.tensor(0.0))
        (tensor(1.), tensor(0.))
    """

    @functools.wraps(fn)
    def gradient_and_value(*args: Any, **kwargs: Any) -> Any:
        if _differentiated_outside(args, kwargs):
            return torch.func.grad_and_value(fn, _argnums(argnums), has_aux)(*args, **kwargs)
        grads, (value, aux) = _grad(fn, argnums, has_aux, args, kwargs)
        return (grads, (value, aux)) if has_aux else (grads, value)

    return gradient_and_value


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Returns `fn(*primals)` and its vector-Jacobian product: `torch.func.vjp` without the extra memory.

    Args:
        fn: a function from pytrees of tensors to a pytree of tensors (with `has_aux`, a pair with anything).
        primals: the arguments at which to evaluate `fn`.
        has_aux: whether `fn` returns a pair.

    Returns:
        (output, vjp_fn), or (output, vjp_fn, aux). `vjp_fn(cotangents, retain_graph=True, create_graph=None)`
        returns a tuple with one tree per primal. It may be called again, so the residuals of `fn` are held as long as
        `vjp_fn` exists; `retain_graph=False` frees them during the call, which must then be the last one.

    Example:
        >>> import torch, fckpt
        >>> out, vjp_fn = fckpt.vjp(torch.sin, torch.tensor(0.0))
        >>> vjp_fn(torch.tensor(2.0), retain_graph=False)
        (tensor(2.),)
    """
    if _differentiated_outside(primals, {}):
        return torch.func.vjp(fn, *primals, has_aux=has_aux)
    run = _Recording(fn, tuple(range(len(primals))), has_aux, primals, {})
    leaves, spec = tree.flatten(run.output)
    _check_tensors(leaves, "vjp", "returned", run.output)

    def vjp_fn(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> tuple[Any, ...]:
        given, given_spec = tree.flatten(cotangents)
        if given_spec != spec:
            raise ArgumentValueError(
                f"the cotangents have the structure {given_spec}, but the function returned {spec}."
            )
        return run.pull(given, retain_graph, create_graph)

    output = tree.unflatten(spec, [_result(x, run.closes_over) for x in leaves])
    return (output, vjp_fn, run.aux) if has_aux else (output, vjp_fn)


def _differentiated_outside(args: Any, kwargs: Any) -> bool:
    """Whether code outside may differentiate the result, judging by the arguments and the active transforms."""
    if transforms_active() or torch.compiler.is_compiling():
        return True
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree.leaves((args, kwargs)))


def _grad(
    fn: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, args: Any, kwargs: Any
) -> tuple[Any, tuple[Any, Any]]:
    nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for num in nums:
        if not -len(args) <= num < len(args):
            raise ArgumentValueError(f"argnums={num} is out of range: grad's function got {len(args)} arguments.")
    run = _Recording(fn, tuple(num % len(args) for num in nums), has_aux, args, kwargs)
    value = run.output
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        got = tree.describe(value)
        raise ArgumentValueError(f"grad needs a function that returns a scalar tensor; this one returned {got}.")
    result = _result(value, run.closes_over)
    run.output = None
    grads = run.pull([None], retain_graph=False, create_graph=None, outputs=[value])
    del value
    run.release()
    return grads[0] if isinstance(argnums, int) else grads, (result, run.aux)


class _Recording:
    """One forward run of a function, recorded by plain autograd."""

    def __init__(self, fn: Callable[..., Any], nums: tuple[int, ...], has_aux: bool, args: Sequence[Any], kwargs: Any):
        args = list(args)
        self.nodes: list[Any] = []
        self.output: Any = None
        self.outputs: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []
        self.parts: list[tuple[int, tree.TreeSpec]] = []
        self.grad_mode = torch.is_grad_enabled()
        for num in nums:
            leaves, spec = tree.flatten(args[num])
            _check_tensors(leaves, "grad and vjp", f"got for argument {num}", args[num])
            # A new leaf per place, so that a tensor that is passed twice has two gradients.
            fresh = [x.detach().requires_grad_() for x in leaves]
            self.inputs += fresh
            self.parts.append((len(fresh), spec))
            args[num] = tree.unflatten(spec, fresh)
        with torch.enable_grad():
            result = fn(*args, **kwargs)
        self.aux = None
        if has_aux:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise ArgumentTypeError("with has_aux=True the function must return a pair (output, aux).")
            result, aux = result
            self.aux = tree.map_leaves(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, aux)
        self.output = result
        self.outputs = [x for x in tree.leaves(result) if isinstance(x, torch.Tensor)]
        self.closes_over = self.grad_mode and self._reaches_others()
        """Whether the result depends on a captured tensor that requires grad."""

    def _reaches_others(self) -> bool:
        """Whether the graph behind the outputs ends in a leaf that is not an input."""
        own = {id(x) for x in self.inputs}
        if any(x.requires_grad and x.is_leaf and id(x) not in own for x in self.outputs):
            return True
        todo = [x.grad_fn for x in self.outputs if x.grad_fn is not None]
        seen = set(todo)
        found = False
        while todo:
            node = todo.pop()
            variable = getattr(node, "variable", None)
            found = found or (variable is not None and id(variable) not in own)
            for parent, _ in node.next_functions:
                if parent is not None and parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        self.nodes = sorted(seen, key=lambda node: node._sequence_nr() if not hasattr(node, "variable") else -1)
        return found

    def release(self) -> None:
        """Frees the graph, from its outputs to its leaves.

        Python frees a node that it has seen by recursion, together with the nodes that only it refers to. In a long
        graph that would exhaust the stack.
        """
        self.output, self.outputs = None, []
        while self.nodes:
            self.nodes.pop()

    def __del__(self) -> None:
        self.release()

    def pull(
        self,
        cotangents: list[Any],
        retain_graph: bool,
        create_graph: bool | None,
        outputs: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        outputs = self.outputs if outputs is None else outputs
        if create_graph is None:
            # A cotangent may be differentiated too: it requires grad, or belongs to an active transform.
            tracked = any(ct is not None and ct.requires_grad for ct in cotangents)
            create_graph = torch.is_grad_enabled() and (self.closes_over or tracked or transforms_active())
        pairs = [(y, ct) for y, ct in zip(outputs, cotangents, strict=True) if y.requires_grad]
        if not retain_graph:
            self.outputs = []
        grads: Sequence[torch.Tensor | None] = [None] * len(self.inputs)
        if pairs:
            grads = torch.autograd.grad(
                [y for y, _ in pairs],
                self.inputs,
                [ct for _, ct in pairs],
                retain_graph=retain_graph or create_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
        filled = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, self.inputs, strict=True)]
        trees = []
        for count, spec in self.parts:
            trees.append(tree.unflatten(spec, filled[:count]))
            filled = filled[count:]
        return tuple(trees)


def _argnums(argnums: int | Sequence[int]) -> int | tuple[int, ...]:
    return argnums if isinstance(argnums, int) else tuple(argnums)


def _result(value: torch.Tensor, differentiable: bool) -> torch.Tensor:
    return value if differentiable else value.detach()


def _check_tensors(leaves: list[Any], who: str, verb: str, where: Any) -> None:
    for path, leaf in zip(tree.flatten(where)[1].paths(), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise ArgumentTypeError(
                f"{who} differentiate pytrees of tensors; {verb}: a {type(leaf).__name__} at {path or 'its root'}. "
                "Pass it as another argument, or close over it."
            )
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise ArgumentTypeError(
                f"{who} differentiate floating point tensors; {verb}: {tree.describe(leaf)} at "
                f"{path or 'its root'}. Pass it as another argument, or convert it."
            )
