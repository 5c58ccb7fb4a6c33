"""The command lines of the benches: options, opening lines, tables, progress, and the loop over records."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benches.common.results import describe_machine, machine_line, write_json
from benches.common.rows import Record
from benches.common.training import Network

# ---- the command line ----------------------------------------------------------------------------


def script_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser for the script `name`, whose docstring is the description."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m benches {name}", description=doc, formatter_class=form)


def report_parser(
    name: str, doc: str | None, *, device: bool = True, rounds: str = "", tiny: bool = False, check: str = ""
) -> argparse.ArgumentParser:
    """Returns a parser with `--json`, and with `--device`, `--rounds` (default), `--tiny` and `--check` if asked."""
    parser = script_parser(name, doc)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results to this file")
    if device:
        parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: a GPU if there is one")
    if rounds:
        default = int(rounds) if rounds.isdecimal() else None
        text = f"timed steps of each kind (default {rounds})"
        parser.add_argument("--rounds", type=int, default=default, metavar="N", help=text)
    if tiny:
        parser.add_argument("--tiny", action="store_true", help="very small sizes, for a try")
    if check:
        parser.add_argument("--check", action="store_true", help=f"exit 1 if {check}")
    return parser


def network_parser(name: str, doc: str | None, check: str, networks: Mapping[str, Network]) -> argparse.ArgumentParser:
    """Returns a parser for a script that runs `networks`, by name."""
    parser = report_parser(name, doc, rounds="11; 5 with smaller networks", tiny=True, check=check)
    parser.add_argument("--networks", nargs="+", choices=list(networks), metavar="NAME", help=", ".join(networks))
    parser.set_defaults(quick=False)
    if any("quick" in network.sizes for network in networks.values()):
        parser.add_argument("--quick", action="store_true", help="smaller networks and fewer rounds")
    return parser


def parse_networks(
    parser: argparse.ArgumentParser, networks: Mapping[str, Network], arguments: Sequence[str]
) -> argparse.Namespace:
    """Parses the command line of a `network_parser`, with the defaults of `--networks` and `--rounds`."""
    parsed = parser.parse_args(arguments)
    parsed.networks = parsed.networks or list(networks)
    parsed.rounds = parsed.rounds or (5 if parsed.quick or parsed.tiny else 11)
    return parsed


def add_names(parser: argparse.ArgumentParser, what: str, names: Iterable[str]) -> None:
    """Adds an option for some of the `names`; all of them by default."""
    known = list(names)
    parser.add_argument(f"--{what}", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))


def fraction(text: str) -> float:
    """Reads a budget that is a fraction."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"a budget is a fraction above 0 and at most 1, not {text}")
    return value


def parse_picture(
    name: str, doc: str | None, report: str, read: Callable[[Path], Any], arguments: Sequence[str]
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


def opening(name: str, arguments: Sequence[str], device: torch.device) -> tuple[Console, dict[str, Any]]:
    """Prints the machine. Returns the console, and the first entries of the JSON: the command and the machine."""
    machine = describe_machine(device)
    console = Console(highlight=False)
    console.print(f"{machine_line(machine)}\n", style="dim", soft_wrap=True)
    command = shlex.join(["python", "-m", "benches", name, *arguments])
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
    """Shows a progress bar on stderr, or lines if it is no terminal. The function that is yielded advances it and
    describes the next step.
    """
    if not sys.stderr.isatty():
        start, count = time.monotonic(), itertools.count(1)
        say = lambda what: f"{next(count)}/{total} {what} ({(time.monotonic() - start) / 60:.1f} min)"
        yield lambda what: print(say(what), file=sys.stderr, flush=True)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda what: progress.update(bar, advance=1, description=what)


def mib(nbytes: int | None) -> str:
    """Returns bytes as a number of MiB, without the unit; None as nothing."""
    return "" if nbytes is None else f"{nbytes / 2**20:,.1f}"


def share(part: int | None, whole: int) -> str:
    """Returns bytes as a fraction of others; None as nothing."""
    return "" if part is None else f"{part / max(whole, 1):.3f}"


def described(error: Exception) -> str:
    """Returns an error as a complaint. A bench records it and continues."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


# ---- the loop ------------------------------------------------------------------------------------

R = TypeVar("R", bound=Record)


def report_each(
    parsed: argparse.Namespace,
    opened: tuple[Console, dict[str, Any]],
    kind: str,
    names: Collection[str],
    examine: Callable[[str, Callable[[str], object]], Sequence[R]],
    show: Callable[[Sequence[R], Console], object],
    *,
    note: str,
    count: int = 0,
    known: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Examines one thing after the other, and shows its records and their complaints.

    The JSON is written after each, because a run takes hours and may be interrupted.

    Args:
        parsed: the command line.
        opened: the console and the first entries of the JSON.
        kind: the name of the records, also in the JSON.
        names: of what is examined.
        examine: makes the records of one name, with a function that advances the progress bar.
        show: prints these records.
        note: an explanation, printed at the end.
        count: how often `examine` advances the progress bar.
        known: records of other names from an earlier run, for the JSON.

    Returns:
        1 if there are complaints and `--check` was given, otherwise 0.
    """
    console, document = opened
    records: list[R] = []
    wrong = 0
    with steps(len(names) * (1 + count)) as advance:
        for name in names:
            advance(name)
            found = examine(name, lambda what, name=name: advance(f"{name}: {what}"))
            show(found, console)
            for complaint in (text for record in found for text in record.everything_wrong()):
                console.print(f"  [bold red]{complaint}[/]")
                wrong += 1
            console.print()
            gc.collect()
            records += found
            if parsed.json:
                write_json(parsed.json, {**document, kind: [*known, *map(asdict, records)]})
    console.print(note, style="dim")
    console.print(f"{wrong} complaints about {len(records)} {kind}.")
    return int(getattr(parsed, "check", False) and wrong > 0)
