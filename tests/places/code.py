"""Code: globals, functions, closures, methods, caches. See `places`."""

from __future__ import annotations

import abc
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from places import registry

PLACES, Place = registry()


NUMBER: Any = 2


SWITCHES: dict[str, Any] = {"number": 2}


constants: Any = types.ModuleType("constants")


constants.number = 2


class Global(Place):
    def read(self) -> Any:
        return NUMBER

    def write(self, number: int) -> None:
        global NUMBER
        NUMBER = number


class GlobalDict(Place):
    def read(self) -> Any:
        return SWITCHES["number"]

    def write(self, number: int) -> None:
        SWITCHES["number"] = number


class ModuleConstant(Place):
    def read(self) -> Any:
        return constants.number

    def write(self, number: int) -> None:
        constants.number = number


def helper() -> Any:
    return NUMBER


class GlobalOfHelper(Global):
    def read(self) -> Any:
        return helper()


class GlobalOfHelpersHelper(Global):
    def read(self) -> Any:
        return (lambda: helper())()


class GlobalOfGenerator(Global):
    def numbers(self) -> Iterator[Any]:
        yield NUMBER

    def read(self) -> Any:
        return sum(self.numbers())


class Callme:
    def __call__(self) -> Any:
        return NUMBER


class GlobalOfCall(Global):
    def __init__(self) -> None:
        self.callme = Callme()

    def read(self) -> Any:
        return self.callme()


class GlobalOfProperty(Global):
    @property
    def number(self) -> Any:
        return NUMBER

    def read(self) -> Any:
        return self.number


class GlobalOfStaticMethod(Global):
    @staticmethod
    def number() -> Any:
        return NUMBER

    def read(self) -> Any:
        return self.number()


class FunctionAttribute(Place):
    def __init__(self) -> None:
        helper.number = 2  # type: ignore[attr-defined]

    def read(self) -> Any:
        return helper.number  # type: ignore[attr-defined]

    def write(self, number: int) -> None:
        helper.number = number  # type: ignore[attr-defined]


class Cell(Place):
    def __init__(self) -> None:
        number: Any = 2

        def get() -> Any:
            return number

        def put(new: Any) -> None:
            nonlocal number
            number = new

        self.get, self.put = get, put

    def read(self) -> Any:
        return self.get()

    def write(self, number: int) -> None:
        self.put(number)


class Default(Place):
    def __init__(self) -> None:
        def get(number: Any = 2) -> Any:
            return number

        self.get: Any = get

    def read(self) -> Any:
        return self.get()

    def write(self, number: int) -> None:
        self.get.__defaults__ = (number,)


class KeywordDefault(Place):
    def __init__(self) -> None:
        def get(*, number: Any = 2) -> Any:
            return number

        self.get: Any = get

    def read(self) -> Any:
        return self.get()

    def write(self, number: int) -> None:
        self.get.__kwdefaults__["number"] = number


class MutableDefault(Place):
    def read(self, numbers: list[Any] = [2]) -> Any:  # noqa: B006  what is tested
        return numbers[0]

    def write(self, number: int) -> None:
        type(self).read.__defaults__[0][0] = number  # type: ignore[index]


def identity(number: Any) -> Any:
    return number


class Partial(Place):
    def __init__(self) -> None:
        self.get = functools.partial(identity, number=2)

    def read(self) -> Any:
        return self.get()

    def write(self, number: int) -> None:
        self.get = functools.partial(identity, number=number)


class PartialKeywords(Partial):
    def write(self, number: int) -> None:
        self.get.keywords["number"] = number


class ReplacedFunction(Place):
    def __init__(self) -> None:
        self.get: Callable[[], Any] = lambda: 2

    def read(self) -> Any:
        return self.get()

    def write(self, number: int) -> None:
        self.get = lambda: number


class ReplacedCode(Place):
    def __init__(self) -> None:
        def get() -> Any:
            return 2

        def three() -> Any:
            return 3

        self.get, self.three = get, three

    def read(self) -> Any:
        return self.get()

    def write(self, number: int) -> None:
        self.get.__code__ = self.three.__code__


class PatchedMethod(Place):
    def number(self) -> Any:
        return 2

    def read(self) -> Any:
        return self.number()

    def write(self, number: int) -> None:
        type(self).number = lambda self: number  # type: ignore[method-assign]


class PatchedOnInstance(PatchedMethod):
    def write(self, number: int) -> None:
        self.number = lambda: number  # type: ignore[method-assign]


class OfBase:
    def number(self) -> Any:
        return 2


class Derived(OfBase):
    pass


class PatchedBase(Place):
    def __init__(self) -> None:
        self.object = Derived()

    def read(self) -> Any:
        return self.object.number()

    def write(self, number: int) -> None:
        OfBase.number = lambda self: number  # type: ignore[method-assign]


class ShadowingMethod(PatchedBase):
    def write(self, number: int) -> None:
        Derived.number = lambda self: number  # type: ignore[method-assign]


class PatchedStaticMethod(Place):
    @staticmethod
    def number() -> Any:
        return 2

    def read(self) -> Any:
        return self.number()

    def write(self, number: int) -> None:
        type(self).number = staticmethod(lambda: number)  # type: ignore[method-assign]


class PatchedProperty(Place):
    @property
    def number(self) -> Any:
        return 2

    def read(self) -> Any:
        return self.number

    def write(self, number: int) -> None:
        type(self).number = property(lambda self: number)  # type: ignore[method-assign,assignment]


class PatchedHelper(Place):
    def read(self) -> Any:
        return helper()

    def write(self, number: int) -> None:
        global helper
        helper = lambda: number


class LruCached(Place):
    """Stale in plain Python too, until the cache is cleared."""

    def __init__(self) -> None:
        self.stored = 2
        self.get = functools.lru_cache(maxsize=None)(lambda: self.stored)

    def read(self) -> Any:
        return self.get()

    def write(self, number: int) -> None:
        self.stored = number
        self.get.cache_clear()


class CachedProperty(Place):
    def __init__(self) -> None:
        self.stored = 2

    @functools.cached_property
    def number(self) -> Any:
        return self.stored

    def read(self) -> Any:
        return self.number

    def write(self, number: int) -> None:
        self.stored = number
        self.__dict__.pop("number", None)


class NameOfBuiltin(Place):
    """A global that stands before a built-in one."""

    def read(self) -> Any:
        return max(1, 2)

    def write(self, number: int) -> None:
        globals()["max"] = lambda *args: number


class NameOfBuiltinInHelper(Place):
    def read(self) -> Any:
        return negated(-2)

    def write(self, number: int) -> None:
        globals()["abs"] = lambda x: number


def negated(x: int) -> int:
    return abs(x)


class GlobalByName(Global):
    def read(self) -> Any:
        return globals()["NUMBER"]


class TensorOfGlobal(Place):
    def __init__(self) -> None:
        SWITCHES["tensor"] = torch.tensor(2.0)

    def read(self) -> Tensor:
        return SWITCHES["tensor"]

    def write(self, number: int) -> None:
        SWITCHES["tensor"] = torch.tensor(float(number))


class Kind(abc.ABC):  # noqa: B024  others register
    pass


class Registered:
    pass


class RegisteredClass(Place):
    def __init__(self) -> None:
        self.object = Registered()

    def read(self) -> Any:
        return 3 if isinstance(self.object, Kind) else 2

    def write(self, number: int) -> None:
        Kind.register(Registered)
