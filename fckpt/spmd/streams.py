"""`fold_in`: a seed for each of many streams of random numbers, by axis of a mesh, by step, by layer.

As `jax.random.fold_in` makes a key of a key and a number. A seed depends on numbers alone, and on none of the ranks or
sizes of a mesh that are not named: training goes on with the same numbers on another mesh.
"""

from __future__ import annotations

import hashlib
from typing import Any

from fckpt.errors import ArgumentTypeError
from fckpt.spmd.mesh import current_mesh, transport_of

__all__ = ["fold_in"]


def fold_in(seed: int, *data: int | str | tuple[str, ...]) -> int:
    """Returns a seed that `seed` and `data` make, far from those of other data.

    Args:
        seed: a number, the same on all ranks as a rule.
        data: numbers (of a step, a layer), and axes of the mesh in use: the number of this rank along an axis counts.
            So ranks have the same seed along axes that are not named, and different ones along those that are.

    Returns:
        A number below 2**63, for `torch.manual_seed` or `torch.Generator().manual_seed`.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is neither a number nor an axis; there is no mesh, or no such axis.

    Example:
        Dropout that is the same along "model", and different along "data" and from step to step:

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
            f"fold_in: a seed is made of numbers and names of axes, not of {value!r}. Pass int(x) of a tensor."
        )
    return value
