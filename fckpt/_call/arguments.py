"""The arguments of one call, split into the distinct tensors and the static rest."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fckpt import _tree as tree
from fckpt._call.levels import is_wrapped, unseen, unwrapped
from fckpt._call.modules import storage_of
from fckpt.errors import ArgumentTypeError, ArgumentValueError, MutationError, region_name

__all__ = [
    "Arguments",
    "DonatedArguments",
    "StaticArguments",
    "argument_written",
    "check_donated",
    "check_returned",
    "outlived",
]


class _SelectedArguments:
    """Arguments that an option of `remat` selects, by position and by name."""

    __slots__ = ("names", "nums")

    option = ""

    def __init__(self, fn: Callable[..., Any], argnums: int | Sequence[int] = (), argnames: str | Sequence[str] = ()):
        option = self.option
        nums = _tuple_of(argnums, int, f"{option}_argnums", "an int or a tuple of ints")
        self.names = frozenset(_tuple_of(argnames, str, f"{option}_argnames", "a str or a tuple of strs"))
        parameters = _positional(fn)
        if parameters is not None:
            for num in nums:
                if not -len(parameters) <= num < len(parameters):
                    raise ArgumentValueError(
                        f"{option}_argnums={num} is out of range: {_name(fn)} takes {len(parameters)} positional "
                        f"arguments ({', '.join(parameters)}), so {-len(parameters)} <= {option}_argnums < "
                        f"{len(parameters)}."
                    )
        self.nums = nums

    def __bool__(self) -> bool:
        return bool(self.nums or self.names)

    def positions(self, count: int) -> set[int]:
        """Returns the selected positions of a call with `count` positional arguments."""
        return {n % count for n in self.nums if -count <= n < count} if count else set()


class StaticArguments(_SelectedArguments):
    """The arguments that are passed to the function unchanged."""

    __slots__ = ()

    option = "static"


class DonatedArguments(_SelectedArguments):
    """The arguments whose memory the caller gives away: results may be written over it."""

    __slots__ = ()

    option = "donate"

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, str]:
        """Returns the donated tensors of a call, as the paths of the tensors by the tensors' ids.

        Raises:
            ArgumentValueError: a donated tensor requires grad, is a wrapper of torch.func, or shares memory with
                another tensor among the arguments.
        """
        arguments = Arguments(args, kwargs)
        paths = arguments.paths()
        chosen = [f"args[{n}]" for n in sorted(self.positions(len(args)))]
        chosen += [f"kwargs[{name!r}]" for name in kwargs if name in self.names]
        places: dict[int, list[str]] = {}
        found: dict[int, str] = {}
        for position, index in arguments._where:
            path, tensor = paths[position], arguments.tensors[index]
            with unseen():
                places.setdefault(storage_of(unwrapped(tensor)), []).append(path)
            if any(path == own or path.startswith((f"{own}[", f"{own}.")) for own in chosen):
                found[id(tensor)] = path
                if is_wrapped(tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
                    raise ArgumentValueError(
                        f"{path} is donated, but is differentiated from outside: its old value belongs to that "
                        "backward pass. Differentiate inside of the function, and pass tensors that do not require "
                        "grad, or call the function under torch.no_grad()."
                    )
        for path in found.values():
            shared = next((paths for s, paths in places.items() if s and path in paths and len(paths) > 1), None)
            if shared is not None:
                other = next(p for p in shared if p != path)
                raise ArgumentValueError(
                    f"{path} is donated, but shares memory with {other}, which would change as well. Donate a tensor "
                    f"that nothing else uses: {path}.clone()."
                )
        return found


def check_donated(tensors: Sequence[torch.Tensor], closure: Iterable[torch.Tensor], paths: dict[int, str]) -> None:
    """Raises `ArgumentValueError` if a donated tensor shares memory with a captured tensor."""
    if tensors:
        captured = {storage_of(unwrapped(t)) for t in closure} - {0}
        for tensor in tensors:
            if storage_of(tensor) in captured:
                raise ArgumentValueError(
                    f"{paths[id(tensor)]} is donated, but shares memory with a tensor that the function closes over, "
                    "which would change as well. Pass that tensor as an argument, or donate a clone."
                )


def check_returned(result: Any, written: Sequence[int], paths: dict[int, str]) -> None:
    """Raises `ArgumentValueError` if a call returns a donated tensor more often than results were written over it.

    Args:
        result: the result of the call.
        written: the ids of the donated tensors that are results of the graph, as often as they are.
        paths: the paths of the donated tensors, by id.
    """
    found = [id(leaf) for leaf in tree.leaves(result)]
    for key in set(written):
        if found.count(key) > written.count(key):
            raise ArgumentValueError(
                f"{paths[key]} is donated, and a result was written over it, but the function also returns it itself "
                "(or returns that result twice). Return a clone, or do not donate this argument."
            )


def _tuple_of(value: Any, kind: type, what: str, wanted: str) -> tuple[Any, ...]:
    items = (value,) if isinstance(value, (int, str)) else value
    if not isinstance(items, (tuple, list, set, frozenset)):
        raise ArgumentTypeError(f"{what} must be {wanted}, not {type(value).__name__}: {value!r}.")
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise ArgumentTypeError(f"{what} must be {wanted}; it holds {item!r} ({type(item).__name__}).")
    return tuple(items)


def _positional(fn: Callable[..., Any]) -> list[str] | None:
    """Returns the names of the positional parameters; None if the function takes `*args`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def argument_written(path: str, fn: Any = None) -> MutationError:
    """Returns the error for a function that changes the argument at `path` in place."""
    return MutationError(
        f"{path} was changed in place by {region_name(fn)} itself; its recompute would change it again. Return the new "
        "value instead of writing into the argument (`fckpt.from_module` does so for a module's buffers)."
    )


class Arguments:
    """The arguments of one call: `tensors`, and the structure that `rebuild` fills with other tensors."""

    __slots__ = ("_rest", "_spec", "_static", "_where", "given", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: StaticArguments | None = None):
        """Flattens the arguments."""
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs)
        """The arguments exactly as the caller passed them. The forward receives these objects, so that its changes to a
        list or a dict reach the caller."""
        self._static: tuple[dict[int, Any], dict[str, Any]] | None = None
        if static:
            args, kwargs = self._set_aside(args, kwargs, static)
        leaves, self._spec = tree.flatten((args, kwargs))
        self.tensors: list[torch.Tensor] = []
        """The distinct tensors, in order of first appearance."""
        self._where: list[tuple[int, int]] = []  # (position among the leaves, index into tensors)
        seen: dict[int, int] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                index = seen.get(id(leaf))
                if index is None:
                    index = seen[id(leaf)] = len(self.tensors)
                    self.tensors.append(leaf)
                self._where.append((position, index))
                leaves[position] = None
        self._rest = leaves

    def _set_aside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], static: StaticArguments
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nums = static.positions(len(args))
        by_num = {n: args[n] for n in nums}
        by_name = {k: v for k, v in kwargs.items() if k in static.names}
        self._static = (by_num, by_name)
        rest = {k: v for k, v in kwargs.items() if k not in by_name}
        return tuple(a for i, a in enumerate(args) if i not in nums), rest

    @property
    def statics(self) -> list[Any]:
        """The leaves that are not tensors, and the static arguments."""
        static = [] if self._static is None else [*self._static[0].values(), *self._static[1].values()]
        return [leaf for leaf in self._rest if leaf is not None] + static

    def signature(self) -> Any:
        """Returns what a trace of the call depends on, apart from the layouts of its tensors: structure, orders of
        keys, repeated tensors and static leaves.

        The result is hashable. An object that is equal only to itself, such as a module, is held by a weak reference;
        see `outlived`.

        Raises:
            ArgumentTypeError: a static leaf or a static argument is not hashable.
        """
        for position, leaf in enumerate(self._rest):
            if type(leaf) not in _HASHABLE:
                _check_hashable(leaf, lambda position=position: self._path(position))
        rest = tuple(_key(leaf) for leaf in self._rest)
        static: tuple[Any, ...] = ()
        if self._static is not None:
            by_num, by_name = self._static
            named = {
                **{f"args[{n}]": v for n, v in by_num.items()},
                **{f"kwargs[{k!r}]": v for k, v in by_name.items()},
            }
            for name, value in named.items():
                _check_hashable(value, lambda name=name: name)
            static = tuple((name, _key(value)) for name, value in named.items())
        return (self._spec, tree.key_orders(self.given), tuple(self._where), rest, static)

    def rebuild(
        self, tensors: Sequence[Any], statics: Sequence[Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) with `tensors` instead of `self.tensors`, and with `statics` instead of
        `self.statics`.
        """
        leaves = list(self._rest)
        static = self._static
        if statics is not None:
            others = iter(statics)
            leaves = [leaf if leaf is None else next(others) for leaf in leaves]
            if static is not None:
                static = ({n: next(others) for n in static[0]}, {k: next(others) for k in static[1]})
        for position, index in self._where:
            leaves[position] = tensors[index]
        args, kwargs = tree.unflatten(self._spec, leaves)
        if static is not None:
            by_num, by_name = static
            positional = list(args)
            for n in sorted(by_num):
                positional.insert(n, by_num[n])
            args, kwargs = tuple(positional), {**kwargs, **by_name}
        return args, kwargs

    def release(self) -> None:
        """Drops the references to the tensors. `rebuild` still works."""
        self.tensors = []
        self.given = ((), {})

    def path(self, index: int) -> str:
        """Returns the path of tensor `index` as the caller would write it: `args[0]['w']`, `kwargs['x']`."""
        return next(self._path(position) for position, i in self._where if i == index)

    def written(self, index: int, fn: Callable[..., Any]) -> MutationError:
        """Returns the error for a function `fn` that changed tensor `index` in place."""
        return argument_written(self.path(index), fn)

    def paths(self) -> list[str]:
        """Returns the path of every leaf as the caller would write it."""
        return [("args" if path.startswith("[0]") else "kwargs") + path[3:] for path in self._spec.paths()]

    def _path(self, position: int) -> str:
        return self.paths()[position]


def _check_hashable(value: Any, path: Callable[[], str]) -> None:
    try:
        hash(value)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{path()} is a {type(value).__name__}, which cannot be hashed. This function has a plan and cannot be "
            "captured, so its plans are looked up by the values of its static arguments. Pass a hashable value (a "
            "tuple for a list, torch.as_tensor(a) for a NumPy array), register the type as a pytree with optree, or "
            "let the function read the value from its closure."
        ) from None


def _key(leaf: Any) -> Any:
    # 1 == 1.0 == True, but a function may distinguish them, so the type is part of the key. Slices are hashable only
    # from Python 3.12 on.
    if type(leaf) is slice:
        return (slice, _key(leaf.start), _key(leaf.stop), _key(leaf.step))
    if type(leaf).__hash__ is object.__hash__:
        with contextlib.suppress(TypeError):  # the type does not support weak references
            return weakref.ref(leaf)
    return (type(leaf), leaf)


def outlived(signature: Any) -> bool:
    """Whether no later call can have this `Arguments.signature`, because an object in it no longer exists."""
    if isinstance(signature, tuple):
        return any(map(outlived, signature))
    return isinstance(signature, weakref.ref) and signature() is None


_HASHABLE = frozenset({bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device})
