"""A kernel to compile: the operations of a block, with its tensors numbered from 0."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fckpt._trace.in_place import writer_of
from fckpt._trace.operations import Call, Ref, TensorSpec, strides_of, tensors_of

__all__ = ["Kernel"]


@dataclass(frozen=True)
class Kernel:
    """The operations of a block, in order, with the views that they read of one another's results."""

    calls: tuple[Call, ...]
    specs: tuple[TensorSpec, ...]
    """By number in `calls`: the tensor."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    """The positions in `inputs` of tensors that nothing reads afterwards: outputs may be written over them."""
    over: tuple[int | None, ...]
    """By call: the tensor that torch's kernel writes its result over, if the block is not compiled."""
    exact: bool
    """Whether the results must equal the results of torch's kernels, bit for bit."""

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.specs[0].device

    @functools.cached_property
    def signature(self) -> str:
        """A text that is equal for kernels that compile to the same code."""
        # Results count too: the result of int / int has the default dtype, whatever the dtypes of the inputs.
        tensors = [(s.shape, strides_of(s.shape, s.stride), s.dtype, s.value) for s in self.specs]
        made = [(t, self.specs[t].stride) for t in self.outputs]
        calls = [
            f"{c.outputs} = {c.op}({c.args}, {c.kwargs}) over {over}"
            for c, over in zip(self.calls, self.over, strict=True)
        ]
        parts = [self.device, tensors, made, self.inputs, self.donated, self.exact, *calls]
        return "\n".join(map(str, parts))

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the operations one after the other, as they are written."""
        found: dict[int, Any] = dict(zip(self.inputs, inputs, strict=True))
        for call in self.calls:
            results = call.op(*_sent(call.args, found), **{k: _sent(v, found) for k, v in call.kwargs.items()})
            flat = results if isinstance(results, (list, tuple)) else [results]
            found.update({t: r for t, r in zip(call.outputs, flat, strict=True) if t is not None})
        return [found[t] for t in self.outputs]

    def as_planned(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """Returns a function that runs the operations as a plan without the block does, freeing and overwriting."""
        scope: dict[str, Any] = {}
        last = {t: i for i, call in enumerate(self.calls) for t in (*tensors_of(call), *_made(call))}
        lines = [f"{', '.join(f't{t}' for t in self.inputs)}, = given", "given.clear()"]
        dying = {self.inputs[i] for i in self.donated}
        for i, (call, over) in enumerate(zip(self.calls, self.over, strict=True)):
            op, keyword = (call.op, "") if over is None else writer_of(call.op)
            scope[f"op{i}"] = op._op
            texts = [_text(a, scope) for a in call.args] + [f"{k}={_text(v, scope)}" for k, v in call.kwargs.items()]
            texts += [f"{keyword}=t{over}"] if keyword else []
            several = len(call.outputs) > 1 or str(call.op._schema.returns[0].type) != "Tensor"
            made = ", ".join("_" if t is None else f"t{t}" for t in call.outputs) + ("," if several else "")
            lines.append(f"{made} = op{i}({', '.join(texts)})")
            kept = {*self.outputs, *(t for t in self.inputs if t not in dying)}
            lines += [
                f"t{t} = None"
                for t in dict.fromkeys((*tensors_of(call), *_made(call)))
                if last[t] == i and t not in kept
            ]
        source = "\n    ".join(["def run(given):", *lines, f"return [{', '.join(f't{t}' for t in self.outputs)}]"])
        exec(compile(source, "<fckpt block>", "exec"), scope)
        return scope["run"]

    @staticmethod
    def numbered(
        calls: Sequence[Call],
        specs: Sequence[TensorSpec] | dict[int, TensorSpec],
        inputs: Sequence[int],
        outputs: Sequence[int],
        donated: Sequence[int],
        over: Sequence[int | None],
        *,
        exact: bool,
    ) -> Kernel:
        """Returns the kernel with tensors numbered in the order of their first use.

        Args:
            calls: the calls, which refer to tensors of a trace.
            specs: the specs of the tensors of the trace, by number.
            inputs: the tensors that the calls read and do not make.
            outputs: the tensors that are read outside of the block.
            donated: the inputs that nothing reads afterwards.
            over: by call, the tensor that torch's kernel would write its result over.
            exact: see `Kernel`.
        """
        seen = [*inputs, *(t for call in calls for t in _made(call))]
        number = {t: i for i, t in enumerate(dict.fromkeys(seen))}
        storage = {v: i for i, v in enumerate(dict.fromkeys(specs[t].value for t in number))}
        renamed = [
            dataclasses.replace(
                call,
                args=_renumbered(call.args, number),
                kwargs={k: _renumbered(v, number) for k, v in call.kwargs.items()},
                outputs=tuple(None if t is None else number[t] for t in call.outputs),
                node=None,
            )
            for call in calls
        ]
        return Kernel(
            tuple(renamed),
            tuple(dataclasses.replace(specs[t], value=storage[specs[t].value]) for t in number),
            tuple(number[t] for t in inputs),
            tuple(number[t] for t in outputs),
            tuple(i for i, t in enumerate(inputs) if t in donated),
            tuple(None if t is None else number[t] for t in over),
            exact,
        )


def _made(call: Call) -> list[int]:
    return [t for t in call.outputs if t is not None]


def _renumbered(value: Any, number: dict[int, int]) -> Any:
    if isinstance(value, Ref):
        return Ref(number[value.tensor])
    if isinstance(value, (list, tuple)):
        return type(value)(_renumbered(v, number) for v in value)
    return value


def _sent(value: Any, found: dict[int, Any]) -> Any:
    if isinstance(value, Ref):
        return found[value.tensor]
    if isinstance(value, (list, tuple)):
        return type(value)(_sent(v, found) for v in value)
    return value


def _text(value: Any, scope: dict[str, Any]) -> str:
    if isinstance(value, Ref):
        return f"t{value.tensor}"
    if isinstance(value, list):
        return f"[{', '.join(_text(v, scope) for v in value)}]"
    name = f"c{len(scope)}"
    scope[name] = value
    return name
