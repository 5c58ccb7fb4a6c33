"""Classes of the user, evaluated as Python does: the four differences that Dynamo has, put right or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fckpt._capture.class_calls import class_calls_followed
from fckpt._capture.class_writes import class_writes_found
from fckpt._capture.hashed import hashes_compared
from fckpt._capture.unsourced import unsourced_guarded

__all__ = ["users_classes_like_pythons"]


@contextlib.contextmanager
def users_classes_like_pythons(folded: set[str]) -> Iterator[None]:
    """Makes Dynamo treat the user's classes as Python does, within the body, or raise a `LookupError`.

    Args:
        folded: receives the names of attributes that Dynamo reads without a guard.
    """
    with unsourced_guarded(folded), class_writes_found(), class_calls_followed(), hashes_compared():
        yield
