"""`remat_blocks`: rematerialises the repeated blocks of a model, in place."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fckpt._remat import remat
from fckpt._repeats import repeated_blocks, replace_modules
from fckpt.errors import ArgumentTypeError, ArgumentValueError, CacheWarning, ImpureFunctionError, users_stacklevel

__all__ = ["Blocks", "remat_blocks"]

BlockSpec = str | type[nn.Module] | nn.Module | Callable[[nn.Module], bool]
"""A path pattern or class name, a class, a module of the model (or a list of modules), or a predicate."""


class Blocks(Sequence[str]):
    """The blocks that `remat_blocks` rematerialised: a sequence of their paths that prints as a summary."""

    def __init__(self, names: Iterable[str], classes: Iterable[str], found: int):
        self._names = tuple(names)
        self.classes = tuple(classes)
        """The class name of each block."""
        self.found = found
        """The number of blocks found, including blocks that `every` skipped."""

    def __getitem__(self, index: Any) -> Any:
        return self._names[index]

    def __len__(self) -> int:
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and self._names == tuple(other)

    def __hash__(self) -> int:
        return hash(self._names)

    def __repr__(self) -> str:
        by_class: dict[str, list[str]] = {}
        for name, kind in zip(self._names, self.classes, strict=True):
            by_class.setdefault(kind, []).append(name)
        count = f"{len(self)} of {self.found}" if self.found > len(self) else f"{len(self)}"
        groups = "; ".join(f"{', '.join(_ranges(names))} ({kind})" for kind, names in by_class.items())
        return f"{count} block{'' if self.found == 1 else 's'}: {groups}"


def remat_blocks(
    model: nn.Module,
    *,
    every: int = 1,
    blocks: BlockSpec | Sequence[BlockSpec] | None = None,
    **options: Any,
) -> Blocks:
    """Rematerialises the repeated blocks of a model, each as a separate region, in place.

    Each block is replaced in its container by `fckpt.remat(block, **options)`. The model remains the same object, with
    the same parameters, buffers, hooks and `state_dict` keys. Blocks are found by structure: modules of one class that
    repeat in a `ModuleList`, `Sequential` or `ModuleDict` (`encoder.layer.0` to `11`, timm's `blocks`), within stages
    if there are any (Swin, ResNet, ConvNeXt, U-Net), and in every tower and stack (CLIP, T5). Layers that Hugging
    Face's libraries declare (`GradientCheckpointingLayer`, `_no_split_modules`) take precedence. A block that occurs in
    several places (ALBERT) stays shared and is listed once.

    If the configuration of a Hugging Face model has `use_cache=True`, the model gets a hook that switches the cache off
    in differentiated calls and emits a `CacheWarning`: a block that writes to a cache cannot run twice. The step is
    then bitwise equal to a step of the model without a cache (with a cache, kernels receive other memory layouts). The
    cache still works under `torch.no_grad()`, and therefore in `model.generate`; the configuration is not changed.

    Args:
        model: the model. It is changed in place.
        every: `2` rematerialises the first block and every second one after it, which saves about half of the memory
            for half of the time. Blocks are counted per class, in the order of `model.named_modules()`.
        blocks: selects the blocks, if the search does not find them or others are wanted: a class, a path
            ("encoder.layer.3") or pattern ("encoder.layer.*"; `*` matches one name, `**` any number of names), a class
            name, a module or `ModuleList` of the model, a predicate on modules, or a list of these.
        options: options of `remat`. A `budget` or a `plan` applies to one block.

    Returns:
        The paths of the blocks, as a sequence that prints a summary: `12 blocks: encoder.layer.0-11 (BertLayer)`.

    Raises:
        ArgumentTypeError: `model` is not a module, or `blocks` has a wrong type.
        ArgumentValueError: no block is found, or nothing matches `blocks`; a block is already rematerialised or
            checkpoints itself; `every` is not a positive int. The model is then unchanged.

    Example:
        >>> import torch, fckpt
        >>> layer = lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), *(layer() for _ in range(3)))
        >>> fckpt.remat_blocks(model)
        3 blocks: 1-3 (TransformerEncoderLayer)
        >>> model(torch.randn(2, 5, 4)).sum().backward()
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ArgumentTypeError(f"remat_blocks takes an nn.Module, not {given}.")
    if type(every) is not int or every < 1:
        raise ArgumentValueError(f"every must be a positive int, not {every!r}: 2 is every second block.")
    found = repeated_blocks(model) if blocks is None else _chosen(model, blocks)
    _check(model, found, blocks)
    paths = _every(found, every)
    twins = {id(module): remat(module, **options) for module in paths.values()}
    replace_modules(model, twins)
    _switch_caches_off(model)
    return Blocks(paths, (type(m).__name__ for m in paths.values()), len(found))


