"""Copies of a function and its closure in which some places hold other values, for a recompute to run on.

A recompute must find the buffers, flags and attributes that its forward found, and its writes must not be visible. The
original objects belong to the program: another thread may be running the same module. So the function is copied,
together with the cells, modules, objects and containers on a path to a changed place. Everything else is shared.

Some objects cannot be copied: classes, imported modules, compiled or sharded modules, and everything reached through
them. Changes to these are returned, and the caller makes them in place.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fckpt._call.closure import DEPTH, RECORDS, global_names, imported, is_compilers, slot_names
from fckpt._call.closure import method_globals as globals_of_methods
from fckpt._call.facts import attribute, is_user_class
from fckpt._call.modules import HOOKS, INTERNAL, is_closed, known_parts
from fckpt._call.places import ABSENT, ARRAYS, BUILTIN, Slot, content, entries, is_inert, put, referent

__all__ = ["shadow"]

_MOST = 50_000
"""The most objects that are searched."""


def shadow(
    roots: list[Any], changes: Iterable[Slot], made: dict[int, Any] | None = None
) -> tuple[list[Any], list[Slot]]:
    """Returns copies of `roots` that find other values in some places.

    Args:
        roots: functions, modules, objects.
        changes: the places and their new values.
        made: a dict that receives the copies, by the id of the original.

    Returns:
        The roots, copied if necessary, and the changes that no copy could hold.
    """
    graph = _Graph(changes)
    graph.made = {} if made is None else made
    graph.explore(roots)
    left = graph.choose()
    return [graph.copied(root) for root in roots], left


class _Graph:
    """The objects that can be reached from some roots, by id, and the references between them."""

    def __init__(self, changes: Iterable[Slot]):
        self.changes = list(changes)
        self.given: dict[int, dict[Any, Any]] = {}
        """The new values in the places of each object, by key."""
        for holder, key, value in self.changes:
            self.given.setdefault(id(holder), {})[key] = value
        self.nodes: dict[int, Any] = {}
        self.depths: dict[int, int] = {}
        self.above: dict[int, set[int]] = {}
        self.below: dict[int, list[int]] = {}
        self.fixed: list[int] = []
        """The objects that cannot be copied, or are reached only through such an object."""
        self.live: set[tuple[int, Any]] = set()
        """Globals that methods read from the original scope."""
        self.todo: list[tuple[Any, int]] = []
        self.deeper: list[tuple[Any, Any]] = []
        """References that lie deeper than `DEPTH` levels."""
        self.chosen: set[int] = set()
        self.made: dict[int, Any] = {}

    # -- search

    def explore(self, roots: Iterable[Any]) -> None:
        for root in roots:
            self.edge(None, root, DEPTH)
        self.search()
        if any(id(holder) not in self.nodes and not isinstance(holder, type) for holder, _, _ in self.changes):
            deeper, self.deeper = self.deeper, []
            for parent, child in deeper:
                self.edge(parent, child, DEPTH - 1)
            self.search()

    def search(self) -> None:
        while self.todo:
            self.visit(*self.todo.pop())

    def edge(self, parent: Any, child: Any, depth: int) -> None:
        """Records a reference from `parent` to `child`, which is searched `depth` levels deep."""
        kind = type(child)
        if is_inert(kind):
            return
        if depth < 0:
            if len(self.deeper) < _MOST:
                self.deeper.append((parent, child))
            return
        if kind not in weakref.ProxyTypes and isinstance(child, (torch.Tensor, type)):
            return
        key = id(child)
        if parent is not None:
            self.above.setdefault(key, set()).add(id(parent))
            self.below.setdefault(id(parent), []).append(key)
        if self.depths.get(key, -1) < depth and len(self.nodes) < _MOST:
            self.nodes[key] = child
            self.depths[key] = depth
            self.todo.append((child, depth))

    def visit(self, node: Any, depth: int) -> None:
        kind = type(node)
        if kind in weakref.ProxyTypes:
            self.edge(node, referent(node), depth)
        elif isinstance(node, weakref.ref):
            self.fix(node())  # it would not keep a copy alive
        elif kind is types.FunctionType:
            self.function(node, depth)
        elif kind is types.CellType:
            self.edge(node, self.content(node), depth)
        elif kind in (types.MethodType, types.BuiltinMethodType):
            self.edge(node, node.__self__, depth)
            if kind is types.MethodType and not (node.__func__.__module__ or "").startswith("torch.nn."):
                self.edge(node, node.__func__, depth)
        elif isinstance(node, functools.partial):
            for item in (node.func, *node.args, *node.keywords.values()):
                self.edge(node, item, depth)
        elif isinstance(node, (tuple, list, set, frozenset, collections.deque)):
            for item in self.elements(node):
                self.edge(node, item, depth - 1)
            self.attributes(node, kind, depth)
        elif isinstance(node, dict):
            for item in self.items(node).values():
                self.edge(node, item, depth)
            self.attributes(node, kind, depth)
        elif isinstance(node, torch.jit.ScriptModule):
            self.fixed.append(id(node))
        elif isinstance(node, nn.Module):
            self.module(node)
        elif not isinstance(node, ARRAYS):
            self.object(node, kind, depth)

    def items(self, node: dict[Any, Any]) -> dict[Any, Any]:
        """Returns the entries of a dict after the changes."""
        given = self.given.get(id(node))
        held = entries(node)
        return held if given is None else {k: v for k, v in {**held, **given}.items() if v is not ABSENT}

    def elements(self, node: Any) -> Iterable[Any]:
        """Returns the items of a sequence or set after the changes."""
        given = self.given.get(id(node))
        if given is not None:
            return given[None]
        return list(node) if isinstance(node, (tuple, frozenset)) else content(node, None)

    def attributes(self, node: Any, kind: type, depth: int) -> None:
        """Visits the attributes that a container subclass adds."""
        if kind in BUILTIN or isinstance(node, tuple):
            return
        self.class_of(node)
        attributes = attribute(node, "__dict__")
        if type(attributes) is dict:
            self.edge(node, attributes, depth)

    def content(self, cell: types.CellType) -> Any:
        given = self.given.get(id(cell))
        try:
            return cell.cell_contents if given is None else given[None]
        except ValueError:
            return None

    def leaf(self, parent: Any, child: Any) -> None:
        """Records a dict that holds only tensors, if it changes."""
        if child and id(child) in self.given:
            self.nodes[id(child)] = child
            self.above.setdefault(id(child), set()).add(id(parent))
            self.below.setdefault(id(parent), []).append(id(child))

    def function(self, fn: types.FunctionType, depth: int) -> None:
        if is_compilers(fn):
            self.fixed.append(id(fn))
        given = self.given.get(id(fn), {})
        self.edge(fn, given.get("__defaults__", fn.__defaults__), depth + 1)
        self.edge(fn, fn.__kwdefaults__, depth)
        for cell in fn.__closure__ or ():
            self.edge(fn, cell, depth)
        names = global_names(fn.__code__)
        if names:
            scope = fn.__globals__
            given = self.given.get(id(scope), {})
            self.nodes[id(scope)] = scope
            self.above.setdefault(id(scope), set()).add(id(fn))
            self.below.setdefault(id(fn), []).append(id(scope))
            for name in names:
                held = given.get(name, scope.get(name))
                if isinstance(held, types.ModuleType):
                    for _, _, value in imported(held, names):
                        self.fix(value)
                else:
                    self.edge(scope, held, depth)
        self.edge(fn, fn.__dict__.get("__wrapped__"), depth)

    def fix(self, value: Any) -> None:
        """Records a value that cannot be replaced by a copy, because it is found through the original object."""
        self.edge(None, value, DEPTH)
        self.fixed.append(id(value))

    def module(self, module: nn.Module) -> None:
        attributes = vars(module)
        if self.tree(module, attributes):
            return
        self.class_of(module)
        self.join(module, attributes)
        for name in ("_buffers", "_parameters"):
            self.leaf(attributes, attributes[name])
        children = attributes["_modules"]
        if children:
            self.join(attributes, children)
            for child in self.items(children).values():
                self.edge(children, child, DEPTH)
        if len(attributes) > len(INTERNAL) or id(attributes) in self.given:
            for name, value in self.items(attributes).items():
                if name not in INTERNAL and not is_closed(value):
                    self.edge(attributes, value, DEPTH)
        for name in HOOKS:  # hooks may write to their captured values
            if attributes[name]:
                self.edge(attributes, attributes[name], DEPTH)
        for name in slot_names(type(module)):
            self.edge(module, attribute(module, name), DEPTH)

    def tree(self, module: nn.Module, attributes: dict[str, Any]) -> bool:
        """Records the paths to the changes in a module tree without a search; returns False if a search is needed."""
        parts = None if slot_names(type(module)) else known_parts(module)
        if parts is None or parts.ways is None or not _can_copy_all(parts.kinds):
            return False
        ways = parts.ways
        found = [holder for holder in self.given if holder in ways]
        for holder in found:
            if not all(isinstance(v, torch.Tensor) or v is ABSENT or is_closed(v) for v in self.given[holder].values()):
                return False
        if any(id(children) in self.given for children in parts._children) or any(map(_is_compiled, parts.modules)):
            return False
        if any(map(_is_hooked, parts.modules)):
            return False
        for scope, name in parts.named:
            self.method_global(scope, name)
        for owner, name in parts.open:
            value = self.given.get(id(owner), {}).get(name, owner.get(name))
            if not is_inert(type(value)):
                found.append(id(owner))
                self.edge(owner, value, DEPTH)
        if found:
            self.join(module, attributes)
        for holder in found:
            for above, below in ways[holder]:
                self.nodes[id(above)] = above
                self.join(above, below)
        return True

    def join(self, parent: Any, child: dict[str, Any]) -> None:
        self.nodes[id(child)] = child
        self.above.setdefault(id(child), set()).add(id(parent))
        self.below.setdefault(id(parent), []).append(id(child))

    def object(self, node: Any, kind: type, depth: int) -> None:
        attributes = attribute(node, "__dict__")
        if type(attributes) is not dict and not slot_names(kind):
            return
        self.class_of(node)
        if type(attributes) is dict:
            self.edge(node, attributes, depth - 1)
        given = self.given.get(id(node), {})
        for name in slot_names(kind):
            self.edge(node, given.get(name, attribute(node, name)), depth - 1)

    def class_of(self, node: Any) -> None:
        """Fixes the globals that methods of the object's class read, and the object itself if it cannot be copied."""
        kind = type(node)
        for scope, name in globals_of_methods(kind):
            self.method_global(scope, name)
        if not _can_copy(kind) or (isinstance(node, nn.Module) and _is_compiled(vars(node))):
            self.fixed.append(id(node))

    def method_global(self, scope: dict[str, Any], name: str) -> None:
        self.live.add((id(scope), name))
        self.fix(self.given.get(id(scope), {}).get(name, scope.get(name)))

    # -- the copies

    def choose(self) -> list[Slot]:
        """Chooses the objects to copy; returns the changes that must be made in place."""
        fixed: set[int] = set()
        todo = self.fixed
        while todo:
            key = todo.pop()
            if key not in fixed:
                fixed.add(key)
                todo += self.below.get(key, ())
        left = []
        for change in self.changes:
            holder, name, _ = change
            key = id(holder)
            if key in fixed or key not in self.nodes or (key, name) in self.live:
                left.append(change)
            else:
                todo.append(key)
        while todo:
            key = todo.pop()
            if key not in self.chosen:
                self.chosen.add(key)
                todo += self.above.get(key, ())
        return left

    def copied(self, node: Any) -> Any:
        """Returns the copy of an object that was chosen; otherwise the object itself."""
        key = id(node)
        if key not in self.chosen:
            return node
        if key in self.made:
            return self.made[key]
        kind = type(node)
        if kind in weakref.ProxyTypes:  # the copy may have no other reference
            return self.copied(referent(node))
        if kind is types.FunctionType:
            return self.function_copy(node)
        if kind is types.CellType:
            cell = self.made[key] = types.CellType()
            cell.cell_contents = self.copied(self.content(node))
            return cell
        if kind is types.MethodType:
            return types.MethodType(self.copied(node.__func__), self.copied(node.__self__))
        if kind is types.BuiltinMethodType:
            return getattr(self.copied(node.__self__), node.__name__)
        if isinstance(node, functools.partial):
            words = {name: self.copied(value) for name, value in node.keywords.items()}
            return functools.partial(self.copied(node.func), *map(self.copied, node.args), **words)
        if isinstance(node, tuple):
            items = map(self.copied, node)
            return type(node)(*items) if hasattr(node, "_fields") else tuple(items)
        return self.mutable_copy(node, kind)

    def mutable_copy(self, node: Any, kind: type) -> Any:
        key = id(node)
        given = self.given.get(key)
        if kind is dict:
            new = self.made[key] = dict(node)
            for name, value in self.items(node).items():
                new[name] = self.copied(value) if id(value) in self.chosen else value
            for name, value in (given or {}).items():
                if value is ABSENT:
                    new.pop(name, None)
            return new
        if isinstance(node, (*CONTAINERS, *ARRAYS)):
            return self.container_copy(node, kind)
        new = self.made[key] = copy.copy(node) if kind in RECORDS else object.__new__(kind)
        attributes = attribute(node, "__dict__")
        if kind in RECORDS:
            vars(new).update(self.copied(attributes))
            return new
        for name in slot_names(kind):
            held = (given or {}).get(name, attribute(node, name, ABSENT))
            if held is not ABSENT:
                object.__setattr__(new, name, self.copied(held))
        if type(attributes) is dict:
            own = self.copied(attributes)
            object.__setattr__(new, "__dict__", dict(own) if own is attributes else own)
        return new

    def container_copy(self, node: Any, kind: type) -> Any:
        """Returns the copy of a list, a set, an array, or of a container subclass."""
        if isinstance(node, frozenset):
            return node  # compared by value, as are its items
        new = self.made[id(node)] = _empty(node, kind)
        if isinstance(node, dict):
            for name, value in self.items(node).items():
                put(new, name, self.copied(value))
        elif isinstance(node, ARRAYS):
            put(new, None, self.given[id(node)][None])
        else:
            put(new, None, list(map(self.copied, self.elements(node))))
        attributes = None if kind in BUILTIN else attribute(node, "__dict__")
        if type(attributes) is dict:
            own = self.copied(attributes)
            object.__setattr__(new, "__dict__", dict(own) if own is attributes else own)
        return new

    def function_copy(self, fn: types.FunctionType) -> Any:
        given = self.given.get(id(fn), {})
        cells = tuple(map(self.cell_shell, fn.__closure__ or ()))
        defaults = self.copied(given.get("__defaults__", fn.__defaults__))
        new = types.FunctionType(fn.__code__, self.scope_shell(fn.__globals__), fn.__name__, defaults, cells)
        self.made[id(fn)] = new
        new.__kwdefaults__ = self.copied(fn.__kwdefaults__)
        new.__dict__.update(fn.__dict__)
        new.__qualname__, new.__module__ = fn.__qualname__, fn.__module__
        if "__wrapped__" in fn.__dict__:
            new.__dict__["__wrapped__"] = self.copied(fn.__dict__["__wrapped__"])
        for cell, own in zip(fn.__closure__ or (), cells, strict=True):
            if own is not cell:
                self.fill(cell, own)
        self.fill_scope(fn.__globals__)
        return new

    def cell_shell(self, cell: types.CellType) -> types.CellType:
        """Returns the copy of a cell, still empty: its content may refer back to the function."""
        if id(cell) not in self.chosen:
            return cell
        return self.made.setdefault(id(cell), types.CellType())

    def fill(self, cell: types.CellType, own: types.CellType) -> None:
        try:
            own.cell_contents  # noqa: B018  # raises ValueError if it is empty
        except ValueError:
            own.cell_contents = None
            content = self.content(cell)
            own.cell_contents = self.copied(content)

    def scope_shell(self, scope: dict[str, Any]) -> dict[str, Any]:
        if id(scope) not in self.chosen:
            return scope
        return self.made.setdefault(id(scope), {})

    def fill_scope(self, scope: dict[str, Any]) -> None:
        own = self.made.get(id(scope))
        if own is not None and not own:
            held = self.items(scope)
            own.update(held)  # first, as a value may refer back to the scope
            own.update({name: self.copied(value) for name, value in held.items()})


def _is_compiled(attributes: dict[str, Any]) -> bool:
    return attributes.get("_compiled_call_impl") is not None


def _is_hooked(attributes: dict[str, Any]) -> bool:
    return any(attributes[name] for name in HOOKS)


def _empty(node: Any, kind: Any) -> Any:
    """Returns an empty container like `node`; for an array, a copy."""
    if isinstance(node, ARRAYS):
        return copy.copy(node)
    new = kind.__new__(kind)
    if isinstance(node, collections.deque):
        collections.deque.__init__(new, (), node.maxlen)
    if isinstance(node, collections.defaultdict):
        collections.defaultdict.__init__(new, node.default_factory)
    return new


@functools.lru_cache(maxsize=4096)
def _can_copy(kind: type) -> bool:
    """Whether an object of a class consists of its attributes, and nothing refers to the object by identity."""
    if kind in RECORDS:
        return True
    if issubclass(kind, CONTAINERS):
        return kind.__new__ in _NEW
    if not (is_user_class(kind) or issubclass(kind, nn.Module)):
        return False  # for example a lock, a thread or a file
    if hasattr(kind, "__del__"):
        return False  # a copy would release its resources a second time
    if any(base.__module__.startswith(_SEALED) for base in kind.__mro__):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # state in C
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _can_copy_all(kinds: tuple[type, ...]) -> bool:
    return all(map(_can_copy, kinds))


CONTAINERS = (dict, list, set, frozenset, collections.deque)
_NEW = {kind.__new__ for kind in (*CONTAINERS, collections.OrderedDict, collections.defaultdict)}
_SEALED = ("torch.jit", "torch._dynamo", "torch.distributed", "torch.fx", "torch._higher_order")
