"""What the garbage collector runs while a function is traced is not the function's doing."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

import fckpt


def test_a_monitor_of_the_collector_is_not_taken_for_the_function() -> None:
    seen: list[float] = []

    def monitor(phase: str, info: Any) -> None:
        seen.append(time.perf_counter())

    before = gc.get_threshold()
    gc.callbacks.append(monitor)
    gc.set_threshold(50, 5, 5)
    try:
        f = fckpt.remat(lambda x: torch.tanh(x).sin().exp().sum(), policy=fckpt.policies.nothing_saveable)
        f(torch.randn(8, 4, requires_grad=True)).backward()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(monitor)
    assert seen
    assert gc.isenabled()
