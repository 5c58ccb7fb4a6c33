"""The buffers, parameters and attributes of a module tree, found once and read at every call."""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from fckpt._call.closure import Closure, check_scripted, class_attributes, closure_of, method_globals, slot_names
from fckpt._call.facts import fact
from fckpt._call.levels import unwrapped, version
from fckpt._call.places import ABSENT, PLAIN, Slot
from fckpt._call.rng import generator_types

__all__ = [
    "HOOKS",
    "INTERNAL",
    "BufferKey",
    "BufferWrites",
    "ModuleParts",
    "ModuleState",
    "add_parts",
    "facts_of",
    "is_closed",
    "is_plain_type",
    "known_parts",
    "open_closures",
    "parts_of",
    "storage_of",
]

BufferKey = tuple[int, str, bool, bool]
BufferWrites = dict[BufferKey, bool]
"""Whether a function wrote each buffer in earlier calls."""


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage; 0 for tensors without one, such as sparse and uninitialised ones."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, ValueError):  # a ValueError for parameters of lazy modules
        return 0


class ModuleParts:
    """The dicts that hold the buffers and parameters of a module tree, found once: the walk takes 1 us per module."""

    __slots__ = (
        "_buffers",
        "_children",
        "_edges",
        "_hooked",
        "_hooks",
        "_lazy",
        "_names",
        "_owners",
        "_places",
        "_root",
        "_settings",
        "_sizes",
        "_structure",
        "_tensors",
        "_values",
        "classes",
        "constants",
        "generators",
        "kinds",
        "members",
        "modules",
        "named",
        "open",
        "parameters",
        "scripted",
        "sharded",
        "ways",
    )  # fmt: skip

    def __init__(self, module: nn.Module):
        kinds = generator_types()
        tree = list(_python_modules(module))
        self.scripted = any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())
        """Whether the tree contains TorchScript modules."""
        modules = self.modules = [vars(m) for m in tree]
        self.kinds = tuple(map(type, tree))
        """The class of each module."""
        self.classes = frozenset(self.kinds)
        self._root = weakref.ref(module)
        self._buffers = [(m, m._buffers) for m in tree if m._buffers]
        self.parameters = [m["_parameters"] for m in modules if m["_parameters"]]
        self.generators = [v for m in modules for v in m.values() if isinstance(v, kinds)]
        own = [(m, k, v) for m in modules for k, v in m.items() if k not in INTERNAL]
        self.open = [(m, k) for m, k, v in own if not is_closed(v)]
        """(attribute dict, name) of the attributes that may hold tensors or modules."""
        classes = dict.fromkeys(self.kinds)
        found = {(id(scope), name): (scope, name) for c in classes for scope, name in method_globals(c)}
        self.named = list(found.values())
        """(scope, name) of the globals that hold data and that methods of the modules refer to."""
        self.constants = list(dict.fromkeys(pair for c in classes for pair in class_attributes(c)))
        """(class, name) of the class attributes that hold plain values."""
        # All other attributes hold plain values, such as a rate, a stride or an activation function. They are compared
        # by identity at every call, without Python code per attribute, because there are thousands of them.
        closed = [(m, k) for m, k, v in own if is_closed(v)]
        closed += [(m, k) for m in modules for k in ("training", *HOOKS, *_WITH_KWARGS)]
        self._owners = [m for m, _ in closed]
        self._names = [k for _, k in closed]
        self._hooked = [(m, k) for m in modules for k in (*HOOKS, *_WITH_KWARGS)]
        self._hooks = [m[k] for m in modules for k in (*HOOKS, *_OTHER_HOOKS)]
        self._children = [m["_modules"] for m in modules]
        places = {id(m): i for i, m in enumerate(tree)}
        self._edges = tuple([tuple([(k, places.get(id(c))) for k, c in held.items()]) for held in self._children])
        """By module: the names of its submodules, and their positions in the tree."""
        self._sizes = [*modules, *self._children]
        self.sharded = any(c.__module__.startswith("torch.distributed.fsdp") for t in self.kinds for c in t.__mro__)
        """Whether FSDP installs the parameters into the modules before each call and removes them after it."""
        self._lazy = [m for m in tree if isinstance(m, LazyModuleMixin)]
        self.ways = None if any(map(slot_names, self.kinds)) else _ways(module)
        """The path from the root to each dict of the tree; None if a module has several places."""
        self.members = [(children, children.copy()) for children in self._children]
        """The dicts of submodules, each with a copy."""
        self._tensors = [(held, set(held)) for m in modules for held in (m["_parameters"], m["_buffers"])]
        """The dicts of parameters and of buffers, each with its names."""
        self._places = [(held, name) for held, names in self._tensors for name in names]
        self._structure = self._read_structure()
        self._values = self._read()
        self._settings: _Settings | None = None

    def valid(self) -> bool:
        """Whether the tree still has the same modules, and holds tensors in the same attributes."""
        if self._structure != self._read_structure():
            return False
        values = self._read()
        if not all(map(operator.is_, values, self._values)):
            changed = [v for v, then in zip(values, self._values, strict=True) if v is not then]
            if not all(map(is_closed, changed)):
                return False
            self._values, self._settings = values, None
        return True

    def _read(self) -> list[Any]:
        return list(map(dict.get, self._owners, self._names, itertools.repeat(ABSENT)))

    def _read_structure(self) -> tuple[list[int], list[Any], list[type], list[int], list[str]]:
        """Returns sizes, submodules, their classes, the addresses of the dicts that hold tensors and modules, and the
        names in these dicts.
        """
        chained = itertools.chain.from_iterable
        children = list(chained(map(dict.values, self._children)))
        dicts = list(chained(map(_DICTS, self.modules)))
        kinds = [type(self._root()), *map(type, children)]
        return list(map(len, self._sizes)), children, kinds, list(map(id, dicts)), list(chained(dicts))

    def unchanged(self) -> bool:
        """Whether the tree still has the same modules."""
        return self._structure == self._read_structure()

    def lazy(self) -> bool:
        """Whether a lazy module of the tree has parameters that its first call will create."""
        held = [t for m in self._lazy for t in (*m._parameters.values(), *m._buffers.values())]
        return any(is_lazy(t) for t in held if t is not None)

    def state(self) -> ModuleState:
        """Returns the present values of the attributes that hold no tensors."""
        return ModuleState(self, self._values, self._structure[0], self.registered(), self.unset())

    def registered(self) -> list[tuple[int, dict[int, Any]]]:
        """Returns the forward hooks of each module that has some, and their kinds, by position in `_hooked`."""
        return [(i, m[k].copy()) for i, (m, k) in enumerate(self._hooked) if m[k]]

    def unset(self) -> list[tuple[dict[str, Any], str]]:
        """Returns the places of parameters and buffers that hold None."""
        held = itertools.starmap(dict.get, self._places)
        return list(itertools.compress(self._places, map(operator.is_, held, itertools.repeat(None))))

    def settings(self) -> _Settings:
        """Returns everything but tensors that determines what the modules do: classes, names, attributes and hooks."""
        if self._settings is None:
            names = tuple(self._names), tuple(self._structure[-1])
            self._settings = _Settings((self.kinds, self._edges, names, tuple(map(fact, self._values))))
        if not any(self._hooks):
            return self._settings
        return _Settings((self._settings, *((i, *d) for i, d in enumerate(self._hooks) if d)))

    def buffers(self) -> list[tuple[dict[str, Any], str, BufferKey, torch.Tensor, int]]:
        """Returns (dict, name, key, tensor, version of the tensor) of each buffer."""
        return [
            (buffers, name, (id(buffers), name, owner.training, norm), tensor, version(unwrapped(tensor)))
            for owner, buffers in self._buffers
            for norm in (_is_norm(owner),)
            for name, tensor in buffers.items()
            if tensor is not None
        ]

    def hooks(self) -> list[Any]:
        """Returns the functions that are registered as hooks."""
        return [hook for registered in self._hooks for hook in registered.values()]


