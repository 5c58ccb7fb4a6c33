"""Capture of one call by Dynamo: a graph of torch calls, the guards under which it is valid, and surrounding bytecode.

Dynamo evaluates the function's Python code symbolically. Everything the code reads (attributes, items, globals, cells,
classes, hooks) becomes a guard, and guards are checked at every call in microseconds. Everything the code writes is
replayed by bytecode that Dynamo generates; the bytecode also collects the graph's inputs and builds the function's
result. Nothing is compiled, no frame is intercepted, and the user's code never sees a fake tensor.

Only this folder uses `torch._dynamo`. This file relies on `fullgraph_capture`, and on `build_guards` and the bytecode
in its result (seen on torch 2.11 and 2.13).

Reference: J. Ansel et al., "PyTorch 2: Faster machine learning through dynamic Python bytecode transformation and graph
compilation" (2024), https://doi.org/10.1145/3620665.3640366.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import itertools
import logging
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import allow_in_graph, config, convert_frame, symbolic_convert
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.hooks import Hooks
from torch._dynamo.mutation_guard import install_generation_tagging_init
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch.fx.experimental import _config as shapes_config
from torch.overrides import _get_current_function_mode_stack

from fckpt import _tree as tree
from fckpt._call.ambient import errors_unlogged, function_modes
from fckpt._call.levels import below_all
from fckpt._capture import marks
from fckpt._capture.absences import absences_guarded
from fckpt._capture.as_plain import Answers
from fckpt._capture.branches import Branches
from fckpt._capture.cached import caches_asked
from fckpt._capture.certain import certain_comparisons
from fckpt._capture.checks import validation_captured
from fckpt._capture.classes import ClassFacts, classes_of, guards_script, patched_methods
from fckpt._capture.compared import compared_constants
from fckpt._capture.containers import containers_like_pythons
from fckpt._capture.corrected import answers_corrected
from fckpt._capture.default_device import default_device_known
from fckpt._capture.dict_attributes import DictAttributes, keep_factories
from fckpt._capture.distinct import Distinct
from fckpt._capture.equivalents import equivalents_evaluated
from fckpt._capture.exceptions import exceptions_only_caught
from fckpt._capture.frames import Frames
from fckpt._capture.function import GraphFunction
from fckpt._capture.generators import unfinished_generators_refused
from fckpt._capture.graphs import FlatGraph
from fckpt._capture.identities import Identities
from fckpt._capture.instance_checks import instance_checks_followed
from fckpt._capture.late_code import late_readers_refused
from fckpt._capture.lazy_properties import drop_lazy_properties
from fckpt._capture.numbers import options_constant, values_asked
from fckpt._capture.numpys import numpy_not_computed
from fckpt._capture.objects import objects_like_pythons
from fckpt._capture.own_formulas import own_formulas_used
from fckpt._capture.patching import patched
from fckpt._capture.readable import PASSED, explained, holds, readable
from fckpt._capture.recurrent import steps_alike
from fckpt._capture.repeated_blocks import Repeated
from fckpt._capture.settings import changed_setting
from fckpt._capture.shadows import BuiltinNames, shadows_guarded
from fckpt._capture.sources import Names
from fckpt._capture.symbols import (
    TOO_LARGE,
    convolutions_unguarded,
    environments_released,
    floats_in_order,
    large_expressions_refused,
    symbols_remembered,
)
from fckpt._capture.tensor_states import state_reads_refused
from fckpt._capture.tensor_subclasses import tensor_subclasses_refused
from fckpt._capture.texts import texts_like_pythons
from fckpt._capture.undecomposed import undecomposed
from fckpt._capture.users_classes import users_classes_like_pythons
from fckpt._capture.warned import IGNORED, Warned
from fckpt._capture.wrapped import WrappedTensors, name_of, without_tensors
from fckpt._memory import collector_paused
from fckpt.errors import FckptError, GradientWarning, TraceError, users_stacklevel

__all__ = ["CaptureError", "Captured", "Entry", "Input", "capture"]

for mark in (marks.begin, marks.end, marks.name):
    allow_in_graph(mark)
# Dynamo replaces `nn.Module.__init__` at the first `torch.compile` of a process. Replaced before the first capture, it
# does not differ from what a capture has read.
install_generation_tagging_init()

_LOGGING = ("debug", "info", "warning", "error", "critical", "exception", "log", "warning_once", "warning_advice")
"""Names of logging calls, including those that Hugging Face adds. A plan does not repeat logging calls."""
_SETTINGS = {
    "skip_nnmodule_hook_guards": False,  # hooks on torch's built-in modules can change
    "skip_no_tensor_aliasing_guards_on_parameters": False,  # parameter tying can change
    "skip_guards_on_constant_func_defaults": False,
    "allow_unspec_int_on_nn_module": True,  # a counter on a module becomes an input of the graph, not a constant
    "specialize_float": True,
    "allow_rnn": True,
    "capture_scalar_outputs": False,
    "enable_dynamo_decompositions": False,  # for example, a decomposed addcdiv with a value rounds differently
    "verbose": False,
    "suppress_errors": False,
}


class CaptureError(TraceError):
    """Dynamo cannot capture a function; the message comes from Dynamo."""


@dataclass(frozen=True)
class Input:
    """The origin of one input of a captured graph."""

    name: str
    """The input as the user writes it: `args[0]['w']`, `encoder.layer.3.mlp.weight`."""
    is_argument: bool
    """Whether the caller passed the input. Otherwise the function captures it."""


def _entry(fn: Any, this: Any, args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def _entry_of_method(fn: Any, this: Any, args: Any, kwargs: Any) -> Any:
    return fn(this, *args, **kwargs)


class Entry:
    """The function that Dynamo captures for a region: a wrapper that calls the region's function.

    Each region gets a separate code object and separate globals, because Dynamo records per code object which numbers
    have changed, and adds names to the globals.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        number = next(Entry._numbers)
        self._functions: list[types.FunctionType] = []
        for template in (_entry, _entry_of_method):
            code = template.__code__.replace(co_name=f"{template.__name__}_{number}", co_firstlineno=1)
            scope = {"__builtins__": builtins, "__name__": "fckpt._capture.entry"}
            self._functions.append(types.FunctionType(code, scope))

    def taken(self, fn: Any) -> tuple[types.FunctionType, Any, Any]:
        """Returns (entry, function, bound object) for a region's function.

        A bound method is split into function and object, because Python makes a new bound method at each access.
        """
        if type(fn) is types.MethodType:
            return self._of(fn.__func__)[1], fn.__func__, fn.__self__
        return self._of(fn)[0], fn, None

    def _of(self, fn: Any) -> list[types.FunctionType]:
        """Returns the entries for a function and for a bound method.

        Dynamo looks up the globals of a function by the name of its module. For a function that `exec` defined in a
        namespace of no module, the entries therefore get that namespace as their globals.
        """
        scope = getattr(fn, "__globals__", None)
        if scope is None or vars(sys.modules.get(scope.get("__name__", ""), types)) is scope:
            return self._functions
        return [types.FunctionType(entry.__code__, scope) for entry in self._functions]


