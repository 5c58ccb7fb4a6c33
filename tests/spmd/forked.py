"""Processes that need not import torch: they are forked from one that has imported it."""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Callable
from typing import Any

__all__ = ["Forked"]


class Forked:
    """Stands for `multiprocessing` in `launch`."""

    def __init__(self) -> None:
        self.server = multiprocessing.get_context("forkserver")
        modules = ["fckpt", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
        self.server.set_forkserver_preload(modules)
        self.Pipe = self.server.Pipe

    def get_context(self, method: str) -> Forked:
        return self

    def Process(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> Any:
        return self.server.Process(target=_to_its_end, args=(target, args), daemon=daemon)


def _to_its_end(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Runs a process as one that was spawned: to its end belong the functions that are registered for it."""
    try:
        target(*args)
    finally:
        atexit._run_exitfuncs()
