"""Where Dynamo differs from Python: the order of sets, deques of limited length, NumPy, which objects are one,
iterators, generators that are left, and classes of parameters.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import assert_equal
from torch import Tensor, nn

import fckpt

LAYERS = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
W = torch.randn(8, 8, requires_grad=True)
X = torch.randn(4, 8)
REFUSES_DEQUES = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
"""Whether Dynamo refuses functions that write to deques."""


def through(indices: Any, x: Tensor) -> Tensor:
    for i in indices:
        x = LAYERS[i](x).tanh()
    return x.square().mean()


def added(x: Tensor) -> Tensor:
    chosen = set()
    for i in (5, 2, 0):
        chosen.add(i)
    return through(chosen, x)


CHOSEN = [5, 3, 4, 0]
SETS: dict[str, Callable[[Tensor], Tensor]] = {
    "set of a list": lambda x: through(set(CHOSEN), x),
    "frozenset": lambda x: through(frozenset(CHOSEN), x),
    "difference": lambda x: through({5, 4, 1, 0} - {4}, x),
    "union": lambda x: through({5, 1} | {0, 2}, x),
    "comprehension": lambda x: through({(k * 7) % 5 for k in range(5, 0, -1)}, x),
    "added": added,
    "list of a set": lambda x: through(list(set(CHOSEN)), x),
    "keys": lambda x: through(dict.fromkeys(set(CHOSEN)), x),
    "unpacked": lambda x: through([*set(CHOSEN)], x),
    "pop": lambda x: through([set(CHOSEN).pop()], x),
    "sorted": lambda x: through(sorted(set(CHOSEN)), x),
    "largest": lambda x: through([max(set(CHOSEN)), len(set(CHOSEN)), 3 in set(CHOSEN)], x),
    "one item": lambda x: through({3}, x),
}


WIDE = [8, 16, 0, 24, 3, 0]
"""Numbers that take each other's places in a hash table, so that their order depends on what was in it before."""


