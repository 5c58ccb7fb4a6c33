"""A function of 100 operations, called 1,000 times: what is kept for backward, and what is not.

Checkpointing is often explained with `heavy_function(x, a)`, which sets `x = x + a` 100 times, and a model
that calls it 1,000 times: "100,000 intermediates are stored; with a checkpoint, about 100 at a time".
Measured, the additions show something else: the derivative of a sum needs neither operand, so PyTorch stores
none of the 100,000, and there is nothing to gain. With `x = x * a`, whose derivative by `a` needs `x`, the
story holds: 100,000 intermediates become 1,000 inputs and 100 intermediates at a time; and with a region
around every 31 regions as well, about 32 + 31 + 100.

    python docs/examples/heavy_function.py
    python docs/examples/heavy_function.py --calls 100 --length 50 --width 4096

The first takes a minute or two, for recording every allocation of the 100,000 operations.
"""

from __future__ import annotations

import argparse
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fckpt

Heavy = Callable[[Tensor, Tensor], Tensor]


def heavy(operation: Heavy, length: int) -> Heavy:
    """Returns the heavy function: `x = operation(x, a)`, `length` times."""

    def heavy_function(x: Tensor, a: Tensor) -> Tensor:
        for _ in range(length):
            x = operation(x, a)
        return x

    return heavy_function


def repeated(function: Heavy, calls: int) -> Heavy:
    """Returns the model: `function`, `calls` times."""

    def model(x: Tensor, a: Tensor) -> Tensor:
        for _ in range(calls):
            x = function(x, a)
        return x

    return model


def nested(function: Heavy, calls: int) -> Heavy:
    """Returns the same model with regions at two levels: each call, and about every sqrt(calls) calls."""
    group = max(1, math.isqrt(calls))
    whole, rest = divmod(calls, group)
    groups = [fckpt.remat(repeated(fckpt.remat(function), n)) for n in [group] * whole + [rest] * bool(rest)]

    def model(x: Tensor, a: Tensor) -> Tensor:
        for part in groups:
            x = part(x, a)
        return x

    return model


WAYS: dict[str, Callable[[Heavy, int], Heavy]] = {
    "plain": repeated,
    "torch checkpoint": lambda fn, calls: repeated(lambda x, a: checkpoint(fn, x, a, use_reentrant=False), calls),
    "fckpt.remat": lambda fn, calls: repeated(fckpt.remat(fn), calls),
    "fckpt.remat, two levels": nested,
}
OPERATIONS = {"x + a": operator.add, "x * a": operator.mul}


@dataclass(frozen=True)
class Row:
    """What one way of running the model comes to."""

    operation: str
    way: str
    peak: float
    """In tensors of the size of `x`."""
    equal: bool
    """Whether the gradient of `a` is that of the plain model, bit for bit."""


def main(arguments: list[str] | None = None) -> list[Row]:
    """Parses the command line, runs, prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description="100 operations, 1,000 times.")
    parser.add_argument("--calls", type=int, default=1000, help="calls of the function (default 1000)")
    parser.add_argument("--length", type=int, default=100, help="operations per call (default 100)")
    parser.add_argument("--width", type=int, default=1024, help="elements of x (default 1024)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    x, start = torch.randn(options.width), 1 + 1e-6 * torch.randn(options.width)
    rows: list[Row] = []
    print(f"{options.calls:,} calls of {options.length} operations; peak in tensors of x's size")
    for name, operation in OPERATIONS.items():
        function = heavy(operation, options.length)
        plain = start
        for way, build in WAYS.items():
            a = start.clone().requires_grad_()
            model = build(function, options.calls)
            peak = fckpt.measure_peak(lambda model=model, a=a: model(x, a).sum().backward()).peak_bytes
            assert a.grad is not None
            if way == "plain":
                plain = a.grad
            rows.append(Row(name, way, peak / x.nbytes, torch.equal(a.grad, plain)))
            same = "equal" if rows[-1].equal else "DIFFERS"
            print(f"  {name}  {way:24} {rows[-1].peak:10,.1f}   gradient {same}")
    return rows


if __name__ == "__main__":
    main()
