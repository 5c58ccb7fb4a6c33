"""`checkpoint_name`, which names values for policies, and `names_recorded`, which observes the names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["Naming", "check_name", "checkpoint_name", "names_recorded"]

T = TypeVar("T")

Naming = Callable[[torch.Tensor, str], None]
_namings: ContextVar[tuple[Naming, ...]] = ContextVar("namings", default=())


@contextlib.contextmanager
def names_recorded(naming: Naming) -> Iterator[None]:
    """Calls `naming(tensor, name)` for every tensor that `checkpoint_name` names in the body, in this thread.

    The tensor is the one that the function sees: under `vmap` or `grad`, a wrapper. In nested blocks, the functions of
    all blocks are called.

    Example:
        >>> import torch, fckpt.policies as policies
        >>> with policies.names_recorded(lambda tensor, name: print(name, tuple(tensor.shape))):
        ...     _ = policies.checkpoint_name({"q": torch.ones(2), "k": torch.ones(3)}, "qk")
        qk (3,)
        qk (2,)
    """
    token = _namings.set((*_namings.get(), naming))
    try:
        yield
    finally:
        _namings.reset(token)


def checkpoint_name(tree: T, name: str) -> T:
    """Names the tensors of a pytree, for policies such as `save_only_these_names`. Returns `tree` itself.

    Outside of traces, this function has no effect. A name belongs to the memory of a tensor, and so to all its views.

    Args:
        tree: a tensor, or a pytree of tensors, which all get the name. `None` is not a leaf.
        name: the name. Several values may have the same name.

    Returns:
        `tree`, the same object.

    Raises:
        ArgumentTypeError: `name` is not a str, or a leaf is not a tensor.
        ArgumentValueError: `name` is empty.

    Example:
        >>> import torch
        >>> from fckpt.policies import checkpoint_name, save_only_these_names
        >>> def block(params, x):
        ...     h = checkpoint_name(torch.tanh(x @ params["w1"]), "hidden")
        ...     return h @ params["w2"]
        >>> policy = save_only_these_names("hidden")     # remat(block, policy=policy) saves h, and nothing else
        >>> x = torch.ones(3)
        >>> checkpoint_name(x, "x") is x
        True

    References:
        `jax.ad_checkpoint.checkpoint_name`, https://docs.jax.dev/en/latest/gradient-checkpointing.html
    """
    if torch.compiler.is_compiling():  # Dynamo does not support context variables (torch 2.13)
        from fckpt._capture import compiling  # imports Dynamo, which takes a second

        return compiling.named(tree, name)
    check_name("checkpoint_name", name)
    if isinstance(tree, torch.Tensor):
        leaves = [tree]
    else:
        leaves, spec = trees.flatten(tree)
        for path, leaf in zip(spec.paths(), leaves, strict=True):
            if not isinstance(leaf, torch.Tensor):
                where = f"tree{path}" if path else "it"
                raise ArgumentTypeError(
                    f"checkpoint_name names tensors, but {where} is {type(leaf).__name__}: {leaf!r}."
                )
    for naming in _namings.get():
        for leaf in leaves:
            naming(leaf, name)
    return tree


def check_name(function: str, name: Any) -> None:
    """Raises an error if `name`, passed to `function`, is not a valid name."""
    if not isinstance(name, str):
        hint = f" Pass them one by one: {function}(*names)." if isinstance(name, (list, tuple, set, frozenset)) else ""
        raise ArgumentTypeError(f"{function}: a name is a str, not {type(name).__name__}: {name!r}.{hint}")
    if not name:
        raise ArgumentValueError(f"{function}: a name must not be empty.")
