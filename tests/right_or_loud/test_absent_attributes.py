"""Attributes that a function asks for and does not find: when they appear, the call is the plain one, or an error."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import leaf
from torch import Tensor, nn

import fckpt


class Meta(type):
    pass


class OfMeta(metaclass=Meta):
    pass


class Thing:
    pass


class Entries(dict[str, Any]):
    pass


class Items(list[Any]):
    pass


def function() -> None:
    pass


MODULE = types.ModuleType("absent")
THING, LINEAR, ENTRIES, ITEMS = Thing(), nn.Linear(1, 1), Entries(), Items()
PARTIAL, TENSOR, NAMESPACE = functools.partial(function), torch.ones(3), types.SimpleNamespace()

HELD: dict[str, tuple[Callable[[], Any], Any]] = {
    "a class": (lambda: Thing, Thing),
    "the class of an object": (lambda: THING, Thing),
    "an object": (lambda: THING, THING),
    "a metaclass": (lambda: OfMeta, Meta),
    "a function": (lambda: function, function),
    "a partial": (lambda: PARTIAL, PARTIAL),
    "a tensor": (lambda: TENSOR, TENSOR),
    "a module of torch": (lambda: LINEAR, LINEAR),
    "the class of a module of torch": (lambda: LINEAR, nn.Linear),
    "a namespace": (lambda: NAMESPACE, NAMESPACE),
    "a dict": (lambda: ENTRIES, ENTRIES),
    "a list": (lambda: ITEMS, ITEMS),
    "an imported module": (lambda: MODULE, MODULE),
}
"""How a function refers to something, and where the attribute appears."""


def by_hasattr(held: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x * (5.0 if hasattr(held(), "number") else 2.0)).sin().sum()


def by_default(held: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x * getattr(held(), "number", 2.0)).sin().sum()


def by_error(held: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        try:
            number = held().number
        except AttributeError:
            number = 2.0
        return (x * number).sin().sum()

    return fn


@pytest.mark.parametrize("way", [by_hasattr, by_default, by_error])
@pytest.mark.parametrize("what", HELD)
def test_an_attribute_that_appears_and_disappears(
    what: str, way: Callable[[Callable[[], Any]], Callable[[Tensor], Tensor]]
) -> None:
    held, owner = HELD[what]
    fn, x = way(held), leaf(torch.randn(8))
    planned = fckpt.remat(fn, budget=1.0)
    try:
        for number in (None, 5.0, None):
            if number is not None:
                owner.number = number
            elif "number" in vars(owner):
                del owner.number
            (expected,) = torch.autograd.grad(fn(x), [x])
            with contextlib.suppress(fckpt.FckptError):
                assert torch.equal(torch.autograd.grad(planned(x), [x])[0], expected)
    finally:
        with contextlib.suppress(AttributeError):
            del owner.number
