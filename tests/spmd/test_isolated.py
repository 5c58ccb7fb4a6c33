"""Simulated ranks are as alone as processes: each has its own globals, modules, tensors, caches and generators."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import spmd_programs
import torch
from torch import Tensor, nn

import fckpt
from fckpt import P
from fckpt.errors import ArgumentTypeError

F64 = torch.float64
RANKS = 3
SIM = fckpt.sim({"a": RANKS})
X = torch.randn(RANKS, 5, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
COUNT = 0


def rank() -> int:
    return int(fckpt.axis_index("a"))


def network(**options: Any) -> nn.Module:
    torch.manual_seed(2)
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).to(F64)
    return fckpt.remat(made, **options) if options.pop("region", bool(options)) else made


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- state of a program's own ----------------------------------------------------------------------


def counts_globally() -> int:
    global COUNT
    for _ in range(2):
        fckpt.psum(torch.ones(1), "a")
        COUNT += 1
    return COUNT


def test_globals():
    assert SIM.run(counts_globally) == [2] * RANKS


def test_variables_containers_and_objects():
    number, seen, words, names = 0, [0], {"first": 0}, {"a"}

    class Counter:
        def __init__(self) -> None:
            self.value, self.log = 0, [1]

        def __call__(self) -> int:
            self.value += 1
            self.log.append(self.value)
            return self.value + len(self.log)

    counter = Counter()

    def program(given: list[int], *, named: dict[str, int]) -> Any:
        nonlocal number
        number += 1
        fckpt.psum(torch.ones(1), "a")
        seen.append(rank())
        given.append(rank())
        words[f"rank {rank()}"] = named["n"] = len(seen) + len(given)
        names.add(f"rank {rank()}")
        fckpt.psum(torch.ones(1), "a")
        return number, len(seen), len(given), len(words), len(names), counter(), named["n"]

    given: list[int] = []
    assert SIM.run(program, given, named={}) == [(1, 2, 1, 2, 2, 3, 3)] * RANKS
    # what they have added is there when the run is over
    assert seen == [0, 0, 1, 2] and given == [0, 1, 2] and list(words) == ["first", "rank 0", "rank 1", "rank 2"]
    assert names == {"a", "rank 0", "rank 1", "rank 2"} and number == 1 and counter.value == 1


def test_functions_with_a_cache():
    calls = []

    @functools.lru_cache
    def place(axis: str) -> int:
        calls.append(axis)
        return int(fckpt.axis_index(axis))

    assert SIM.run(lambda: (place("a"), place("a"))) == [(0, 0), (1, 1), (2, 2)] and len(calls) == RANKS


class Noted:
    last: Any = None
    every: list[int] = []  # noqa: RUF012  # a list that all objects share is what this is about


def test_attributes_of_classes():
    noted = Noted()

    def program() -> Any:
        Noted.last = rank()
        Noted.every.append(rank())
        fckpt.psum(torch.ones(1), "a")
        if not hasattr(Noted, "made"):
            Noted.made = [rank()]  # type: ignore[attr-defined]
        fckpt.psum(torch.ones(1), "a")
        return noted.last, [*noted.every], Noted.made  # type: ignore[attr-defined]

    try:
        assert SIM.run(program) == [(r, [r], [r]) for r in range(RANKS)]
        assert Noted.last == 0 and Noted.every == [0]
    finally:
        Noted.last, Noted.every = None, []
        del Noted.made  # type: ignore[attr-defined]


CALLS, SEEN, TOTAL = 0, [0], torch.zeros(2)


class Writing:
    """Its methods find their globals where they are, whoever has a copy of it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        SEEN.append(CALLS)
        self.count += 1
        TOTAL.add_(fckpt.axis_index("a") + 1)
        return fckpt.psum(x, "a") + TOTAL[0].clone()

    def state(self) -> Any:
        return CALLS, len(SEEN), self.count, TOTAL.tolist()


class Closing(Writing):
    """Is let go once."""

    ended: list[int] = []  # noqa: RUF012

    def __del__(self) -> None:
        self.ended.append(self.count)


@pytest.fixture
def written():
    global CALLS
    CALLS, SEEN[1:] = 0, []
    TOTAL.zero_()


