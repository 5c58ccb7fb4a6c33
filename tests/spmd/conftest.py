"""What the tests of many devices share: processes that start fast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked import Forked


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """The processes of `launch` are forked from one that has imported torch, which takes each of them seconds.

    Elsewhere `launch` spawns them, since a process that has used a GPU cannot be forked. Its example does so, which
    the tests run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fckpt.spmd.launching.multiprocessing", Forked())
        yield
