"""Random pure programs with nested regions, for property tests: what they are, how to run and draw them.

A program is a straight line of steps over a growing list of values, the first of which are the leaves of
its parameter tree. Regions are nested intervals of steps; running a program hands each region to `wrap`
as a function from what it reads to what later steps read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Tree = Any

LARGEST = 128  # elements of a value: programs stay fast however they grow

# the pool ------------------------------------------------------------------------------------------
# Every op takes any tensors x and y of at least one dimension for which `fits(x, y)`, which always holds
# for y = x, and a small `k` that picks a dimension, a shift, a variant.

Op = Callable[..., Any]

UNARY: dict[str, Op] = {
    "sin": lambda x, k: x.sin(),
    "tanh": lambda x, k: x.tanh(),
    "gelu": lambda x, k: F.gelu(x, approximate=("none", "tanh")[k % 2]),
    "silu": lambda x, k: F.silu(x),
    "softplus": lambda x, k: F.softplus(x),
    "relu": lambda x, k: x.relu(),
    "abs": lambda x, k: x.abs(),
    "square": lambda x, k: x.square(),
    "scale": lambda x, k: (0.5 + k) * x,
    "exp": lambda x, k: x.tanh().exp(),
    "log": lambda x, k: (1.5 + x.square()).log(),
    "reciprocal": lambda x, k: 1 / (2 + x * x),
    "float32": lambda x, k: x.float().sin().double(),
    "detached": lambda x, k: x * x.detach().cos(),
    "no_grad": lambda x, k: x / _unrecorded_size(x),
    "inner_grad": lambda x, k: x + torch.func.grad(lambda z: z.sin().square().sum())(x),
    "inner_vmap": lambda x, k: torch.func.vmap(lambda row: row * row.sum())(x),
    "layer_norm": lambda x, k: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x, k: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x, k: F.group_norm(torch.cat([x, x.sin()]).reshape(1, 1, -1), 1)[0, 0],
    "batch_norm": lambda x, k: F.batch_norm(_matrix(x).repeat(2, 1), None, None, training=True),
    "normalize": lambda x, k: F.normalize(x, dim=k % x.ndim, eps=1e-3),
    "softmax": lambda x, k: x.softmax(k % x.ndim),
    "log_softmax": lambda x, k: x.log_softmax(k % x.ndim),
    "sum": lambda x, k: x.sum(k % x.ndim),
    "mean": lambda x, k: x.mean(k % x.ndim, keepdim=True),
    "var": lambda x, k: x.var(k % x.ndim, correction=0),
    "std_mean": lambda x, k: torch.std_mean(torch.cat([x, x + 1], k % x.ndim), k % x.ndim),
    "amax": lambda x, k: x.amax(k % x.ndim),
    "max_values": lambda x, k: x.max(k % x.ndim).values,
    "logsumexp": lambda x, k: x.logsumexp(k % x.ndim),
    "prod": lambda x, k: x.tanh().prod(k % x.ndim),
    "cumsum": lambda x, k: x.cumsum(k % x.ndim),
    "sort": lambda x, k: x.sort(k % x.ndim).values,
    "topk": lambda x, k: x.flatten().topk(1 + k % x.numel()).values,
    "select": lambda x, k: x.select(0, k % x.shape[0]),
    "slice": lambda x, k: x[k % x.shape[0] :: 2],
    "index": lambda x, k: x[[0, k % x.shape[0], 0]],
    "gather": lambda x, k: x.take_along_dim(x.argsort(k % x.ndim), k % x.ndim),
    "embedding": lambda x, k: F.embedding(torch.tensor([k % _matrix(x).shape[0], 0, 0]), _matrix(x)),
    "masked_fill": lambda x, k: x.masked_fill(x > 0.3, 0.5 * k),
    "triu": lambda x, k: _matrix(x).triu(k - 1),
    "flip": lambda x, k: x.flip(k % x.ndim),
    "roll": lambda x, k: x.roll(k, 0),
    "chunk": lambda x, k: x.chunk(2, k % x.ndim),
    "unbind": lambda x, k: x[:3].unbind(0),
    "flatten": lambda x, k: x.reshape(-1),
    "transpose": lambda x, k: _matrix(x).transpose(0, 1),
    "unsqueeze": lambda x, k: x.unsqueeze(k % (x.ndim + 1)),
    "expand": lambda x, k: x.expand(2, *x.shape),
    "diagonal": lambda x, k: _matrix(x).diagonal(),
    "movedim": lambda x, k: x.movedim(k % x.ndim, 0),
    "unfold": lambda x, k: x.flatten().unfold(0, 1 + k % x.numel(), 1),
    "inplace_relu": lambda x, k: (x * 1.5).relu_(),
    "inplace_slice": lambda x, k: _overwritten(x * 1.5, k),
    "inplace_view": lambda x, k: _scaled_view(x.sin(), k),
    "dropout": lambda x, k: F.dropout(x, (0.5, 0.75, 0.0, 1.0)[k]),
    "alpha_dropout": lambda x, k: F.alpha_dropout(x, 0.3, training=True),
    "random_scale": lambda x, k: x * torch.rand_like(x),
    "random_noise": lambda x, k: x + torch.randn(x.shape[-1], dtype=x.dtype),
    "bernoulli": lambda x, k: x * torch.bernoulli(torch.full_like(x, 0.5)),
}

BINARY: dict[str, Op] = {
    "add": lambda x, y, k: x + y,
    "sub": lambda x, y, k: torch.sub(x, y, alpha=k),
    "mul": lambda x, y, k: x * y,
    "div": lambda x, y, k: x / (2 + y * y),
    "maximum": lambda x, y, k: torch.maximum(x, y),
    "where": lambda x, y, k: torch.where(x > y, x.sin(), y),
    "inplace_add": lambda x, y, k: (x * y).add_(x).mul_(2),
}
"""Of shapes that broadcast."""

MIXING: dict[str, Op] = {
    "matmul": lambda x, y, k: _matrix(x) @ _matrix(y).mT,
    "linear": lambda x, y, k: F.linear(x, _matrix(y), None if k % 2 else _matrix(y).sum(-1)),
    "einsum": lambda x, y, k: torch.einsum("ik,jk->ji", _matrix(x), _matrix(y)),
    "attention": lambda x, y, k: F.scaled_dot_product_attention(_image(x)[0], _image(y)[0], _image(y)[0]),
    "cat": lambda x, y, k: torch.cat([_matrix(x), _matrix(y)]),
    "cosine": lambda x, y, k: F.cosine_similarity(_matrix(x)[:1], _matrix(y)[:1], eps=1e-3),
}
"""Of shapes that agree in the last dimension."""

FREE: dict[str, Op] = {
    "outer": lambda x, y, k: torch.outer(x.flatten()[:6], y.flatten()[:6]),
    "conv1d": lambda x, y, k: F.conv1d(_row(x), _row(y)[:, :, :3], padding=2)[0, 0],
    "conv2d": lambda x, y, k: F.conv2d(_image(x), _image(y)[:, :, :2, :2], padding=1)[0, 0],
    "conv_transpose1d": lambda x, y, k: F.conv_transpose1d(_row(x), _row(y)[:, :, :2])[0, 0],
    "stack": lambda x, y, k: torch.stack([x.flatten()[:1], y.flatten()[:1]]),
    "scatter_add": lambda x, y, k: x.flatten().scatter_add(0, torch.tensor([0]), y.flatten()[:1]),
    "copy_into_buffer": lambda x, y, k: _buffer(x, y),
}
"""Of any two shapes."""

# fmt: off
GROWING = {
    "square", "inner_vmap", "mul", "inplace_add", "matmul", "linear", "einsum", "outer", "conv1d",
    "conv2d", "conv_transpose1d",
}
"""Polynomials of degree two: exact on small integers, if they are not stacked too high."""
EXACT = sorted(GROWING | {
    "relu", "abs", "sum", "cumsum", "sort", "topk", "max_values", "select", "slice", "index", "gather",
    "embedding", "masked_fill", "triu", "flip", "roll", "chunk", "unbind", "flatten", "transpose",
    "unsqueeze", "expand", "diagonal", "movedim", "unfold", "inplace_relu", "dropout", "bernoulli", "add",
    "sub", "maximum", "cat", "stack", "scatter_add", "copy_into_buffer",
})
"""Ops that round nothing on small integers, so that their sums are the same in any order."""

# fmt: on
RANDOM_OPS = frozenset({"dropout", "alpha_dropout", "random_scale", "random_noise", "bernoulli"})


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _image(x: Tensor) -> Tensor:
    return _matrix(x)[None, None]


def _row(x: Tensor) -> Tensor:
    return x.reshape(1, 1, -1)


def _unrecorded_size(x: Tensor) -> Tensor:
    with torch.no_grad():
        return 1 + x.abs().sum()


def _overwritten(own: Tensor, k: int) -> Tensor:
    own[k % own.shape[0]] = own[0].clone().cos()
    return own


def _scaled_view(own: Tensor, k: int) -> Tensor:
    own.flatten()[:: k + 1].mul_(0.5)
    return own


def _buffer(x: Tensor, y: Tensor) -> Tensor:
    own = torch.stack([x.flatten()[0], y.flatten()[0], y.flatten()[-1]]) * 0
    own[0].copy_(x.flatten()[0])
    own[1:] += y.flatten()[:1]
    return own


def _broadcasts(x: torch.Size, y: torch.Size) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(x), reversed(y), strict=False))


OPS = UNARY | BINARY | MIXING | FREE


def apply(op: str, operands: Sequence[Tensor], k: int) -> Sequence[Tensor]:
    """The results of an op, each of at least one dimension and at most `LARGEST` elements."""
    results = OPS[op](*operands, k)
    return [_bounded(result) for result in ([results] if isinstance(results, Tensor) else results)]


def _bounded(value: Tensor) -> Tensor:
    value = value.reshape(1) if value.ndim == 0 else value
    return value.flatten()[:LARGEST] if value.numel() > LARGEST else value


def fits(name: str, x: torch.Size, y: torch.Size) -> bool:
    """Whether op `name` takes a second operand of shape `y` beside a first of shape `x`."""
    if name in BINARY:
        return _broadcasts(x, y)
    return name in FREE or x[-1] == y[-1]


# programs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """The shape of one parameter."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One op on earlier values, by their numbers."""

    op: str
    operands: tuple[int, ...]
    k: int
    results: tuple[int, ...]

    def run(self, values: dict[int, Tensor]) -> None:
        results = apply(self.op, [values[i] for i in self.operands], self.k)
        values.update(zip(self.results, results, strict=True))


