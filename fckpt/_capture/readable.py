"""Texts of Dynamo's guards and sources, with the names that the user gave."""

from __future__ import annotations

import re
import types
from typing import Any

from fckpt._capture.unsourced import functions_named

__all__ = ["PASSED", "explained", "holds", "readable"]


def holds(part: str, scope: dict[str, Any]) -> bool:
    """Whether one of several conditions on sizes holds, which Dynamo checks together."""
    try:
        return bool(eval(part.partition("  # ")[0], {"L": scope, "__builtins__": {}}))
    except Exception:  # a condition on something else, with functions of Dynamo
        return False


def explained(part: str) -> str:
    """Formats a guard with the user's names: `temp == 1.0, read by y * self.temp (model.py:3 in forward)`."""
    condition, _, comment = functions_named(part).partition("  # ")
    line, _, place = comment.strip().partition("  # ")
    condition = _SOURCE.sub(lambda found: readable(found.group(0)), condition.strip())
    place = place.partition(" (HINT:")[0].strip().rpartition("/")[2]
    return condition + (f", read by `{line.strip()}`" if line.strip() else "") + (f" ({place})" if place else "")


_SOURCE = re.compile(r"[LG]\['\w+'\](?:\['?\w+'?\]|\.\w+)*")
PASSED = re.compile(r"L\['(?:args|kwargs)'\](?:\[[^\]]+\])*")
"""A source that is an argument of the function."""
_MEMBER = re.compile(r"(?:_modules|_parameters|_buffers)'?\]?\['([^']+)'\]")
_CELL = re.compile(r"^L\['(?:fn|this)'\]\.__closure__\[(\d+)\]\.cell_contents")


def readable(text: str, fn: Any = None) -> str:
    """Formats a source as the user would write it: `L['this']._modules['a'].p` is `a.p`."""
    if PASSED.fullmatch(text):
        return re.sub(r"L\['(args|kwargs)'\]", r"\1", text)
    text = functions_named(text)
    members = list(_MEMBER.finditer(text))
    if members:
        rest = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", text[members[-1].end() :])
        names = ".".join([member[1] for member in members])
        return names if "__" in rest else names + rest
    cell = _CELL.search(text)
    if cell and isinstance(fn, types.FunctionType):
        return f"closed-over {fn.__code__.co_freevars[int(cell.group(1))]!r}"
    scope = re.search(r"^G\['([^']+)'\]", text) or re.search(r"__globals__\['([^']+)'\]", text)
    if scope and fn is not None:
        return f"closed-over {scope.group(1)!r}"
    return re.sub(r"L\['(fn|this)'\]", "the function", text)
