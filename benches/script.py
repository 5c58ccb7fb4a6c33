"""What the scripts share: their options, opening lines, tables and progress, and the loop through networks."""

from __future__ import annotations

import argparse
import contextlib
import gc
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benches.task import Network
from benches.timing import describe_machine, machine_line, progress_bar, write_json

__all__ = [
    "DEVICE",
    "conclude",
    "described",
    "each_network",
    "in_mib",
    "network_parser",
    "opening",
    "picture_parser",
    "report_parser",
    "rounds_of",
    "script_parser",
    "steps",
    "table_of",
]

DEVICE = "cpu, cuda, cuda:1, ...; default: a GPU when there is one"


# ---- the command line ----------------------------------------------------------------------------


def script_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser for the script `name` with this docstring."""
    return argparse.ArgumentParser(prog=f"python -m benches.{name}", description=(doc or "").partition("\n")[0])


def report_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the same with `--json`."""
    parser = script_parser(name, doc)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers there as well")
    return parser


def picture_parser(name: str, doc: str | None, option: str, report: str) -> argparse.ArgumentParser:
    """Returns a parser for a script that draws what a report says.

    Args:
        name: of the script.
        doc: its docstring.
        option: that names the report.
        report: the file in benches/results that it is by default.
    """
    parser = script_parser(name, doc)
    for flag, default, metavar in ((option, f"benches/results/{report}", "JSON"), ("--folder", "docs/pictures", "OUT")):
        parser.add_argument(flag, type=Path, default=Path(default), metavar=metavar, help=f"default: {default}")
    return parser


def network_parser(name: str, doc: str | None, check: str, networks: Mapping[str, Network]) -> argparse.ArgumentParser:
    """Returns a parser of the options that scripts have which run networks.

    Args:
        name: of the script.
        doc: its docstring.
        check: what `--check` is for.
        networks: by the name on the command line. There is `--quick` if they have such sizes.
    """
    parser = report_parser(name, doc)
    parser.add_argument("--device", help=DEVICE)
    parser.add_argument("--networks", nargs="+", choices=list(networks), metavar="NAME", help=", ".join(networks))
    parser.add_argument("--rounds", type=int, metavar="N", help="timed steps of each kind (default 11; 5 if small)")
    parser.set_defaults(quick=False)
    if any("quick" in network.sizes for network in networks.values()):
        parser.add_argument("--quick", action="store_true", help="smaller networks and fewer rounds")
    parser.add_argument("--tiny", action="store_true", help="networks that compute next to nothing, for a try")
    parser.add_argument("--check", action="store_true", help=check)
    return parser


def rounds_of(parsed: argparse.Namespace) -> int:
    """Returns how many rounds to time."""
    return parsed.rounds or (5 if parsed.quick or parsed.tiny else 11)


def opening(name: str, arguments: Sequence[str] | None, device: torch.device) -> tuple[Console, dict[str, Any]]:
    """Prints what machine this is; returns where to print, and what the JSON begins with: the command, the machine."""
    machine = describe_machine(device)
    console = Console()
    console.print(f"{machine_line(machine)}\n", style="dim", highlight=False, soft_wrap=True)
    command = shlex.join(["python", "-m", f"benches.{name}", *(sys.argv[1:] if arguments is None else arguments)])
    return console, {"command": command, "machine": machine}


# ---- what is shown -------------------------------------------------------------------------------


def table_of(*columns: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """Returns an empty table; columns that are not among `left` stand on the right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


@contextlib.contextmanager
def steps(total: int, title: str = "") -> Iterator[Callable[[str], None]]:
    """Shows a progress bar of so many steps; what is yielded takes the next one, and says which that is."""
    with progress_bar() as progress:
        bar = progress.add_task(title, total=total)
        yield lambda what: progress.update(bar, advance=1, description=what)


def in_mib(nbytes: int) -> str:
    """Returns bytes as a number of MiB, for a column that says so."""
    return f"{nbytes / 2**20:,.1f}"


def described(error: Exception) -> str:
    """Returns an error as a complaint: a bench goes on after it, for what fails here may work with the next."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


# ---- the loop ------------------------------------------------------------------------------------


class _Report(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def everything_wrong(self) -> Iterator[str]: ...


R = TypeVar("R", bound=_Report)


def each_network(
    parsed: argparse.Namespace,
    document: Mapping[str, Any],
    networks: Mapping[str, Network],
    count: int,
    examine: Callable[[str, Callable[[str], object]], R],
    show: Callable[[R, Console], object],
    console: Console,
    known: Sequence[Mapping[str, Any]] = (),
) -> list[R]:
    """Examines and shows one network after the other, and what is wrong with it.

    The JSON is written after each network: a run of hours may be cut short.

    Args:
        parsed: the command line.
        document: what the JSON says besides.
        networks: by name.
        count: how many steps of the progress bar a network takes.
        examine: of the name of a network, and a function that takes a step.
        show: prints a report.
        console: where to.
        known: what was found before about other networks, for the JSON.
    """
    names = list(networks) if parsed.networks is None else parsed.networks
    reports: list[R] = []
    with steps(len(names) * count) as advance:
        for name in names:
            reports.append(examine(name, lambda what, title=networks[name].title: advance(f"{title}: {what}")))
            show(reports[-1], console)
            for complaint in reports[-1].everything_wrong():
                console.print(f"  [bold red]{complaint}[/]", highlight=False)
            console.print()
            gc.collect()
            if parsed.json:
                write_json(parsed.json, {**document, "networks": [*known, *(asdict(report) for report in reports)]})
    return reports


def conclude(parsed: argparse.Namespace, reports: Sequence[_Report], console: Console) -> int:
    """Prints how much is wrong. Returns 1 if that is anything and `--check` was asked for, otherwise 0."""
    wrong = sum(1 for report in reports for _ in report.everything_wrong())
    console.print(f"{wrong} complaints about {len(reports)} networks.", highlight=False)
    return int(parsed.check and wrong > 0)
