"""What remat promises of one region: values, gradients, what it keeps, how often it computes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers import assert_equal, gradients, leaf
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fckpt


class Counted(torch.autograd.Function):
    """sin, counting its forward runs."""

    forwards = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counted.forwards += 1
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


# -- no input-requires-grad quirk ---------------------------------------------------------------------------


def test_parameters_get_gradients_whether_or_not_the_data_requires_grad() -> None:
    net, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)),
        torch.randn(2, 4),
    )
    net(x).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
    for data in (x, x.clone().requires_grad_()):
        net.zero_grad()
        fckpt.remat(lambda t: net(t))(data).sum().backward()
        assert_equal([p.grad for p in net.parameters()], expected)
    net.zero_grad()
    with pytest.warns(UserWarning, match="None of the inputs"):
        out = checkpoint(net, x, use_reentrant=True)
    assert not out.requires_grad, "torch's reentrant checkpoint has lost its quirk; say so in the docs"


# -- closed-over tensors ------------------------------------------------------------------------------------

GLOBAL_WEIGHT = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)


class Holder:
    def __init__(self, weight: torch.Tensor):
        self.inner = {"weights": [weight]}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.inner["weights"][0]).sin()


def test_closed_over_global_gets_its_gradient() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ GLOBAL_WEIGHT).sin()

    for f in (fn, lambda x: vmap(fn)(x)):
        (expected,) = torch.autograd.grad(f(x).sum(), GLOBAL_WEIGHT)
        region = fckpt.remat(fn)
        run = region if f is fn else lambda x: vmap(region)(x)
        (actual,) = torch.autograd.grad(run(x).sum(), GLOBAL_WEIGHT)
        assert_equal(actual, expected)


def test_tensor_held_by_an_object_gets_its_gradient_under_every_transform() -> None:
    x, w = torch.randn(2, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    loss = lambda make: lambda w: (make(Holder(w))(x) ** 2).sum()
    plain, region = loss(lambda h: h), loss(fckpt.remat)
    assert_equal(grad(region)(w), grad(plain)(w))
    assert_equal(vmap(grad(region))(torch.stack([w, w + 1])), vmap(grad(plain))(torch.stack([w, w + 1])))
    assert_equal(torch.func.jvp(region, (w,), (w,)), torch.func.jvp(plain, (w,), (w,)))
    assert_equal(torch.func.jacrev(region)(w), torch.func.jacrev(plain)(w))


def test_closed_over_tensor_is_returned_and_used_in_place_of_an_argument() -> None:
    w = torch.randn(3, dtype=torch.float64)
    fn = lambda w: lambda x: (w, torch.sin(torch.exp(w)) * x)
    value = lambda make: lambda w: sum((y**2).sum() for y in make(fn(w))(torch.ones_like(w)))
    assert_equal(grad(value(fckpt.remat))(w), grad(value(lambda f: f))(w))


def test_discovery_of_closed_over_tensors_costs_no_second_forward() -> None:
    w = torch.randn(3)
    calls = 0

    def run(w: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return torch.sin(torch.exp(w) * x)

        return fckpt.remat(inner)(torch.ones(3)).sum()

    grad(run)(w)
    assert calls == 2  # one forward, one recompute
    calls = 0
    leaf_w = leaf(w)
    run(leaf_w).backward()
    assert calls == 2


# -- arguments and outputs of all kinds ---------------------------------------------------------------------


def both(fn: Any, *args: Any) -> None:
    """Compares outputs, flags and gradients of fn and remat(fn), under plain autograd and torch.func."""
    inputs, inputs2 = leaf(args), leaf(args)
    plain, region = fn(*inputs), fckpt.remat(fn)(*inputs2)
    assert_equal(region, plain)
    got, want = [torch.utils._pytree.tree_leaves(t) for t in (region, plain)]
    assert [y.requires_grad for y in got if torch.is_tensor(y)] == [y.requires_grad for y in want if torch.is_tensor(y)]
    total = lambda outs: sum((y * y.conj()).real.sum() for y in outs if torch.is_tensor(y) and y.requires_grad)
    total(want).backward()
    total(got).backward()
    assert_equal(gradients(inputs2), gradients(inputs))

    def value(f: Any) -> Any:
        def scalar(args: Any) -> torch.Tensor:
            outs = torch.utils._pytree.tree_leaves(f(*args))
            kept = [y for y in outs if torch.is_tensor(y) and (y.is_floating_point() or y.is_complex())]
            return sum((y * y.conj()).real.sum() for y in kept)  # type: ignore[return-value]

        return scalar

    assert_equal(grad(value(fckpt.remat(fn)))(args), grad(value(fn))(args))


A, B = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)


def test_same_tensor_passed_twice() -> None:
    both(lambda tree: torch.sin(tree[0] * 2) * torch.exp(tree[1]["x"]), (A, {"x": A}))
    shared = leaf(A)
    (fckpt.remat(lambda a, b: torch.sin(a).exp() * torch.cos(b).exp())(shared, shared)).sum().backward()
    other = leaf(A)
    (torch.sin(other).exp() * torch.cos(other).exp()).sum().backward()
    assert_equal(shared.grad, other.grad)


def test_inputs_returned_as_outputs_keep_their_identity() -> None:
    both(lambda a, b: (a, torch.sin(a).exp() * b, b), A, B)
    x = leaf(A)
    assert fckpt.remat(lambda x: (x, x.sin()))(x)[0] is x
    assert_equal(grad(lambda x: fckpt.remat(lambda x: x)(x).sum())(A), torch.ones_like(A))


def test_views_of_inputs_as_outputs() -> None:
    both(lambda a: (a.t(), a[0], a.view(-1), torch.sin(a.t()).exp()), A)


def test_one_output_returned_twice() -> None:
    def fn(a: torch.Tensor) -> Any:
        y = torch.sin(a).exp()
        return y, {"again": y}

    both(fn, A)
    first, second = fckpt.remat(fn)(leaf(A))
    assert first is second["again"]


def test_outputs_that_depend_on_no_input() -> None:
    both(lambda a: (torch.sin(a).exp(), torch.ones(2, dtype=torch.float64)), A)


def test_integer_and_boolean_outputs_and_other_leaves() -> None:
    both(lambda a: {"i": a.argmax(), "b": a > 0, "none": None, "s": "text", "y": torch.sin(a).exp(), "n": 3}, A)


def test_integer_and_boolean_arguments() -> None:
    index, mask = torch.tensor([2, 0]), A > 0
    fn = lambda a, index, mask: torch.where(mask, a.exp(), a.sin())[index]
    x, y = leaf(A), leaf(A)
    fn(x, index, mask).sum().backward()
    fckpt.remat(fn)(y, index, mask).sum().backward()
    assert_equal(y.grad, x.grad)
    assert_equal(grad(lambda a: fckpt.remat(fn)(a, index, mask).sum())(A), x.grad)


def test_no_tensor_at_all() -> None:
    assert fckpt.remat(lambda *a, **k: (a, k))(1, "two", three=None) == ((1, "two"), {"three": None})
    assert fckpt.remat(lambda: None)() is None
    assert grad(lambda x: x * fckpt.remat(lambda n: n + 1)(2))(torch.tensor(1.0)) == 3


def test_zero_size_complex_and_mixed_dtypes() -> None:
    both(lambda a: torch.sin(a).exp(), torch.zeros(0, 3, dtype=torch.float64))
    both(lambda a, b: torch.sin(a).exp() * b.sum(), torch.randn(3, dtype=torch.complex128), A)
    both(lambda a, b: (torch.sin(a).exp() @ b.double(), b.exp().sin()), A, torch.randn(4, 2))
    both(
        lambda a, b: a.float().sin().exp().half().float() * b,
        torch.randn(3, dtype=torch.float64),
        torch.randn(3),
    )


def test_in_place_work_on_tensors_that_fn_made() -> None:
    def fn(a: torch.Tensor) -> torch.Tensor:
        h = a * 2
        h[0] = a[1].sin()
        h.add_(1).sigmoid_()
        return torch.cat([h, a]).clamp_(-0.5, 0.5).exp().sin()

    both(fn, A)


def test_unused_arguments_and_outputs() -> None:
    both(lambda a, b: torch.sin(a).exp(), A, B)
    x = leaf(A)
    first, _ = fckpt.remat(lambda a: (a.sin().exp(), a.cos().exp()))(x)
    first.sum().backward()
    y = leaf(A)
    y.sin().exp().sum().backward()
    assert_equal(x.grad, y.grad)


def test_keyword_arguments_are_differentiated_like_positional_ones() -> None:
    x, w = leaf(A), leaf(B)
    fckpt.remat(lambda x, *, w, flag: torch.sin(x * w).exp() if flag else x)(x, w=w, flag=True).sum().backward()
    y, v = leaf(A), leaf(B)
    torch.sin(y * v).exp().sum().backward()
    assert_equal((x.grad, w.grad), (y.grad, v.grad))


def test_static_arguments_reach_the_function_whole() -> None:
    config = ("sin", 2)
    seen = []

    def fn(config: Any, x: torch.Tensor, *, mode: Any) -> torch.Tensor:
        seen.append((config, mode))
        return getattr(x, config[0])().exp() * config[1]

    region = fckpt.remat(fn, static_argnums=0, static_argnames="mode")
    x = leaf(A)
    region(config, x, mode=(1, 2)).sum().backward()
    assert seen == [(config, (1, 2))] * 2
    assert_equal(grad(lambda x: region(config, x, mode=None).sum())(A), x.grad)


def test_decorator_with_and_without_arguments_and_on_methods() -> None:
    @fckpt.remat
    def plain(x: torch.Tensor) -> torch.Tensor:
        """Documented."""
        return x.sin().exp()

    @fckpt.remat(static_argnums=(1,))
    def with_options(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x * n).sin().exp()

    class Model:
        scale = 2

        @fckpt.remat
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).sin().exp()

    assert plain.__name__ == "plain" and plain.__doc__ == "Documented."
    for fn in (plain, lambda x: with_options(x, 1)):
        x, y = leaf(A), leaf(A)
        fn(x).sum().backward()
        y.sin().exp().sum().backward()
        assert_equal(x.grad, y.grad)
    assert_equal(grad(lambda x: Model().run(x).sum())(A), grad(lambda x: (x * 2).sin().exp().sum())(A))


def test_data_dependent_control_flow() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        while x.sum() < 100:
            x = (x * 2).exp() if x[0, 0] > 0 else x.abs() + 3
        return x.sin().exp()

    both(fn, A.abs())


# -- what is kept -------------------------------------------------------------------------------------------


def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor below all levels of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def test_inputs_that_backward_does_not_need_are_not_held() -> None:
    def alive(fn: Any) -> tuple[bool, ...]:
        w = torch.ones(3, requires_grad=True)
        x, y = w * 1.5, w * 2.5
        references = [weakref.ref(x.untyped_storage()), weakref.ref(y.untyped_storage())]
        out = fckpt.remat(fn)(x, y)
        # Multiplication by a number saves nothing, so only the region can hold x and y.
        del x, y
        gc.collect()
        assert out is not None
        return tuple(reference() is not None for reference in references)

    assert alive(lambda x, y: x + y) == (False, False)
    assert alive(lambda x, y: x.sin() + y) == (True, False)
    assert alive(lambda x, y: x.sin().exp() * y) == (True, True)


def test_intermediates_are_not_held() -> None:
    references = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        references.append(weakref.ref(storage(h)))
        return h.exp().sin()

    for x in (torch.ones(3, requires_grad=True),):
        out = fckpt.remat(fn)(x)
        gc.collect()
        assert references[0]() is None
        out.sum().backward()
    references.clear()
    out, pull = torch.func.vjp(fckpt.remat(fn), torch.ones(3))
    gc.collect()
    assert references[0]() is None
    pull(out)


def test_a_region_whose_saved_values_are_its_inputs_is_never_recomputed() -> None:
    calls = 0

    def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.nn.functional.linear(x, w, b)

    x, w, b = leaf(torch.randn(2, 3)), leaf(torch.randn(4, 3)), leaf(torch.randn(4))
    fckpt.remat(linear)(x * 1.0, w, b).sum().backward()
    assert calls == 1


# -- how often it computes ----------------------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """Counts the kernels of one operation."""

    fckpt_looks_on = True

    def __init__(self, op: Any):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


def halving(fns: list[Any]) -> Any:
    """Recursive halving: the first half of every chain is a region."""
    if len(fns) == 1:
        return fns[0]
    first, second = halving(fns[: len(fns) // 2]), halving(fns[len(fns) // 2 :])
    if len(fns) == 2:
        return lambda x: second(first(x))
    return lambda x: second(fckpt.remat(first)(x))


@pytest.mark.parametrize(("n", "begun", "computed"), [(4, 2, 1), (8, 8, 5), (16, 24, 17)])
@pytest.mark.parametrize("functional", [False, True])
def test_recursive_halving_recomputes_2_8_24(n: int, begun: int, computed: int, functional: bool) -> None:
    """R(n) = n/2 + 2 R(n/2) operations are begun again, as in JAX; the last of each region need not run.

    Under torch.func regions have no early stop, so all that are begun are computed.
    """
    calls = 0

    def op(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.sin(x)

    x = torch.randn(3, dtype=torch.float64)
    plain = halving([torch.sin] * n) if n == 0 else (lambda x: [x := torch.sin(x) for _ in range(n)][-1])
    with Kernels(torch.ops.aten.sin.default) as kernels:
        if functional:
            actual = grad(lambda x: halving([op] * n)(x).sum())(x)
        else:
            leaf_x = leaf(x)
            halving([op] * n)(leaf_x).sum().backward()
            actual = leaf_x.grad
    assert calls - n == begun
    assert kernels.count - n == (begun if functional else computed)
    assert_equal(actual, grad(lambda x: plain(x).sum())(x))


def test_early_stop_skips_what_follows_the_last_saved_value() -> None:
    x, w = leaf(torch.randn(4, 8)), leaf(torch.randn(8, 8))
    with Kernels(torch.ops.aten.mm.default) as kernels:
        out = fckpt.remat(lambda x: torch.tanh(x @ w) @ w)(x)
        forward = kernels.count
        out.sum().backward()
    # Forward 2; recompute 1 (the last product is not needed); backward 2 per product.
    assert (forward, kernels.count) == (2, 2 + 1 + 4)


def test_a_backward_that_is_retained_recomputes_once_per_pass() -> None:
    Counted.forwards = 0
    out = fckpt.remat(lambda x: Counted.apply(Counted.apply(x)))(leaf(A)).sum()
    for _ in range(3):
        out.backward(retain_graph=True)
    # Early stop: the second application saves its input only after it ran, like every autograd.Function.
    assert Counted.forwards == 2 + 3 * 2


def test_not_differentiated_it_computes_once_and_keeps_nothing() -> None:
    Counted.forwards = 0
    with torch.no_grad():
        out = fckpt.remat(lambda x: Counted.apply(x).exp())(leaf(A))
    assert Counted.forwards == 1 and out.grad_fn is None
    assert fckpt.remat(lambda x: x.sin().exp())(A).grad_fn is None


# -- many replicas ------------------------------------------------------------------------------------------


class Broadcast(torch.autograd.Function):
    """Makes the weights of all replicas in one node, as nn.DataParallel does, and counts its backward runs."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, replicas: int, *weights: torch.Tensor) -> Any:
        ctx.count = len(weights)
        return tuple(w.clone() for _ in range(replicas) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        Broadcast.backwards += 1
        sums = [sum(g for g in grads[i :: ctx.count] if g is not None) for i in range(ctx.count)]
        return (None, *sums)


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_node_that_broadcasts_weights_runs_once(replicas: int) -> None:
    """60 regions per replica. torch's reentrant checkpoint runs that node 60 times per replica."""
    depth = 60
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(depth)]

    def step(region: Any) -> list[torch.Tensor]:
        Broadcast.backwards = 0
        copies = Broadcast.apply(replicas, *weights)
        total = torch.zeros(())
        for r in range(replicas):
            h = torch.full((2, 4), float(r + 1), requires_grad=True)
            for i in range(depth):
                h = region(lambda h, w=copies[r * depth + i]: torch.tanh(h @ w), h)
            total = total + h.sum()
        for w in weights:
            w.grad = None
        total.backward()
        return [w.grad for w in weights]  # type: ignore[misc]

    expected = step(lambda f, *a: f(*a))
    assert Broadcast.backwards == 1
    assert_equal(step(lambda f, *a: fckpt.remat(f)(*a)), expected)
    assert Broadcast.backwards == 1
    step(lambda f, *a: checkpoint(f, *a, use_reentrant=True))
    assert Broadcast.backwards == depth * replicas


def test_slices_are_static_arguments() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    pick = lambda x, where: torch.tanh(x)[where].sin().sum()
    for where in (slice(1, 3), (slice(None), 1), ...):
        assert_equal(grad(fckpt.remat(pick))(x, where), grad(pick)(x, where))
