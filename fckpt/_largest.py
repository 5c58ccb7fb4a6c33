"""`largest`: the largest batch, length or image for which a plan fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fckpt import solve
from fckpt._inspect import Outputs, _Looked
from fckpt._planned.families import Families
from fckpt._planned.making import make_plan, nbytes_of, priced
from fckpt._units import format_bytes
from fckpt.cost.calls import CostSource
from fckpt.errors import ArgumentTypeError, ArgumentValueError, BudgetError
from fckpt.policies.decisions import PolicyLike, as_policy
from fckpt.report.progress import Line
from fckpt.solve.proofs.bounds import least_peak

__all__ = ["largest"]

_UNBOUNDED = 2**40


def largest(
    fn: Callable[..., Any],
    make_args: Callable[[int], Any],
    *,
    budget: int | str,
    least: int = 1,
    most: int | None = None,
    policy: PolicyLike | None = None,
    solver: str = "auto",
    costs: CostSource | None = None,
    outputs: Outputs | None = None,
) -> int:
    """Returns the largest size for which a plan of `fn` fits a budget, without running `fn`.

    The size is whatever `make_args` makes of a number: a batch size, a sequence length, the edge of an image. Larger
    sizes are assumed to need more memory. The search doubles the size until nothing fits, and then bisects, guided by
    the peaks seen so far. Each size is traced and priced; known plans are adapted to it, and the solver runs where none
    of them fits and no lower bound on the peak excludes the size.

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
        outputs: see `plan`.

    Raises:
        BudgetError: no plan fits the budget for the size `least`.
        ArgumentValueError: the budget is a fraction, which every size can meet; or `least` and `most` are no range.
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
    if isinstance(budget, float):
        raise ArgumentValueError(
            f"largest needs a budget in bytes, not {budget!r}: a fraction of the plain peak grows with the size."
        )
    for name, value in (("least", least), ("most", most)):
        if value is not None and (type(value) is not int or value < 1):
            raise ArgumentTypeError(f"{name} must be an int of at least 1, not {value!r}.")
    if most is not None and most < least:
        raise ArgumentValueError(f"most={most} is smaller than least={least}.")
    solve.get(solver)  # raises if there is no such solver
    sizes = _Sizes(fn, make_args, budget, None if policy is None else as_policy(policy), solver, costs, outputs)
    with Line() as line:
        return _search(sizes, least, most, line)


def _search(sizes: _Sizes, least: int, most: int | None, line: Line) -> int:
    """Returns the largest size that fits."""
    sizes.check(least)
    fits, fails = least, None if most is None else most + 1
    while fails is None or fails - fits > 1:
        size = sizes.guess(fits, fails)
        line.say(f"size {size}: looking for a plan within {format_bytes(sizes.nbytes)}")
        if sizes.fits(size):
            fits = size
            if fits >= _UNBOUNDED:
                raise ArgumentValueError("the peak does not grow with the size, so no size is the largest: pass most=.")
        else:
            fails = size
    return fits


class _Sizes:
    """Whether sizes fit, and the least peaks of the sizes that were tried."""

    def __init__(
        self,
        fn: Any,
        make_args: Callable[[int], Any],
        budget: int | str,
        policy: Any,
        solver: str,
        costs: CostSource | None,
        outputs: Outputs | None,
    ):
        self.fn, self.make_args, self.policy, self.solver = fn, make_args, policy, solver
        self.costs, self.outputs = costs, outputs
        self.budget = budget
        self.families = Families()
        self.nbytes = 0
        self._least: dict[int, int] = {}

    def check(self, size: int) -> None:
        """Raises `BudgetError` if no plan fits a size."""
        given = self.make_args(size)
        args: Sequence[Any] = given if isinstance(given, tuple) else (given,)
        looked = _Looked(self.fn, args, {}, self.costs, self.outputs)
        graph = priced(looked.trace, self.policy, looked.costs, budgeted=True)
        self.nbytes, self._least[size] = nbytes_of(self.budget, graph), least_peak(graph)
        version = str(torch.__version__)
        solve = lambda: make_plan(graph, self.nbytes, self.solver, version)
        if self.solver != "auto" or self._least[size] > self.nbytes:
            solve()
        else:
            self.families.plan(graph, self.nbytes, version, solve)

    def fits(self, size: int) -> bool:
        try:
            self.check(size)
        except BudgetError:
            return False
        return True

    def guess(self, fits: int, fails: int | None) -> int:
        """Returns the size to try next: where the least peaks of the last two sizes suggest that the budget is met."""
        tried = sorted(self._least)[-2:] if fails is None else [fits, fails]
        middle = 2 * fits if fails is None else (fits + fails) // 2
        if len(tried) < 2 or any(size not in self._least for size in tried):
            return middle
        (small, large), (low, high) = tried, [self._least[size] for size in tried]
        if high <= low:
            return middle
        found = small + int((self.nbytes - low) * (large - small) / (high - low))
        if fails is None:
            return max(fits + 1, min(found + 1, 16 * fits))
        # Not too close to either end, where a wrong guess would hardly narrow the range.
        margin = max(1, (fails - fits) // 8)
        return max(fits + margin, min(found, fails - margin))
