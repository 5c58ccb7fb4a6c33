"""Peaks are measured hundreds of times here, and each measurement collects garbage: what is imported is left out."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """Takes what lives already out of the collector's way."""
    import torch._dynamo  # noqa: F401  the largest of what is imported on the way

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
