"""Places where Python programs keep numbers that a function reads, a kind of place in each file.

Each use imports a file anew (`judge.fresh`), so that classes, globals and caches belong to one test. A place has two
methods: `read`, which a function under a plan calls, and `write`, which a test calls between its calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

STEMS = ("attributes", "containers", "values", "code", "surroundings", "process")
FILES = {stem: Path(__file__).parent / f"{stem}.py" for stem in STEMS}
"""Each has a table `PLACES`, by name."""


def registry() -> tuple[dict[str, type], type]:
    """Returns an empty table of places, and a base class whose subclasses are entered in it."""
    places: dict[str, type] = {}

    class Place:
        """A number somewhere, which is 2 at first."""

        def __init_subclass__(cls, *, abstract: bool = False) -> None:
            """Registers a place by its name, unless it is a base of others only."""
            if not abstract:
                places[cls.__name__] = cls

        def read(self) -> Any:
            """Returns the number."""
            raise NotImplementedError

        def write(self, number: int) -> None:
            """Puts another number in the place."""
            raise NotImplementedError

    return places, Place
