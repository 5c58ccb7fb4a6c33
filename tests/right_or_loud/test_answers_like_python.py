"""Code that Dynamo answers unlike Python, or without a guard: one object in two places, sets, generators, texts."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fckpt

pytestmark = pytest.mark.filterwarnings("ignore::fckpt.PlanWarning", "ignore::fckpt.BudgetWarning")
W, X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.randn(4, 8), torch.randn(4, 8)
SCOPE: dict[str, Any] = {}
"""What the programs read; each call of `run` sets some of it."""


def run(fn: Callable[..., Any], *settings: dict[str, Any], args: Any = (X,)) -> None:
    """Checks that planned calls give what plain ones give, or are refused, while what the function reads changes."""
    torch._dynamo.reset()
    planned = fckpt.remat(fn, budget=10**6, solver="greedy")
    for values in settings:
        SCOPE.update(values)
        given = values.get("args", args)
        results = []
        for f in (fn, planned):
            try:
                results.append(f(*given))
            except Exception as error:
                results.append(error)
        plain, found = results
        if isinstance(found, fckpt.FckptError):
            return
        if isinstance(plain, Exception):
            assert type(found) is type(plain), values
        elif isinstance(plain, Tensor):
            assert isinstance(found, Tensor) and torch.equal(plain, found), values
        else:
            assert found == plain, values


class Holder:
    x: Any = None


HOLDER = Holder()
PLACES: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {
    "item": (lambda value: SCOPE.update(n=value), lambda: SCOPE["n"]),
    "attribute": (lambda value: setattr(HOLDER, "x", value), lambda: HOLDER.x),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["value", "none", "type"])
def test_a_global_that_is_the_argument(place: str, kind: str) -> None:
    write, read = PLACES[place]
    uses: dict[str, Callable[[], Any]] = {
        "value": lambda: read() if read() is not None else 1,
        "none": lambda: 2 if read() is None else 3,
        "type": lambda: 2 if isinstance(read(), Tensor) else 3,
    }
    fn = lambda x: torch.tanh(x @ W) * uses[kind]()
    planned = fckpt.remat(fn, budget=10**6, solver="greedy")
    for value in (X, Y, None, X, Y):
        write(value)
        assert torch.equal(fn(X), planned(X))


HEAD: list[nn.Module] = []


def test_a_module_that_is_also_global() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x)) + HEAD[0](x)

    model = Tied()
    planned = fckpt.remat(model, budget=10**6, solver="greedy")
    for head in (model.layer, nn.Linear(8, 8), model.layer):
        HEAD[:] = [head]
        assert torch.equal(model(X), planned(X))


class Todo(nn.Module):
    def __init__(self, change: Callable[[Any, int], None]) -> None:
        super().__init__()
        self.todo, self.change = {1, 2, 3}, change

    def forward(self, x: Tensor, k: int) -> Tensor:
        self.change(self, k)
        return torch.tanh(x @ W) * len(self.todo)


def _subtract(model: Any, k: int) -> None:
    model.todo -= {k}


def _subtract_and_add(model: Any, k: int) -> None:
    todo = model.todo
    todo -= {k}
    todo.add(k + 10)


def _intersect(model: Any, k: int) -> None:
    model.todo &= {k, k + 1}


@pytest.mark.parametrize("change", [_subtract, _subtract_and_add, _intersect])
def test_a_set_that_changes(change: Callable[[Any, int], None]) -> None:
    plain, model = Todo(change), Todo(change)
    planned = fckpt.remat(model, budget=10**6, solver="greedy")
    for k in (1, 2, 3):
        assert torch.equal(plain(X, k), planned(X, k))
        assert plain.todo == model.todo


def _counted(items: list[int]) -> Iterator[int]:
    yield from items
    return len(items)


def _walk(items: list[int]) -> Iterator[int]:
    count = yield from _counted(items)
    if not count:
        yield 5
    yield count


class Named:
    def __init__(self, a: int) -> None:
        self.a = a

    def __repr__(self) -> str:
        return f"a{self.a}"


class Mode(str, enum.Enum):  # noqa: UP042
    A = "a"


class Registry:
    items: dict[str, int] = {}  # noqa: RUF012

    def __class_getitem__(cls, key: str) -> int:
        return cls.items[key]


def _given(a: Any, b: Any = 2, **rest: Any) -> Any:
    return a + b + len(rest)


Point = collections.namedtuple("Point", "a b")
ASKED: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "yield from": (lambda: sum(_walk(SCOPE["v"])), [[1, 2], [], [3]]),
    "str": (lambda: len(str(SCOPE["v"])) if str(SCOPE["v"]) != "a2" else 7, [Named(1), Named(2), Named(1)]),
    "percent": (lambda: 2 if "%s" % (SCOPE["v"],) == "a2" else 3, [Named(1), Named(2), Named(1)]),  # noqa: UP031
    "str of a named tuple": (lambda: 2 if str(SCOPE["v"]) == "Point(a=1, b=2)" else 3, [Point(1, 2), Point(1, 3)]),
    "twice": (lambda: _given(1, 7, **SCOPE["v"]), [{"c": 1}, {"b": 3}, {"a": 1}]),
    "twice by keyword": (lambda: _given(a=1, **SCOPE["v"]), [{"c": 1}, {"a": 3}]),
    "an enum and a string": (lambda: {"a_x": 2}.get(SCOPE["v"] + "_x", 1), [Mode.A, "b", "a"]),
    "of a class": (lambda: Registry[SCOPE["v"]], ["a", "b", "a"]),
    "dates": (
        lambda: 2 if SCOPE["v"] == datetime.date(2020, 1, 1) else 3,
        [datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)],
    ),
    "decimals": (lambda: 2 if SCOPE["v"] in [decimal.Decimal(1)] else 3, [decimal.Decimal(1), decimal.Decimal(2)]),
    "class of a list": (lambda: 2 if SCOPE["v"].__class__ is list else 3, [[1], (1,), [2]]),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_code_asks(asked: str) -> None:
    compute, values = ASKED[asked]
    Registry.items = {"a": 2, "b": 3}
    run(lambda x: torch.tanh(x @ W) * compute(), *({"v": value} for value in values))


@pytest.mark.parametrize("fn", [lambda x: x in (x,), lambda x: (h := x * 2) in [h], lambda x: x[:2] in [x[:2], x]])
def test_a_tensor_in_a_container(fn: Callable[[Tensor], Any]) -> None:
    run(fn, {}, {})


@pytest.mark.parametrize("name", ["__len__", "__bool__"])
def test_a_method_that_a_class_gets_later(name: str) -> None:
    class Late:
        pass

    SCOPE["v"] = Late()
    fn = lambda x: torch.tanh(x @ W) * (2 if SCOPE["v"] else 3)
    planned = fckpt.remat(fn, budget=10**6, solver="greedy")
    assert torch.equal(fn(X), planned(X))
    setattr(Late, name, lambda self: False)
    assert torch.equal(fn(X), planned(X))


def test_named_tuples_as_keys() -> None:
    run(lambda x: torch.tanh(x @ W) * {(4, 8): 2}.get(Point(*x.shape), 3), {}, {"args": (X[:2],)})
    run(lambda x: torch.tanh(x @ W) * (2 if SCOPE["v"] in {(3, 3)} else 3), {"v": Point(3, 3)}, {"v": Point(3, 4)})


def test_sizes_that_are_results() -> None:
    """Also of a function that is traced as Python."""
    counts = (n for n in (1, 2, 3))
    for fn in (lambda x: (torch.tanh(x), x.shape, [x.size()]), lambda x: (torch.tanh(x) * next(counts), x.shape, [])):
        try:
            found = fckpt.remat(fn, budget=10**6)(X)
        except fckpt.FckptError:
            continue
        assert type(found[1]) is torch.Size and found[1] == X.shape
        assert all(type(size) is torch.Size for size in found[2])


def _delete(holder: Any) -> int:
    try:
        del holder.cache
    except AttributeError:
        return 2
    return 3


def _delete_by_name(holder: Any) -> int:
    if hasattr(holder, "cache"):
        delattr(holder, "cache")
        return 2
    return 3


@pytest.mark.parametrize("delete", [_delete, _delete_by_name])
def test_an_attribute_that_is_deleted(delete: Callable[[Any], int]) -> None:
    class Held:
        cache: int

    plain, holder = Held(), Held()
    fn = lambda x, h: torch.tanh(x @ W) * delete(h)
    planned = fckpt.remat(fn, budget=10**6, solver="greedy")
    for there in (True, False, True, True):
        for h in (plain, holder) if there else ():
            h.cache = 1
        try:
            found = planned(X, holder)
        except (fckpt.FckptError, Warning):
            return
        assert torch.equal(fn(X, plain), found)
        assert vars(plain) == vars(holder)


def test_items_of_a_class_change() -> None:
    fn = lambda x: torch.tanh(x @ W) * Registry["a"]
    planned = fckpt.remat(fn, budget=10**6, solver="greedy")
    for value in (2, 3, 2):
        Registry.items = {"a": value}
        try:
            found = planned(X)
        except fckpt.FckptError:
            return
        assert torch.equal(fn(X), found)


# -- tensors -----------------------------------------------------------------------------------------------------


def _no_grad_row(x: Tensor) -> Tensor:
    with torch.no_grad():
        row = x[0]
    return row.requires_grad_()


NEW: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": lambda x: x.detach().requires_grad_(),
    "a row": lambda x: x[0].detach().requires_grad_(),
    "a view of it": lambda x: x.detach().requires_grad_()[0],
    "parameter": lambda x: nn.Parameter(x.detach()),
    "under no_grad": _no_grad_row,
    "a view": lambda x: x[0],
    "itself": lambda x: x,
    "detached only": lambda x: x.detach(),
}


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("new", NEW)
def test_new_leaves_of_the_memory_of_an_argument(new: str, tracked: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x * w), NEW[new](x)

    found = []
    for f in (fn, fckpt.remat(fn, budget=10**6, solver="greedy")):
        torch.manual_seed(0)
        x, w = torch.randn(8, 3, requires_grad=tracked), torch.randn(3, requires_grad=True)
        try:
            y, z = f(x, w)
        except fckpt.TraceError:
            assert new not in ("a view", "itself", "detached only")
            return
        (y.sum() + (z * 5).sum()).backward()
        found.append([z.requires_grad, z.is_leaf, x.grad, w.grad, z.grad if z.is_leaf else None])
    plain, planned = found
    for a, b in zip(plain, planned, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("write", [torch._foreach_zero_, torch._foreach_neg_, lambda ts: torch._foreach_mul_(ts, 2.0)])
def test_lists_of_tensors_that_backward_needs(write: Callable[[list[Tensor]], Any]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        t = torch.sigmoid(x * w)
        y = t * w
        write([t])
        return y

    with pytest.raises((fckpt.FckptError, RuntimeError)):
        fckpt.remat(fn, budget=10**6)(X, torch.randn(8, requires_grad=True)).sum().backward()


def test_grad_fn_of_an_argument() -> None:
    fn = lambda x: torch.tanh(x @ W) * (2 if x.grad_fn is None else 3)
    leaf = torch.randn(4, 8, requires_grad=True)
    run(fn, {"args": (leaf,)}, {"args": (leaf * 2,)}, {"args": (leaf,)})
