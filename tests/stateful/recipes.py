"""Random programs with state: a recipe says which pieces a program has, how it is called, and what changes between.

A recipe is plain data, so that hypothesis shrinks it and prints it; `scenario` makes a judge's scenario of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import places
import torch
from hypothesis import strategies as st
from judge import Session, fresh, leaves_of
from torch import Tensor, nn

HERE = Path(__file__).parent
FILES = {"pieces": HERE / "pieces.py", "memory": HERE / "memory.py", **places.FILES}


def _names() -> dict[str, list[str]]:
    found = {}
    for stem, path in FILES.items():
        with fresh(path) as module:
            table = module.PIECES if hasattr(module, "PIECES") else module.PLACES
            found[stem] = list(table)
    return found


NAMES = _names()
REFUSED = {"Deciding", "Drawing", "ItemOfTensor", "ContextVariable", "DecimalNumber", "FractionNumber"}
"""What no plan may be made of: rare, as an example ends there."""


@dataclass(frozen=True)
class Part:
    """A piece, or a place that is read in a way."""

    file: str
    name: str
    way: str = ""


@dataclass(frozen=True)
class Round:
    """Changes before some calls, and how these calls are made."""

    changes: tuple[tuple[str, int, int], ...]
    """(what, which piece, which change of it)."""
    subset: int
    """Which of the outputs are in the loss."""
    writes: int = 0
    """Which output the caller writes to before the loss; 0 for none."""


@dataclass(frozen=True)
class Recipe:
    """A program with state and its history."""

    parts: tuple[Part, ...]
    form: str
    region: str
    mask: str
    input_grad: bool
    budget: float
    rounds: tuple[Round, ...]


class Pair(NamedTuple):
    out: Tensor
    hidden: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "tensor": lambda x, h, out: out,
    "loss": lambda x, h, out: out.square().mean(),
    "tuple": lambda x, h, out: (out, h),
    "dict": lambda x, h, out: {"loss": out.square().mean(), "hidden": h, "out": out},
    "named": lambda x, h, out: Pair(out, h),
    "nested": lambda x, h, out: [out, {"all": (h, [out * 2])}, None, 3],
    "views": lambda x, h, out: (out, out[:4], out.t()),
    "input": lambda x, h, out: (x, out),
    "detached": lambda x, h, out: (out, h.detach()),
}
REGIONS = ("module", "function", "method", "partial", "callable", "parts", "policy", "nested")
GLOBALS = (
    "optimizer", "batch", "mask", "unread", "unread of a class", "save and load", "evaluate", "train", "freeze",
    "input grad", "autocast", "no_grad call", "double", "collect", "deepcopy", "keywords", "swap", "repeat",
)  # fmt: skip


class Program(nn.Module):
    """The pieces one after another."""

    scale = 1.0
    unread_of_class = 0

    def __init__(self, pieces: list[nn.Module], form: str) -> None:
        super().__init__()
        self.pieces, self.form = nn.ModuleList(pieces), form
        self.unread: dict[str, int] = {}

    def forward(self, x: Tensor, mask: Tensor | None = None, **extras: Any) -> Any:
        h = hidden = x
        for i, piece in enumerate(self.pieces):
            h = piece(h, mask)
            if i == 0:
                hidden = h
        for extra in extras.values():
            h = torch.tanh(h * extra)
        return FORMS[self.form](x, hidden, h * self.scale)


class Callable_:
    """An object that is called like a function."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)


def regions(session: Session, kind: str, program: Program) -> Any:
    """Makes the region, or the regions, of a program."""
    if kind == "module":
        return session.region(program)
    if kind == "function":
        return session.region(lambda *args, **kwargs: program(*args, **kwargs))
    if kind == "method":
        return session.region(program.forward)
    if kind == "partial":
        return session.region(functools.partial(program))
    if kind == "callable":
        return session.region(Callable_(program))
    if kind == "nested":
        inner = session.region(program)
        return session.remat(lambda *args, **kwargs: inner(*args, **kwargs))
    if kind == "parts":
        for i, piece in enumerate(program.pieces):
            program.pieces[i] = session.region(piece)
    return program if kind == "parts" else session.region(program)


