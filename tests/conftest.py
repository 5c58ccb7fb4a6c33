"""Settings for all tests: deterministic hypothesis under CI, one thread per worker."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Two workers on two cores: more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a device that is not here."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def costs_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs go to a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FCKPT_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield
