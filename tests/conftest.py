"""Settings for all tests: deterministic hypothesis under CI, one thread per worker."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sampling import DAY, WHOLE, left_for_other_days

# Two workers on two cores: more threads would only wait for each other.
torch.set_num_threads(1)
# Plans are solved in the background in tests of that alone: elsewhere the worker would only take time.
os.environ["FCKPT_BACKGROUND"] = "0"
# Plans are read from disk in tests of that alone: elsewhere each test has its plans solved.
os.environ["FCKPT_PLANS"] = "0"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def dispatch_keys_as_before() -> Iterator[None]:
    """No test leaves the thread with other dispatch keys: later calls would take other paths through torch."""
    keys = lambda: (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
    before = [str(found) for found in keys()]
    yield
    assert [str(found) for found in keys()] == before


@pytest.fixture(scope="session", autouse=True)
def exact_kernels_of_the_session() -> Iterator[None]:
    """With FCKPT_KERNELS, all plans run with exact kernels, see `exact_kernels.py`."""
    mode = os.environ.get("FCKPT_KERNELS", "")
    with pytest.MonkeyPatch.context() as patch:
        if mode:
            import exact_kernels

            exact_kernels.use_exact_kernels(patch, mode)
        yield


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Takes what lives already out of the way of the garbage collector, which every measured peak sets to work."""
    importlib.import_module("torch._dynamo")  # the largest of what is imported on the way
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_report_header() -> str:
    """Says which part of the sweeps runs."""
    return "sweeps: all of them" if WHOLE else f"sweeps: the part of day {DAY} (FCKPT_DAY={DAY} runs it again)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has its turn another day or needs a missing device, and freezes where many peaks are measured."""
    by_name = config.option.keyword or any("::" in argument for argument in config.args)
    left = set() if by_name else left_for_other_days(items)
    if left:
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
    for item in items:
        measures = item.path.parent.name in ("right_or_loud", "stateful") and isinstance(item, pytest.Function)
        if measures and "frozen" not in item.fixturenames:  # a list that the cases of one test share
            item.fixturenames.insert(0, "frozen")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def costs_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs go to a new folder, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FCKPT_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture
def cost_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measured costs of this test go to an empty folder."""
    monkeypatch.setenv("FCKPT_CACHE", str(tmp_path / "costs"))
    return tmp_path / "costs"
