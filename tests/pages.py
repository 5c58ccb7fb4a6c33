"""Runs the Python blocks of a Markdown page, and compares what they print with what the page shows.

The blocks of a page run from top to bottom in one namespace, from seed 0. A `text` block right after a Python
block is its output (`...` stands for anything). A comment before a block says otherwise:

    <!-- needs transformers -->    the block, and what shows its output, run only where that is installed
    <!-- not run: why -->          the block is not run
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import re
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["ROOT", "Block", "blocks", "run_page"]

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(
    r"(?:^<!-- (?P<comment>(?:needs|not run)[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_CHECKER = doctest.OutputChecker()
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    body: str
    line: int
    comment: str
    shown: str | None
    """The output that the page shows, if it does."""


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page."""
    text = page.read_text()
    found = list(_FENCE.finditer(text))
    result = []
    for i, match in enumerate(found):
        shown = None
        if i + 1 < len(found) and found[i + 1]["language"] == "text":
            between = text[match.end() : found[i + 1].start()].strip()
            if between in ("", "It prints:"):
                shown = found[i + 1]["body"]
        line = text.count("\n", 0, match.start("body"))
        result.append(Block(match["language"], match["body"], line, match["comment"] or "", shown))
    return result


def run_page(page: Path) -> int:
    """Runs a page's Python blocks; returns how many ran.

    Raises:
        AssertionError: a block printed something else than the page shows.
    """
    torch.manual_seed(0)
    namespace = {"__name__": page.stem}
    ran = 0
    for block in blocks(page):
        if block.language != "python" or block.comment.startswith("not run"):
            continue
        needed = block.comment.removeprefix("needs ").split(", ") if block.comment else []
        if any(importlib.util.find_spec(name) is None for name in needed):
            continue
        # Line numbers in a traceback are then those of the page.
        code = compile("\n" * block.line + block.body, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        ran += 1
        if block.shown is not None:
            where = f"{page.relative_to(ROOT)}:{block.line}"
            assert _CHECKER.check_output(block.shown, printed.getvalue(), _FLAGS), (
                f"{where} prints\n{printed.getvalue()}but the page shows\n{block.shown}"
            )
    return ran
