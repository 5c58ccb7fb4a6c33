"""A recompute sees the Python state that its forward saw."""

from __future__ import annotations

import argparse
import collections
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, leaf
from torch import Tensor, nn

import fckpt

FLAG = True
SETTINGS = {"temperature": 1.0, "nested": {"steps": [1, 2]}}
W = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)) / 3


class Config:
    temperature = 1.0

    def __init__(self) -> None:
        self.scale = 1.0
        self.modes = ["relu"]


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Block(nn.Module):
    factor = 1.0

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.1)
        self.config = config or Config()
        self.scale = 1.0
        self.sizes = [1.0, 2.0]

    def helper(self, h: Tensor) -> Tensor:
        return h * SETTINGS["temperature"] if FLAG else h.cos()

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.linear(x)))
        h = (
            self.helper(h)
            * self.scale
            * self.sizes[0]
            * self.config.scale
            * self.factor
            * type(self.config).temperature
        )
        return torch.tanh(h if self.config.modes[0] == "relu" else h.sin()).exp().sin()


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


Change = Callable[[Any], None]
IN_A_MODULE: dict[str, tuple[Change, Change]] = {
    "a global that a method reads": (lambda m: set_global("FLAG", False), lambda m: set_global("FLAG", True)),
    "an item of a global dict": (
        lambda m: SETTINGS.update(temperature=3.0),
        lambda m: SETTINGS.update(temperature=1.0),
    ),
    "an attribute": (lambda m: setattr(m, "scale", 2.0), lambda m: None),
    "an item of a list": (lambda m: m.sizes.__setitem__(0, 3.0), lambda m: None),
    "an attribute of a config": (lambda m: setattr(m.config, "scale", 0.5), lambda m: None),
    "an item of a list of a config": (lambda m: m.config.modes.insert(0, "sin"), lambda m: None),
    "another config": (lambda m: setattr(m, "config", argparse.Namespace(scale=2.0, modes=["x"], temperature=1.0)),
        lambda m: None),
    "a class attribute of the module": (
        lambda m: setattr(Block, "factor", 2.0),
        lambda m: setattr(Block, "factor", 1.0),
    ),
    "a class attribute of a config": (
        lambda m: setattr(Config, "temperature", 2.0),
        lambda m: setattr(Config, "temperature", 1.0),
    ),
    "the rate of dropout": (lambda m: setattr(m.drop, "p", 0.7), lambda m: None),
    "the mode": (lambda m: m.eval(), lambda m: None),
    "another activation": (lambda m: setattr(m, "drop", nn.Tanh()), lambda m: None),
}  # fmt: skip


def module_gradients(wrap: Any, change: Change, back: Change) -> list[Any]:
    """Two forwards, a change between them, and both backwards after it."""
    argparse.Namespace.temperature = 1.0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    block = Block()
    module = wrap(block)
    x = leaf(torch.randn(4, 6))
    try:
        first = module(x)
        change(block)
        second = module(x)
        (first.sum() + 2 * second.sum()).backward()
    finally:
        back(block)
        del argparse.Namespace.temperature  # type: ignore[attr-defined]
    return [first, second, x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("wrap", [fckpt.remat, lambda m: fckpt.remat(lambda x: m(x)), lambda m: fckpt.remat(m.forward)])
@pytest.mark.parametrize("name", IN_A_MODULE)
def test_state_of_modules_that_changes_between_two_forwards(name: str, wrap: Any) -> None:
    assert_equal(module_gradients(wrap, *IN_A_MODULE[name]), module_gradients(lambda m: m, *IN_A_MODULE[name]))


class Scaled:
    """An object that is no module; what its method reads is a global, a tensor and an attribute of its class."""

    factor = 1.0

    def value(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ W) * self.factor * SETTINGS["temperature"] * (1.0 if FLAG else 2.0)).sin().exp()


IN_AN_OBJECT: dict[str, tuple[str, Any]] = {
    "a global": ("FLAG", False),
    "another global dict": ("SETTINGS", {"temperature": 3.0}),
    "a global tensor": ("W", W + 1),
}


