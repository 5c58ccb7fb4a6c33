"""Solvers: `(Graph, budget) -> Schedule`, one file per family, by name."""

from __future__ import annotations

from fckpt.errors import ArgumentValueError
from fckpt.solve._auto import auto
from fckpt.solve._brute import brute
from fckpt.solve._checkmate import checkmate, checkmate_lp
from fckpt.solve._chen import chen
from fckpt.solve._dtr import dtr
from fckpt.solve._greedy import greedy
from fckpt.solve._hierarchy import hierarchy
from fckpt.solve._knapsack import knapsack
from fckpt.solve._lower_sets import lower_sets
from fckpt.solve._min_cut import min_cut
from fckpt.solve._moccasin import moccasin, moccasin3
from fckpt.solve._moments import moments
from fckpt.solve._ogc import ogc
from fckpt.solve._policy import policy
from fckpt.solve._recompute_all import recompute_all
from fckpt.solve._revolve import revolve
from fckpt.solve._rotor import rotor
from fckpt.solve._save_all import save_all
from fckpt.solve._xla import xla
from fckpt.solve.core.rules import Solver, from_saved

__all__ = ["Solver", "auto", "from_saved", "get", "names", "register"]


def __dir__() -> list[str]:
    """Lists the public names alone, without the modules that hold them."""
    return [*__all__, "__doc__"]


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


for _solver in (
    auto,
    brute,
    checkmate,
    checkmate_lp,
    chen,
    dtr,
    greedy,
    hierarchy,
    knapsack,
    lower_sets,
    min_cut,
    moccasin,
    moccasin3,
    moments,
    ogc,
    policy,
    recompute_all,
    revolve,
    rotor,
    save_all,
    xla,
):
    register(_solver.__name__, _solver)