@dataclass(frozen=True)
class Region:
    """Steps `start` to `stop` (exclusive) as one function, and how it is handed its values."""

    start: int
    stop: int
    form: str
    """A key of `FORMS`."""
    closes_over: bool
    """Half of what it reads comes through its closure instead of its arguments."""
    inner: tuple[Region, ...]

    def any_closes_over(self) -> bool:
        return self.closes_over or any(region.any_closes_over() for region in self.inner)

    def depth(self) -> int:
        return 1 + max((region.depth() for region in self.inner), default=0)


FORMS: dict[str, Callable[[list[Tensor]], Tree]] = {
    "list": lambda values: values,
    "tuple": tuple,
    "dict": lambda values: {f"v{i}": value for i, value in enumerate(values)},
    "nested": lambda values: {"head": values[:1], "rest": ({"tail": tuple(values[1:])}, [])},
    "flags": lambda values: [{"mode": "train", "values": values, "rate": 0.5, "nothing": None}],
}


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The `wrap` that leaves a region alone."""
    return function


@dataclass(frozen=True)
class Turns:
    """A `wrap` for each region, by its first step."""

    of: tuple[Wrap, ...]

    def __call__(self, fn: Any) -> Any:
        raise NotImplementedError("which region?")


@dataclass(frozen=True)
class Program:
    """A pure function from a tree of parameters to one number, with regions."""

    tree: Tree
    """Of `Leaf`."""
    steps: tuple[Step, ...]
    regions: tuple[Region, ...]
    exact: bool
    """Made of `EXACT` ops, on small integers."""

    def parameters(self) -> Tree:
        """The same float64 values at every call."""
        generator = torch.Generator().manual_seed(0)

        def values(leaf: Leaf) -> Tensor:
            if self.exact:
                return torch.randint(-1, 3, leaf.shape, generator=generator).double()
            return torch.randn(leaf.shape, dtype=torch.float64, generator=generator)

        return pytree.tree_map(values, self.tree)

    def function(self, wrap: Wrap, aliases: bool = False) -> Callable[[Tree], Tensor]:
        """The program as a function of its parameters, every region `f` called as `wrap(f)`.

        With `wrap=plain` regions are inlined. With `aliases` each then reads its values through aliases:
        the gradient of a value that a region reads twice and a later step once is (inside + inside) + later
        where the region is one function, and floating point tells that from inside + (inside + later).
        """

        def run(parameters: Tree) -> Tensor:
            values = dict(enumerate(pytree.tree_leaves(parameters)))
            self._run(values, 0, len(self.steps), self.regions, wrap, aliases)
            return scalar([values[i] if self.exact else values[i].tanh() for i in self.sinks()])

        return run

    def sinks(self) -> list[int]:
        """The values that no step reads: the result depends on all of them."""
        read = {i for step in self.steps for i in step.operands}
        leaves = len(pytree.tree_leaves(self.tree))
        return [i for i in range(leaves) if i not in read] + [
            i for step in self.steps for i in step.results if i not in read
        ]

    def closes_over(self) -> bool:
        """Whether some region reads values through its closure."""
        return any(region.any_closes_over() for region in self.regions)

    def depth(self) -> int:
        """How deep its regions nest."""
        return max((region.depth() for region in self.regions), default=0)

    def _run(
        self,
        values: dict[int, Tensor],
        start: int,
        stop: int,
        regions: Sequence[Region],
        wrap: Wrap,
        aliases: bool,
    ) -> None:
        at = start
        for region in regions:
            self._steps(values, at, region.start)
            self._region(values, region, wrap, aliases)
            at = region.stop
        self._steps(values, at, stop)

    def _steps(self, values: dict[int, Tensor], start: int, stop: int) -> None:
        for step in self.steps[start:stop]:
            step.run(values)

    def _region(self, values: dict[int, Tensor], region: Region, wrap: Wrap, aliases: bool) -> None:
        steps = self.steps[region.start : region.stop]
        made = {i for step in steps for i in step.results}
        read = sorted({i for step in steps for i in step.operands} - made)
        later = {i for step in self.steps[region.stop :] for i in step.operands} | set(self.sinks())
        given = sorted(made & later)
        split = len(read) // 2 if region.closes_over else 0
        # A region that differentiates inside is one function without a transform too.
        aliased = wrap is plain and (aliases or any(step.op == "inner_grad" for step in steps))
        distinct = {id(values[i]): values[i] for i in read}
        if aliased:
            distinct = {key: value.view_as(value) for key, value in distinct.items()}
        entering = [distinct[id(values[i])] for i in read]
        captured = entering[:split]

        def body(tree: Tree) -> Tree:
            passed = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
            own = dict(zip(read, [*captured, *passed], strict=True))
            self._run(own, region.start, region.stop, region.inner, wrap, aliases)
            return FORMS[region.form]([own[i] for i in given])

        chosen = wrap.of[region.start % len(wrap.of)] if isinstance(wrap, Turns) else wrap
        results = chosen(body)(FORMS[region.form](entering[split:]))
        results = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        # What a region returns as it came is the value outside, not the alias.
        outside = {id(x): values[i] for i, x in zip(read, entering, strict=True)}
        values.update(zip(given, (outside.get(id(x), x) for x in results), strict=True))


# transforms ----------------------------------------------------------------------------------------

Function = Callable[[Tree], Tree]


def scalar(tree: Tree) -> Tensor:
    """One number that depends differently on every entry of the tensors of `tree`."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(tree):
        weights = torch.arange(leaf.numel(), dtype=leaf.dtype).remainder(5) - 1
        total = total + (leaf * weights.reshape(leaf.shape)).sum()
    return total


