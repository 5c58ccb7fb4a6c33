"""Imported before transformers or timm: makes torchvision importable where its build does not match torch's.

The repair itself is the examples' own, `docs/examples/repair_torchvision.py`. Nothing happens where
torchvision is absent or whole.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))
with warnings.catch_warnings():
    # What a library warns of while it is imported is not ours to fix.
    warnings.simplefilter("ignore")
    import repair_torchvision  # noqa: F401
