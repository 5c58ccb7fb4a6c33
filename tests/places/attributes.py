"""Attributes of objects and classes, and the classes themselves. See `places`."""

from __future__ import annotations

import dataclasses
import types
import weakref
from typing import Any, NamedTuple

from places import registry

PLACES, Place = registry()


class Attribute(Place):
    def __init__(self) -> None:
        self.number: Any = 2

    def read(self) -> Any:
        return self.number

    def write(self, number: int) -> None:
        self.number = number


class Settings:
    number: Any = 2


class ClassAttribute(Place):
    def read(self) -> Any:
        return Settings.number

    def write(self, number: int) -> None:
        Settings.number = number


class ClassAttributeByInstance(Place):
    def __init__(self) -> None:
        self.settings = Settings()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        Settings.number = number


class DerivedSettings(Settings):
    pass


class InheritedClassAttribute(Place):
    def read(self) -> Any:
        return DerivedSettings.number

    def write(self, number: int) -> None:
        Settings.number = number


class ShadowedClassAttribute(Place):
    """Written on the subclass, where nothing was before."""

    def __init__(self) -> None:
        self.settings = DerivedSettings()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        DerivedSettings.number = number


class ShadowedByInstance(Place):
    def __init__(self) -> None:
        self.settings = Settings()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        self.settings.number = number


class Meta(type):
    number: Any = 2


class WithMeta(metaclass=Meta):
    pass


class MetaclassAttribute(Place):
    def read(self) -> Any:
        return WithMeta.number

    def write(self, number: int) -> None:
        Meta.number = number


class OwnClassAttribute(Place):
    number: Any = 2

    def read(self) -> Any:
        return type(self).number

    def write(self, number: int) -> None:
        type(self).number = number


class PrivateSlots(Place):
    __slots__ = ("__number",)

    def __init__(self) -> None:
        self.__number: Any = 2

    def read(self) -> Any:
        return self.__number

    def write(self, number: int) -> None:
        self.__number = number


@dataclasses.dataclass
class Config:
    number: Any = 2
    unread: Any = 0


class DataclassField(Place):
    def __init__(self) -> None:
        self.config = Config()

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config.number = number


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    number: Any = 2


class FrozenDataclass(Place):
    def __init__(self) -> None:
        self.config = FrozenConfig()

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config = FrozenConfig(number)


class Pair(NamedTuple):
    number: Any
    other: Any


class NamedTupleField(Place):
    def __init__(self) -> None:
        self.config = Pair(2, 0)

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config = Pair(number, 0)


class Namespace(Place):
    def __init__(self) -> None:
        self.config = types.SimpleNamespace(number=2)

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config.number = number


class DynamicAttribute(Place):
    def __init__(self) -> None:
        self.number: Any = 2

    def read(self) -> Any:
        return getattr(self, "num" + "ber")

    def write(self, number: int) -> None:
        self.number = number


class ByVars(Place):
    def __init__(self) -> None:
        self.number: Any = 2

    def read(self) -> Any:
        return vars(self)["number"]

    def write(self, number: int) -> None:
        self.number = number


class AbsentAttribute(Place):
    def read(self) -> Any:
        return getattr(self, "number", 2)

    def write(self, number: int) -> None:
        self.number = number


class HasAttribute(Place):
    def read(self) -> Any:
        return 3 if hasattr(self, "flag") else 2

    def write(self, number: int) -> None:
        self.flag = True


class Fallback:
    def __init__(self) -> None:
        self.inner = {"number": 2}

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # copy.deepcopy asks for `__deepcopy__`
            raise AttributeError(name)
        return self.inner[name]


class GetAttr(Place):
    def __init__(self) -> None:
        self.config = Fallback()

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        self.config.inner["number"] = number


class Descriptor:
    number: Any = 2

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.number


class WithDescriptor:
    number = Descriptor()


class DescriptorAttribute(Place):
    def __init__(self) -> None:
        self.config = WithDescriptor()

    def read(self) -> Any:
        return self.config.number

    def write(self, number: int) -> None:
        vars(WithDescriptor)["number"].number = number


class Property(Place):
    def __init__(self) -> None:
        self._number = 2

    @property
    def number(self) -> Any:
        return self._number

    def read(self) -> Any:
        return self.number

    def write(self, number: int) -> None:
        self._number = number


class WeakReference(Place):
    def __init__(self) -> None:
        self.config = Config()
        self.reference = weakref.ref(self.config)

    def read(self) -> Any:
        config = self.reference()
        return config.number if config is not None else 0

    def write(self, number: int) -> None:
        self.config.number = number


class WeakProxy(Place):
    def __init__(self) -> None:
        self.config = Config()
        self.proxy = weakref.proxy(self.config)

    def read(self) -> Any:
        return self.proxy.number

    def write(self, number: int) -> None:
        self.config.number = number


class Other(Config):
    @property
    def factor(self) -> int:
        return 3


class Plain(Config):
    @property
    def factor(self) -> int:
        return 2


class ClassOfObject(Place):
    def __init__(self) -> None:
        self.config: Any = Plain()

    def read(self) -> Any:
        return self.config.factor

    def write(self, number: int) -> None:
        self.config.__class__ = Other


class IsInstance(Place):
    def __init__(self) -> None:
        self.config: Any = Plain()

    def read(self) -> Any:
        return 3 if isinstance(self.config, Other) else 2

    def write(self, number: int) -> None:
        self.config = Other()


class Picky:
    """Raises KeyError for what it has not, as many a configuration does."""

    def __init__(self) -> None:
        self.__dict__["held"] = {"number": 2}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy.deepcopy
            raise AttributeError(name)
        return self.__dict__["held"][name]


class RaisingGetAttr(Place):
    def __init__(self) -> None:
        self.settings = Picky()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        self.settings.held["number"] = number


class OneBase:
    number = 2


class OtherBase:
    number = 3


class WithBases(OneBase):
    pass


class BasesOfClass(Place):
    def __init__(self) -> None:
        self.settings = WithBases()

    def read(self) -> Any:
        return self.settings.number

    def write(self, number: int) -> None:
        OtherBase.number = number
        WithBases.__bases__ = (OtherBase,)
