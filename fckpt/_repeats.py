"""The repeated blocks of a model, found from declarations of libraries and from the model's structure.

Blocks are modules of one class that repeat in a container. Three kinds of modules are not treated as blocks: stages,
which contain the blocks (Swin, ResNet, ConvNeXt, U-Net); layers of torch.nn, which are too small; and modules within a
block (experts, a convolution with its norm).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["repeated_blocks", "replace_modules"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the repeated blocks of a model by path, in the order of `model.named_modules()`; empty if there are none.

    Args:
        model: any module. A block that occurs several times is returned once, under its first path.
    """
    search = _Search(model)
    found = search.declared() | search.repeated()
    return search.ordered(found or search.siblings() or search.repeated(small=True) or search.single())


def replace_modules(model: nn.Module, new: dict[int, nn.Module]) -> None:
    """Replaces modules of a model; `new` maps the id of each replaced module to its replacement."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in new:
                parent._modules[name] = new[id(child)]


Found = dict[int, nn.Module]


class _Search:
    """The search for the blocks of one model."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.modules = dict(model.named_modules())
        self.by_class: dict[type, list[nn.Module]] = {}
        for module in self.modules.values():
            self.by_class.setdefault(type(module), []).append(module)
        listed = {name for m in self.modules.values() for name in getattr(m, "_no_split_modules", None) or ()}
        kinds = {type(m) for parent, m in self.edges() if _declares(parent, m, listed)}
        outer = {kind for kind in kinds if any(type(m) in kinds for of in self.by_class[kind] for m in _within(of))}
        self.kinds = {kind for kind in kinds - outer if not all(map(self.is_stage, self.by_class[kind]))}
        """The classes that Hugging Face's libraries declare as layers; of nested classes, the innermost."""

    def edges(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        return ((parent, child) for parent in self.modules.values() for child in parent.children())

    def ordered(self, found: Found) -> dict[str, nn.Module]:
        """Returns the blocks by path, without blocks that are inside another block."""
        inner = {id(m) for block in found.values() for m in _within(block)}
        return {path: m for path, m in self.modules.items() if id(m) in found and id(m) not in inner}

    def declared(self) -> Found:
        return {id(m): m for m in self.modules.values() if type(m) in self.kinds}

    def repeated(self, *, small: bool = False) -> Found:
        """Returns modules of one class that repeat in containers, on the outermost level that does not consist of
        stages.

        If a library declares the layers of the model, only submodels without declared layers (another tower) are
        searched.

        Args:
            small: whether modules with a single matrix count.
        """
        items: Found = {}

        def visit(module: nn.Module) -> None:
            if self.declares(module):
                others = [m for m in _within(module) if hasattr(m, "_no_split_modules") and not self.declares(m)]
                for other in others:
                    visit(other)
                return
            for child in module.children():
                if isinstance(module, _CONTAINERS) and _is_block(child, small) and not self.is_stage(child):
                    items[id(child)] = child
                elif type(child) not in self.kinds:
                    visit(child)

        visit(self.model)
        counts = Counter(type(m) for m in items.values())
        return {i: m for i, m in items.items() if counts[type(m)] > 1}

    def declares(self, module: nn.Module) -> bool:
        """Whether a module is a model of a library with declared layers."""
        return hasattr(module, "_no_split_modules") and any(type(m) in self.kinds for m in _within(module))

    def siblings(self) -> Found:
        """Returns attributes of one module that have the same class: `self.down1`, `self.down2`."""
        found: Found = {}
        for parent in self.modules.values():
            blocks = [m for m in parent.children() if _is_block(m) and type(m) is not nn.Sequential and _parts(m)]
            counts = Counter(type(m) for m in blocks)
            found |= {id(m): m for m in blocks if counts[type(m)] > 1 or _named_stage(parent)}
        stages = [i for i, m in found.items() if _named_stage(m) and any(id(inner) in found for inner in _within(m))]
        return {i: m for i, m in found.items() if i not in stages}

    def single(self) -> Found:
        """Returns the block in a list of length one: in a model with one layer, or with one layer that is reused
        (ALBERT).
        """
        lists = [m for m in self.modules.values() if isinstance(m, nn.ModuleList) and len(m) == 1]
        found = {id(m[0]): m[0] for m in lists if _is_block(m[0])}
        return {i: m for i, m in found.items() if not any(id(inner) in found for inner in _within(m))}

    def is_stage(self, module: nn.Module) -> bool:
        """Whether a module is a stage: it directly contains a row of blocks, and no other module has equal shapes
        (widths differ).
        """
        rows = [row for c in (module, *module.children()) if isinstance(c, _CONTAINERS) and (row := _row(c))]
        uniform = any(len(set(map(type, row))) == 1 for row in rows)
        if not rows or _named_stage(module):
            return bool(rows)
        container = isinstance(module, _CONTAINERS)
        if container == uniform:  # a row of equal blocks; T5's block, which contains two different ones, is not
            return container
        shapes = _shapes(module)
        return not any(other is not module and _shapes(other) == shapes for other in self.by_class[type(module)])


def _declares(parent: nn.Module, child: nn.Module, listed: set[str]) -> bool:
    """Whether `child` has transformers' base class for layers, or is in a container and listed by its model."""
    if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(child).__mro__):
        return True
    return isinstance(parent, _CONTAINERS) and type(child).__name__ in listed and _is_block(child)


def _named_stage(module: nn.Module) -> bool:
    return "Stage" in type(module).__name__


def _row(container: nn.Module) -> list[nn.Module]:
    """Returns the modules of a container if all of them are blocks; otherwise an empty list."""
    row = list(container.children())
    return row if all(map(_is_block, row)) else []


def _is_block(module: nn.Module, small: bool = False) -> bool:
    """Whether a module can be a block: it has a forward, and more than one matrix."""
    if type(module).forward is nn.Module.forward:
        return False
    kinds = [kind for kind in type(module).__mro__ if kind is not nn.Module]
    if not _parts(module) and any(kind.__module__.startswith("torch.nn.") for kind in kinds):
        return False  # a layer of torch.nn, or a class derived from one
    return sum(p.dim() > 1 for p in module.parameters()) > (0 if small else 1)


def _parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _shapes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


def _within(module: nn.Module) -> Iterator[nn.Module]:
    return (m for m in module.modules() if m is not module)
