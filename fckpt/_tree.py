"""Pytrees: the only file that imports optree, wrapped in plain `Any`-tree types."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch.utils import _pytree as torch_pytree

__all__ = [
    "STRUCTURE",
    "TreeSpec",
    "describe",
    "flatten",
    "key_orders",
    "leaves",
    "map_leaves",
    "selected",
    "spread",
    "unflatten",
]

STRUCTURE = optree.PyTreeSpec
"""The type of optree's descriptions of structures: immutable, comparable and hashable."""

# Containers that only torch's registry knows (such as Hugging Face's ModelOutput) are flattened through that registry,
# and so are reordered dicts; all others through optree.
_TORCH_NODES = torch_pytree.SUPPORTED_NODES


class TreeSpec:
    """The structure of a pytree, without its leaves: the input of `unflatten`. Comparable and hashable."""

    __slots__ = ("inner", "spec")

    def __init__(self, spec: Any, inner: tuple[Any, ...] | None = None):
        self.spec = spec
        self.inner = inner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeSpec) and self.spec == other.spec and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.spec)

    def paths(self) -> list[str]:
        """Returns the path of each leaf as a Python expression: `[0]['w']`."""
        paths = [_path_string(path) for path in optree.treespec_paths(self.spec)]
        if self.inner is None:
            return paths
        return [path for path, (count, _) in zip(paths, self.inner, strict=True) for _ in range(count)]

    def names(self) -> list[str]:
        """Returns the name of each leaf as in a state dict: `blocks.0.w`. Names are not always unique."""
        names = [".".join(map(_entry_name, accessor)) for accessor in optree.treespec_accessors(self.spec)]
        if self.inner is None:
            return names
        return [
            name if subspec is None else f"{name}.{inner}".removeprefix(".")
            for name, (count, subspec) in zip(names, self.inner, strict=True)
            for inner in ([""] if subspec is None else _inner_names(count, subspec))
        ]

    def __repr__(self) -> str:
        return repr(self.spec).removeprefix("PyTreeSpec(").removesuffix(")")


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Returns the leaves of `tree`, left to right, and its structure. `None` is a node without leaves."""
    found, spec = optree.tree_flatten(tree, is_leaf=_is_reordered)
    if all(type(leaf) not in _TORCH_NODES for leaf in found):
        return found, TreeSpec(spec)
    flat: list[Any] = []
    inner = []
    for leaf in found:
        if type(leaf) in _TORCH_NODES:
            sub, subspec = torch_pytree.tree_flatten(leaf)
        else:
            sub, subspec = [leaf], None
        flat += sub
        inner.append((len(sub), subspec))
    return flat, TreeSpec(spec, tuple(inner))


def _is_reordered(node: Any) -> bool:
    """Whether `move_to_end` changed the order of keys, which optree does not see: it reads the order of insertion."""
    return type(node) is OrderedDict and list(node) != list(dict.__iter__(node))


def key_orders(tree: Any) -> tuple[tuple[Any, ...], ...]:
    """Returns the keys of all dicts in `tree`, each in its order, which a `TreeSpec` does not tell."""
    found: list[tuple[Any, ...]] = []

    def note(node: Any) -> bool:
        if isinstance(node, dict):
            found.append(tuple(node))
        return False

    optree.tree_leaves(tree, is_leaf=note)
    return tuple(found)


def unflatten(spec: TreeSpec, flat: Sequence[Any]) -> Any:
    """Returns the tree with structure `spec` and leaves `flat`: the inverse of `flatten`."""
    if spec.inner is None:
        return optree.tree_unflatten(spec.spec, flat)
    found = []
    start = 0
    for count, subspec in spec.inner:
        part = list(flat[start : start + count])
        found.append(part[0] if subspec is None else _of_torch(part, subspec))
        start += count
    return optree.tree_unflatten(spec.spec, found)


def _of_torch(part: list[Any], subspec: Any) -> Any:
    made = torch_pytree.tree_unflatten(part, subspec)
    is_size = subspec.type is torch.Size and all(isinstance(n, int) for n in part)
    return torch.Size(made) if is_size else made  # which torch makes a tuple


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of `tree`, left to right."""
    return flatten(tree)[0]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to every leaf of `tree`."""
    flat, spec = flatten(tree)
    return unflatten(spec, list(map(fn, flat)))


def spread(prefix: Any, tree: Any) -> list[Any]:
    """Returns, for every leaf of `tree`, the leaf of `prefix` at or above it.

    Args:
        prefix: a tree prefix of `tree`. `None` is a leaf of it.
        tree: any pytree.

    Raises:
        ValueError: `prefix` is not a tree prefix; the message says where.
    """
    pairs: list[Any] = []

    def visit(leaf: Any, below: Any) -> None:
        pairs.extend([leaf] * len(leaves(below)))

    try:
        optree.tree_map_(visit, prefix, tree, none_is_leaf=True)
    except ValueError as error:  # the message contains the whole tree
        found = optree.prefix_errors(prefix, tree, none_is_leaf=True)
        raise ValueError(" ".join(str(found[0]("tree")).split()) if found else str(error)) from None
    return pairs


def _inner_names(count: int, spec: Any) -> list[str]:
    """Returns the name of each leaf in a container that only torch knows: `loss`, `past_key_values.0`."""
    whole = torch_pytree.tree_unflatten(list(range(count)), spec)
    found, _ = torch_pytree.tree_flatten_with_path(whole)
    return [
        ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path) for path, _ in found
    ]


def selected(chosen: Sequence[int | str], names: Sequence[str]) -> list[int]:
    """Returns the indices of the tensors of a result that are chosen by index or by name.

    Args:
        chosen: indices or names; a name also selects all names below it.
        names: the names of the tensors, as returned by `TreeSpec.names`.

    Raises:
        LookupError: there is no such tensor; the message lists the tensors.
    """
    found: list[int] = []
    for choice in chosen:
        if isinstance(choice, str):
            some = [i for i, name in enumerate(names) if name == choice or name.startswith(f"{choice}.")]
        else:
            some = [choice % len(names)] if names and -len(names) <= choice < len(names) else []
        if not some:
            listed = ", ".join(name or str(i) for i, name in enumerate(names))
            raise LookupError(f"{choice!r} is not a tensor of the result, which has {listed or 'none'}")
        found += some
    return sorted(set(found))


def _path_string(path: Sequence[Any]) -> str:
    """Formats a tree path as Python indexing."""
    return "".join(f"[{entry!r}]" for entry in path)


def _entry_name(entry: optree.PyTreeEntry) -> str:
    """Returns the name of a field, if the container has named fields; otherwise the key or the index."""
    fields = (optree.NamedTupleEntry, optree.StructSequenceEntry)
    return entry.field if isinstance(entry, fields) else str(entry.entry)


def describe(leaf: Any) -> str:
    """Describes a leaf: `float32[4, 5]` for a tensor, otherwise the name of its type."""
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return type(leaf).__name__