def _grad(function: Function, variant: int) -> Function:
    del variant
    return torch.func.grad(lambda parameters: scalar(function(parameters)))


def _jvp(function: Function, variant: int) -> Function:
    def run(parameters: Tree) -> Tree:
        # Tangents that depend on the parameters: an outer transform differentiates them too.
        tangents = pytree.tree_map(lambda leaf: variant - leaf, parameters)
        return torch.func.jvp(function, (parameters,), (tangents,))

    return run


def _vmap(function: Function, variant: int) -> Function:
    """Over all parameters, over one of them, over none of them, or over all with the same noise."""

    def run(parameters: Tree) -> Tree:
        leaves, spec = pytree.tree_flatten(parameters)
        mapped = {0: len(leaves), 1: 1, 2: 0, 3: len(leaves)}[variant]

        def example(batched: list[Tensor], unused: Tensor) -> Tree:
            return function(pytree.tree_unflatten(batched + leaves[mapped:], spec))

        stacked = [torch.stack([leaf, 0.5 * leaf]) for leaf in leaves[:mapped]]
        randomness = "same" if variant == 3 else "different"
        return torch.func.vmap(example, randomness=randomness)(stacked, torch.zeros(2))

    return run


TRANSFORMS: dict[str, Callable[[Function, int], Function]] = {"grad": _grad, "vmap": _vmap, "jvp": _jvp}