class _Substitute(threading.local):
    """The function that runs instead of the captured graph, in the current thread's call."""

    run: Callable[[tuple[Any, ...]], Sequence[Any]] | None = None


class Captured:
    """A captured call. It is valid for every call for which `holds` returns True."""

    def __init__(
        self,
        entry: Entry,
        taken: tuple[Any, Any, Any],
        passed: Any,
        output: Any,
        guards: Any,
        below: bool,
        frames: Frames,
        folded: set[str],
    ):
        fn = taken[1] if taken[2] is None else types.MethodType(taken[1], taken[2])
        names = Names(fn, [leaf for leaf in tree.leaves(passed) if not isinstance(leaf, torch.Tensor)])
        self.graph: FlatGraph | None = None
        """The torch calls; None if the function makes none, so that it can be called directly."""
        if output.backend_input is not None:
            self.graph = FlatGraph(output.backend_input.graph_module, names, frames.ends)
        self.writes = False
        """Whether the function changes attributes or containers that existed before."""
        self.below = below
        """Whether the call was captured below levels of torch.func, where Dynamo's guards would reject the wrappers."""
        self.branches: Branches
        """The branches that the function took by the data of tensors."""
        self.attributes: DictAttributes
        """The attributes of dicts that the function read."""
        self.distinct: Distinct
        """The pairs of objects that the function compared, and that were distinct."""
        self.identities: Identities
        """The objects that the guards recognise by their addresses."""
        self._names: list[str] = []
        self._wrapped: WrappedTensors | None = None
        self._entry = entry
        self._guards = guards
        graph_guards = output.graph_capture_output.output_graph
        classes = [cls for guard in graph_guards.guards for cls in classes_of(guard)]
        if any(map(guards_script, graph_guards.guards)):
            raise CaptureError("the function calls TorchScript, which has its own derivative formulas")
        local = _scope(taken, *passed)
        sources = self.graph.sources if self.graph is not None else ()
        compared = compared_constants(graph_guards.guards, sources, taken[0].__globals__, local, folded)
        self._classes = ClassFacts(classes, output.graph_capture_output.traced_code, compared)
        self.builtins = BuiltinNames()
        """The built-in names that the function's code looked up."""
        self._settings = _folded_settings()
        self.keywords: tuple[str, ...] = ()
        """The names of the keyword arguments, in order: a function may read the order, and no guard checks it."""
        self.told_compiled: tuple[str, ...] = ()
        """The lines of libraries for which `torch.compiler.is_compiling()` is true, as captures failed without."""
        self.inputs: tuple[Input, ...] = ()
        self._substitute = _Substitute()
        self._call: Any = None
        if self.graph is not None:
            self.inputs = tuple(_input(source, taken) for source in self.graph.sources)
            substitute = self._substitute

            def compiled(*inputs: Any) -> Any:
                assert substitute.run is not None
                return substitute.run(inputs)

            self._call = _callable(output, compiled, taken[0].__globals__)

    @property
    def generality(self) -> int:
        """How many numbers (sizes, counters) are inputs of the capture, which is valid for every value of them."""
        return 0 if self.graph is None else len(self.graph.numbers)

    def holds(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the capture is valid for a call: everything that it read is unchanged."""
        scope = _scope(self._entry.taken(fn), args, kwargs)
        known = self.keywords == tuple(kwargs) and self._guards.check(scope) and self._classes.hold()
        known = known and self.builtins.hold() and self.identities.hold()
        known = known and (self._wrapped is None or self._wrapped.same(scope))
        known = known and self._settings == _folded_settings() and self.attributes.hold(scope)
        known = known and self.distinct.hold(scope)
        return known and self.branches.hold(scope)

    def guard_wrapped(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds guards on the layouts of the call's wrapped tensors, as the function sees them."""
        taken = self._entry.taken(fn)
        self._wrapped = WrappedTensors(self._names, taken[0].__globals__, _scope(taken, args, kwargs))

    def why(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Returns a description of the guard that fails for a call, with the user's line; empty if none fails."""
        scope = _scope(self._entry.taken(fn), args, kwargs)
        found = self._guards.check_verbose(scope)
        if self.keywords != tuple(kwargs):
            return f"the keyword arguments were {', '.join(self.keywords)}, and are {', '.join(kwargs)}"
        if found.result:
            known = self._classes.changed() or self.builtins.changed() or self.identities.changed()
            known = known or ("settings of Python or autocast" if self._settings != _folded_settings() else "")
            known = known or self.attributes.changed(scope) or self.distinct.changed(scope)
            return known or self.branches.changed(scope) or "the layout of a tensor"
        failing = [part for part in found.verbose_code_parts if not holds(part, scope)]
        return "; ".join(explained(part) for part in failing or found.verbose_code_parts)

    def bound(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphFunction:
        """Binds the graph to the inputs of a call, without making the call."""
        assert self.graph is not None
        taken: list[tuple[Any, ...]] = []

        def stop(inputs: tuple[Any, ...]) -> Sequence[Any]:
            taken.append(inputs)
            raise _Bound

        with contextlib.suppress(_Bound):
            self.call(stop, fn, args, kwargs)
        return self.function(taken[0])

    def function(self, inputs: tuple[Any, ...]) -> GraphFunction:
        """Binds the graph to the given inputs of a call."""
        assert self.graph is not None
        return GraphFunction(self.graph, [i.is_argument for i in self.inputs], inputs)

    def same_graph(self, other: Captured) -> bool:
        """Whether another capture has the same graph and the same kinds of inputs, so that it can share plans."""
        return (
            self.graph is not None
            and other.graph is not None
            and self.graph.same(other.graph)
            and self._classes.same_functions(other._classes)
            and [i.is_argument for i in self.inputs] == [i.is_argument for i in other.inputs]
        )

    def call(
        self, run: Callable[[tuple[Any, ...]], Sequence[Any]], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the function with its graph replaced by `run`, which maps the graph's inputs to its outputs."""
        _, function, this = self._entry.taken(fn)
        if self._call is None:
            return fn(*args, **kwargs)
        before, self._substitute.run = self._substitute.run, run
        try:
            return self._call(function, this, args, kwargs)
        except Exception as error:
            if self.writes and not isinstance(error, FckptError):  # a call that is refused changes nothing
                warnings.warn(
                    f"the function raised {type(error).__name__} at run time. The attributes and containers that it "
                    "had changed before are not changed in this call, because a plan changes them at its end.",
                    GradientWarning,
                    stacklevel=users_stacklevel(),
                )
            raise
        finally:
            self._substitute.run = before


def _folded_settings() -> tuple[Any, ...]:
    """Returns the settings whose values Dynamo takes for constants, without a guard."""
    precision = torch._C._get_float32_matmul_precision()
    return sys.getrecursionlimit(), precision, *map(torch.get_autocast_dtype, _AUTOCAST)


_AUTOCAST = ("cpu", "cuda")


def _callable(output: Any, compiled: Callable[..., Any], scope: dict[str, Any]) -> Callable[..., Any]:
    """Returns Dynamo's bytecode as a function with the same globals object that the guards check."""
    captured = output.graph_capture_output
    for alias, module in captured.import_sources.items():
        try:
            scope[alias] = importlib.import_module(module)
        except ImportError as error:  # it was made from a file, and is not in `sys.modules`
            raise CaptureError(f"the module {module!r}, which the function uses, cannot be imported") from error
    scope[output.backend_input.backend_id] = compiled
    made = types.FunctionType(captured.bytecode, scope, closure=captured.closure, argdefs=captured.argdefs)
    made.__kwdefaults__ = getattr(captured, "kwdefaults", None)
    # Guards keep the globals in C++, where the garbage collector does not see them.
    weakref.finalize(made, scope.pop, output.backend_input.backend_id, None)
    return made


class _Bound(BaseException):
    """Raised in place of the graph to end a call as soon as its inputs are known, before any operation has run."""


@collector_paused()
def capture(
    entry: Entry,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    below: bool = False,
    data: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Captured:
    """Captures a call without running it.

    Args:
        entry: the entry of the region.
        fn: the function.
        args: the positional arguments, none of which may be a wrapper of torch.func.
        kwargs: the keyword arguments, under the same condition.
        below: whether the capture must be valid for wrappers of torch.func. If so, Dynamo's guards do not cover
            tensors, and the caller must call `Captured.guard_wrapped` with the wrappers.
        data: the arguments as the caller passed them, if `args` and `kwargs` have other data.

    Raises:
        CaptureError: Dynamo cannot capture the function, or the captured graph would be wrong at the next call.
    """
    taken = entry.taken(fn)
    places = _scope(taken, *(data or (args, kwargs)))
    answers = Answers()
    first: CaptureError | None = None
    # Sizes and numbers that are inputs of the graph: some code does not allow that.
    for dynamic in (True, False):
        while True:
            attempt = _Attempt(taken, below, dynamic, answers, places)
            try:
                found = attempt.captured(entry, args, kwargs)
                found.told_compiled = answers.exceptions
                return found
            except CaptureError as error:
                first = first or error
                # A branch on data that depends on sizes is known if they are constants; then nothing is conceded.
                constant = "ata-dependent" in str(error) or TOO_LARGE in str(error)
                if (dynamic and constant) or not answers.concede():
                    break
    raise first


def _scope(taken: tuple[Any, Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the entry by name, as guards read them."""
    return {"fn": taken[1], "this": taken[2], "args": args, "kwargs": kwargs}


class _Attempt:
    """One way to capture a call."""

    def __init__(
        self, taken: tuple[Any, Any, Any], below: bool, dynamic: bool, answers: Answers, places: dict[str, Any]
    ):
        self.taken = taken
        self.below = below
        self.dynamic = dynamic
        self.answers = answers
        self.branches = Branches(taken[0].__globals__, places)
        self.frames = Frames()
        self.folded: set[str] = set()
        self.identities = Identities()
        self.attributes = DictAttributes(taken[0].__globals__)
        self.distinct = Distinct(taken[0].__globals__, places)
        self.warned = Warned()
        self.writes = False
        self.hooks_inputs = False
        """Whether the function registers hooks on tensors from outside."""

    def _writes_noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the method of Dynamo that writes the code for changes of objects."""

        @functools.wraps(original)
        def write(effects: Any, *args: Any, **kwargs: Any) -> Any:
            new = (AttributeMutationNew, ValueMutationNew)
            held = [item for item in list(effects.id_to_variable.values()) if not isinstance(item.mutation_type, new)]
            self.writes |= any(map(effects.is_modified, held))
            self.hooks_inputs |= bool(effects.tensor_hooks)
            return original(effects, *args, **kwargs)

        return write

    def _noted(self) -> int:
        """Returns how often facts were used that Dynamo does not guard."""
        return self.branches.uses + self.attributes.uses + self.distinct.uses

    def captured(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        output, guards, names, builtin_names = self._run(args, kwargs)
        captured = Captured(entry, self.taken, (args, kwargs), output, guards, self.below, self.frames, self.folded)
        captured.keywords, captured.branches = tuple(kwargs), self.branches
        captured.identities, captured.attributes, captured.distinct = self.identities, self.attributes, self.distinct
        captured._names, captured.builtins, captured.writes = names, builtin_names, self.writes
        replaced = patched_methods(output.graph_capture_output.traced_code)
        if replaced:
            raise CaptureError(f"Tensor.{replaced[0]} is not the method of torch")
        _check_settings(captured)
        if self.hooks_inputs and captured.graph is not None and captured.graph.takes_gradients:
            raise CaptureError("the function registers a hook on an input, and takes gradients inside")
        self.warned.give()
        return captured

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, list[str], BuiltinNames]:
        """Returns Dynamo's output, its guards, the names of tensors without a guard (below levels), and built-in
        names.
        """
        taken, names = self.taken, list[str]()
        try:
            with contextlib.ExitStack() as stack:
                builtin_names = stack.enter_context(shadows_guarded())
                modes = stack.enter_context(_settings(self.dynamic))
                stack.enter_context(users_classes_like_pythons(self.folded))
                stack.enter_context(own_formulas_used(self.below))
                stack.enter_context(self.answers.given())
                stack.enter_context(self.attributes.recorded())
                stack.enter_context(self.distinct.recorded())
                stack.enter_context(self.warned.noted())
                stack.enter_context(self.branches.decided())
                stack.enter_context(marks.capturing())
                # within `frames`, which notes what the caller of a block releases
                stack.enter_context(Repeated(self.frames, self._noted).recorded())
                stack.enter_context(self.frames.recorded())
                stack.enter_context(patched(SideEffects, "codegen_update_mutated", self._writes_noted))
                with unfinished_generators_refused():
                    output = convert_frame.fullgraph_capture(taken[0], (taken[1], taken[2], args, kwargs))
                made = output.graph_capture_output
                where = taken[0].__globals__, _scope(taken, args, kwargs)
                drop_lazy_properties(made.output_graph.guards, *where)
                keep_factories(made.output_graph.guard_on_key_order, *where)
                filtered = functools.partial(without_tensors, names=names)
                hooks = Hooks(guard_filter_fn=filtered) if self.below else Hooks()
                with function_modes(modes), self.identities.recorded():
                    guards = made.build_guards(taken[0].__code__, hooks=hooks).guard_manager
                self.attributes.add_orders(made.output_graph.guards, where[1])
                return output, guards, names, builtin_names
        except TorchDynamoException as error:
            raise CaptureError(_reason(error)) from error
        except Exception as error:
            # An error that the user's code raises, or a defect in Dynamo.
            raise CaptureError(f"{type(error).__name__}: {error}") from error


def _check_settings(captured: Captured) -> None:
    if captured.graph is not None and (name := changed_setting(captured.graph.module, torch.is_grad_enabled())):
        raise CaptureError(f"the function changes a setting of torch (`{name}`)")


@contextlib.contextmanager
def _settings(dynamic: bool) -> Iterator[list[Any]]:
    """Configures Dynamo for a capture; yields the function modes that are active outside."""
    places = (logging, logging.Logger)
    ignored = {f for place in places for name in _LOGGING if (f := getattr(place, name, None))}
    sizes = {"automatic_dynamic_shapes": dynamic, "assume_static_by_default": not dynamic}
    patch = {**_SETTINGS, **sizes, "ignore_logging_functions": ignored | IGNORED}
    with contextlib.ExitStack() as stack:
        stack.enter_context(get_metrics_context())
        stack.enter_context(dynamo_timed("fckpt_capture"))
        stack.enter_context(below_all())
        modes = _get_current_function_mode_stack()
        if torch.torch_version.TorchVersion(torch.__version__) >= (2, 12):  # torch 2.11 does this for each frame
            stack.enter_context(torch_function_mode_stack_state_mgr)
        stack.enter_context(config.patch(**patch))
        stack.enter_context(shapes_config.patch(use_duck_shape=False))  # sizes that are equal now may differ later
        stack.enter_context(absences_guarded())
        stack.enter_context(certain_comparisons())
        stack.enter_context(validation_captured())
        stack.enter_context(undecomposed())
        stack.enter_context(steps_alike())
        stack.enter_context(containers_like_pythons())
        stack.enter_context(numpy_not_computed())
        stack.enter_context(options_constant())
        stack.enter_context(values_asked())
        stack.enter_context(answers_corrected())
        stack.enter_context(texts_like_pythons())
        stack.enter_context(equivalents_evaluated())
        stack.enter_context(default_device_known())
        stack.enter_context(caches_asked())
        stack.enter_context(exceptions_only_caught())
        stack.enter_context(state_reads_refused())
        stack.enter_context(instance_checks_followed())
        stack.enter_context(tensor_subclasses_refused())
        stack.enter_context(late_readers_refused())
        stack.enter_context(objects_like_pythons())
        stack.enter_context(environments_released())
        stack.enter_context(symbols_remembered())
        stack.enter_context(large_expressions_refused())
        stack.enter_context(convolutions_unguarded())
        stack.enter_context(floats_in_order())
        # The names of functions in Dynamo's log lines, for which it would split whole files into tokens.
        stack.enter_context(patched(symbolic_convert, "get_funcname", lambda _: lambda *_: None))
        # Dynamo flushes the processor's caches (tens of milliseconds) and times the guards, only to log the latency.
        stack.enter_context(patched(dynamo_guards, "profile_guard_manager", lambda _: lambda *_: 0.0))
        for name in ("torch._subclasses.fake_tensor", "torch._guards"):
            stack.enter_context(errors_unlogged(name))  # an error that ends the capture becomes a `CaptureError`
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # Dynamo warns about functions that it looks through, such as lru_cache
        yield modes


def _reason(error: BaseException) -> str:
    """Returns the first paragraph of Dynamo's message, and the user's line."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines()]
    first = next((line for line in lines if line), type(error).__name__)
    explanation = next(
        (line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), ""
    )
    place = ""
    for line, following in itertools.pairwise(lines):
        if line.startswith("File ") and "fckpt" not in line.split(",")[0]:
            place = f"{line.removeprefix('File ')} ({following})"
    return ": ".join(part for part in (place, f"{first}. {explanation}".strip()) if part)


def _input(source: Any, taken: tuple[Any, Any, Any]) -> Input:
    text = name_of(source)
    if PASSED.fullmatch(text):  # an argument itself, not a tensor held by a module that is an argument
        return Input(readable(text), True)
    return Input(readable(text, taken[1]), False)
