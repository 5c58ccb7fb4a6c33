"""Lists the benches, or runs one: `python -m benches`, `python -m benches NAME --help`."""

from __future__ import annotations

import importlib
import sys

from rich.console import Console

BENCHES = {
    "demo": ("Hugging Face models: peak, time and bits, within a budget and without", "3 minutes"),
    "overhead": ("time of a call of remat, planned and not, and steps with a region per block", "3 minutes"),
    "step_picture": ("a picture of a training step of BERT: memory, plain and planned", "a minute"),
    "budgets": ("eleven networks: predicted and measured peaks, and times, for ten budgets", "half an hour"),
    "calls": ("six functions with derivatives inside, within half of their peak: peak and time", "5 minutes"),
    "steps": ("twelve networks: whole training steps, their peaks and times, by hand and by fckpt.step", "an hour"),
    "steps_page": ("the tables of a page, from the results of steps", "seconds"),
    "sizes": ("six networks: runs over batches of many lengths, their times, budgets and bits", "an hour"),
    "first_calls": ("five networks: seconds of the first step by stage, without plans on disk and with", "5 minutes"),
    "networks": ("eighteen networks: plans in the memory, or time, of published checkpoints", "an hour"),
    "networks_picture": ("pictures of the results of networks", "a minute"),
    "solvers": ("all solvers on the same graphs, which it traces: extra time, least peak and seconds", "3 hours"),
    "solvers_picture": ("a picture of the results of solvers", "seconds"),
    "tiles": ("cross-entropy and attention: least peak and time, with tiles and without", "15 minutes"),
    "kernels": ("twelve networks: peak, time and bits with compiled kernels, and by torch.compile", "an hour"),
    "kernels_page": ("the tables of a page, from the results of kernels", "seconds"),
    "multi_gpu": ("data parallel training of DenseNet: memory and time, PyTorch's methods and fckpt", "4 minutes"),
}
"""For each script, in the order of the list: its table, and how long it takes on two cores."""


def listing() -> str:
    """Returns a line per script: name, table, duration, command."""
    rows = [(name, *row, f"python -m benches {name}") for name, row in BENCHES.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Lists the scripts, or runs the one that is named, with the other arguments."""
    name, *options = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in BENCHES:
        return importlib.import_module(f"benches.{name}").main(options)
    if name not in ("-h", "--help"):
        print(f"there is no bench {name!r}; these are the benches:\n\n{listing()}", file=sys.stderr)
        return 2
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{listing()}\n\nEach explains its table and its options with --help; most have smaller sizes as well."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
