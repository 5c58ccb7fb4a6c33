"""Refusals: why a function could not be captured, which errors of tracing its Python code instead do not say."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from fckpt._planned.tracing import REACHES
from fckpt._trace.effects import ASSIGNS
from fckpt._trace.stand_ins import WAY_OUT
from fckpt._trace.untraceable import LOOKS
from fckpt.errors import TraceError

__all__ = ["explaining", "latest"]


@contextlib.contextmanager
def explaining(refusals: dict[bool, str]) -> Iterator[None]:
    """Adds to a `TraceError` of the body, which traces Python code, why the function was not captured.

    Args:
        refusals: the reasons. They are forgotten if there is an error, because the obstacle may be gone at the next
            call.
    """
    try:
        yield
    except TraceError as error:
        reasons = latest(refusals).replace(WAY_OUT, "").strip().rstrip(".")
        refusals.clear()
        if not reasons or reasons in str(error) or _is_same_place(str(error), reasons):
            raise
        for said, why in _LATER.items():
            if said in str(error) and "ata-dependent" not in reasons:
                raise TraceError(
                    f"the function cannot be captured: {reasons}. It is traced by running its Python code instead, "
                    f"{why}: {error}"
                ) from error
        raise TraceError(f"{error} (Nor could it be captured: {reasons}.)") from error


_LATER = {
    ASSIGNS: "which may assign nothing",
    REACHES: "which is not possible here",
    LOOKS: "which may not depend on data",
}
"""By what an error says: how tracing Python code differs. Such errors are further than the obstacle to a capture."""


def latest(refusals: dict[bool, str]) -> str:
    """Returns the latest reason, or an empty text if there are no reasons."""
    return next(reversed(refusals.values()), "")


def _is_same_place(error: str, reasons: str) -> bool:
    """Whether an error and the reasons against a capture name one line of code: `model.py:12`."""
    found = re.match(r"(.+?):(\d+)\b", error)
    return found is not None and os.path.basename(found[1]) in reasons and f"line {found[2]}" in reasons