def _every(found: dict[str, nn.Module], every: int) -> dict[str, nn.Module]:
    """Returns the first block of each class and every n-th block after it."""
    # The last blocks are left out rather than the first: a block that is recomputed first in backward saves nothing at
    # the peak.
    counts: Counter[type] = Counter()
    kept = {}
    for path, module in found.items():
        if counts[type(module)] % every == 0:
            kept[path] = module
        counts[type(module)] += 1
    return kept


def _check(model: nn.Module, found: dict[str, nn.Module], blocks: Any) -> None:
    if not found:
        what = "no block repeats in it" if blocks is None else f"nothing in it matches blocks={_text(blocks)}"
        raise ArgumentValueError(
            f"remat_blocks found nothing to rematerialise in this {type(model).__name__}: {what}. Say what a block is: "
            "blocks=SomeClass, blocks='path.to.layers.*' or blocks=lambda module: .... Modules with children: "
            f"{_outline(model)}. fckpt.remat(model) rematerialises the whole model."
        )
    for path, module in found.items():
        if module is model:
            raise ArgumentValueError(
                "`blocks` matches the model itself, which cannot be replaced in place. Use model = fckpt.remat(model)."
            )
        if hasattr(module, "_fckpt_region"):
            raise ArgumentValueError(
                f"{path} ({type(module).__name__}) is already rematerialised; a second region around it would compute "
                "it three times. Call remat_blocks once per model, on a model without other regions, or select the "
                "remaining blocks with blocks=."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ArgumentValueError(
                f"{path} ({type(module).__name__}) already checkpoints itself (gradient_checkpointing=True). Switch "
                "that off first: model.gradient_checkpointing_disable() (activation_checkpointing_disable() in newer "
                "versions of transformers)."
            )


def _outline(model: nn.Module) -> str:
    kinds = Counter(
        type(m).__name__ for m in model.modules() if m is not model and next(m.children(), None) is not None
    )
    return ", ".join(f"{kind} x{n}" if n > 1 else kind for kind, n in kinds.most_common(8)) or "none"


# -- blocks= ---------------------------------------------------------------------------------------------------


def _chosen(model: nn.Module, blocks: Any) -> dict[str, nn.Module]:
    """Returns the modules that `blocks` selects, by path."""
    several = isinstance(blocks, (list, tuple, set, frozenset)) and not isinstance(blocks, nn.Module)
    specs = list(blocks) if several else [blocks]
    named = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for spec in specs:
        chosen = _matching(named, spec)
        if several and not chosen:
            raise ArgumentValueError(f"nothing in this {type(model).__name__} matches {_text(spec)} in `blocks`.")
        found.update(chosen)
    return {path: module for path, module in named.items() if path in found}


def _matching(named: dict[str, nn.Module], spec: Any) -> dict[str, nn.Module]:
    if isinstance(spec, str):
        pattern = re.compile(_regex(spec))
        matched = {path: m for path, m in named.items() if path and pattern.fullmatch(path)}
        return matched or {path: m for path, m in named.items() if type(m).__name__ == spec}
    if isinstance(spec, type) and issubclass(spec, nn.Module):
        return {path: m for path, m in named.items() if isinstance(m, spec)}
    if isinstance(spec, nn.Module):
        wanted = {id(m) for m in (spec if isinstance(spec, nn.ModuleList) else [spec])}
        return {path: m for path, m in named.items() if id(m) in wanted}
    if callable(spec) and not isinstance(spec, type):
        return {path: m for path, m in named.items() if spec(m)}
    raise ArgumentTypeError(
        f"blocks takes a module class, a path or pattern, the name of a class, a module, a predicate on modules, or a "
        f"list of these, not {_text(spec)}."
    )


def _regex(pattern: str) -> str:
    """Converts a path pattern to a regular expression: `*` matches within one name, `**` any number of names."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return "".join({"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(part, re.escape(part)) for part in parts)


def _text(spec: Any) -> str:
    if isinstance(spec, type):
        return spec.__name__
    return f"a {type(spec).__name__}" if isinstance(spec, nn.Module) else repr(spec)


def _ranges(names: Sequence[str]) -> list[str]:
    """Abbreviates paths: `h.0-2` for `h.0`, `h.1`, `h.2`, and `h.0-4 by 2` for `h.0`, `h.2`, `h.4`."""
    runs: list[tuple[str, list[int], str]] = []  # text before the number, numbers, text after it
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)((?:\.[^.\d]*)*)", name)
        if match is None:
            runs.append((name, [], ""))
            continue
        before, number, after = match[1], int(match[2]), match[3]
        last = runs[-1] if runs else None
        if last is not None and last[1] and (last[0], last[2]) == (before, after):
            numbers = last[1]
            if len(numbers) == 1 or number - numbers[-1] == numbers[-1] - numbers[-2]:
                numbers.append(number)
                continue
        runs.append((before, [number], after))
    return [_range(*run) for run in runs]


def _range(before: str, numbers: list[int], after: str) -> str:
    if len(numbers) < 2:
        return f"{before}{numbers[0] if numbers else ''}{after}"
    step = numbers[1] - numbers[0]
    return f"{before}{numbers[0]}-{numbers[-1]}{after}" + (f" by {step}" if step != 1 else "")


# -- caches ----------------------------------------------------------------------------------------------------


class _CacheSwitch:
    """Forward pre-hook that passes `use_cache=False` to a model in differentiated calls.

    Hugging Face's checkpointing does the same. The configuration is not changed, because it is saved with the model and
    read by evaluation. In evaluation mode, a value that the caller passes takes precedence.
    """

    def __init__(self, position: int):
        self.position = position
        self.warned = False
        """Whether a warning has said that the configuration switches on the cache, which may happen later."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        if module.training and kwargs.get("past_key_values") is not None:
            raise ImpureFunctionError(
                f"this call passes past_key_values to a {type(module).__name__} whose blocks are rematerialised: they "
                "would write to this cache again in backward. Fill and read caches under torch.no_grad(), or train a "
                "model without rematerialised blocks."
            )
        positional = len(args) > self.position
        given = args[self.position] if positional else kwargs.get("use_cache")
        if given is False or (given and not module.training):
            return None
        if not given and not getattr(module.config, "use_cache", False):
            return None
        if not torch.compiler.is_compiling():
            if given:
                _warn_of_cache("this call passes use_cache=True")
            elif not self.warned and _has_cache(module):
                self.warned = True
                _warn_of_cache(_CONFIGURED)
        if positional:
            return (*args[: self.position], False, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}


_CACHE = (
    "remat_blocks: {}, and blocks that write to a cache cannot run again in backward. The cache is switched off in "
    "differentiated calls; their results are bitwise equal to those without a cache. To switch it off yourself, pass "
    "use_cache=False or set model.config.use_cache = False."
)


_CONFIGURED = "the configuration has use_cache=True"


def _warn_of_cache(cause: str) -> None:
    warnings.warn(_CACHE.format(cause), CacheWarning, stacklevel=users_stacklevel())


def _switch_caches_off(model: nn.Module) -> None:
    warned = False
    modules: list[Any] = list(model.modules())
    for module in modules:
        if not (hasattr(module, "config") and hasattr(module, "_no_split_modules")):
            continue  # only whole Hugging Face models, although their layers take
        parameters = list(inspect.signature(type(module).forward).parameters)
        if "use_cache" not in parameters:
            continue
        switch = next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _CacheSwitch)), None)
        if switch is None:
            switch = _CacheSwitch(parameters.index("use_cache") - 1)
            module.register_forward_pre_hook(switch, with_kwargs=True)
        if _has_cache(module):
            if not warned:
                _warn_of_cache(_CONFIGURED)
            warned = switch.warned = True


def _has_cache(module: Any) -> bool:
    """Whether the configuration switches on a cache that the model really has (BERT's also says use_cache=True)."""
    config = module.config
    if not getattr(config, "use_cache", False):
        return False
    encoder = getattr(config, "is_decoder", None) is False and not getattr(config, "is_encoder_decoder", False)
    return not encoder or bool(getattr(module, "can_generate", lambda: False)())
