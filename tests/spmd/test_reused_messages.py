"""What a rematerialised function sends again, and what it keeps: results of reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fckpt
from fckpt import policies

F64 = torch.float64
Fn = Callable[..., torch.Tensor]


class Messages(TorchDispatchMode):
    """Counts the messages that this rank sends."""

    fckpt_looks_on = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("fckpt."):
            self.counts[str(func).split(".")[1]] += 1
        return func(*args, **kwargs or {})


def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A gather, a reduction, an exchange and a reduction that leaves each a part, with work between."""
    x = torch.tanh(x @ fckpt.all_gather(w, "data", tiled=True))
    x = torch.tanh(fckpt.psum(x, "data"))
    x = torch.tanh(fckpt.all_to_all(x, "data", split=0, concat=0, tiled=True))
    x = torch.tanh(fckpt.psum_scatter(x, "data", tiled=True))
    return x * fckpt.pmax(x.detach(), "data")


def mine() -> tuple[torch.Tensor, torch.Tensor]:
    rank = int(fckpt.axis_index("data"))
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(2, 4, dtype=F64, generator=generator), torch.randn(4, 4, dtype=F64, generator=generator))


def by_grad(fn: Fn) -> torch.Tensor:
    w, x = mine()
    return torch.func.grad(lambda w: fn(w, x).sum())(w)


def by_backward(fn: Fn) -> torch.Tensor:
    w, x = mine()
    fn(w.requires_grad_(), x).sum().backward()
    assert w.grad is not None
    return w.grad


def on_two(*fns: Callable[[], torch.Tensor]) -> list[tuple[torch.Tensor, Counter[str]]]:
    """What each returns on rank 0 of 2, and what it sends."""

    def program() -> list[tuple[torch.Tensor, Counter[str]]]:
        found = []
        for fn in fns:
            with Messages() as messages:
                found.append((fn(), messages.counts))
        return found

    return fckpt.sim({"data": 2}).run(program)[0]


@pytest.mark.parametrize("differentiate", [by_grad, by_backward])
def test_reductions_are_kept_and_gathers_repeated(differentiate: Callable[[Fn], torch.Tensor]) -> None:
    (plain, sent), (again, sent_again) = on_two(lambda: differentiate(block), lambda: differentiate(fckpt.remat(block)))
    assert torch.equal(plain, again)
    assert sent_again == sent + Counter(all_gather=1)
    assert sent["all_reduce"] == 3  # psum, its transpose, pmax


@pytest.mark.parametrize("differentiate", [by_grad, by_backward])
def test_regions_within_regions(differentiate: Callable[[Fn], torch.Tensor]) -> None:
    inner = fckpt.remat(block)
    twice = lambda f: lambda w, x: f(w, torch.cat([f(w, x), f(w, x)]))
    (plain, sent), (again, sent_again) = on_two(
        lambda: differentiate(twice(block)), lambda: differentiate(fckpt.remat(twice(inner)))
    )
    assert torch.equal(plain, again)
    sent_again -= sent
    assert set(sent_again) == {"all_gather"}


def test_a_result_that_is_changed_in_place_is_sent_again() -> None:
    def changing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(fckpt.psum(torch.tanh(x @ w.T), "data").mul_(2.0))

    (plain, sent), (again, sent_again) = on_two(lambda: by_grad(changing), lambda: by_grad(fckpt.remat(changing)))
    assert torch.equal(plain, again)
    assert sent_again == sent + Counter(all_reduce=1)


def second(fn: Fn) -> torch.Tensor:
    w, x = mine()
    first = torch.func.grad(lambda w: fn(w, x).sum())
    return torch.func.grad(lambda w: first(w).square().sum())(w)


def forward_over_reverse(fn: Fn) -> torch.Tensor:
    w, x = mine()
    return torch.func.jvp(torch.func.grad(lambda w: fn(w, x).sum()), (w,), (torch.ones_like(w),))[1]


def reverse_over_forward(fn: Fn) -> torch.Tensor:
    w, x = mine()
    along = lambda w: torch.func.jvp(lambda w: fn(w, x), (w,), (torch.ones_like(w),))[1].sum()
    return torch.func.grad(along)(w)


def batched(fn: Fn) -> torch.Tensor:
    w, x = mine()
    each = torch.func.vmap(torch.func.grad(lambda w, x: fn(w, x).sum()), in_dims=(None, 0))
    return each(w, torch.stack([x, 2 * x, 3 * x]))


def jacobian(fn: Fn) -> torch.Tensor:
    w, x = mine()
    return torch.func.jacrev(lambda w: fn(w, x))(w)


@pytest.mark.parametrize("differentiate", [second, forward_over_reverse, reverse_over_forward, batched, jacobian])
def test_the_numbers_are_the_same_under_all_transforms(differentiate: Callable[[Fn], torch.Tensor]) -> None:
    def smooth(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ fckpt.all_gather(w, "data", tiled=True))
        x = torch.tanh(fckpt.psum(x, "data"))
        return torch.tanh(fckpt.psum_scatter(x, "data", tiled=True))

    (plain, _), (again, _) = on_two(lambda: differentiate(smooth), lambda: differentiate(fckpt.remat(smooth)))
    assert torch.equal(plain, again)


def test_the_policy_of_the_same_name() -> None:
    reductions = policies.reductions_saveable

    def program() -> tuple[list[str], list[str], torch.Tensor, torch.Tensor]:
        w, x = mine()
        rows = lambda fn: fckpt.saved_residuals(fn, w.requires_grad_(), x)
        kept = lambda fn: [row.origin for row in rows(fn) if row.kind == "intermediate"]
        planned = fckpt.remat(block, policy=reductions)
        return kept(fckpt.remat(block)), kept(planned), by_grad(block), by_grad(planned)

    default, planned, plain, again = fckpt.sim({"data": 2}).run(program)[0]
    assert default == planned
    assert torch.equal(plain, again)
    reducing = {f"fckpt.{op}" for op in ("all_reduce", "all_to_all", "reduce_scatter")}
    assert {origin.split(" ")[0] for origin in default} == reducing