@pytest.mark.parametrize("kind", [Writing, Closing])
def test_globals_of_methods(kind: type[Writing], written: None):
    found = kind()

    def program(x: Tensor) -> Any:
        found(found(x))
        return found.state()

    assert SIM.run(program, torch.ones(1)) == [(2, 3, 2, [2.0 * (r + 1)] * 2) for r in range(RANKS)]
    assert found.state() == (2, 1 + 2 * RANKS, 2, [2.0] * 2) and [0, *[1, 2] * RANKS] == SEEN
    if kind is Closing:
        Closing.ended.clear()
        del found, program
        gc.collect()
        assert Closing.ended == [2]


@pytest.mark.parametrize("kind", [Writing, Closing])
def test_the_check_writes_nothing(kind: type[Writing], written: None):
    found, words = kind(), []

    def step(x: Tensor) -> Tensor:
        words.append("step")
        return found(x)

    def program() -> Any:
        mapped = fckpt.shard_map(step, fckpt.init_mesh({"a": -1}), in_specs=P("a"), out_specs=P("a"))
        mapped(torch.ones(1))
        return found.state(), [*words]

    assert SIM.run(program) == [((1, 2, 1, [r + 1.0] * 2), ["step"]) for r in range(RANKS)]


# ---- tensors and modules ---------------------------------------------------------------------------


def test_tensors_are_written_by_one_rank():
    weight, leaf = torch.zeros(2), torch.ones(2, requires_grad=True)
    alias = weight[:1]

    def program(x: Tensor) -> Any:
        for _ in range(2):
            weight.add_(fckpt.psum(torch.ones(2), "a"))
            (leaf * (rank() + 1)).sum().backward()
        x.add_(rank())
        return weight.tolist(), float(alias), leaf.grad.tolist(), x.tolist()  # type: ignore[union-attr]

    found = SIM.run(program, torch.zeros(1))
    assert found == [([6.0, 6.0], 6.0, [2.0 * (r + 1)] * 2, [float(r)]) for r in range(RANKS)]


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "remat": {"region": True},
    "budget": {"budget": 10**7},
    "policy": {"policy": fckpt.policies.dots_saveable},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("way", ["backward", "functional_call", "from_module", "grad of functional_call"])
def test_modules_made_outside_are_those_made_inside(how: str, way: str):
    def steps(model: nn.Module, apply: Any = None) -> list[Tensor]:
        if way == "backward":
            for _ in range(2):
                fckpt.psum(model(X[rank()]), "a").square().sum().backward()
            return [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]  # type: ignore[misc]
        params = {name: p.detach() for name, p in model.named_parameters()}
        buffers = lambda: {name: b.clone() for name, b in model.named_buffers()}
        if way == "from_module":
            apply, _, _ = apply
            loss = lambda p: fckpt.psum(apply(p, buffers(), X[rank()])[0], "a").square().sum()
            return [*fckpt.grad(loss)(params).values()]
        loss = lambda p: fckpt.psum(torch.func.functional_call(model, (p, buffers()), (X[rank()],)), "a").square().sum()
        if way == "functional_call":
            leaves = {name: p.requires_grad_() for name, p in params.items()}
            return [*torch.autograd.grad(loss(leaves), [*leaves.values()])]
        return [*torch.func.grad(loss)(params).values()]

    def inside() -> list[Tensor]:
        model = network(**HOW[how])
        return steps(model, fckpt.from_module(model) if way == "from_module" else None)

    model = network(**HOW[how])
    applied = fckpt.from_module(model) if way == "from_module" else None
    expected = SIM.run(inside)
    for found, own in zip(SIM.run(lambda: steps(model, applied)), expected, strict=True):
        assert equal(found, own)


def global_loss(w: Tensor, x: Tensor) -> Tensor:
    return fckpt.psum(torch.tanh(torch.tanh(x @ w) @ WEIGHT), "a").square().sum()


REGIONS = [fckpt.remat(global_loss), fckpt.remat(global_loss, budget=10**7)]


@pytest.mark.parametrize("region", REGIONS, ids=["remat", "budget"])
@pytest.mark.parametrize("grad", [torch.func.grad, fckpt.grad])
def test_a_global_tensor_in_many_runs(region: Any, grad: Any):
    w = torch.randn(4, 4, dtype=F64)
    program = lambda: grad(region)(w, X[rank()])
    expected = SIM.run(lambda: grad(global_loss)(w, X[rank()]))
    for _ in range(40):
        assert equal(SIM.run(program), expected)