def without(x: Tensor, remove: Callable[[set[int]], Any]) -> Tensor:
    chosen = {40, *WIDE}
    remove(chosen)
    return through([n // 8 for n in chosen], x)


SETS |= {
    "of equal places": lambda x: through([n // 8 for n in set(WIDE)], x),
    "copied": lambda x: through([n // 8 for n in set(set(WIDE))], x),  # noqa: C414  a set of a set has another table
    "copy": lambda x: through([n // 8 for n in set(WIDE).copy()], x),
    "joined": lambda x: through([n // 8 for n in set(WIDE) | {5, 32}], x),
    "updated": lambda x: without(x, lambda chosen: chosen.update({1, 32})),
    "discarded": lambda x: without(x, lambda chosen: chosen.discard(40)),
    "removed": lambda x: without(x, lambda chosen: chosen.difference_update({8, 40})),
    "subtracted": lambda x: without(x, lambda chosen: chosen.__isub__({16, 0})),
}


@pytest.mark.parametrize("name", SETS)
def test_sets_are_iterated_over_in_pythons_order(name: str) -> None:
    fn, parameters = SETS[name], list(LAYERS.parameters())
    planned = fckpt.remat(fn, budget=1.0)
    for _ in range(2):
        got, want = (torch.autograd.grad(f(X), parameters, allow_unused=True) for f in (planned, fn))
        assert_equal(got, want)
    known = ("set of a list", "sorted", "largest", "one item")
    assert fckpt.stats(planned).captures or name not in known


def test_a_set_from_outside_keeps_its_order() -> None:
    held = {5, 1, 3}
    fn = lambda x: through(held, x)
    planned = fckpt.remat(fn, budget=1.0)
    assert_equal(planned(X), fn(X))
    held.add(0)
    assert_equal(planned(X), fn(X))


def test_an_intermediate_that_is_made_to_require_grad() -> None:
    """As Hugging Face's `enable_input_require_grads` does, for checkpoints behind a frozen embedding."""
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 8)
    embedding.weight.requires_grad_(False)
    embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    fn = lambda i: head(embedding(i)).tanh().sum()
    planned, i = fckpt.remat(fn, budget="1MiB"), torch.arange(4)
    for _ in range(2):
        assert_equal(*(torch.autograd.grad(f(i), list(head.parameters())) for f in (planned, fn)))
    assert fckpt.stats(planned).captures or REFUSES_DEQUES  # torch 2.11 refuses to set it in a captured function


DEQUES: dict[str, Callable[[Any, Tensor], Any]] = {
    "append": lambda held, t: held.append(t),
    "appendleft": lambda held, t: held.appendleft(t),
    "extend": lambda held, t: held.extend([t, t + 1]),
    "extendleft": lambda held, t: held.extendleft([t, t + 1]),
    "popleft": lambda held, t: (held.append(t), held.append(t * 2), held.popleft()),
    "copy": lambda held, t: (held.append(t), held.copy().append(t)),
    "insert": lambda held, t: held.insert(0, t),
    "rotate": lambda held, t: (held.append(t), held.rotate(1)),
}


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("limit", [3, None])
@pytest.mark.parametrize("name", DEQUES)
def test_deques_of_limited_length_drop_items(name: str, limit: int | None) -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        held: collections.deque[Tensor] = collections.deque(maxlen=limit)

        def fn(x: Tensor) -> Tensor:
            DEQUES[name](held, (x * 1).detach())
            return (x @ W).mean() + sum((t @ W).square().mean() * (i + 1) for i, t in enumerate(held))

        region, found = wrap(fn), []
        for number in range(6):
            loss = region(X + number)
            found.append((loss, torch.autograd.grad(loss, W), [t.clone() for t in held]))
        return found

    try:
        want: Any = run(lambda fn: fn)
    except IndexError:
        with pytest.raises((IndexError, fckpt.TraceError)):
            run(lambda fn: fckpt.remat(fn, budget=1.0))
        return
    try:
        got = run(lambda fn: fckpt.remat(fn, budget=1.0))
    except fckpt.TraceError:
        assert REFUSES_DEQUES or name in ("copy", "rotate", "insert")
        return
    assert_equal(got, want)


@pytest.mark.skipif(REFUSES_DEQUES, reason="such functions are refused")
@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
def test_a_deque_with_another_limit_is_another_function() -> None:
    class Window:
        held: ClassVar[collections.deque[Tensor]] = collections.deque([X, X], maxlen=2)

    def fn(x: Tensor) -> Tensor:
        Window.held.append((x * 1).detach())
        return sum(((t @ W).sin().sum() for t in Window.held), torch.zeros(()))

    planned = fckpt.remat(fn, budget=1.0)
    for limit in (2, 3, 2):
        Window.held = collections.deque([X, X], maxlen=limit)
        want = fn(X)
        Window.held = collections.deque([X, X], maxlen=limit)
        assert_equal(planned(X), want)


class Numbers:
    double, single, integer = np.float64(0.3), np.float32(0.3), np.int64(3)
    array = np.array([1.0, 2.0])
    table = np.sin(np.arange(8, dtype=np.float32))


NUMPY: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda x: (x @ W / np.sqrt(x.shape[-1])).sin().sum(),
    "scaled loss": lambda x: (x @ W).sum() * np.sqrt(2.0),
    "attribute": lambda x: (x @ W).sum() * Numbers.double,
    "float32": lambda x: (x @ W).bfloat16().sum() * Numbers.single,
    "power": lambda x: ((x @ W) ** Numbers.integer).sum() + ((x @ W) ** np.float64(2)).sum(),
    "quotient": lambda x: (np.float64(2) / (x @ W).exp()).sum(),
    "item": lambda x: (x @ W).sum() * Numbers.array[1] * np.linspace(0, 1, 5)[2],
    "table": lambda x: (x @ W * torch.from_numpy(Numbers.table)).sum(),
    "computed table": lambda x: (x @ W * torch.from_numpy(np.exp(np.sin(np.arange(8, dtype=np.float32))))).sum(),
    "order": lambda x: (x @ W)[:, torch.from_numpy(np.argsort(np.array([1, 1, 0, 0, 1, 1, 0, 0])))].sin().sum(),
    "mean": lambda x: (x @ W).sum() * np.mean([1, 2, 4]),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_computes_what_numpy_computes(name: str) -> None:
    fn = NUMPY[name]
    planned = fckpt.remat(fn, budget=1.0)
    for x in (X, X * 2):
        got, want = planned(x), fn(x)
        assert got.dtype == want.dtype
        assert_equal((got, torch.autograd.grad(got, W)), (want, torch.autograd.grad(want, W)))


def test_a_number_of_numpy_that_changes_is_seen() -> None:
    scales = {"now": np.float64(0.3)}
    fn = lambda x: (x @ W).sum() * scales["now"]
    planned = fckpt.remat(fn, budget=1.0)
    for number in (0.3, 0.5, 0.3):
        scales["now"] = np.float64(number)
        assert_equal(planned(X), fn(X))


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
def test_numbers_of_numpy_do_not_change_other_captures() -> None:
    numbers = (1.5, np.float32(2.5), np.bool_(True), np.bool_(False), np.int64(3))
    held: dict[str, Any] = {}
    fn = lambda x: ((x @ W).sum() * held["now"], torch.arange(3) * held["now"], x.half() * held["now"])
    planned = fckpt.remat(fn, budget=1.0)
    for number in numbers * 2:
        held["now"] = number
        got, want = planned(X), fn(X)
        assert_equal(got, want)
        assert [t.dtype for t in got] == [t.dtype for t in want]
        held.clear()
        other = fckpt.remat(lambda x: (x.sin(), True, False, None, 0, 1), budget=1.0)(X)
        assert other[1:] == (True, False, None, 0, 1) and [type(v) for v in other[1:3]] == [bool, bool]


NEW: dict[str, Callable[[], Any]] = {
    "int": lambda: int("1000"),
    "str": lambda: "".join(["a", " b"]),
    "tuple": lambda: tuple([1, 2]),  # noqa: C409
    "float": lambda: float("0.5"),
}


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("kind", NEW)
def test_equal_values_that_are_one_object_or_two(kind: str) -> None:
    held = [NEW[kind](), NEW[kind]()]
    fn = lambda x: (x @ W).sum() * (2 if held[0] is held[1] else 3) * (5 if held[0] is not held[1] else 7)
    planned = fckpt.remat(fn, budget=1.0)
    for same in (False, True, False, True, True):
        held[0] = NEW[kind]()
        held[1] = held[0] if same else NEW[kind]()
        assert_equal(planned(X), fn(X))


FIVE = 5


class Counter(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x @ W).sum() * (2 if self.calls is FIVE else 3)


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
def test_a_counter_that_becomes_a_certain_object() -> None:
    plain, planned = Counter(), fckpt.remat(Counter(), budget=1.0)
    for _ in range(7):
        assert_equal(planned(X), plain(X))


ITERATORS: dict[str, Callable[[Tensor], Any]] = {
    "generator": lambda x: (v for v in [x.sin(), x.cos()]),
    "numbers": lambda x: (x.sin(), (i for i in range(3))),
    "iter": lambda x: (x.sin(), iter([1, 2])),
    "enumerate": lambda x: (x.sin(), enumerate([1, 2])),
    "map": lambda x: map(lambda v: v * 2, [x.sin(), x.cos()]),  # noqa: C417
    "zip": lambda x: (x.sin(), zip([1], [2], strict=True)),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_that_is_returned_is_new_at_each_call(name: str) -> None:
    fn = ITERATORS[name]
    planned = fckpt.remat(fn, budget=1.0)

    def listed(found: Any) -> Any:
        return [type(found), [v if isinstance(v, Tensor) or type(v) is int else listed(v) for v in found]]

    for _ in range(2):
        try:
            got = planned(X)
        except fckpt.TraceError as error:
            assert "returns a" in str(error)
            continue
        assert_equal(listed(got), listed(fn(X)))


class Closing:
    closed: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.closed.append(1)


def test_an_object_that_is_made_is_deleted_once() -> None:
    def fn(x: Tensor) -> Tensor:
        held = Closing()
        del held
        return (x @ W).sum()

    planned = fckpt.remat(fn, budget=1.0)
    for calls in (1, 2):
        try:
            planned(X)
        except fckpt.TraceError:
            Closing.closed.clear()
            continue
        assert len(Closing.closed) == calls


class Cleaning(nn.Module):
    """Reads chunks from a generator that restores a factor at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 8), 1.0

    def chunks(self, x: Tensor) -> Iterator[Tensor]:
        self.factor = 2.0
        try:
            for chunk in x.chunk(2):
                yield self.layer(chunk)
        finally:
            self.factor = 1.0

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        for found in self.chunks(x):
            last = found
            if not whole:
                break
        return last.sum() * self.factor


@pytest.mark.parametrize("whole", [True, False])
def test_generators_that_are_left_clean_up(whole: bool) -> None:
    plain = Cleaning()
    planned = fckpt.remat(copy.deepcopy(plain), budget=1.0)
    want = plain(X, whole)
    try:
        assert_equal(planned(X, whole), want)
    except fckpt.TraceError:
        assert not whole


class Marked(nn.Parameter):
    """A class of parameters that redefines nothing."""


class Doubled(nn.Parameter):
    def sin(self) -> Any:
        return 2 * super().sin()


class Weighted(nn.Module):
    def __init__(self, python: bool) -> None:
        super().__init__()
        self.weight, self.python = Marked(torch.randn(8, 8)), python
        self.weight.scale = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Marked and isinstance(self.weight, nn.Parameter)
        if self.python:
            for i in {1, len(x)}:  # Dynamo does not follow the order of a set
                x = x * i
        return (x @ self.weight * self.weight.scale).tanh().sum()  # type: ignore[attr-defined]


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": fckpt.policies.nothing_saveable}], ids=str)
def test_a_class_of_parameters_that_redefines_nothing(options: Any, python: bool) -> None:
    plain = Weighted(python)
    net = copy.deepcopy(plain)
    planned = fckpt.remat(net, **options)
    for scale in (2.0, 3.0, 3.0):
        plain.weight.scale = net.weight.scale = scale  # type: ignore[attr-defined]
        loss, want = planned(X), plain(X)
        loss.backward()
        want.backward()
        assert_equal([loss, net.weight.grad], [want, plain.weight.grad])
    assert fckpt.stats(planned).fallbacks == {}


def test_a_class_of_parameters_that_redefines_a_method_is_named() -> None:
    weight = Doubled(torch.randn(3))
    with pytest.raises(fckpt.TraceError, match="a tensor of the class Doubled cannot be traced"):
        fckpt.remat(lambda: weight.sin().sum(), budget=1.0)()
