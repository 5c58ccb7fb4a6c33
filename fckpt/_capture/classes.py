"""Guards on classes: methods and attributes in class dicts, and global module hooks.

Dynamo guards the class of an object but not the contents of the class: its guards still hold after `Block.forward =
other`, or after `Block.scale = 2` on a subclass. The guards here compare the entries of the guarded classes and of
their bases, for all names that occur in the evaluated code, and the code of methods: IPython's autoreload replaces the
code and keeps the function.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import module as nn_module
from torch.overrides import handle_torch_function

from fckpt._call.facts import attribute
from fckpt._capture.sources import is_users
from fckpt._late import registrations

__all__ = ["ClassFacts", "classes_of", "functions_in", "guards_script", "original_of", "patched_methods"]

_ABSENT = object()
_FUNCTIONS = types.MappingProxyType(vars(functional))
_HOOKS = [value for name, value in vars(nn_module).items() if name.startswith("_global_") and isinstance(value, dict)]


class ClassFacts:
    """The class attributes that evaluated code may have read, as they were at the capture.

    And the functions of `torch.nn.functional`, which torch's modules call by name.
    """

    __slots__ = ("_abstract", "_codes", "_dicts", "_functions", "_hooks", "_names", "_of_classes", "_sizes", "_values")

    def __init__(
        self,
        guarded: Iterable[type],
        codes: Iterable[types.CodeType],
        compared: Collection[tuple[int, str]] = (),
    ):
        """Records the attributes.

        Args:
            guarded: the classes.
            codes: the evaluated code.
            compared: the attributes that other guards cover, see `compared.py`.
        """
        names = _names_in(codes)
        classes: dict[int, type] = {id(torch.Tensor): torch.Tensor}  # Dynamo does not guard tensor methods either
        for cls in guarded:
            meta: type = type(cls)
            lineage = (*cls.__mro__, *meta.__mro__)
            classes.update((id(base), base) for base in lineage if base is not object and base is not type)
        mutable = [cls for cls in classes.values() if cls.__flags__ & _HEAPTYPE]
        found = [(cls, name) for cls in mutable for name in vars(cls) if _is_read(name, names)]
        read = [(vars(cls), name) for cls, name in found if (id(cls), name) not in compared]
        self._of_classes = len(read)
        read += [(_FUNCTIONS, name) for name, held in _FUNCTIONS.items() if callable(held)]
        self._dicts = [held for held, _ in read]
        self._names = [name for _, name in read]
        self._values = self._read()
        methods = [fn for cls, name in found for fn in functions_in(vars(cls)[name])]
        self._functions = [fn for fn in methods if not (fn.__module__ or "").startswith("torch.")]
        self._codes = list(map(_code_of, self._functions))
        # An absent name can only appear as a new entry, which makes the dict grow.
        self._sizes = [(vars(cls), len(vars(cls))) for cls in mutable]
        self._hooks = [tuple(hooks.values()) for hooks in _HOOKS]
        # `ABC.register` changes the result of `isinstance` without changing the class itself.
        self._abstract = registrations() if {"isinstance", "issubclass"}.intersection(names) else None

    def _read(self) -> list[Any]:
        return [held.get(name, _ABSENT) for held, name in zip(self._dicts, self._names, strict=True)]

    def hold(self) -> bool:
        """Whether all entries are still the same objects, and no class has gained or lost an entry."""
        values = map(types.MappingProxyType.get, self._dicts, self._names)
        return (
            all(map(operator.is_, values, self._values))
            and all(map(operator.is_, map(_code_of, self._functions), self._codes))
            and all(len(held) == size for held, size in self._sizes)
            and all(tuple(hooks.values()) == then for hooks, then in zip(_HOOKS, self._hooks, strict=True))
            and self._abstract in (None, registrations())
        )

    def same_functions(self, other: ClassFacts) -> bool:
        """Whether `torch.nn.functional` had the same functions, which a function of torch in a graph may call."""
        mine, others = (facts._values[facts._of_classes :] for facts in (self, other))
        return len(mine) == len(others) and all(map(operator.is_, mine, others))

    def changed(self) -> str:
        """Returns a description of the first difference; empty if there is none."""
        pairs = zip(self._names, self._read(), self._values, strict=True)
        names = [name for name, now, then in pairs if now is not then]
        if names:
            return f"a class, or torch.nn.functional, has another {names[0]!r}"
        for fn, code in zip(self._functions, self._codes, strict=True):
            if fn.__code__ is not code:
                return f"the code of {fn.__qualname__} was replaced"
        if any(len(held) != size for held, size in self._sizes):
            return "a class has gained or lost an attribute"
        if self._abstract not in (None, registrations()):
            return "a class was registered with an abstract base class"
        return "" if self.hold() else "global module hooks have changed"


_code_of = operator.attrgetter("__code__")


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yields the functions that an entry of a class consists of: a method, or the accessors of a property."""
    parts = (value, *(attribute(value, name) for name in ("__func__", "func", "__wrapped__")))
    if isinstance(value, property):
        parts = (value.fget, value.fset, value.fdel, None)
    for part in parts:
        if type(part) is types.FunctionType:
            yield part


