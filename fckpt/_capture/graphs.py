"""A captured graph as a function of a flat list of tensors and numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from fckpt._call.ambient import function_modes, has_function_modes
from fckpt._capture import marks
from fckpt._capture.entered import Entered, entered_exited, enters
from fckpt._capture.sources import Names, running, source_of

__all__ = ["FlatGraph"]

_LEVEL = {"_wrap_for_grad": 1, "_unwrap_for_grad": 1, "_add_batch_dim": 2, "_remove_batch_dim": 1, "_unwrap_batched": 1}
"""By function of torch.func that a graph calls with a level number: the position of that argument."""

Held = Callable[[fx.Graph], dict[fx.Node, fx.Node]]
"""By result of a call in a graph: the last call during which the plain function holds it."""


class FlatGraph:
    """The torch calls of a function, mapping its inputs to a flat list of results."""

    def __init__(self, module: fx.GraphModule, names: Names | None = None, held: Held = lambda _: {}):
        """Takes ownership of a graph.

        Args:
            module: the graph.
            names: maps modules to paths, which locate each call in the model.
            held: returns, by result that the plain function holds beyond its last use, the last call during which it is
                held. A trace holds these results for just as long.
        """
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.placeholders = [node.name for node in nodes]
        self.sources = [getattr(node, "_dynamo_source", None) for node in nodes]
        """The source of each input, as Dynamo records it."""
        self.numbers = tuple(i for i, node in enumerate(nodes) if _is_number(node))
        """The positions of the inputs that are Python numbers."""
        self.differentiates = any("_grad_increment_nesting" in str(n.target) for n in module.graph.nodes)
        """Whether the graph takes gradients with torch.func."""
        self.takes_gradients = any(n.target is torch.autograd.grad for n in module.graph.nodes)
        """Whether the graph takes gradients with autograd; hooks on its inputs, which it lacks, would run then."""
        self.checkpoints_draw = _take_checkpoints(module)
        """Whether random numbers are drawn in calls of `torch.utils.checkpoint`."""
        self.constants = _constants_as_inputs(module)
        """Tensors that the graph holds, which become additional inputs."""
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        self._numeric, fixed = _numeric_outputs(module, output)
        self.decisive = tuple(i for i in self.numbers if _decides(nodes[i], fixed))
        """The positions of the numbers on which a trace depends: the value or shape of a tensor, or a number among the
        results that cannot be computed from input numbers alone."""
        self._enters = enters(module.graph)
        for function in _functions_of_autograd(module):
            _hold(function, held(function.graph))
        for function in _functions_of_autograd(module)[1::2]:
            _follow_grad_mode(function)
        self._strip(module, names)
        self._held = held(module.graph)
        module.recompile()
        self.module = module

    @staticmethod
    def _strip(module: fx.GraphModule, names: Names | None) -> None:
        """Removes the metadata of the capture, except the source of each call in the user's code."""
        for node in module.graph.nodes:
            node.meta = {"source": source_of(node.meta, names)}
        module.meta.clear()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the calls on `inputs`, which end with the constants."""
        traced = marks.answered() is not None
        with _captured_modes_off():
            if traced or self._enters or get_dynamic_layer_stack_depth():
                with entered_exited() if self._enters else _NOTHING as entered:
                    result = _Walk(self.module, self._held if traced else {}, entered).run(*inputs)
            else:
                result = self.module.forward(*inputs)
        return list(result)

    @property
    def computed(self) -> Collection[int]:
        """The positions of the results that `numeric` computes."""
        if self._numeric is None:
            return ()
        positions, _ = self._numeric
        return positions

    def numeric(self, inputs: Sequence[Any]) -> dict[int, Any]:
        """Computes, by position, the results that are Python numbers and depend on numbers among the inputs."""
        if self._numeric is None:
            return {}
        positions, graph = self._numeric
        return dict(zip(positions, graph.forward(*inputs, *self.constants), strict=True))

    def same(self, other: FlatGraph) -> bool:
        """Whether the graphs make the same calls on the same inputs."""
        ours, theirs = self.module.graph.nodes, other.module.graph.nodes
        return (
            len(ours) == len(theirs)
            and self.numbers == other.numbers
            and len(self.constants) == len(other.constants)
            and all(a is b for a, b in zip(self.constants, other.constants, strict=True))
            and all(
                a.op == b.op != "get_attr" and _is_same(a.target, b.target) for a, b in zip(ours, theirs, strict=True)
            )
            and self.module.code == other.module.code
        )


@contextlib.contextmanager
def _captured_modes_off() -> Iterator[None]:
    """Disables the user's torch function modes within the body: a captured graph already contains their effect.

    A default device is one of torch's modes. It stays, because a graph does not contain it.
    """
    if not has_function_modes():
        yield
        return
    own = lambda mode: type(mode).__module__.partition(".")[0] == "fckpt"
    with function_modes([m for m in _get_current_function_mode_stack() if isinstance(m, DeviceContext) or own(m)]):
        yield


_NOTHING = contextlib.nullcontext()


class _Walk(fx.Interpreter):
    """Runs the calls one by one, reporting the source of each call and shifting level numbers to the current depth.

    A result is freed after its last use, or after the call until which the plain function holds it (`held`).
    """

    def __init__(self, module: fx.GraphModule, held: dict[fx.Node, fx.Node], entered: Entered | None):
        super().__init__(module)
        self.extra_traceback = False  # it would add lines of the graph to the messages of errors
        self.entered = entered
        self.depth = get_dynamic_layer_stack_depth()
        places = {node: place for place, node in enumerate(module.graph.nodes)}
        self.user_to_last_uses: dict[fx.Node, list[fx.Node]] = {}
        for node in places:
            ends = {node, *node.users, held.get(node)} - {None}
            if node.op != "output":
                self.user_to_last_uses.setdefault(max(ends, key=places.__getitem__), []).append(node)

    def run_node(self, n: fx.Node) -> Any:
        with running(*n.meta["source"]):
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        position = _LEVEL.get(getattr(target, "__name__", ""))
        if self.depth and position is not None and len(args) > position and isinstance(args[position], int):
            args = (*args[:position], args[position] + self.depth, *args[position + 1 :])
        result = super().call_function(target, args, kwargs)
        if self.entered is not None:
            self.entered.note(target, result)
        if getattr(target, "__name__", "") == "autograd_function_apply" and marks.answered() is not None:
            for output in result if isinstance(result, (list, tuple)) else [result]:
                _release_after_backward(output)
        return result


def _functions_of_autograd(module: fx.GraphModule) -> list[Any]:
    """Returns the graphs of the `forward` and the `backward` of each `autograd.Function`."""
    found: list[Any] = []
    for owner in module.modules():
        for node in owner.graph.nodes if isinstance(owner, fx.GraphModule) else ():
            if getattr(node.target, "__name__", "") == "autograd_function_apply":
                found += [owner.get_submodule(body.target) for body in node.args[:2]]
    return found


def _hold(module: fx.GraphModule, held: dict[fx.Node, fx.Node]) -> None:
    """Adds calls that do nothing to a graph, which torch interprets, so that it frees each result after its end."""
    by_end: dict[fx.Node, list[fx.Node]] = {}
    for node, end in held.items():
        if "placeholder" not in (node.op, end.op):
            by_end.setdefault(end, []).append(node)
    for end, nodes in by_end.items():
        with module.graph.inserting_after(end):
            module.graph.call_function(_do_nothing, (*nodes,))
    module.recompile()


def _follow_grad_mode(backward: fx.GraphModule) -> None:
    """Makes the `backward` of an `autograd.Function` run in the grad mode of the backward pass.

    Dynamo turns grad mode off in it, and so loses the second derivatives of a pass with `create_graph=True`. It does
    not do so twice: code that changes grad mode itself is not captured, see `own_formulas.py`.
    """
    for node in list(backward.graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            backward.graph.erase_node(node)
    backward.recompile()


def _do_nothing(*_: Any) -> None:
    return


def _release_after_backward(output: Any) -> None:
    """Frees the tensors that an `autograd.Function` saved after its backward, if `output` is a result of one.

    The plain function frees them at that point. The class that represents the `autograd.Function` in a captured graph
    would hold them in a closure variable until the garbage collector runs (torch 2.13, `AutogradFunctionApply`).
    """
    node = getattr(output, "grad_fn", None)
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    names = getattr(getattr(backward, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(backward, "__closure__", None) or (), strict=True):
        if name == "saved_values" and node is not None:
            node.register_hook(lambda *_, held=cell: setattr(held, "cell_contents", ()))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, str) and a == b)


def _take_checkpoints(module: fx.GraphModule) -> bool:
    """Replaces Dynamo's operator for `torch.utils.checkpoint`, which may be nested, by `marks.checkpoint`.

    Returns:
        Whether random numbers are drawn in such calls, as far as `marks.draws` knows.
    """
    drawn = False
    for owner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        nodes = [n for n in owner.graph.nodes if getattr(n.target, "__name__", "") == "tag_activation_checkpoint"]
        for node in nodes:
            node.target = marks.checkpoint
            drawn = drawn or marks.draws(owner.get_submodule(str(node.args[0].target)))
        if nodes:
            owner.recompile()
    return drawn


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool))


def _decides(node: fx.Node, fixed: Collection[fx.Node]) -> bool:
    """Whether a tensor, or one of these numbers, depends on a number."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or user in seen:
                continue
            if not _is_number(user) or user in fixed:
                return True
            seen.add(user)
            todo.append(user)
    return False


def _constants_as_inputs(module: fx.GraphModule) -> list[torch.Tensor]:
    """Turns the tensors that a graph holds as attributes into inputs, after the existing ones."""
    constants: list[torch.Tensor] = []
    placeholders: dict[str, fx.Node] = {}
    last = None
    for node in module.graph.nodes:
        if node.op == "placeholder":
            last = node
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        value = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            continue
        target = str(node.target)
        if target not in placeholders:
            first = next(iter(module.graph.nodes)) if last is None else last
            where = module.graph.inserting_before(first) if last is None else module.graph.inserting_after(first)
            with where:
                last = placeholders[target] = module.graph.placeholder(f"constant_{len(constants)}")
            last.meta["example_value"] = value
            constants.append(value)
        node.replace_all_uses_with(placeholders[target])
        module.graph.erase_node(node)
    return constants


def _numeric_outputs(
    module: fx.GraphModule, output: fx.Node
) -> tuple[tuple[list[int], fx.GraphModule] | None, list[fx.Node]]:
    """Returns the results that are numbers.

    Returns:
        First, the positions of the results that depend on input numbers alone, with a graph that computes them, or None
        if there are no such results. Second, the nodes of all other results that are numbers. These results depend on
        sizes of tensors, and every call that uses the same trace has the same values for them.
    """
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    found = [(i, node) for i, node in enumerate(results) if isinstance(node, fx.Node) and _is_number(node)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes if found else ():
        number = node.op != "output" and _is_number(node) and all(n in copies for n in node.all_input_nodes)
        if node.op == "placeholder" or number:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    computed = [(i, node) for i, node in found if node in copies]
    fixed = [node for _, node in found if node not in copies]
    if not computed:
        return None, fixed
    graph.output(tuple(copies[node] for _, node in computed))
    graph.eliminate_dead_code()
    return ([i for i, _ in computed], fx.GraphModule(module, graph)), fixed
