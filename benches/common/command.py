"""The command lines of the benches: options, opening lines, tables, progress, and the loop over networks."""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benches.common.results import describe_machine, machine_line, write_json
from benches.common.training import Network

DEVICE = "cpu, cuda, cuda:1, ...; default: a GPU if there is one"
TOLERANCE = 0.02
"""How far a predicted peak may be from the measured one."""


# ---- the command line ----------------------------------------------------------------------------


def script_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser for the script `name`, whose docstring is the description."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m benches.{name}", description=doc, formatter_class=form)


def report_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with `--json`."""
    parser = script_parser(name, doc)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results to this file")
    return parser


def parse_picture(
    name: str, doc: str | None, report: str, read: Callable[[Path], Any], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parses the command line of a script that draws results; `found` is what `read` returns for their file.

    By default that is the file `report` in benches/results. If `read` raises an error, the script ends.
    """
    parser = script_parser(name, doc)
    for flag, default, metavar in (
        ("--results", f"benches/results/{report}", "JSON"),
        ("--folder", "docs/pictures", "OUT"),
    ):
        parser.add_argument(flag, type=Path, default=Path(default), metavar=metavar, help=f"default: {default}")
    parsed = parser.parse_args(arguments)
    try:
        parsed.found = read(parsed.results)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        parser.error(f"{parsed.results} is not a result of benches.{name.removesuffix('_picture')}: {described(error)}")
    return parsed


def network_parser(name: str, doc: str | None, check: str, networks: Mapping[str, Network]) -> argparse.ArgumentParser:
    """Returns a parser for a script that runs `networks`, by name; `check` is the help of `--check`."""
    parser = report_parser(name, doc)
    parser.add_argument("--device", help=DEVICE)
    parser.add_argument("--networks", nargs="+", choices=list(networks), metavar="NAME", help=", ".join(networks))
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed steps of each kind (default 11; 5 with smaller networks)"
    )
    parser.set_defaults(quick=False)
    if any("quick" in network.sizes for network in networks.values()):
        parser.add_argument("--quick", action="store_true", help="smaller networks and fewer rounds")
    parser.add_argument("--tiny", action="store_true", help="very small networks, for a try")
    parser.add_argument("--check", action="store_true", help=check)
    return parser


def rounds_of(parsed: argparse.Namespace) -> int:
    """Returns the number of timed rounds."""
    return parsed.rounds or (5 if parsed.quick or parsed.tiny else 11)


def opening(name: str, arguments: Sequence[str] | None, device: torch.device) -> tuple[Console, dict[str, Any]]:
    """Prints the machine. Returns the console, and the first entries of the JSON: the command and the machine."""
    machine = describe_machine(device)
    console = Console()
    console.print(f"{machine_line(machine)}\n", style="dim", highlight=False, soft_wrap=True)
    command = shlex.join(["python", "-m", f"benches.{name}", *(sys.argv[1:] if arguments is None else arguments)])
    return console, {"command": command, "machine": machine}


# ---- tables and progress ----------------------------------------------------------------------------


def table_of(*columns: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """Returns an empty table. Columns are aligned right, except those in `left`."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


@contextlib.contextmanager
def steps(total: int, title: str = "") -> Iterator[Callable[[str], None]]:
    """Shows a progress bar on stderr. The function that is yielded advances it and describes the next step."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda what: progress.update(bar, advance=1, description=what)


def mib(nbytes: int) -> str:
    """Returns bytes as text in MiB."""
    return f"{nbytes / 2**20:,.1f} MiB"


def in_mib(nbytes: int) -> str:
    """Returns bytes as a number of MiB, without the unit."""
    return f"{nbytes / 2**20:,.1f}"


def deviation(predicted: int, measured: int) -> str:
    """Returns a complaint if a predicted peak is off by more than `TOLERANCE`, otherwise nothing."""
    if abs(predicted - measured) <= TOLERANCE * measured:
        return ""
    return f"predicted {mib(predicted)}, measured {mib(measured)} ({predicted / measured - 1:+.1%})"


def described(error: Exception) -> str:
    """Returns an error as a complaint. A bench records it and continues."""
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
    """Examines one network after the other, and shows its report and its complaints.

    The JSON is written after each network, because a run takes hours and may be interrupted.

    Args:
        parsed: the command line.
        document: the other entries of the JSON.
        networks: by name.
        count: steps of the progress bar for a network.
        examine: makes a report, from the name of a network and a function that advances the progress bar.
        show: prints a report.
        console: to print on.
        known: reports of other networks from an earlier run, for the JSON.
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
    """Prints the number of complaints. Returns 1 if there are any and `--check` was given, otherwise 0."""
    wrong = sum(1 for report in reports for _ in report.everything_wrong())
    console.print(f"{wrong} complaints about {len(reports)} networks.", highlight=False)
    return int(parsed.check and wrong > 0)