_METHODS = dict(vars(torch.Tensor))


def patched_methods(codes: Iterable[types.CodeType]) -> list[str]:
    """Returns the methods of `torch.Tensor` that code mentions and that were replaced or added.

    Dynamo would use torch's original methods, and refer to new ones by their names only.
    """
    now = vars(torch.Tensor)
    return [name for name in sorted(_names_in(codes)) if now.get(name, _ABSENT) is not _METHODS.get(name, _ABSENT)]


def original_of(called: Any) -> Any:
    """Returns the function of torch of which a torch function mode is told.

    Torch looks the function up by its name, and finds the one by which the user has replaced it, while the original
    runs: it is the original that calls the mode.
    """
    if type(called) is not types.FunctionType or not is_users(called.__code__.co_filename):
        return called
    frame: Any = sys._getframe(2)  # of the caller of the mode
    if frame.f_code is handle_torch_function.__code__:  # a function that is written in Python
        running = frame.f_back
        return types.FunctionType(running.f_code, running.f_globals, running.f_code.co_name)
    now, base = vars(torch.Tensor), vars(torch._C.TensorBase)
    return next((base[name] for name, value in now.items() if value is called and name in base), called)


_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was created by Python code, so its dict can change


def classes_of(guard: Any) -> list[type]:
    """Returns the classes that one of Dynamo's guards checks."""
    found = []
    for name in ("guarded_class_weakref", "obj_weakref"):
        reference = getattr(guard, name, None)
        value = reference() if callable(reference) else None
        if isinstance(value, type):
            found.append(value)
        elif name == "obj_weakref" and value is not None and not isinstance(value, types.ModuleType):
            found.append(type(value))
    return found


def guards_script(guard: Any) -> bool:
    """Whether one of Dynamo's guards is on a TorchScript function. (Code that names the class guards the class.)"""
    reference = getattr(guard, "obj_weakref", None)
    return callable(reference) and isinstance(reference(), torch.jit.ScriptFunction)


def _is_read(name: str, names: set[str]) -> bool:
    """Whether code with these names may read an entry of a class: Python calls special methods without a name."""
    return name in names or (name.startswith("__") and name not in _INERT)


_INERT = {"__annotations__", "__dict__", "__doc__", "__module__", "__qualname__", "__weakref__"}


def _names_in(codes: Iterable[types.CodeType]) -> set[str]:
    names: set[str] = set()
    todo = list(codes)
    while todo:
        code = todo.pop()
        names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, str) and constant.isidentifier():
                names.add(constant)
            elif isinstance(constant, types.CodeType):
                todo.append(constant)
    return names | {"forward", "backward", "setup_context"}
