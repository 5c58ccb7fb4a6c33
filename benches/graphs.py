"""Traces the graphs on which solvers are compared, and prints their sizes.

    python -m benches.graphs --frozen frozen                     # traces the graphs that are not in the folder yet
    python -m benches.graphs --frozen frozen --graphs gpt12 unet
    git clone https://github.com/haoming-codes/moccasin
    python -m benches.graphs --files moccasin/data/*train_nx.json moccasin/data/random_layered*.json

The graphs are described in `common/graphs.py`; `--files` reads those of the Checkmate and the Moccasin papers instead,
which are not part of fckpt. The table has the operations, the edges, the peak of the plain step, the working set (the
most bytes that one operation reads, makes and uses) and the seconds of a step.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from benches.common import checkmate
from benches.common.command import script_parser, steps, table_of
from benches.common.graphs import GRAPHS, LARGER, checksum, frozen
from fckpt._units import format_bytes, format_seconds
from fckpt.graph import simulate
from fckpt.solve._save_all import save_all


def main(arguments: list[str] | None = None) -> int:
    """Traces graphs or reads files, and prints the table."""
    parser = script_parser("graphs", __doc__)
    parser.add_argument("--frozen", type=Path, metavar="FOLDER", help="folder of traced graphs, filled if necessary")
    known = [*GRAPHS, *LARGER]
    parser.add_argument("--graphs", nargs="+", choices=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--files", nargs="+", type=Path, default=[], metavar="FILE", help="read these graphs instead")
    parsed = parser.parse_args(arguments)
    if not (parsed.files or parsed.frozen):
        parser.error("give --frozen FOLDER, or --files FILE ...")
    try:
        files = {path.name: checkmate.load(path) for path in parsed.files}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    numbers = ("operations", "of forward", "edges", "plain peak", "working set", "a step takes")
    table = table_of("graph", *numbers, "checksum", left=["graph", "checksum"])
    names = [*files] or parsed.graphs or list(GRAPHS)
    with steps(len(names)) as advance:
        for name in names:
            advance(name)
            graph = files[name] if name in files else frozen(name, parsed.frozen)
            peak = simulate(graph.plain, save_all(graph)).peak_nbytes
            edges = sum(len(node.inputs) for node in graph.nodes) - len(graph.cotangents)
            sizes = [f"{n:,}" for n in (len(graph.nodes), graph.boundary, edges)]
            sizes += [format_bytes(peak), format_bytes(checkmate.working_set(graph)), format_seconds(graph.seconds)]
            table.add_row(name, *sizes, checksum(graph))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