@dataclass(frozen=True)
class Experiment:
    """A program under a stack of transforms, the innermost first, called or differentiated once more."""

    program: Program
    stack: tuple[tuple[str, int], ...]
    backward: bool
    """Ends in `.backward()` on the parameters."""

    def order(self) -> int:
        """How often the program is differentiated."""
        return sum(name != "vmap" for name, _ in self.stack) + self.backward

    def run(self, wrap: Wrap = plain, aliases: bool | None = None) -> tuple[list[Tensor], Tensor]:
        """Its results and the generator's state afterwards; under a transform `aliases` defaults to true."""
        aliases = bool(self.stack) if aliases is None else aliases
        function: Function = self.program.function(wrap, aliases)
        for name, variant in self.stack:
            function = TRANSFORMS[name](function, variant)
        parameters = self.program.parameters()
        torch.manual_seed(0)
        if not self.backward:
            return pytree.tree_leaves(function(parameters)), torch.get_rng_state()
        leaves = [leaf.requires_grad_() for leaf in pytree.tree_leaves(parameters)]
        outputs = function(parameters)
        total = scalar(outputs)
        if total.requires_grad:  # high derivatives can be constant
            total.backward()
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return [*pytree.tree_leaves(outputs), *gradients], torch.get_rng_state()


# strategies ----------------------------------------------------------------------------------------

