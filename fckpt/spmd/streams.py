"""`fold_in`: derives the seeds of many random number streams, for example one per rank along an axis, step and layer.

It works like `jax.random.fold_in`, which derives a key from a key and a number. A seed depends only on its arguments,
in which an axis stands for the rank's index along it. It does not depend on the sizes of the mesh or on other axes, so
training can continue with the same random numbers on another mesh.
"""

from __future__ import annotations

import hashlib
from typing import Any

from fckpt.errors import ArgumentTypeError
from fckpt.spmd.mesh import current_mesh, transport_of

__all__ = ["fold_in"]


def fold_in(seed: int, *data: int | str | tuple[str, ...]) -> int:
    """Derives a seed from a seed and further data. Different data give unrelated seeds.

    Args:
        seed: an int, usually the same on all ranks.
        data: ints (a step, a layer) and axes of the mesh in use. An axis stands for the index of this rank along it, so
            ranks get different seeds along the axes in `data`, and equal seeds along all other axes.

    Returns:
        An int below 2**63, for `torch.manual_seed` or `torch.Generator().manual_seed`.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is neither an int nor an axis; no mesh is in use, or the
            mesh does not have this axis.

    Example:
        Dropout that is equal on all ranks along "model", and different along "data" and in every step:

        >>> import fckpt
        >>> def program(step):
        ...     return fckpt.fold_in(7, step, "data")
        >>> seeds = fckpt.sim({"data": 2, "model": 2}).run(program, 100)
        >>> seeds[0] == seeds[1], seeds[0] == seeds[2]
        (True, False)

    References:
        `jax.random.fold_in`, https://docs.jax.dev/en/latest/_autosummary/jax.random.fold_in.html
    """
    found = _number(seed)
    for one in data:
        if isinstance(one, (str, tuple)):
            mesh = current_mesh("fold_in")
            rank = transport_of(mesh.key).rank
            numbers = [mesh.index(rank, (axis,)) for axis in mesh.axes("fold_in", one)]
        else:
            numbers = [_number(one)]
        for number in numbers:
            digest = hashlib.blake2b(f"{found},{number}".encode(), digest_size=8).digest()
            found = int.from_bytes(digest, "big") >> 1
    return found


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(
            f"fold_in: takes ints and names of axes, not {value!r}. Convert a tensor x with int(x)."
        )
    return value
