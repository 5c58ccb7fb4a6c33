"""A progress line on stderr for long work."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from fckpt._units import format_seconds

__all__ = ["Line"]


class Line:
    """A progress line. It appears after a while, on terminals only, and disappears at the end of its `with` block."""

    def __init__(self, enabled: bool = True):
        self.enabled = enabled and sys.stderr.isatty()
        self.start = self.last = time.perf_counter()
        self.text = ""
        self.shown = False

    def __enter__(self) -> Line:
        return self

    def update(self, done: int, total: int, text: str) -> None:
        """Shows the progress and the remaining time, at most five times per second.

        Args:
            done: the number of finished items, at least 1.
            total: the number of all items.
            text: the text of the line, with two `{}` for the two numbers. A new text restarts the time estimate.
        """
        now = time.perf_counter()
        if self.text not in ("", text):
            self.start = self.last = now
        self.text = text
        left = (now - self.start) * (total - done) / done
        if now - self.last < 0.2 or not (self.shown or left > 1.0):
            return
        self.last = now
        self._write(f"{text.format(done, total)}, {format_seconds(left)} left")

    def say(self, text: str) -> None:
        """Shows a text immediately."""
        self.text = text
        self._write(text)

    def _write(self, text: str) -> None:
        if self.enabled:
            self.shown = True
            sys.stderr.write(f"\r{f'fckpt: {text}':<78}")
            sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            sys.stderr.write(f"\r{'':<78}\r")
            sys.stderr.flush()
