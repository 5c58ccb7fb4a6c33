"""Solvers: functions from a graph and a budget to a schedule. Each family has one file, and each solver has a name."""

from __future__ import annotations

import difflib

from fckpt.errors import ArgumentTypeError, ArgumentValueError
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
    """Lists only the public names, without the modules that define them."""
    return [*__all__, "__doc__"]


_SOLVERS: dict[str, Solver] = {}


def register(name: str, solver: Solver) -> None:
    """Registers `solver` under `name`, and replaces a solver registered under that name before."""
    _SOLVERS[name] = solver


def get(name: str) -> Solver:
    """Returns the solver registered under `name`.

    Raises:
        ArgumentTypeError: the name is no str.
        ArgumentValueError: no solver has this name.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"a solver is named by a str, not {type(name).__name__}: {name!r}. fckpt.solve.register gives a function "
            "a name."
        )
    if name not in _SOLVERS:
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ArgumentValueError(f"there is no solver {name!r}. {hint}The solvers are {', '.join(names())}.")
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
