"""Branches on the data of tensors that a call is given: a capture takes the branch of its call, and guards the outcome.

Models look at their masks, for example: `if mask.all():` leaves out a mask of ones, so that a faster kernel runs. Such
a condition can be computed before each call, because it depends only on tensors that the call is given and does not
differentiate. If the outcome differs, the capture is not valid for the call.

A condition that depends on parameters changes during training, and computing it would take the model's operations, so
such a branch cannot be captured. Nor can one that takes several times the memory of the largest tensor.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_batchedtensor
from torch._dynamo.variables import builtin
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable

from fckpt._call.ambient import without_modes
from fckpt._call.levels import layers, unseen
from fckpt._call.modules import is_plain_type
from fckpt._call.rng import RandomState
from fckpt._capture.checks import checked
from fckpt._capture.patching import instructions_patched, patched
from fckpt._capture.wrapped import name_of, reader

__all__ = ["Branches"]

_MOST_CALLS = 64
"""The most calls that a condition may consist of."""
_MOST_CONDITIONS = 64
_MOST_TENSORS = 4
"""A condition may take this many times the memory of the largest tensor of the function."""
_MOST_SIZES = 1024
"""The most sizes for which the outcome of a condition is remembered."""


class _Condition:
    """A condition on the data or sizes of tensors, as a graph of torch calls, with its outcome in the captured call."""

    def __init__(
        self,
        graph: fx.Graph,
        names: list[str],
        written: set[int],
        scope: dict[str, Any],
        line: str,
        of_sizes: bool,
        nbytes: int,
    ):
        self._read = reader(names, scope)
        self._compute = fx.GraphModule({}, graph)
        self._written = written
        """The positions of the inputs that the graph writes: copies take their places."""
        self.line = line
        self.nbytes = nbytes
        """The most bytes that the condition takes at once, at the sizes of the captured call."""
        self.outcome = False
        self._by_sizes: dict[Any, bool] | None = {} if of_sizes else None
        """The outcomes by the inputs' sizes, if the condition depends on nothing else."""

    def evaluated(self, places: dict[str, Any]) -> bool | None:
        """Returns the outcome for a call; None if it cannot be known.

        It cannot be known if the tensors have no data, if they are batches of `vmap`, or while a device graph is being
        recorded, which allows no read of data.
        """
        tensors = []
        for i, tensor in enumerate(self._read(places)):
            if not isinstance(tensor, torch.Tensor):  # a size
                tensors.append(tensor)
                continue
            below = list(layers(tensor))
            bottom = below[-1]
            if not is_plain_type(type(bottom)) or bottom.is_meta or any(map(is_batchedtensor, below)):
                return None
            if bottom.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            if i in self._written:
                if bottom._is_view():  # the graph may write it through another tensor
                    return None
                bottom = bottom.detach().clone()
            tensors.append(bottom)
        if self._by_sizes is None:
            return self._computed(tensors)
        sizes = tuple([t.shape if isinstance(t, torch.Tensor) else t for t in tensors])
        outcome = self._by_sizes.get(sizes)
        if outcome is None:
            if len(self._by_sizes) >= _MOST_SIZES:
                self._by_sizes.clear()
            outcome = self._by_sizes[sizes] = self._computed(tensors)
        return outcome

    def _computed(self, tensors: list[Any]) -> bool:
        # Under autocast, as in the call: guards compare its settings.
        with torch._C._DisableFuncTorch(), unseen(), without_modes(), torch.no_grad():
            return bool(self._compute(*tensors))