@pytest.mark.parametrize("name", [*IN_AN_OBJECT, "a class attribute"])
@pytest.mark.parametrize("how", ["a closure", "a method"])
def test_what_methods_of_objects_read_that_changes_before_the_backward(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, x = Scaled(), leaf(torch.randn(4, 6))
    wanted = torch.autograd.grad(found.value(x).sum(), x)
    result = fckpt.remat(found.value if how == "a method" else lambda x: found.value(x))(x)
    if name in IN_AN_OBJECT:
        place, value = IN_AN_OBJECT[name]
        monkeypatch.setitem(globals(), place, value)
    else:
        monkeypatch.setattr(Scaled, "factor", 2.0)
    assert_equal(torch.autograd.grad(result.sum(), x), wanted)


def in_closures() -> Iterator[Any]:
    flag, settings, config, slotted = True, {"a": 1.0, "deep": {"b": [1.0]}}, Config(), Slotted()
    space, ordered = types.SimpleNamespace(scale=1.0), collections.OrderedDict(a=1.0)
    names = {"relu"}

    def fn(x: Tensor) -> Tensor:
        h = torch.relu(x @ W)
        h = h * settings["a"] * settings["deep"]["b"][0] * config.scale * slotted.scale * space.scale  # type: ignore[index]
        h = h * ordered["a"] * Config.temperature
        h = h if flag and FLAG and "relu" in names else h.cos()
        return torch.tanh(h if "debug" not in settings else h.sin()).exp().sin()

    def switch() -> None:
        nonlocal flag
        flag = not flag

    def both(set_: Any, name: str, old: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        return lambda: set_(name, 2.0), lambda: set_(name, old)

    yield fn
    yield switch, lambda: None
    yield lambda: set_global("FLAG", False), lambda: set_global("FLAG", True)
    yield lambda: settings.update(a=3.0), lambda: None
    yield lambda: settings.update(debug=True), lambda: None
    yield lambda: settings["deep"]["b"].insert(0, 2.0), lambda: None  # type: ignore[index]
    yield lambda: setattr(config, "scale", 2.0), lambda: None
    yield lambda: setattr(slotted, "scale", 2.0), lambda: None
    yield lambda: setattr(space, "scale", 2.0), lambda: None
    yield lambda: setattr(Config, "temperature", 2.0), lambda: setattr(Config, "temperature", 1.0)
    yield lambda: names.add("other") or names.discard("relu"), lambda: None


def closure_gradients(number: int, region: bool, seed: int) -> list[Tensor]:
    changes = in_closures()
    fn = next(changes)
    change, back = list(changes)[number]
    fn = fckpt.remat(fn) if region else fn
    x = leaf(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
    try:
        first = fn(x)
        change()
        second = fn(x)
        (first.sum() + 2 * second.sum()).backward()
    finally:
        back()
    return [first, second, x.grad]


@pytest.mark.parametrize("number", range(10))
def test_state_of_closures_that_changes_between_two_forwards(number: int) -> None:
    for seed in range(20):
        assert_equal(closure_gradients(number, True, seed), closure_gradients(number, False, seed))


def test_a_difference_that_no_walk_finds_shows_in_a_sample_spread_over_the_values() -> None:
    """Relu makes the head of a value zero; what is compared lies all over it."""
    missed = 0
    for seed in range(200):
        factors = iter([1.0, 2.0])
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        x[0] = -1.0
        fn = fckpt.remat(lambda x: torch.relu(x * next(factors)).square().sin())
        try:
            fn(x.requires_grad_()).sum().backward()
        except fckpt.ImpureFunctionError:
            continue
        missed += 1
    assert missed == 0


def test_memory_that_an_operation_leaves_as_it_was_is_not_compared() -> None:
    """`ctc_loss` saves a table with gaps: what lies there is whatever was there before."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)  # with other threads about, by-products are looked at
    thread.start()
    try:
        x = torch.randn(50, 4, 20, requires_grad=True)
        targets = torch.randint(1, 20, (4, 30))

        def loss(x: torch.Tensor) -> torch.Tensor:
            return F.ctc_loss((x * 2).log_softmax(-1), targets, (50,) * 4, (5, 6, 10, 3))

        expected = torch.autograd.grad(loss(x), x)[0]
        region = fckpt.remat(loss)
        for _ in range(8):
            value = region(x)
            dirt = [torch.full((4, 50, 61), float(i)) for i in range(8)]
            del dirt  # which the recompute may be given
            assert torch.equal(torch.autograd.grad(value, x)[0], expected)
    finally:
        stop.set()
        thread.join()


def test_dropout_around_a_gradient_inside_while_another_thread_is_idle() -> None:
    """The backward pass inside of the forward recomputes a part, which ends with other random numbers to come."""

    def penalty(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(F.dropout(torch.tanh(x @ w), 0.3).sum(), x, create_graph=True)
        return found.square().mean() + F.dropout(found, 0.5).sum()

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        w, x = torch.randn(8, 8, requires_grad=True), torch.randn(16, 8)
        found = []
        for fn in (penalty, fckpt.remat(penalty)):
            torch.manual_seed(0)
            found.append((*torch.autograd.grad(fn(w, x), w), torch.get_rng_state()))
        assert all(map(torch.equal, *found))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("where", ["closure", "buffer", "argument"])
def test_a_recompute_finds_the_attributes_of_tensors(where: str) -> None:
    scale = torch.ones(6)
    scale.factor = 2.0  # type: ignore[attr-defined]
    holder = nn.Module()
    holder.register_buffer("scale", scale)

    def fn(x: Tensor, held: Any = None) -> Tensor:
        held = held if where == "argument" else holder.scale if where == "buffer" else scale
        return (x.sin() * held * held.factor).exp().sin()  # type: ignore[union-attr]

    got = []
    for f in (fn, fckpt.remat(fn)):
        x = leaf(W)
        f(x, *((scale,) if where == "argument" else ())).sum().backward()
        got.append(x.grad)
    assert_equal(got[1], got[0])


class Holder(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("place", ["variable", "dict", "namespace", "attribute"])
def test_a_captured_tensor_that_was_filled_in_place_before(place: str, shape: tuple[int, ...]) -> None:
    """Its version is not 0, but that of the copy on which a recompute may write is."""
    mask = torch.ones(shape)
    mask[..., 0] = 0.5
    mask.mul_(2)
    named: dict[str, Any] = {"mask": mask}
    space, holder = types.SimpleNamespace(mask=mask), Holder(mask)
    reads = {
        "variable": lambda: mask,
        "dict": lambda: named["mask"],
        "namespace": lambda: space.mask,
        "attribute": lambda: holder.mask,
    }
    read, w = reads[place], torch.randn(4, 4, requires_grad=True)
    fn = lambda x: (torch.sin(x @ w) * read()[..., None, :]).tanh().sum()
    wrapped = fckpt.remat(fn)
    for turn in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(torch.autograd.grad(wrapped(x), w)[0], torch.autograd.grad(fn(x), w)[0])
        if turn == 1:
            mask.add_(1)


class Kept(nn.Module):
    """Holds a method of another module, as `PeftModelForCausalLM` does, which reads a name of a built-in function."""

    def __init__(self, inner: nn.Module, kept: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.kept = inner, kept(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).cos().sum()


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin() * float("2")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "kept", [lambda m: m.forward, lambda m: [m.forward], lambda m: type(m).forward, lambda m: m.linear.forward]
)
def test_a_module_that_holds_a_method_of_another(kept: Callable[[Any], Any], whole: bool) -> None:
    model, x = Kept(Numbers(), kept), torch.randn(2, 6)
    model(x).backward()
    weight: Any = model.inner.linear.weight
    expected, weight.grad = weight.grad, None
    (fckpt.remat(model) if whole else fckpt.remat(lambda x: model(x)))(x).backward()
    assert torch.equal(weight.grad, expected) and "float" not in globals()


def test_a_global_that_is_made_after_the_forward_is_absent_in_the_recompute() -> None:
    def fn(x: Tensor) -> Tensor:
        try:
            scale = ADDED  # type: ignore[name-defined]
        except NameError:
            scale = 1.0
        return (x.sin() * scale).sum()

    x = leaf(W)
    y = fckpt.remat(fn)(x)
    globals()["ADDED"] = 2.0
    try:
        y.backward()
        assert globals()["ADDED"] == 2.0
    finally:
        del globals()["ADDED"]
    assert_equal(x.grad, W.cos())


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize("place", ["block", "inside"])
def test_hooks_with_keyword_arguments_that_are_there_for_one_forward(kind: str, place: str) -> None:
    """As peft registers them for `adapter_names` and aLoRA."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled(6, 6)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.inner(x).sin() * scale

    hooks: dict[str, Any] = {
        "forward": lambda module, args, kwargs, out: out * 2,
        "forward_pre": lambda module, args, kwargs: (args, {**kwargs, "scale": 2.0}),
    }
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 6)
    got = []
    for net in (model, nn.Sequential(*map(fckpt.remat, model))):
        chosen: list[Any] = [block if place == "block" else block.inner for block in net]
        handles = [getattr(m, f"register_{kind}_hook")(hooks[kind], with_kwargs=True) for m in chosen]
        loss = net(x).cos().sum()
        for handle in handles:
            handle.remove()
        got.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    assert_equal(got[1], got[0])
