"""Solvers: `(Graph, budget) -> Schedule`, one file per family, by name."""

from __future__ import annotations

from fckpt.errors import ArgumentValueError
from fckpt.solve.auto import auto
from fckpt.solve.base import Solver, from_saved
from fckpt.solve.brute import brute
from fckpt.solve.greedy import greedy
from fckpt.solve.knapsack import knapsack
from fckpt.solve.min_cut import min_cut
from fckpt.solve.moments import moments
from fckpt.solve.policy import policy
from fckpt.solve.recompute_all import recompute_all
from fckpt.solve.save_all import save_all

__all__ = ["Solver", "from_saved", "get", "names", "register"]

_SOLVERS: dict[str, Solver] = {}


def register(name: str, solver: Solver) -> None:
    """Makes `solver` known as `name`; one that was known by it before is replaced."""
    _SOLVERS[name] = solver


def get(name: str) -> Solver:
    """Returns the solver that is known as `name`.

    Raises:
        ArgumentValueError: none is.
    """
    if name not in _SOLVERS:
        raise ArgumentValueError(f"there is no solver {name!r}. Take one of {', '.join(names())}.")
    return _SOLVERS[name]


def names() -> tuple[str, ...]:
    """Returns the names of all solvers, in alphabetical order."""
    return tuple(sorted(_SOLVERS))


for _solver in (auto, brute, greedy, knapsack, min_cut, moments, policy, recompute_all, save_all):
    register(_solver.__name__, _solver)
