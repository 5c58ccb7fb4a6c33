"""Warnings that a captured function gives.

Dynamo cannot capture `warnings.warn`, so it is told to leave such calls out. The warnings whose text is known are given
when the capture ends, and so once for each capture. Seen on torch 2.11 and 2.13:
`IgnoredFunctionVariable`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables.misc import IgnoredFunctionVariable

from fckpt._capture.patching import patched

__all__ = ["IGNORED", "Warned"]

IGNORED = {warnings.warn, warnings.warn_explicit}
"""The functions that Dynamo is to leave out."""


class Warned:
    """The warnings that a capture has left out."""

    def __init__(self) -> None:
        self._found: list[tuple[str, type[Warning], str, int, Any]] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes, within the body, the warnings that Dynamo leaves out."""
        with patched(IgnoredFunctionVariable, "call_function", self._calling):
            yield

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_function(this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if this.value is warnings.warn:
                given = dict(zip(("message", "category"), args, strict=False)) | kwargs
                constants = {name: value.as_python_constant() for name, value in given.items() if _is_known(value)}
                message, category = constants.get("message"), constants.get("category") or UserWarning
                if isinstance(message, str):
                    registry = tx.f_globals.setdefault("__warningregistry__", {})
                    self._found.append((message, category, tx.f_code.co_filename, tx.lineno, registry))
            return original(this, tx, args, kwargs)

        return call_function

    def give(self) -> None:
        """Gives the warnings that were noted."""
        for message, category, filename, line, registry in self._found:
            warnings.warn_explicit(message, category, filename, line, registry=registry)


def _is_known(variable: Any) -> bool:
    return variable.realize().is_python_constant()
