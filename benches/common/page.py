"""Tables of pages of the documentation, written from the results of benches: each between two comments of its page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benches.common.command import described, script_parser
from benches.common.results import read_json


def wrapped(paragraph: str) -> str:
    """Returns a paragraph in lines of the page's width."""
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown: the first column is aligned to the left, the others to the right."""
    rule = f"|---|{'--:|' * (len(heads) - 1)}"
    return "\n".join([f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


@dataclass(frozen=True)
class Page:
    """A page whose tables come from the results of a bench."""

    bench: str
    """The name of the bench. The script `<bench>_page` writes the page."""
    path: str
    text: Callable[[dict[str, Any]], str]
    """Returns what stands between the two comments, for the document that the bench wrote."""

    @property
    def results(self) -> str:
        """The file of the results that the page shows."""
        return f"benches/results/{self.bench}-cpu.json"

    def rewritten(self, page: str, found: dict[str, Any]) -> str:
        """Returns the page with the tables of the results `found` in place of its tables."""
        begin = f"<!-- {self.bench}: begin. Replace by `python -m benches {self.bench}_page`. -->"
        end = f"<!-- {self.bench}: end -->"
        before, rest = page.split(begin)
        return f"{before}{begin}\n\n{self.text(found)}\n\n{end}{rest.split(end)[1]}"

    def write(self, doc: str | None, arguments: list[str]) -> int:
        """Rewrites the page, as the command line of the script says, whose docstring is `doc`."""
        parser = script_parser(f"{self.bench}_page", doc)
        for flag, default in (("--results", self.results), ("--page", self.path)):
            parser.add_argument(flag, type=Path, default=Path(default), metavar="FILE", help=f"default: {default}")
        parsed = parser.parse_args(arguments)
        try:
            page = self.rewritten(parsed.page.read_text(), read_json(parsed.results))
        except (OSError, ValueError, LookupError, TypeError) as error:
            parser.error(f"{parsed.page} cannot be written from {parsed.results}: {described(error)}")
        parsed.page.write_text(page)
        Console().print(f"wrote {parsed.page}")
        return 0