def _python_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Returns the modules of a tree, except TorchScript modules, whose parts are in C++."""
    scripted: set[int] = set()
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            if id(module) not in scripted:
                check_scripted(module)
                scripted.update(map(id, module.modules()))
        elif id(module) not in scripted:
            yield module


Ways = dict[int, tuple[tuple[Any, Any], ...]]


def _ways(root: nn.Module) -> Ways | None:
    """Returns the path to each dict in a tree, as pairs (holder, held); None if the tree shares modules.

    Paths begin with the attributes of the root, because a reference to the root itself would keep it alive.
    """
    ways: Ways = {}
    shared = False

    def visit(module: nn.Module, way: tuple[tuple[Any, Any], ...]) -> None:
        nonlocal shared
        attributes = vars(module)
        shared = shared or id(attributes) in ways
        if shared:
            return
        way = ways[id(attributes)] = way if module is root else (*way, (module, attributes))
        for name in ("_buffers", "_parameters"):
            ways[id(attributes[name])] = (*way, (attributes, attributes[name]))
        children = attributes["_modules"]
        for child in children.values():
            if child is not None and not isinstance(child, torch.jit.ScriptModule):
                visit(child, (*way, (attributes, children), (children, child)))

    visit(root, ())
    return None if shared else ways


class ModuleState:
    """The attributes of a module tree that held no tensors at one time, and their values then."""

    __slots__ = ("hooks", "parts", "sizes", "unset", "values")

    def __init__(
        self,
        parts: ModuleParts,
        values: list[Any],
        sizes: list[int],
        hooks: list[tuple[int, dict[int, Any]]],
        unset: list[tuple[dict[str, Any], str]],
    ):
        self.parts = parts
        self.values = values
        self.sizes = sizes
        self.hooks = hooks
        self.unset = unset

    def changes(self) -> list[Slot]:
        """Returns the attributes that have changed since, with their former values."""
        parts = self.parts
        now = parts._read()
        changes: list[Slot] = []
        if not all(map(operator.is_, now, self.values)):
            rows = zip(parts._owners, parts._names, self.values, now, strict=True)
            changes = [(owner, name, then) for owner, name, then, value in rows if value is not then]
        registered = parts.registered()
        if registered != self.hooks:
            before, after = dict(self.hooks), dict(registered)
            changed = [i for i in {**before, **after} if before.get(i) != after.get(i)]
            changes += [(*parts._hooked[i], before.get(i, OrderedDict())) for i in changed]
        if parts._structure != parts._read_structure():
            changes += [
                (held, name, then.get(name, ABSENT))
                for held, then in parts.members
                for name in {**held, **then}
                if held.get(name, ABSENT) is not then.get(name, ABSENT)
            ]
            changes += [(held, name, ABSENT) for held, then in parts._tensors for name in held.keys() - then]
        changes += [(held, name, None) for held, name in self.unset if held.get(name, ABSENT) is not None]
        if self.sizes != list(map(len, parts._sizes)):
            known: dict[int, set[str]] = {}
            for owner, name in [*zip(parts._owners, parts._names, strict=True), *parts.open]:
                known.setdefault(id(owner), set()).add(name)
            for owner in parts.modules:
                new = owner.keys() - INTERNAL - known.get(id(owner), set())
                changes += [(owner, name, ABSENT) for name in new]
        return changes


class _Settings:
    """A tuple of facts whose hash is computed once; it may have thousands of entries."""

    __slots__ = ("facts", "hash")

    def __init__(self, facts: tuple[Any, ...]):
        self.facts = facts
        self.hash = hash(facts)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Settings) and self.facts == other.facts)


_DICTS = operator.itemgetter("_modules", "_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WITH_KWARGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
"""The attributes that say which forward hooks of a module take keyword arguments, by the id of the hook."""
_OTHER_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")


def facts_of(values: Sequence[Any], scopes: Iterable[tuple[types.CodeType, dict[str, Any]]] = ()) -> tuple[Any, ...]:
    """Returns everything but tensors that determines what functions and code do; equal results mean equal behaviour.

    Args:
        values: functions, whose cells, defaults, attributes and globals are read; also objects and containers.
        scopes: further code objects, each with its globals.
    """
    facts: list[Any] = []
    modules = closure_of(list(values), scopes=scopes, facts=facts).modules
    parts = [parts_of(module) for module in modules]
    open_closures(parts, facts)
    return (*facts, *(part.settings() for part in parts))


def open_closures(parts: list[ModuleParts], facts: list[Any] | None, start: int = 0) -> list[Closure]:
    """Walks through what attributes of modules refer to, which `parts_of` does not remember; from `parts[start]` on.

    An object that a module holds may hold another module, such as a metric, which holds further objects. `parts`
    receives the parts of the modules that are found.
    """
    closures = []
    while attributes := [(m, k) for part in parts[start:] for m, k in part.open]:
        start = len(parts)
        closures.append(closure_of([], attributes=attributes, facts=facts))
        add_parts(parts, closures[-1].modules)
    return closures


def add_parts(parts: list[ModuleParts], modules: Iterable[nn.Module]) -> None:
    """Adds the parts of modules, except those that are in a tree already."""
    known = {id(m) for part in parts for m in part.modules}
    parts += [parts_of(module) for module in modules if id(vars(module)) not in known]


def known_parts(module: nn.Module) -> ModuleParts | None:
    """Returns the stored parts of a module tree if it still has the same modules; otherwise None."""
    parts = _parts.get(module)
    return parts if parts is not None and parts.unchanged() else None


_parts: weakref.WeakKeyDictionary[nn.Module, ModuleParts] = weakref.WeakKeyDictionary()


def parts_of(module: nn.Module) -> ModuleParts:
    parts = _parts.get(module)
    if parts is None or not parts.valid():
        parts = _parts[module] = ModuleParts(module)
    return parts


def _is_norm(module: nn.Module) -> bool:
    """Whether `module` writes statistics in its present mode that its forward does not read."""
    return module.training and type(module).forward in _NORM_FORWARDS and bool(module.track_running_stats)


_NORM_FORWARDS = {
    nn.modules.batchnorm._BatchNorm.forward,
    nn.modules.instancenorm._InstanceNorm.forward,
    nn.SyncBatchNorm.forward,
}


def is_closed(value: Any) -> bool:
    """Whether `value` holds no tensor and cannot come to hold one."""
    if type(value) is tuple:
        return len(value) < 20 and all(map(is_closed, value))
    if type(value) is types.FunctionType:
        return not value.__closure__
    if type(value) in weakref.ProxyTypes:
        return False
    return type(value) in PLAIN or isinstance(value, (torch.dtype, torch.device, type, types.BuiltinFunctionType))


INTERNAL = frozenset(vars(nn.Module()))


_OF_ANY_CLASS = {"__module__", "__doc__", "__new__", "__init__", "__repr__", "__reduce_ex__", "__deepcopy__"}


def is_plain_type(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class compute as torch.Tensor does: a class of parameters may add attributes and methods."""
    if kind in (torch.Tensor, nn.Parameter, nn.Buffer):
        return True
    own = kind.__mro__[: kind.__mro__.index(nn.Parameter)] if nn.Parameter in kind.__mro__ else ()
    names = {name for base in own for name in vars(base)} - _OF_ANY_CLASS
    return bool(own) and not any(name == "__slots__" or hasattr(torch.Tensor, name) for name in names)