@dataclass
class Training:
    """The state of a run between its calls."""

    session: Session
    program: Program
    region: Any
    x: Tensor
    mask_kind: str
    keywords: bool = False
    autocast: bool = False
    swapped: bool = False

    def mask(self) -> Tensor | None:
        """The mask of the present batch."""
        if self.mask_kind == "none":
            return None
        mask = torch.ones(len(self.x), dtype=torch.bool)
        if self.mask_kind == "padding":
            mask[len(self.x) // 2 :] = False
        return mask

    def call(self) -> Any:
        """Calls the region as it is called now."""
        extras = {"a": 0.5, "b": 2.0}
        if self.swapped:
            extras = dict(reversed(extras.items()))
        given = {"mask": self.mask(), **extras} if self.keywords else {}
        around = torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with around:
            return self.region(self.x, **given) if self.keywords else self.region(self.x, self.mask())

    def renew(self, x: Tensor) -> None:
        """Takes another batch."""
        self.x = x.detach().requires_grad_(self.x.requires_grad)
        self.session.watch(x=self.x)

    def change(self, what: str, which: int, how: int) -> None:
        """Does one thing between calls."""
        if what == "piece":
            piece: Any = self.program.pieces[which % len(self.program.pieces)]
            changes = piece.changes()
            if changes:
                changes[how % len(changes)]()
            return
        action = {
            "optimizer": self.descend,
            "batch": lambda: self.renew(self.x.repeat(2, 1)[: 64 if len(self.x) == 96 else 96]),
            "mask": lambda: setattr(self, "mask_kind", ("none", "ones", "padding")[which % 3]),
            "unread": lambda: self.program.unread.update({f"n{which}": how}),
            "unread of a class": lambda: setattr(type(self.program), "unread_of_class", how),
            "save and load": lambda: self.program.load_state_dict(copy.deepcopy(self.program.state_dict())),
            "evaluate": lambda: self.region.eval() if isinstance(self.region, nn.Module) else self.program.eval(),
            "train": lambda: self.program.train(),
            "freeze": lambda: self.program.requires_grad_(which % 2 == 0),
            "input grad": lambda: self.x.requires_grad_(not self.x.requires_grad),
            "autocast": lambda: setattr(self, "autocast", not self.autocast),
            "no_grad call": lambda: torch.no_grad()(self.call)(),
            "double": self.double,
            "collect": gc.collect,
            "deepcopy": self.deepcopy,
            "keywords": lambda: setattr(self, "keywords", not self.keywords),
            "swap": lambda: setattr(self, "swapped", not self.swapped),
            "repeat": lambda: None,
        }[what]
        action()

    def descend(self) -> None:
        """Moves all parameters along their gradients."""
        parameters = list(self.program.parameters())
        if parameters:
            torch.optim.SGD(parameters, lr=0.01).step()

    def double(self) -> None:
        """Goes over to double precision."""
        self.program.double()
        self.renew(self.x.double())

    def deepcopy(self) -> None:
        """Goes on with a copy, where the region is a module."""
        if isinstance(self.region, Program):
            try:
                copy.deepcopy(self.program)
            except TypeError:  # it holds a `threading.local`, for example
                return
            self.region = self.program = copy.deepcopy(self.region)
            self.session.regions.append(self.region)
            self.session.watch(program=self.program)


def loss_of(out: Any, subset: int) -> Tensor:
    """A loss of some of the outputs: those that a bit of `subset` names; of all where none is named.

    An input that is a result has its own contribution to its gradient, which a plan adds after those of the program
    (docs/concepts.md, "Higher orders"). So where the program's results are in the loss, that one is not.
    """
    tensors = [t for t in leaves_of(out) if t.requires_grad]
    chosen = [t for i, t in enumerate(tensors) if subset >> i & 1] or tensors
    if not all(t.is_leaf for t in chosen):
        chosen = [t for t in chosen if not t.is_leaf]
    return sum((t.float().sum() for t in chosen), torch.zeros(()))


def written(out: Any, which: int, form: str) -> Any:
    """Writes to an output that no operation has saved for the backward pass: to any of several views of one, say."""
    tensors = [t for t in leaves_of(out) if t.requires_grad and not t.is_leaf]
    if which and tensors and form in ("tensor", "tuple", "named", "views", "detached"):
        tensors[(which - 1) % len(tensors) if form == "views" else 0].mul_(0.5)
    return out


def scenario(recipe: Recipe) -> Callable[[Session], None]:
    """Makes a judge's scenario of a recipe."""

    def run(session: Session) -> None:
        with contextlib.ExitStack() as stack:
            modules: dict[str, Any] = {}

            def module(file: str) -> Any:
                if file not in modules:
                    modules[file] = stack.enter_context(fresh(FILES[file]))
                return modules[file]

            pieces = [_piece(part, module) for part in recipe.parts]
            for piece in pieces:
                session.undo(getattr(piece, "close", lambda: None))
            session.undo(lambda: setattr(Program, "unread_of_class", 0))
            # What several regions and the caller use has contributions to its gradient from each. A region adds up its
            # own before it hands them on, so that sums come in another order.
            form = recipe.form if recipe.region != "parts" or recipe.form == "loss" else "tensor"
            program = Program(pieces, form)
            x = session.leaf(96, 32, grad=recipe.input_grad)
            session.watch(program=program, x=x)
            training = Training(session, program, regions(session, recipe.region, program), x, recipe.mask)
            for turn in recipe.rounds:
                for change in turn.changes:
                    training.change(*change)
                whole = recipe.region not in ("parts", "nested") and recipe.form != "views"
                pick = lambda out, turn=turn: loss_of(written(out, turn.writes, form), turn.subset)
                session.step(training.call, pick, peak=whole)

    return run


def _piece(part: Part, module: Callable[[str], Any]) -> Any:
    if part.way:
        return module("memory")._Reads(module(part.file).PLACES[part.name](), part.way)
    return module(part.file).PIECES[part.name]()


def parts() -> st.SearchStrategy[Part]:
    """Pieces of all kinds: half of them work, a quarter remembers, a quarter reads places."""
    usual = [Part(file, name) for file in ("pieces", "memory") for name in NAMES[file] if name not in REFUSED]
    works, remembers = [p for p in usual if p.file == "pieces"], [p for p in usual if p.file == "memory"]
    read = [(file, name) for file in places.FILES for name in NAMES[file] if name not in REFUSED]
    ways = st.sampled_from(["direct", "property", "hook"])
    reads = st.tuples(st.sampled_from(read), ways).map(lambda both: Part(*both[0], both[1]))
    rare = [Part("memory", name) for name in NAMES["memory"] if name in REFUSED]
    return st.integers(0, 39).flatmap(
        lambda n: st.sampled_from(works) if n < 19 else st.sampled_from(remembers) if n < 29
        else reads if n < 39 else st.sampled_from(rare)
    )  # fmt: skip


def changes() -> st.SearchStrategy[tuple[str, int, int]]:
    """Two thirds of the changes are of pieces."""
    index = st.integers(0, 7)
    of_pieces = st.tuples(st.just("piece"), index, index)
    return st.one_of(of_pieces, of_pieces, st.tuples(st.sampled_from(GLOBALS), index, index))


def recipes(most_parts: int = 4, most_rounds: int = 3) -> st.SearchStrategy[Recipe]:
    """Programs with state, and what happens to them."""
    subset, writes = st.integers(0, 7), st.sampled_from([0, 0, 0, 1, 2, 3])
    later = st.builds(Round, st.lists(changes(), min_size=1, max_size=3).map(tuple), subset, writes)
    first = st.builds(Round, st.just(()), subset, writes)
    rounds = st.tuples(first, st.lists(later, min_size=1, max_size=most_rounds - 1)).map(lambda r: (r[0], *r[1]))
    return st.builds(
        Recipe,
        parts=st.lists(parts(), min_size=1, max_size=most_parts).map(tuple),
        form=st.sampled_from(list(FORMS)),
        region=st.sampled_from(REGIONS),
        mask=st.sampled_from(["none", "ones", "padding"]),
        input_grad=st.booleans(),
        budget=st.sampled_from([0.9, 0.75, 0.6]),
        rounds=rounds,
    )


def tally(recipe: Recipe, outcome: str, counts: Counter[str]) -> None:
    """Counts what kinds of examples were seen, and how they went."""
    counts["examples"] += 1
    counts[outcome] += 1
    counts[f"region {recipe.region}"] += 1
    counts["reads places"] += any(part.way for part in recipe.parts)
    counts["remembers"] += any(part.file == "memory" for part in recipe.parts)
