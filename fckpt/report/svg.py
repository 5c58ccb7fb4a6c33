"""Parts of the pictures: SVG elements for notebooks and web pages, in light and dark mode."""

from __future__ import annotations

import math
import zlib
from html import escape

__all__ = [
    "AFTER",
    "BEFORE",
    "BOTTOM",
    "BUDGET",
    "HEIGHT",
    "LEFT",
    "RIGHT",
    "TOP",
    "WIDTH",
    "document",
    "line",
    "round_up",
    "text",
    "unit",
]

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 44, 44
"""Margins around the axes."""

# Colours of medium brightness, which contrast with white and with black, and which colour-blind readers can tell apart.
# Everything else has the colour of the page's text.
BEFORE, AFTER, BUDGET = "#d97706", "#3b82f6", "#dc2626"
# The style of a page takes precedence. As an <img>, the picture follows the colour scheme of the reader's system.
_STYLE = "svg:root{color:#1f2328}@media(prefers-color-scheme:dark){svg:root{color:#e6edf3}}"


def document(parts: list[str], title: str, description: str) -> str:
    """Returns an `<svg>` element with these parts."""
    content = "\n".join(parts)
    mark = f"{zlib.crc32((content + description).encode()):08x}"  # ids must be unique on a page with several pictures
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" '
        f'style="max-width:{WIDTH}px" role="img" aria-labelledby="fckpt-title-{mark} fckpt-desc-{mark}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">\n'
        f"<style>{_STYLE}</style>\n"
        f'<title id="fckpt-title-{mark}">{escape(title)}</title>\n'
        f'<desc id="fckpt-desc-{mark}">{escape(description)}</desc>\n'
        f"{content}\n</svg>\n"
    )


def line(x1: object, y1: object, x2: object, y2: object, colour: str, more: str) -> str:
    """Returns a line between two points."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" {more}/>'


def text(x: object, y: object, text: str, anchor: str) -> str:
    """Returns a text at a point, which is its start, middle or end."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def unit(nbytes: int) -> tuple[str, int]:
    """Returns the binary unit for an axis that ends at `nbytes`, and its number of bytes."""
    power = min((nbytes.bit_length() - 1) // 10, 4)
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024**power


def round_up(size: float) -> float:
    """Rounds up to the next of ..., 0.5, 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= size)