def test_an_optimizer_made_outside_trains_each_ranks_own_model():
    model = nn.Linear(4, 1).to(F64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    start = copy.deepcopy(model.state_dict())

    def train(model: nn.Module, optimizer: Any) -> Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            (model(X[rank()]).square().mean() * (rank() + 1)).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def inside() -> Tensor:
        own = nn.Linear(4, 1).to(F64)
        own.load_state_dict(start)
        return train(own, torch.optim.Adam(own.parameters(), lr=0.1))

    expected = SIM.run(inside)
    for program in (lambda: train(model, optimizer), lambda: train(*[model, optimizer])):
        model.load_state_dict(start)
        optimizer.load_state_dict(torch.optim.Adam(model.parameters(), lr=0.1).state_dict())
        assert equal(SIM.run(program), expected)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ArgumentTypeError, match=r"uses Adam, made outside of it.* Make it in the program"):
        SIM.run(lambda: train(model, optimizer))


# ---- generators ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.rand(3).tolist(),
        lambda g: random.random(),
        lambda g: np.random.rand(),
        lambda g: torch.rand(3, generator=g["torch"]).tolist(),
        lambda g: g["python"].random(),
        lambda g: float(g["numpy"].random()),
    ],
    ids=["torch", "python", "numpy", "a generator of torch", "of python", "of numpy"],
)
def test_ranks_draw_as_processes_with_one_seed(draw: Any):
    def generators() -> dict[str, Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        return {
            "torch": torch.Generator().manual_seed(3),
            "python": random.Random(3),
            "numpy": np.random.default_rng(3),
        }

    given = generators()
    expected = [draw(given) for _ in range(4)]
    given = generators()

    def program() -> list[Any]:
        first = draw(given)
        if rank() == 1:
            draw(given)  # which no other rank sees
        fckpt.psum(torch.ones(1), "a")
        return [first, draw(given)]

    found = SIM.run(program)
    assert found[0] == found[2] == expected[:2] and found[1] == [expected[0], expected[2]]
    assert draw(given) == expected[2]  # the caller goes on where rank 0 has ended


def test_dropout_in_regions_is_that_of_the_forward():
    layer = nn.Linear(4, 4).to(F64)
    drop = lambda x: nn.functional.dropout(fckpt.psum(torch.tanh(layer(x)), "a"), 0.5)

    def program(fn: Any) -> list[Tensor]:
        torch.manual_seed(rank())
        x = X[rank()].clone().requires_grad_()
        return [*torch.autograd.grad(fn(x).square().sum(), [x, *layer.parameters()]), torch.rand(2)]

    for options in ({}, {"budget": 10**7}):
        for found, expected in zip(SIM.run(program, fckpt.remat(drop, **options)), SIM.run(program, drop), strict=True):
            assert equal(found, expected)


def test_random_numbers_vary_where_ranks_are_seeded_so():
    mesh_of = lambda: fckpt.init_mesh({"a": RANKS})
    noisy = lambda x: x + torch.rand(2)

    def program(seed: bool) -> Any:
        torch.manual_seed(rank() if seed else 0)
        return fckpt.shard_map(noisy, mesh_of(), in_specs=(P(),), out_specs=P())(torch.zeros(2))

    assert equal(SIM.run(program, False), [SIM.run(program, False)[0]] * RANKS)
    with pytest.raises(fckpt.ArgumentValueError, match="varies"):
        SIM.run(program, True)


def test_a_mesh_is_in_use_in_processes_as_in_a_simulation():
    program = spmd_programs.without_mapping
    assert fckpt.launch(program, 2) == fckpt.sim({"a": 2}).run(program)


numbers_of_batches = itertools.count()
batches = iter([torch.tensor([1.0]), torch.tensor([2.0])])
held = threading.Lock()


class Counted(type):
    count = 0


class OfMetaclass(metaclass=Counted):
    pass


def moves_on() -> tuple[Any, ...]:
    seen = [next(numbers_of_batches)]
    with held:  # a lock of another rank would be waited for without an end
        total = fckpt.psum(next(batches), "data")
    seen.append(next(numbers_of_batches))
    type(OfMetaclass).count += 1
    fckpt.psum(next(batches), "data")
    type(OfMetaclass).count += 1
    return seen, total.item(), type(OfMetaclass).count


def test_iterators_and_locks():
    assert fckpt.sim({"data": 3}).run(moves_on) == [([0, 1], 3.0, 2)] * 3
    assert next(numbers_of_batches) == 2  # rank 0 works on what the caller has


def test_a_generator_made_outside_is_refused():
    def drawn() -> Iterator[int]:
        yield from range(9)

    numbers, opened = drawn(), sys.stdout
    with pytest.raises(
        fckpt.ArgumentTypeError, match=r"uses generator .*drawn, made outside .* Make it in the program"
    ):
        fckpt.sim({"data": 2}).run(lambda: next(numbers))
    assert fckpt.sim({"data": 1}).run(lambda: (next(numbers), opened.closed)) == [(0, False)]


def test_the_check_moves_no_iterator_on():
    counted = itertools.count()

    def program() -> int:
        mapped = fckpt.shard_map(
            lambda x: x * next(counted), fckpt.init_mesh({"data": 2}), in_specs=P("data"), out_specs=P("data")
        )
        mapped(torch.ones(1))
        return next(counted)

    assert fckpt.sim({"data": 2}).run(program) == [1, 1]

    def mapped_generator() -> torch.Tensor:
        numbers = (i for i in range(9))
        mapped = fckpt.shard_map(
            lambda x: x * next(numbers), fckpt.init_mesh({"data": 2}), in_specs=P("data"), out_specs=P("data")
        )
        return mapped(torch.ones(1))

    with pytest.raises(
        fckpt.ArgumentTypeError, match=r"takes the next item of generator .*genexpr.* pass it as an argument"
    ):
        fckpt.sim({"data": 2}).run(mapped_generator)


def test_settings_of_torch():
    def program() -> tuple[torch.dtype, bool]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(int(fckpt.axis_index("data")) == 1)
        try:
            fckpt.psum(torch.ones(1), "data")  # a rank that ended here would put the setting back for all
            return torch.ones(1).dtype, torch.are_deterministic_algorithms_enabled()
        finally:
            torch.set_default_dtype(before)
            torch.use_deterministic_algorithms(False)

    assert fckpt.sim({"data": 3}).run(program) == [(torch.float64, rank == 1) for rank in range(3)]
    assert torch.get_default_dtype() is torch.float32


class Settings:
    made: Settings | None = None

    def __init__(self) -> None:
        self.rank = rank()

    @classmethod
    def get(cls) -> Settings:
        cls.made = cls.made or cls()
        return cls.made


def test_an_object_that_a_class_makes_once():
    def program() -> int:
        Settings.get()
        fckpt.psum(torch.ones(1), "a")
        return Settings.get().rank

    assert SIM.run(program) == [0, 1, 2]


def test_state_of_imported_modules(monkeypatch: pytest.MonkeyPatch):
    library = types.ModuleType("users_package")
    library.settings = types.ModuleType("users_package.settings")  # type: ignore[attr-defined]
    library.settings.Counter = type("Counter", (), {"__module__": "users_package", "number": 0})
    library.settings.options = library.settings.Counter()
    library.settings.options.own = 0
    monkeypatch.setitem(globals(), "users_package", library)

    def program() -> list[int]:
        settings: Any = users_package.settings  # type: ignore[name-defined]  # noqa: F821
        for _ in range(2):
            settings.Counter.number += rank() + 1
            settings.options.own += 10 * (rank() + 1)
            fckpt.psum(torch.ones(1), "a")
        return [settings.Counter.number, settings.options.own]

    assert SIM.run(program) == [[2, 20], [4, 40], [6, 60]]
    assert library.settings.Counter.number == 2  # rank 0 works on what the caller has


def test_weak_references():
    known: Any = weakref.WeakValueDictionary()

    def program() -> bool:
        known["mine"] = mine = Settings()
        fckpt.psum(torch.ones(1), "a")
        return known["mine"] is mine

    assert all(SIM.run(program))


def test_a_tensor_with_hooks_made_outside_is_refused():
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda g: g * 2)
    with pytest.raises(ArgumentTypeError, match=r"uses float32\[1\], made outside of it, which has hooks"):
        SIM.run(lambda: (weight * 2).backward())
