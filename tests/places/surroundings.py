"""Surroundings: threads, contexts, the environment, tensors, settings of torch and of modules. See `places`."""

from __future__ import annotations

import contextvars
import os
import threading
from typing import Any

import torch
from torch import Tensor

from places import registry

PLACES, Place = registry()


class ThreadLocal(Place):
    def __init__(self) -> None:
        self.local = threading.local()
        self.local.number = 2

    def read(self) -> Any:
        return self.local.number

    def write(self, number: int) -> None:
        self.local.number = number


class ContextVariable(Place):
    def __init__(self) -> None:
        self.variable = contextvars.ContextVar("number", default=2)

    def read(self) -> Any:
        return self.variable.get()

    def write(self, number: int) -> None:
        self.variable.set(number)


class Environment(Place):
    def read(self) -> Any:
        return int(os.environ.get("FCKPT_TEST_NUMBER", "2"))

    def write(self, number: int) -> None:
        os.environ["FCKPT_TEST_NUMBER"] = str(number)

    def close(self) -> None:
        os.environ.pop("FCKPT_TEST_NUMBER", None)


class EnvironmentByFunction(Environment):
    def read(self) -> Any:
        return int(os.getenv("FCKPT_TEST_NUMBER", "2"))


class TensorAttribute(Place):
    def __init__(self) -> None:
        self.tensor: Any = torch.ones(())
        self.tensor.number = 2

    def read(self) -> Any:
        return self.tensor * self.tensor.number

    def write(self, number: int) -> None:
        self.tensor.number = number


class ParameterAttribute(TensorAttribute):
    def __init__(self) -> None:
        self.tensor: Any = torch.nn.Parameter(torch.ones(()))
        self.tensor.number = 2


class TensorValue(Place):
    """A tensor that the function reads as a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.tensor(2.0)

    def read(self) -> Tensor:
        return self.tensor

    def write(self, number: int) -> None:
        self.tensor.fill_(number)


class ReplacedTensor(TensorValue):
    def write(self, number: int) -> None:
        self.tensor = torch.tensor(float(number))


class TensorInDict(TensorValue):
    def __init__(self) -> None:
        self.tensors = {"number": torch.tensor(2.0)}

    def read(self) -> Tensor:
        return self.tensors["number"]

    def write(self, number: int) -> None:
        self.tensors["number"] = torch.tensor(float(number))


class ItemOfTensor(TensorValue):
    """Read as a Python number: data that decides what is computed."""

    def read(self) -> Any:
        return self.tensor.item()


class DefaultDtype(Place):
    def read(self) -> Any:
        return torch.ones(()) / 3

    def write(self, number: int) -> None:
        torch.set_default_dtype(torch.float64)

    def close(self) -> None:
        torch.set_default_dtype(torch.float32)


class Training(Place):
    def __init__(self) -> None:
        self.module = torch.nn.Dropout(0.5)

    def read(self) -> Any:
        return self.module(torch.ones(())) + 1

    def write(self, number: int) -> None:
        self.module.eval()


class RateOfDropout(Training):
    def write(self, number: int) -> None:
        self.module.p = 0.1
