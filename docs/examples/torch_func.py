"""Derivatives inside of a loss (a PINN, MAML): put the budget around the outermost function.

    python docs/examples/torch_func.py
    python docs/examples/torch_func.py --points 16384 --width 256 --inner 10

A physics-informed network is trained on derivatives of the network itself; MAML, on what some steps of training make
of the weights. Autograd keeps the inner derivatives, too, for the outer ones. A region around the network sees each of
them alone; a budget around the whole loss plans all of them together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

import fckpt

Params = dict[str, Tensor]
Loss = Callable[..., Tensor]


def mlp(width: int, layers: int, inputs: int) -> Params:
    """The weights of a perceptron with one output."""
    sizes = [inputs, *[width] * layers, 1]
    return {f"w{i}": torch.randn(a, b) / a**0.5 for i, (a, b) in enumerate(pairwise(sizes))}


def network(params: Params, x: Tensor) -> Tensor:
    """The perceptron at one or many points."""
    *hidden, last = params.values()
    for w in hidden:
        x = torch.tanh(x @ w)
    return (x @ last).squeeze(-1)


def pinn(net: Loss) -> Loss:
    """The loss of a PINN for the heat equation: `u_t = u_xx` at all points, each of them `(t, x)`."""

    def residual(params: Params, point: Tensor) -> Tensor:
        t, x = point.unbind()
        u = lambda t, x: net(params, torch.stack([t, x]))
        return grad(u)(t, x) - grad(grad(u, 1), 1)(t, x)

    return lambda params, points: vmap(residual, (None, 0))(params, points).square().mean()


def maml(net: Loss, inner: int) -> Loss:
    """The loss of MAML: the error on other points after `inner` steps of gradient descent, over some tasks."""

    def error(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return (net(params, x) - y).square().mean()

    def adapted(params: Params, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(inner):
            step = grad(error)(params, x, y)
            params = {k: w - 0.01 * step[k] for k, w in params.items()}
        return error(params, x.flip(0), y.flip(0))

    def loss(params: Params, xs: Tensor, ys: Tensor) -> Tensor:
        return torch.stack([adapted(params, x, y) for x, y in zip(xs, ys, strict=True)]).mean()

    return loss


@dataclass(frozen=True)
class Row:
    """One way to train, beside plain."""

    problem: str
    way: str
    peak: float
    """Of the plain peak."""
    seconds: float
    """Of the plain time."""
    equal: bool
    """Whether the gradients are equal, bit for bit."""
    difference: float
    """The largest of a gradient, of the largest gradient."""


def compare(problem: str, make: Callable[[Loss], Loss], args: tuple[Any, ...], budget: float, rounds: int) -> list[Row]:
    """Takes one gradient in three ways."""
    plain = make(network)
    ways = {
        "plain": plain,
        "fckpt.remat(network)": make(fckpt.remat(network)),
        f"fckpt.remat(loss, budget={budget})": fckpt.remat(plain, budget=budget),
    }
    steps = {way: lambda loss=loss: fckpt.grad(loss)(*args) for way, loss in ways.items()}
    gradients = {way: step() for way, step in steps.items()}  # also plans
    peaks = {way: fckpt.measure_peak(step).peak_bytes for way, step in steps.items()}
    seconds = {way: float("inf") for way in ways}
    for _ in range(rounds):
        for way, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[way] = min(seconds[way], time.perf_counter() - start)
    expected = gradients["plain"]
    largest = max(float(g.abs().max()) for g in expected.values())
    return [
        Row(
            problem,
            way,
            peaks[way] / peaks["plain"],
            seconds[way] / seconds["plain"],
            all(torch.equal(g, expected[k]) for k, g in gradients[way].items()),
            max(float((g - expected[k]).abs().max()) for k, g in gradients[way].items()) / largest,
        )
        for way in ways
    ]


def main(arguments: list[str] | None = None) -> list[Row]:
    """Parses the command line, runs, prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description="Budgets around losses with derivatives inside.")
    parser.add_argument("--points", type=int, default=4096, help="points of the PINN (default 4096)")
    parser.add_argument("--width", type=int, default=128, help="width of the networks (default 128)")
    parser.add_argument("--layers", type=int, default=6, help="hidden layers (default 6)")
    parser.add_argument("--inner", type=int, default=5, help="inner steps of MAML (default 5)")
    parser.add_argument("--tasks", type=int, default=4, help="tasks of MAML (default 4)")
    parser.add_argument("--budget", type=float, nargs=2, default=(0.4, 0.2), help="of PINN and MAML (default 0.4 0.2)")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each kind (default 3)")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    weights = mlp(options.width, options.layers, 2)
    rows = compare("PINN", pinn, (weights, torch.rand(options.points, 2)), options.budget[0], options.rounds)
    weights = mlp(options.width, options.layers, 1)
    xs = torch.randn(options.tasks, 256, 1)
    make = lambda net: maml(net, options.inner)
    rows += compare("MAML", make, (weights, xs, torch.sin(3 * xs[..., 0])), options.budget[1], options.rounds)
    for row in rows:
        same = "gradients equal" if row.equal else f"gradients differ by {row.difference:.0e}"
        print(f"{row.problem}  {row.way:34} peak {row.peak:.2f}  time {row.seconds:.2f}  {same}")
    return rows


if __name__ == "__main__":
    main()
