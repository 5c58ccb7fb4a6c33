"""What a planned function has read changes between calls: the call is the plain one, or an error."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import places
import pytest
import torch
from judge import Session, fresh, judge
from torch import Tensor, nn

import fckpt
from fckpt._late import late


def _files() -> dict[str, Path]:
    found = {}
    for path in places.FILES.values():
        with fresh(path) as module:
            found |= dict.fromkeys(module.PLACES, path)
    return found


FILES = _files()
"""The file of each place."""

MAY_REFUSE = {
    "NumPyArray", "ZeroDimensionalArray", "CachedProperty",
    "ContextVariable", "DecimalNumber", "FractionNumber", "ItemOfTensor", "MetaclassAttribute", "RegisteredClass",
    "ThreadLocal", "LruCached", "KeywordDefault", "ReplacedCode", "Complex", "UserDict", "ChainMap",
    "EnvironmentByFunction", "GlobalByName", "FileExists", "FileByPath", "FilesOfFolder", "FileMayBeRead", "Mask",
    "RecursionLimit", "CollectorEnabled", "NameOfThread", "LockIsTaken", "MappedFile", "Queue", "Database", "OfC",
    "ByNameInSystemModules",
}  # fmt: skip
"""Places that a plan may refuse to read, by an error."""

PYTHON_MAY_REFUSE = {"Nested", "LongDict", "LongList", "TensorOfGlobal"}
"""Further ones, where the function's Python code is traced."""

Reader = Callable[[Any], Callable[[Tensor, Tensor], Tensor]]


def body(x: Tensor, w: Tensor, number: Any) -> Tensor:
    """Some activations, on whose size a budget bears, and a number."""
    h = torch.tanh(x @ w).sin()
    return ((h * number).float().cos() @ w).exp().sin()


def directly(place: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: body(x, w, place.read())


class Scaled(nn.Module):
    def __init__(self, place: Any) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return body(x, w, self.place.read())


class Outer(nn.Module):
    def __init__(self, place: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(place)])

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, w)
        return x


def by_pre_hook(place: Any) -> nn.Module:
    module = Outer(place)
    plain = type("One", (), {"read": lambda self: 2})()
    module.layers[0].place = plain
    module.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * place.read(), args[1]))
    return module


def by_hook(place: Any) -> nn.Module:
    module = Outer(place)
    module.layers[0].place = type("One", (), {"read": lambda self: 2})()
    module.layers[0].register_forward_hook(lambda module, args, output: output * place.read())
    return module


def by_tensor_hook(place: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x @ w)
        h.register_hook(lambda g: g * place.read())
        return body(h, w, 1)

    return fn


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Any) -> Tensor:
        ctx.number = number
        return x * number

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.number, None


