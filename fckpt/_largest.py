"""`largest`: the largest batch, length or image for which a plan fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fckpt import solve
from fckpt._inspect import Looked, Outputs
from fckpt._planned.families import Families, is_shared
from fckpt._planned.making import make_plan, priced
from fckpt._planned.plan import Plan
from fckpt._units import format_bytes, parse_bytes
from fckpt.cost.calls import CostSource
from fckpt.errors import ArgumentTypeError, ArgumentValueError, BudgetError
from fckpt.graph.graph import Graph
from fckpt.policies.decisions import PolicyLike, as_policy
from fckpt.report.progress import Line
from fckpt.solve.proofs.bounds import least_peak

__all__ = ["largest"]

_GROWTH = 16
"""The largest factor between a size that fits and the next size to try."""
_UNBOUNDED = 2**40
_EQUAL = 5
"""The number of sizes, each much larger than the one before, whose equal peaks mean that the peak does not grow."""


def largest(
    fn: Callable[..., Any],
    make_args: Callable[[int], Any],
    *,
    budget: int | str,
    least: int = 1,
    most: int | None = None,
    policy: PolicyLike | None = None,
    solver: str = "auto",
    costs: CostSource | str | None = None,
    device: torch.device | str | None = None,
    outputs: Outputs | None = None,
) -> int:
    """Returns the largest size for which a plan of `fn` fits a budget, without running `fn`.

    The size is whatever `make_args` makes of a number: a batch size, a sequence length, the side of an image. Larger
    sizes are assumed to need more memory. The search increases the size until nothing fits, and then narrows the range,
    guided by the peaks seen so far. Each size is traced and priced. A size is excluded by a lower bound on its peak, or
    fits by a known plan that is adapted to it; the solver runs where neither decides, and for the result.

    Args:
        fn: a function or a module, as for `remat`.
        make_args: returns the positional arguments for a size, as a tuple, or the only argument. To search sizes that
            this machine cannot hold, return tensors on the meta device, have the model there too, and pass `costs`.
        budget: the largest peak, in bytes or as text (`"80GiB"`), above what is held at the call.
        least: the smallest size to consider.
        most: the largest size to consider, for example the number of a model's positions; None for no limit.
        policy: see `remat`.
        solver: see `fckpt.solve.names()`.
        costs: see `plan`.
        device: see `plan`.
        outputs: see `plan`.

    Raises:
        BudgetError: no plan fits the budget for the size `least`.
        ArgumentTypeError: `make_args` is no function; `least` or `most` is not an int of at least 1.
        ArgumentValueError: the budget is a fraction, which every size can meet; `most` is smaller than `least`; or the
            peak does not grow with the size, and there is no `most`.
        TraceError: the function cannot be traced.

    Example:
        >>> import torch, fckpt
        >>> w = torch.zeros(64, 64, requires_grad=True)
        >>> def loss(x):
        ...     for _ in range(10):
        ...         x = torch.tanh(x @ w)
        ...     return x.sum()
        >>> rows = fckpt.largest(loss, lambda n: torch.zeros(n, 64), budget="1MiB")
        >>> fckpt.plan(loss, torch.zeros(rows, 64), budget="1MiB").peak_bytes <= 2**20
        True
    """
    if not callable(make_args):
        raise ArgumentTypeError(f"make_args must be a function of a size, not {type(make_args).__name__}.")
    if isinstance(budget, float):
        raise ArgumentValueError(
            f"largest needs a budget in bytes, not {budget!r}: a fraction of the plain peak grows with the size."
        )
    for name, value in (("least", least), ("most", most)):
        if value is not None and type(value) is not int:
            raise ArgumentTypeError(f"{name} must be an int, not {type(value).__name__}: {value!r}.")
        if value is not None and value < 1:
            raise ArgumentValueError(f"{name} must be at least 1, not {value}.")
    if most is not None and most < least:
        raise ArgumentValueError(f"most={most} is smaller than least={least}.")
    solve.get(solver)  # raises if there is no such solver
    policy = None if policy is None else as_policy(policy)
    sizes = _Sizes(fn, make_args, budget, policy, solver, costs, device, outputs)
    with Line() as line:
        return _search(sizes, least, most, line)


def _search(sizes: _Sizes, least: int, most: int | None, line: Line) -> int:
    """Returns the largest size that fits."""
    sizes.solve(least)
    solved, fits, fails = least, least, None if most is None else most + 1
    while True:
        while fails is None or fails - fits > 1:
            size = sizes.guess(fits, fails)
            line.say(f"size {size}: looking for a plan within {format_bytes(sizes.nbytes)}")
            if not sizes.fit(size):
                fails = size
            elif size < _UNBOUNDED and not (fails is None and sizes.stay_equal()):
                fits = size
            else:
                raise ArgumentValueError("the peak does not grow with the size, so no size is the largest: pass most=.")
        if fits == solved or sizes.solves(fits):
            return fits
        fits, fails = solved, fits  # a plan of another size fits, but a call of this size alone has no such plan


class _Sizes:
    """Whether sizes fit, and the bytes that the sizes tried need."""

    def __init__(
        self,
        fn: Any,
        make_args: Callable[[int], Any],
        budget: int | str,
        policy: Any,
        solver: str,
        costs: CostSource | str | None,
        device: torch.device | str | None,
        outputs: Outputs | None,
    ):
        self.fn, self.make_args, self.policy, self.solver = fn, make_args, policy, solver
        self.costs, self.device, self.outputs = costs, device, outputs
        self.nbytes = parse_bytes(budget)
        self._families = Families()
        self._bounds: dict[int, int] = {}
        """By size: a lower bound on the peak."""
        self._needed: dict[int, int] = {}
        """By size that does not fit although its bound does: the least budget that would do."""
        self._guesses = 0

    def solve(self, size: int) -> None:
        """Raises `BudgetError` if the solver finds no plan for a size that fits."""
        self._plan(self._graph(size))

    def solves(self, size: int) -> bool:
        """Whether the solver itself, without plans of other sizes, finds a plan for a size."""
        try:
            self.solve(size)
        except BudgetError:
            return False
        return True

    def fit(self, size: int) -> bool:
        """Whether a plan for a size fits, adapted from the plan of another size or found by the solver."""
        graph = self._graph(size)
        if self._bounds[size] > self.nbytes:
            return False
        try:
            if is_shared(self.solver, tile=False):
                self._families.plan(graph, self.nbytes, lambda: self._plan(graph))
            else:
                self._plan(graph)
        except BudgetError as error:
            self._needed[size] = error.least_bytes
            return False
        return True

    def stay_equal(self) -> bool:
        """Whether the lower bounds on the peaks are equal for the `_EQUAL` largest sizes that were tried."""
        bounds = [bound for _, bound in sorted(self._bounds.items())][-_EQUAL:]
        return len(bounds) == _EQUAL and len({*bounds}) == 1

    def _plan(self, graph: Graph) -> Plan:
        return make_plan(graph, self.nbytes, self.solver, str(torch.__version__))

    def _graph(self, size: int) -> Graph:
        given = self.make_args(size)
        args: Sequence[Any] = given if isinstance(given, tuple) else (given,)
        looked = Looked(self.fn, args, {}, self.costs, self.outputs, device=self.device)
        graph = priced(looked.trace, self.policy, looked.costs, budgeted=True)
        self._bounds[size] = least_peak(graph)
        return graph

    def guess(self, fits: int, fails: int | None) -> int:
        """Returns the size to try next.

        Peaks grow about linearly with the size, so the line through two known sizes says where the budget is met. Every
        fourth guess is the middle, in case the peaks are far from a line.
        """
        self._guesses += 1
        middle = _GROWTH * fits if fails is None else (fits + fails) // 2
        for known in (self._needed, self._bounds):
            tried = sorted(known, key=lambda size: abs(known[size] - self.nbytes))[:2]
            if len(tried) == 2 and self._guesses % 4:
                (small, large), (low, high) = tried, [known[size] for size in tried]
                if (high - low) * (large - small) > 0:
                    middle = small + int((self.nbytes - low) * (large - small) / (high - low))
                    break
        most = _GROWTH * fits  # `most` may be far above: larger arguments would be made than are needed
        most, middle = (most, middle + 1) if fails is None else (min(most, fails - 1), middle)
        return max(fits + 1, min(middle, most))