HIGHEST_DEGREE = 6  # polynomials of small integers that stay exact in float64
NESTING = 3
SHAPES = [(3,), (4,), (1,), (2, 3), (3, 4), (4, 4), (1, 3), (2, 3, 4), (5, 5)]


def trees() -> st.SearchStrategy[Tree]:
    """Nested dicts, lists and tuples of one to about six leaves."""
    leaves = st.sampled_from(SHAPES).map(Leaf)
    nodes = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
        ),
        max_leaves=6,
    )
    return nodes


# Recipes, taken modulo what there is: a list of them shrinks by leaving some out, and is always a program.
_RECIPES = st.tuples(st.integers(0, 10**6), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))


def _steps(recipes: list[tuple[int, ...]], shapes: list[torch.Size], exact: bool) -> tuple[Step, ...]:
    pool = EXACT if exact else sorted(OPS)
    degrees = [1] * len(shapes)
    steps = []
    for choice, first, second, k in recipes:
        op = pool[choice % len(pool)]
        # Counted from the latest value: programs are deep before they are wide, and shrink to chains.
        newest = list(reversed(range(len(shapes))))
        operands = [newest[first % len(newest)]]
        if op not in UNARY:
            fitting = [i for i in newest if fits(op, shapes[operands[0]], shapes[i])]
            operands.append(fitting[second % len(fitting)])
        degree = max(degrees[i] for i in operands)
        if op in GROWING:
            degree = sum(degrees[i] for i in (operands * 2)[:2])
        if exact and degree > HIGHEST_DEGREE:
            op, operands, degree = "roll", operands[:1], degrees[operands[0]]
        probes = [torch.zeros(shapes[i], dtype=torch.float64) for i in operands]
        made = [result.shape for result in apply(op, probes, k)]
        steps.append(Step(op, tuple(operands), k, tuple(range(len(shapes), len(shapes) + len(made)))))
        shapes += made
        degrees += [degree] * len(made)
    return tuple(steps)


@st.composite
def _regions(draw: st.DrawFn, start: int, stop: int, depth: int, closures: bool) -> tuple[Region, ...]:
    found: list[Region] = []
    for offset, length, form, closed in draw(
        st.lists(
            st.tuples(st.integers(0, 29), st.integers(0, 29), st.sampled_from(sorted(FORMS)), st.booleans()),
            min_size=depth == NESTING,
            max_size=3 if depth else 0,
        )
    ):
        if start < stop:
            first = start + offset % (stop - start)
            last = first + 1 + length % (stop - first)
            inner = draw(_regions(first, last, depth - 1, closures))
            found.append(Region(first, last, form, closures and closed, inner))
            start = last
    return tuple(found)


@st.composite
def programs(draw: st.DrawFn, exact: bool = False, closures: bool = False) -> Program:
    """Programs of 1 to 30 steps with at least one region, nested up to three deep."""
    tree = draw(trees())
    shapes = [torch.Size(leaf.shape) for leaf in pytree.tree_leaves(tree)]
    least = draw(st.sampled_from([1, 8, 20]))
    steps = _steps(draw(st.lists(_RECIPES, min_size=least, max_size=30)), shapes, exact)
    return Program(tree, steps, draw(_regions(0, len(steps), NESTING, closures)), exact)


@st.composite
def experiments(draw: st.DrawFn, orders: Sequence[int], exact: bool = False, closures: bool = False) -> Experiment:
    """Programs under stacks of up to three transforms, differentiated one of `orders` times."""
    order = draw(st.sampled_from(orders))
    backward = order > 3 or (draw(st.booleans()) and order > 0)
    variants = st.integers(0, 3)
    stack = [(draw(st.sampled_from(["grad", "jvp"])), draw(variants)) for _ in range(order - backward)]
    for place, variant in draw(st.lists(st.tuples(variants, variants), max_size=3 - len(stack))):
        stack.insert(place % (len(stack) + 1), ("vmap", variant))
    return Experiment(draw(programs(exact, closures)), tuple(stack), backward)
