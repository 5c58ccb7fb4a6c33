"""Imported before transformers: makes torchvision importable beside a torch of another build (see the examples)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))
import repair_torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