class Branches:
    """The conditions that a capture has met, with their outcomes."""

    def __init__(self, scope: dict[str, Any], places: dict[str, Any]):
        """Begins without conditions.

        Args:
            scope: the globals of the entry, to which Dynamo's expressions for tensors refer as `G`.
            places: the arguments of the entry in the captured call, to which they refer as `L`.
        """
        self._scope = scope
        self._places = places
        self._conditions: dict[Any, _Condition] = {}
        self.uses = 0
        """How often an outcome was asked for."""

    @property
    def nbytes(self) -> int:
        """The most bytes that a condition takes, at the sizes of the captured call."""
        return max((c.nbytes for c in self._conditions.values()), default=0)

    def hold(self, places: dict[str, Any]) -> bool:
        """Whether all conditions have the same outcomes in a call."""
        return all(c.evaluated(places) is c.outcome for c in self._conditions.values())

    def changed(self, places: dict[str, Any]) -> str:
        """Returns a description of the first condition with another outcome in a call; empty if there is none."""
        lines = (c.line for c in self._conditions.values() if c.evaluated(places) is not c.outcome)
        return next((f"the data of a tensor decides a branch: {line}" for line in lines), "")

    def outcome(self, tx: Any, variable: Any) -> bool | None:
        """Returns the outcome of a tensor's conversion to bool, and guards it; None if it cannot be known."""
        value = variable.realize()
        if not isinstance(value, TensorVariable):
            return None
        node = value.proxy.node
        if node not in self._conditions:
            made = self._condition(node, tx)
            if made is None or len(self._conditions) >= _MOST_CONDITIONS:
                return None
            self._conditions[node] = made
        self.uses += 1
        return self._conditions[node].outcome

    def _condition(self, node: fx.Node, tx: Any) -> _Condition | None:
        computing = _computing(node)
        if computing is None:
            return None
        calls, sizes, written = computing
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for call in calls:
            if call in sizes:
                given, dim = sizes[call]
                copies[call] = graph.call_method("size", (copies[given], dim))
                continue
            copies[call] = graph.node_copy(call, copies.__getitem__)
            copies[call].meta = {}  # it refers to the tensors of the capture
        graph.output(copies[node])
        inputs = [call for call in calls if call.op == "placeholder"]
        names = [name_of(call.meta["grapharg"].source) for call in inputs]
        over = {i for i, call in enumerate(inputs) if _storage(call) in written}
        line = _place(tx)
        read = {node, *(given for call in calls if call not in sizes for given in call.all_input_nodes)}
        of_sizes = not any(n.op == "placeholder" and _example(n) is not None for n in read)
        nbytes = sum(_held(calls).values())
        condition = _Condition(graph, names, over, self._scope, line, of_sizes, nbytes)
        generators = RandomState.capture({example.device for example in map(_example, calls) if example is not None})
        try:
            outcome = condition.evaluated(self._places)
        except Exception:  # the error belongs to the call, which will raise it
            return None
        drawn = generators.drawn()
        if drawn.states:
            drawn.rewind()
            return None
        if outcome is None:
            return None
        condition.outcome = outcome
        return condition

    @contextlib.contextmanager
    def decided(self) -> Iterator[None]:
        """Makes Dynamo take, within the body, the branches whose conditions can be computed before a call."""
        jumps = [name for name in dis.opmap if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name)]
        wrapped = {name: functools.partial(self._jumping, name=name) for name in jumps}
        with contextlib.ExitStack() as stack:
            stack.enter_context(instructions_patched({**wrapped, "UNARY_NOT": self._negating}))
            if "generic_bool" in vars(builtin):  # not a method of `BuiltinVariable`: it caches its methods
                stack.enter_context(patched(builtin, "generic_bool", self._converting))
            stack.enter_context(patched(TensorVariable, "method_item", self._reading))
            yield
        # Arguments of the call and the capture's graph must not stay alive.
        self._places = {}
        self._conditions = dict(enumerate(self._conditions.values()))

    def _jumping(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wraps the handler of an instruction that jumps if the top of the stack is true, or if it is false."""
        wanted = "IF_TRUE" in name
        keeps = name.endswith("OR_POP")  # such an instruction removes the top only if it does not jump

        def jump(tx: Any, inst: Any) -> Any:
            outcome = checked(tx, inst, tx.stack[-1], wanted, _place)
            if outcome is None:
                outcome = self.outcome(tx, tx.stack[-1])
            if outcome is None:
                return original(tx, inst)
            if not keeps or outcome != wanted:
                tx.pop()
            return tx.jump(inst) if outcome == wanted else None

        return jump

    def _negating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def negate(tx: Any, inst: Any) -> Any:
            outcome = self.outcome(tx, tx.stack[-1])
            if outcome is None:
                return original(tx, inst)
            tx.pop()
            return tx.push(ConstantVariable.create(not outcome))

        return negate

    def _converting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def convert(tx: Any, argument: Any) -> Any:
            outcome = self.outcome(tx, argument)
            return original(tx, argument) if outcome is None else _constant(outcome)

        return convert

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def item(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            example = _example(variable.proxy.node)
            is_bool = example is not None and example.dtype == torch.bool
            outcome = self.outcome(tx, variable) if is_bool and not args and not kwargs else None
            return original(variable, tx, *args, **kwargs) if outcome is None else _constant(outcome)

        return item


_constant = ConstantVariable.create


def _place(tx: Any) -> str:
    """Returns the line of the user's code that Dynamo evaluates, and where it is."""
    frame = tx.frame_summary()
    return f"`{frame.line}` ({frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name})"


def _computing(node: fx.Node) -> tuple[list[fx.Node], dict[fx.Node, tuple[fx.Node, int]], set[int]] | None:
    """Returns the inputs and calls from which a graph computes `node`, in order, the sizes among them, and the storages
    that they write.

    A size of an activation is read from the input that has the same size: by node, the input and its dimension.

    None if there are too many, if one is not a torch function, if an input cannot be read before a call, or if they
    take too much memory.
    """
    found, todo, sizes = {node}, [node], dict[fx.Node, tuple[fx.Node, int]]()
    writes = [(call, {_storage(n) for n in _written(call)}) for call in node.graph.nodes]
    while todo:
        while todo:
            read = todo.pop()
            size = _size_of_input(read)
            if size is not None:
                sizes[read] = size
            new = (set(read.all_input_nodes) if size is None else {size[0]}) - found
            found |= new
            todo += new
            if len(found) > _MOST_CALLS:
                return None
        memory = {_storage(n) for n in found}
        todo += [call for call, written in writes if call not in found and written & memory]
        found.update(todo)
    inputs = [n for n in found if n.op == "placeholder"]
    if not all(map(_is_read_before, inputs)):
        return None
    if not all(n.op in ("placeholder", "call_method") or n in sizes or _is_of_torch(n) for n in found):
        return None
    casts = any("autocast" in getattr(n.target, "__name__", "") for n in node.graph.nodes)
    if casts and any(_is_float(n) for n in found if n.op != "placeholder"):  # the calls may be within its body
        return None
    # Guards are computed before a call. A plan whose peak is less than what they hold is warned of (`_region.py`).
    data = [n for n in node.graph.nodes if not isinstance(_example(n), torch.nn.Parameter)]
    if sum(_held(found).values()) > _MOST_TENSORS * max(map(_nbytes, data)):
        return None
    written = {storage for call, storages in writes if call in found for storage in storages}
    return [n for n in node.graph.nodes if n in found], sizes, written


def _size_of_input(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns an input, and a dimension in which its size is the number that `node` computes; None if none."""
    number = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(number, torch.SymInt):
        return None
    for other in node.graph.nodes:
        example = _example(other) if other.op == "placeholder" and _is_read_before(other) else None
        for dim, size in enumerate(() if example is None else example.shape):
            if isinstance(size, torch.SymInt) and size.node.expr == number.node.expr:
                return other, dim
    return None


def _example(node: fx.Node) -> torch.Tensor | None:
    example = node.meta.get("example_value")
    return example if isinstance(example, torch.Tensor) else None


def _is_read_before(node: fx.Node) -> bool:
    """Whether an input is a size, or a tensor whose data can be read before a call: no parameter or activation."""
    example, given = _example(node), node.meta.get("grapharg")
    if given is None or given.source is None or given.pass_arg_as_tensor:
        return False
    if isinstance(node.meta.get("example_value"), (int, torch.SymInt)):
        return True
    if example is None:
        return False
    return not _is_float(node) or not (example.requires_grad or isinstance(example, torch.nn.Parameter))


def _is_float(node: fx.Node) -> bool:
    example = _example(node)
    return example is not None and (example.dtype.is_floating_point or example.dtype.is_complex)


def _is_of_torch(node: fx.Node) -> bool:
    """Whether a call is of a function of torch or Python, not of a custom operation or a function of the user."""
    if node.op != "call_function":
        return False
    if type(node.target).__module__ == "torch._ops":
        return str(node.target).startswith("aten.")
    return str(getattr(node.target, "__module__", "")).partition(".")[0] in ("torch", "_operator", "builtins", "math")


def _nbytes(node: fx.Node) -> int:
    """Returns the bytes of a tensor at the sizes of the captured call; 0 for a number."""
    example = _example(node)
    if example is None:
        return 0
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in example.shape]
    return math.prod(sizes) * example.element_size()


def _held(calls: Collection[fx.Node]) -> dict[int, int]:
    """Returns the bytes of the floating point tensors that calls make, by storage."""
    read = {_storage(n) for n in calls if n.op == "placeholder"}
    held = {_storage(n): _nbytes(n) for n in calls if n.op != "placeholder" and _is_float(n)}
    return {storage: nbytes for storage, nbytes in held.items() if storage not in read}


def _storage(node: fx.Node) -> int:
    example = _example(node)
    if example is None or example.layout is not torch.strided:
        return -1 - id(node)  # no other node's
    return example.untyped_storage()._cdata


def _written(node: fx.Node) -> list[fx.Node]:
    """Returns the tensors that a call may write to, by the name of the function."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    schema = getattr(target, "_schema", None)
    if node.op not in ("call_function", "call_method"):
        return []
    if (schema is not None and schema.is_mutable) or _is_told_in_place(node):
        return node.all_input_nodes
    if getattr(target, "__module__", "") == "_operator":  # which has `and_` too
        by_name = name in _IN_PLACE_OPERATORS
    else:
        by_name = name.strip("_") in _IN_PLACE_OPERATORS if name.endswith("__") else name.endswith("_")
    if by_name:
        return _nodes(node.args[0]) if node.args else node.all_input_nodes
    return _nodes(node.kwargs.get("out"))


def _nodes(value: Any) -> list[fx.Node]:
    return [n for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, fx.Node)]


def _is_told_in_place(node: fx.Node) -> bool:
    """Whether a call has an argument `inplace` that is true."""
    if getattr(node.target, "__module__", "") != "torch.nn.functional" or isinstance(node.target, str):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return True
    return bool(bound.arguments.get("inplace"))


_IN_PLACE_OPERATORS = {
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv",
    "ixor", "setitem",
}  # fmt: skip
