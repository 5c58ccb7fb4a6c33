"""How the site renders docstrings: what stands under `Example:` is code, as under `Examples:`. See mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Griffe knows the plural alone, and takes the prompts of an `Example:` for quotations."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the section."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
