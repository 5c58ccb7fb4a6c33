"""Functions that Dynamo evaluates instead of regions and `checkpoint_name`, inside a function that fckpt captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.backends.common import AotAutograd
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.utils._pytree import tree_leaves

from fckpt._capture import marks

__all__ = [
    "Settings",
    "compiler_name",
    "differentiates",
    "is_capturing",
    "key_of",
    "key_of_settings",
    "marked_region",
    "named",
    "settings_at",
]


@torch.compiler.assume_constant_result
def is_capturing() -> bool:
    """Whether the capture in progress belongs to fckpt, not to the user's `torch.compile`."""
    return marks.is_capturing()


class Settings(NamedTuple):
    """What the caller of `torch.compile` chose for a backend."""

    options: dict[str, Any]
    """The options. For Inductor, they include the options of the mode."""
    mode: str | None
    dynamic: bool | None


@torch.compiler.assume_constant_result
def compiler_name() -> str:
    """Returns the name of the backend for which Dynamo is tracing, `inductor` for example; empty if it has none.

    Frames without tensors are not traced: if a region's function has no arguments, this runs as Python code.
    """
    return str(getattr(_backend(), "compiler_name", ""))


@torch.compiler.assume_constant_result
def differentiates() -> bool:
    """Whether the backend for which Dynamo is tracing is known to differentiate graphs before they run."""
    name = compiler_name()
    known = name in ("inductor", "fckpt", "cudagraphs") or name.startswith("aot_eager")
    return known or isinstance(getattr(_backend(), "compiler_fn", None), AotAutograd)


@torch.compiler.assume_constant_result
def key_of_settings() -> int:
    """Returns the key for `settings_at` of what was chosen for the backend for which Dynamo is tracing."""
    backend = _backend()
    given = getattr(backend, "kwargs", {})  # of any backend but Inductor, which has all in `config`
    options = {**given.get("options", {}), **getattr(backend, "config", {})}
    settings = Settings(options, given.get("mode"), getattr(backend, "dynamic", None))
    if settings not in _settings:
        _settings.append(settings)
    return _settings.index(settings)


_settings: list[Settings] = []


def settings_at(key: int) -> Settings:
    """Returns what was chosen for a backend."""
    return _settings[key]


def _backend() -> Any:
    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None
    while not hasattr(backend, "compiler_name") and hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


@torch.compiler.assume_constant_result
def key_of(policy: Any) -> int:
    """Returns the key under which marks refer to regions with a policy that a captured function creates."""
    return marks.key_of(policy)


def marked_region(key: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a region's function between two marks, so that its torch calls join the enclosing graph."""
    marks.begin(key)
    result = fn(*args, **kwargs)
    marks.end(key, [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
    return result


def named(tree: Any, name: str) -> Any:
    """Names the tensors in `tree` if fckpt is capturing."""
    if is_capturing():
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                marks.name(leaf, name)
    return tree