def by_autograd_function(place: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: Function.apply(body(x, w, 1), place.read())  # type: ignore[return-value]


def drawing(place: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that Dynamo does not capture: its Python code is traced."""
    generator = torch.Generator()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return body(x * torch.rand(32, generator=generator), w, place.read())

    return fn


WAYS: dict[str, Reader] = {
    "module": Outer,
    "pre-hook": by_pre_hook,
    "hook": by_hook,
    "tensor hook": by_tensor_hook,
    "autograd.Function": by_autograd_function,
}
WAYS_MAY_REFUSE = {"tensor hook"}


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Makes the place of a name, its classes and globals anew each time."""
    modules = []

    def make() -> Any:
        modules.append(fresh(FILES[request.param]))
        return modules[-1].__enter__().PLACES[request.param]()

    yield make
    for module in modules:
        module.__exit__(None, None, None)


def reading(session: Session, place: Any, way: Reader) -> None:
    """Calls twice, changes the number, and calls twice again."""
    session.undo(getattr(place, "close", lambda: None))
    x, w = session.leaf(96, 32), session.leaf(32, 32)
    f = session.region(way(place))
    session.step(lambda: f(x, w), times=2)
    place.write(3)
    session.step(lambda: f(x, w), times=2)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("place", FILES, indirect=True)
def test_a_number_that_changes(place: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    verdict = judge(lambda session: reading(session, place(), directly), budget=0.8)
    if request.node.callspec.params["place"] not in MAY_REFUSE:
        assert verdict.outcome == "equal", verdict.error
    assert not verdict.over


@pytest.mark.sweep(4, 2)
@pytest.mark.parametrize("place", FILES, indirect=True)
def test_a_number_that_changes_and_is_read_by_traced_python(
    place: Callable[[], Any], request: pytest.FixtureRequest
) -> None:
    verdict = judge(lambda session: reading(session, place(), drawing), budget=0.8)
    if request.node.callspec.params["place"] not in MAY_REFUSE | PYTHON_MAY_REFUSE:
        assert verdict.outcome == "equal", verdict.error


class Asking:
    """Asks for the signature of a function, for which Python reads the recursion limit."""

    def read(self) -> Any:
        return len(inspect.signature(body).parameters)


def test_a_signature_that_traced_python_asks_for() -> None:
    def scenario(session: Session) -> None:
        x, w = session.leaf(96, 32), session.leaf(32, 32)
        f = session.region(drawing(Asking()))
        session.step(lambda: f(x, w))

    assert judge(scenario, budget=0.8).outcome == "equal"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "place", ["Attribute", "ClassAttribute", "OrderedDict", "Global", "NumPyScalar"], indirect=True
)
def test_a_number_that_is_read_elsewhere(place: Callable[[], Any], way: str) -> None:
    verdict = judge(lambda session: reading(session, place(), WAYS[way]), budget=0.8)
    if way not in WAYS_MAY_REFUSE:
        assert verdict.outcome == "equal", verdict.error


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
@pytest.mark.parametrize("place", ["ClassAttribute", "Deque", "PatchedMethod"], indirect=True)
def test_a_number_that_changes_under_a_policy(place: Callable[[], Any], policy: str) -> None:
    chosen = getattr(fckpt.policies, policy)
    verdict = judge(lambda session: reading(session, place(), directly), budget=None, policy=chosen)
    assert verdict.outcome == "equal", verdict.error


SCALE = {"now": 0}


def test_traced_python_that_reads_what_changes_at_every_call_is_said() -> None:
    generator = torch.Generator()
    region = fckpt.remat(lambda x: (x * torch.rand(4, generator=generator) * SCALE["now"]).sin(), budget=1.0)
    x = torch.ones(4, requires_grad=True)
    with pytest.warns(fckpt.PlanWarning, match="third time in a row.*closure"):
        for _ in range(4):
            SCALE["now"] += 1
            region(x).sum().backward()


def test_what_changes_at_every_call_is_named_with_its_attribute() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    region = fckpt.remat(lambda x: model(x).sin(), budget=1.0)
    dropout: Any = model[1]
    with pytest.warns(fckpt.PlanWarning, match=r"changed: 1\.p == 0\.\d, read by .* in forward\)\. Pass"):
        for turn in range(4):
            dropout.p = 0.1 * (turn + 1)
            region(torch.ones(2, 4)).sum().backward()


def test_what_fckpt_imports_does_not_invalidate_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SciPy, which the first solved plan imports, registers classes with abstract base classes."""
    for name in ("late_library", "users_library"):
        code = "import collections.abc\nclass Sized(dict): pass\ncollections.abc.Sequence.register(Sized)\n"
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    def fn(x: torch.Tensor, kinds: list[int]) -> torch.Tensor:
        return x.sin().exp().sum() if isinstance(kinds, Sequence) else x.sum()

    planned, x = fckpt.remat(fn, budget=1.0), torch.randn(8, requires_grad=True)
    planned(x, [1])
    late("late_library")
    planned(x, [1])
    assert fckpt.stats(planned).captures == 1
    importlib.import_module("users_library")
    planned(x, [1])
    assert fckpt.stats(planned).captures == 2


def _sine(x: Tensor) -> Tensor:
    return x.sin()


class Edited(nn.Module):
    """Its methods are edited while the program runs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.method(x) * self.scale + self.static(x) * self.of_class(x) + _sine(x)

    def method(self, x: Tensor) -> Tensor:
        return x.sin()

    @property
    def scale(self) -> float:
        return 0.5

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x.exp()

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x.tanh()


class New:
    def forward(self, x: Tensor) -> Tensor:
        return self.method(x).cos()  # type: ignore[attr-defined]  # runs on an Edited

    def method(self, x: Tensor) -> Tensor:
        return x.cos()


EDITS: dict[str, tuple[Any, Any]] = {
    "forward": (Edited.forward, New.forward),
    "method": (Edited.method, New.method),
    "property": (vars(Edited)["scale"].fget, lambda self: 2.0),
    "static": (Edited.static, lambda x: x.sigmoid()),
    "class": (Edited.of_class.__func__, lambda cls, x: x.sigmoid()),
    "function": (_sine, lambda x: x.cos()),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", EDITS)
def test_code_that_is_replaced_in_place(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As IPython's autoreload does: the function stays, with other code."""
    model, x = Edited(), torch.randn(6, requires_grad=True)
    planned = fckpt.remat(model if whole else lambda x: model(x), budget=1.0)
    assert torch.equal(planned(x), model(x))
    edited, new = EDITS[name]
    monkeypatch.setattr(edited, "__code__", new.__code__)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(planned(x).sum(), x)[0], expected)
    monkeypatch.undo()
    assert torch.equal(planned(x), model(x))


def test_the_warning_of_the_third_capture_names_the_latest_change() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.first, self.second = nn.Linear(4, 4), 1, 1

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.first * self.second).square().mean()

    net, x = Scaled(), torch.randn(2, 4)
    region = fckpt.remat(net, budget=1.0)
    region(x)
    net.first = 2
    region(x)
    net.second = 2
    with pytest.warns(fckpt.PlanWarning, match=r"third time in a row.*changed: the function.second == 1"):
        region(x)


def test_training_and_evaluation_at_many_sizes_are_not_said_to_change_at_every_call() -> None:
    """Each has its capture, and so has a batch of one; calls in between use a capture that is there."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh())
    region = fckpt.remat(lambda net, x: net(x).square().mean(), budget="1MiB")
    for i, size in enumerate([(2, 16), (3, 20), (4, 12), (5, 17), (6, 11), (7, 9), (1, 9), (3, 5), (1, 4)]):
        region(net.train(i not in (3, 5)), torch.randn(*size, 8)).backward()
    with torch.no_grad():
        region(net.eval(), torch.randn(2, 3, 8))
    assert fckpt.stats(region).captures <= 4


def test_a_value_that_changes_is_said_though_calls_without_gradients_lie_between_the_captures() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    region, x = fckpt.remat(lambda x: net(x).sin().sum(), budget=1.0), torch.ones(2, 4)
    with pytest.warns(fckpt.PlanWarning, match=r"third time in a row.*changed: 1\.p == 0\.\d"):
        for turn in range(4):
            net[1].p = 0.1 * (turn + 1)
            region(x).backward()
            with torch.no_grad():
                region(x)
