"""What the scripts share that go through the networks of `zoo.py`: their options, their opening lines, their loop."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console

from benches.timing import describe_machine, machine_line, progress_bar, write_json
from benches.zoo import NETWORKS, Task

__all__ = ["each_network", "in_mib", "network_parser", "opening", "rounds_of"]


def network_parser(name: str, doc: str | None, check: str) -> argparse.ArgumentParser:
    """Returns a parser of the common options, for the script `name` with this docstring; `check` explains `--check`."""
    parser = argparse.ArgumentParser(prog=f"python -m benches.{name}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: a GPU when there is one")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument("--rounds", type=int, metavar="N", help="timed steps of each kind (default 11; 5 if quick)")
    parser.add_argument("--quick", action="store_true", help="smaller networks and fewer rounds")
    parser.add_argument("--tiny", action="store_true", help="networks that compute next to nothing, for a try")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers there as well")
    parser.add_argument("--check", action="store_true", help=check)
    return parser


def rounds_of(parsed: argparse.Namespace) -> int:
    """Returns how many rounds to time."""
    return parsed.rounds or (5 if parsed.quick or parsed.tiny else 11)


def opening(device: torch.device) -> tuple[Console, dict[str, Any]]:
    """Prints what machine this is; returns where to print, and the machine."""
    machine = describe_machine(device)
    console = Console()
    console.print(f"{machine_line(machine)}\n", style="dim", highlight=False, soft_wrap=True)
    return console, machine


class _Report(Protocol):
    __dataclass_fields__: Any


R = TypeVar("R", bound=_Report)


def each_network(
    parsed: argparse.Namespace,
    document: Mapping[str, Any],
    size: str,
    device: torch.device,
    steps: int,
    examine: Callable[[Task, Callable[[str], object]], R],
    show: Callable[[R], object],
) -> list[R]:
    """Examines and shows one network after the other, with a progress bar of so many `steps` for each.

    The JSON is written after each network: a run of hours may be cut short.
    """
    names = parsed.networks or list(NETWORKS)
    reports: list[R] = []
    with progress_bar() as progress:
        bar = progress.add_task("", total=len(names) * steps)
        for name in names:
            task = NETWORKS[name].task(size, device)

            def advance(what: str, title: str = task.name) -> None:
                progress.update(bar, advance=1, description=f"{title}: {what}")

            reports.append(examine(task, advance))
            show(reports[-1])
            del task
            gc.collect()
            if parsed.json:
                write_json(parsed.json, {**document, "networks": [asdict(report) for report in reports]})
    return reports


def in_mib(nbytes: int) -> str:
    """Returns bytes as a number of MiB, for a column that says so."""
    return f"{nbytes / 2**20:,.1f}"
