"""Registration of the backend "fckpt" with torch, without importing torch's compiler, which takes seconds.

An installed package registers its backends by entry points. A copy of this package on the path, or an editable
installation that is older than the entry point, has none. So the name is also registered as soon as torch's registry of
backends is imported.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

__all__ = ["register"]

_REGISTRY = "torch._dynamo.backends.registry"
_ENTRY = EntryPoint("fckpt", "fckpt._compile.backend:fckpt", "torch_dynamo_backends")


def register() -> None:
    """Registers the backend now if torch's registry is there, otherwise when it is imported."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        _enter(registry)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _enter(registry: Any) -> None:
    known = getattr(registry, "_BACKENDS", None)  # a name that torch may change: entry points remain
    if isinstance(known, dict):
        known.setdefault(_ENTRY.name, _ENTRY)


class _Finder:
    """An entry of `sys.meta_path` that sees the import of the registry, once, and leaves it to the other entries."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_enter(module: ModuleType) -> None:
                run(module)
                _enter(module)

            spec.loader.exec_module = run_and_enter  # for this one import
        return spec


register()
