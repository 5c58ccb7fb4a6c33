"""Policies: what each of them keeps, how they combine, and that none of them is silently without effect."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fckpt import policies
from fckpt.errors import ArgumentTypeError, ArgumentValueError, PolicyWarning
from fckpt.graph import Graph, Node, Value
from fckpt.graph.graph import DECISIONS
from fckpt.policies import (
    Answer,
    Decision,
    Policy,
    PolicyNode,
    apply_policy,
    as_policy,
    checkpoint_name,
    combine_nested,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    named,
    names_recorded,
    nothing_saveable,
    register_dot,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_from_both_policies,
    save_only_these_names,
)

MS, PS, PR, MR = Decision
MM = PolicyNode("aten.mm.default", names=("scores",), shapes=((4, 4),), nbytes=64, source="model.py:3 (forward)")
TANH = PolicyNode("aten.tanh.default", shapes=((4, 4),), nbytes=64)


def perceptron() -> Graph:
    """tanh(x @ w1) @ w2: the product is named "scores", the tanh "hidden"; the factor 1 - tanh² comes late."""

    def value(id: int, producer: int | None = None, **kwargs: Any) -> Value:
        return Value(id, 64, producer, shape=(4, 4), dtype="float32", **kwargs)

    values = [value(0), value(1), value(2), value(3, 0, names=("scores",)), value(4, 1, names=("hidden",))]
    values += [value(5, 2), value(6), *(value(7 + i, 3 + i) for i in range(5))]
    nodes = (
        Node(0, "aten.mm.default", (0, 1), (3,), source="model.py:3 (forward)"),
        Node(1, "aten.tanh.default", (3,), (4,)),
        Node(2, "aten.mm.default", (4, 2), (5,)),
        Node(3, "aten.mm.default", (4, 6), (7,), backward=True),
        Node(4, "aten.mm.default", (6, 2), (8,), backward=True),
        Node(5, "fckpt.tanh_factor.default", (4,), (9,)),
        Node(6, "aten.mul.Tensor", (8, 9), (10,), backward=True),
        Node(7, "aten.mm.default", (0, 10), (11,), backward=True),
    )
    return Graph(nodes, tuple(values), (0, 1, 2), (6,), (5,), (7, 11), boundary=3)


def decisions(graph: Graph) -> list[str]:
    """Those of scores, hidden, result and factor; all others must have none."""
    assert not any(graph.values[v].decision for v in (0, 1, 2, 6, 7, 8, 10, 11))
    return [graph.values[v].decision for v in (3, 4, 5, 9)]


# Answers ----------------------------------------------------------------------------------------------------------


def test_decisions_are_those_of_the_graph() -> None:
    assert tuple(d.value for d in Decision) == DECISIONS


@pytest.mark.parametrize(
    ("answer", "decision"), [(True, PS), (False, MR), (None, None), (MS, MS), (PS, PS), (PR, PR), (MR, MR)]
)
def test_answers(answer: Answer, decision: Decision | None) -> None:
    assert as_policy(lambda node: answer).decide(MM) is decision


@pytest.mark.parametrize("answer", [1, "must_save", torch.tensor(True), ()])
def test_other_answers_raise(answer: Any) -> None:
    def odd(node: PolicyNode) -> Any:
        return answer

    with pytest.raises(ArgumentTypeError) as error:
        as_policy(odd).decide(MM)
    assert str(error.value) == (
        f"the policy as_policy(odd) answered {answer!r} for aten.mm.default at model.py:3 (forward). "
        "It must answer with a Decision, True, False or None."
    )
    with pytest.raises(ArgumentTypeError, match="as_policy\\(odd\\) answered"):  # combined, the culprit is still named
        (dots_saveable & odd).decide(MM)
    with pytest.raises(ArgumentTypeError, match="as_policy\\(odd\\) answered"):
        apply_policy(perceptron(), odd)


def test_a_policy_for_an_answer() -> None:
    def factory(node: Any) -> Any:
        return dots_saveable

    with pytest.raises(ArgumentTypeError, match=r"Did you mean as_policy\(factory\)\(...\)\(node\)\?"):
        as_policy(factory).decide(MM)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("dots_saveable", "not 'dots_saveable'. Pass the policy itself: fckpt.policies.dots_saveable."),
        (3, "a policy is one of fckpt.policies or a function of a PolicyNode, not 3."),
        (int, "a policy is one of fckpt.policies or a function of a PolicyNode, not <class 'int'>."),
        (save_only_these_names, "makes a policy: call it first, save_only_these_names('a', 'b')."),
    ],
)
def test_no_policies(policy: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError) as error:
        as_policy(policy)
    assert str(error.value).endswith(message)


# Objects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "dots_saveable",
        "checkpoint_dots_with_no_batch_dims",
        "save_only_these_names('a', 'b')",
        "~save_anything_except_these_names('a') | dots_saveable",
        "(dots_saveable | save_only_these_names('a')) & ~nothing_saveable",
        "~(dots_saveable & save_any_names_but_these('b')) | everything_saveable",
        "~~dots_saveable",
        "dots_saveable | (everything_saveable | nothing_saveable)",
        "combine_nested(dots_saveable, combine_nested(nothing_saveable, ~everything_saveable))",
    ],
)
def test_policies_are_values(text: str) -> None:
    def make(text: str) -> Policy:
        return eval(text, dict(vars(policies)))

    policy = make(text)
    assert policy == make(text) and hash(policy) == hash(make(text)) and policy is not None
    assert make(repr(policy)) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
    assert policy != as_policy(lambda node: True)


def test_policies_print_as_written() -> None:
    both = (dots_saveable | save_only_these_names("b", "a", "b")) & ~everything_saveable
    assert repr(both) == "(dots_saveable | save_only_these_names('a', 'b')) & ~everything_saveable"
    assert repr(save_from_both_policies(nothing_saveable, dots_saveable)) == "nothing_saveable | dots_saveable"
    place = test_policies_print_as_written.__code__.co_firstlineno + 5
    assert repr(as_policy(lambda node: True)) == f"as_policy(<lambda at test_policies.py:{place}>)"


def test_functions_are_compared_by_identity() -> None:
    make: Callable[[], Any] = lambda: lambda node: True
    first, second = make(), make()
    assert as_policy(first) == as_policy(first) and hash(as_policy(first)) == hash(as_policy(first))
    assert as_policy(first) != as_policy(second)
    assert len({as_policy(first), as_policy(first), as_policy(second), dots_saveable, dots_saveable}) == 3


def test_policies_are_frozen() -> None:
    for policy in (dots_saveable, save_only_these_names("a"), dots_saveable | everything_saveable, ~dots_saveable):
        (field,) = dataclasses.fields(policy)  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            setattr(policy, field.name, None)


def test_constants_keep_their_documentation() -> None:
    assert "register_dot" in (dots_saveable.__doc__ or "")
    assert policies.checkpoint_dots is dots_saveable
    assert policies.checkpoint_dots_with_no_batch_dims is dots_with_no_batch_dims_saveable


# Combinations -----------------------------------------------------------------------------------------------------

ANSWERS: list[Answer] = [True, False, None, *Decision]


def constant(answer: Answer) -> Policy:
    return as_policy(lambda node: answer)


@given(a=st.sampled_from(ANSWERS), b=st.sampled_from(ANSWERS), c=st.sampled_from(ANSWERS))
def test_laws(a: Answer, b: Answer, c: Answer) -> None:
    p, q, r = constant(a), constant(b), constant(c)

    def same(left: Policy, right: Policy) -> None:
        assert left.decide(MM) is right.decide(MM)

    for op in (Policy.__or__, Policy.__and__, combine_nested):
        same(op(p, q), op(q, p))
        same(op(op(p, q), r), op(p, op(q, r)))
        same(op(p, p), p)
        same(op(p, constant(None)), p)
    same(~~p, p)
    same(p | (p & q), p if a is not None else p & q)
    if isinstance(a, bool) and isinstance(b, bool):
        same(~(p | q), ~p & ~q)


@pytest.mark.parametrize(
    ("a", "b", "either", "both", "nested"),
    [
        (True, False, PS, MR, MR),
        (MS, PS, MS, PS, MS),
        (MS, PR, MS, PR, MS),
        (MS, MR, MS, MR, MR),
        (PS, PR, PS, PR, PR),
        (PS, MR, PS, MR, MR),
        (PR, MR, PR, MR, MR),
        (True, MS, MS, PS, MS),
        (None, PR, PR, PR, PR),
        (None, None, None, None, None),
    ],
)
def test_combinations(
    a: Answer, b: Answer, either: Decision | None, both: Decision | None, nested: Decision | None
) -> None:
    p, q = constant(a), constant(b)
    assert ((p | q).decide(MM), (p & q).decide(MM), combine_nested(p, q).decide(MM)) == (either, both, nested)


def test_the_opposite_of_what_may_be_kept_is_not_what_must() -> None:
    assert (~dots_saveable).decide(MM) is MR
    assert (~dots_saveable).decide(TANH) is PS
    assert [(~constant(a)).decide(MM) for a in (MS, PS, PR, MR, None)] == [MR, PR, PS, MS, None]


def test_functions_combine_from_both_sides() -> None:
    def small(node: PolicyNode) -> bool:
        return node.nbytes < 100

    assert repr(small | dots_saveable) == "as_policy(small) | dots_saveable"
    assert repr(small & dots_saveable & small) == "as_policy(small) & dots_saveable & as_policy(small)"
    assert (dots_saveable & small)(MM) is True
    with pytest.raises(ArgumentTypeError, match="not 3"):
        dots_saveable | 3  # type: ignore[operator]


# By operation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "shape", "dot", "no_batch_dims"),
    [
        ("aten.mm.default", (4, 4), True, True),
        ("aten.addmm.default", (4, 4), True, True),
        ("aten.addmm.out", (4, 4), True, True),
        ("aten.linear.default", (2, 4, 4), True, True),
        ("aten.bmm.default", (2, 4, 4), True, False),
        ("aten.bmm.default", (1, 4, 4), True, True),  # as einsum writes x @ w
        ("aten.baddbmm.default", (2, 4, 4), True, False),
        ("aten.convolution.default", (2, 4, 4, 4), True, False),
        ("aten._scaled_dot_product_flash_attention.default", (2, 4, 4), True, False),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", (2, 4, 4), True, False),
        ("aten.mul.Tensor", (4, 4), False, False),
        ("aten.mm_like.default", (4, 4), False, False),
        ("other.mm.default", (4, 4), False, False),
    ],
)
def test_dots(op: str, shape: tuple[int, ...], dot: bool, no_batch_dims: bool) -> None:
    node = PolicyNode(op, shapes=(shape,))
    assert (dots_saveable(node), dots_with_no_batch_dims_saveable(node)) == (dot, no_batch_dims)


def test_every_dot_is_an_operation_of_torch() -> None:
    known = {name for name in named._DOTS if name.startswith("aten.")}
    assert not [name for name in known if not hasattr(torch.ops.aten, name.removeprefix("aten."))]


@pytest.mark.parametrize(
    ("sizes", "rows", "linear"),
    [((5,), 5, True), ((5,), 10, False), ((2, 5), 10, True), ((2, 5), 5, False), ((), 5, False)],
)
def test_batch_dims_of_vmap_do_not_count(sizes: tuple[int, ...], rows: int, linear: bool) -> None:
    node = PolicyNode("aten.bmm.default", shapes=((rows, 4, 4),), batch_sizes=sizes)
    assert node.batch_depth == len(sizes)
    assert dots_with_no_batch_dims_saveable(node) is linear


def test_register_dot() -> None:
    packet = torch.ops.aten.kron
    node = PolicyNode("aten.kron.default")
    assert not dots_saveable(node)
    register_dot(packet)
    register_dot(packet.default)  # again, as when a module is imported twice
    register_dot("fckpt_test::attend", batch_dims=True)
    assert dots_saveable(node) and dots_with_no_batch_dims_saveable(node)
    attend = PolicyNode("fckpt_test.attend.default", shapes=((4, 4),))
    assert dots_saveable(attend) and not dots_with_no_batch_dims_saveable(attend)
    with pytest.raises(ArgumentValueError, match=r"aten\.kron is already registered, with batch_dims=False"):
        register_dot("aten::kron", batch_dims=True)
    del named._DOTS["aten.kron"], named._DOTS["fckpt_test.attend"]


@pytest.mark.parametrize("op", [3.5, "gemm", torch.mm, None])
def test_register_dot_takes_operations(op: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r'torch\.ops\.mylib\.gemm or "mylib::gemm", not'):
        register_dot(op)


# By name ----------------------------------------------------------------------------------------------------------


def test_names() -> None:
    graph = perceptron()
    keep, drop = "prefer_save", "must_recompute"
    assert decisions(apply_policy(graph, save_only_these_names("hidden"))) == [drop, keep, drop, drop]
    assert decisions(apply_policy(graph, save_any_names_but_these("hidden"))) == [keep, drop, drop, drop]
    # Neither the name nor what it was given to is kept.
    assert decisions(apply_policy(graph, save_anything_except_these_names("hidden"))) == [keep, drop, keep, keep]
    either = save_from_both_policies(save_only_these_names("hidden"), save_only_these_names("scores"))
    assert decisions(apply_policy(graph, either)) == [keep, keep, drop, drop]


def test_a_value_with_an_excluded_name_is_excluded() -> None:
    node = PolicyNode("aten.add.Tensor", names=("a", "b"))
    assert save_only_these_names("b")(node)
    assert not save_any_names_but_these("b")(node)
    assert not save_anything_except_these_names("b")(node)


@pytest.mark.parametrize("make", [save_only_these_names, save_any_names_but_these, save_anything_except_these_names])
def test_names_are_strings(make: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"a name is a str, not int: 3\."):
        make("a", 3)
    with pytest.raises(ArgumentTypeError, match=rf"Pass them one by one: {make.__name__}\(\*names\)."):
        make(["a", "b"])
    with pytest.raises(ArgumentValueError, match="must not be empty"):
        make("")


# To the graph -----------------------------------------------------------------------------------------------------


def test_apply_asks_for_what_needs_no_cotangent() -> None:
    seen: list[PolicyNode] = []

    def look(node: PolicyNode) -> Decision:
        seen.append(node)
        return MS

    graph = perceptron()
    assert decisions(apply_policy(graph, look)) == ["must_save"] * 4
    assert not any(value.decision for value in graph.values)
    assert [(node.op, node.in_forward) for node in seen] == [
        ("aten.mm.default", True),
        ("aten.tanh.default", True),
        ("aten.mm.default", True),
        ("fckpt.tanh_factor.default", False),
    ]
    expected = PolicyNode(
        "aten.mm.default", ("scores",), ((4, 4),), ("float32",), 64, source="model.py:3 (forward)", in_forward=True
    )
    assert seen[0] == expected


def test_an_answer_covers_all_outputs() -> None:
    values = (Value(0, 8, None), Value(1, 8, 0, names=("out",), shape=(2,)), Value(2, 4, 0, shape=(1,)), Value(3, 8, 1))
    nodes = (
        Node(0, "aten.native_dropout.default", (0,), (1, 2), random=True, seconds=0.5, flops=3),
        Node(1, "aten.cos.default", (1, 2), (3,)),
    )
    graph = Graph(nodes, values, (0,), (), (3,), (), boundary=2)
    node = PolicyNode.of(graph, nodes[0], (7,))
    assert (node.shapes, node.nbytes, node.random, node.seconds, node.flops) == (((2,), (1,)), 12, True, 0.5, 3)
    assert node.batch_sizes == (7,)
    applied = apply_policy(graph, save_only_these_names("out"))
    assert [v.decision for v in applied.values] == ["", "prefer_save", "prefer_save", "must_recompute"]


def test_what_runs_once_is_kept_whatever_the_policy_says() -> None:
    values = (Value(0, 8, None), Value(1, 8, 0), Value(2, 8, 1))
    nodes = (Node(0, "aten.native_batch_norm.default", (0,), (1,), once=True), Node(1, "aten.cos.default", (1,), (2,)))
    graph = Graph(nodes, values, (0,), (), (2,), (), boundary=2)
    assert [v.decision for v in apply_policy(graph, nothing_saveable).values] == ["", "prefer_save", "must_recompute"]


def test_batching_reaches_the_policy() -> None:
    depths: list[int] = []

    def look(node: PolicyNode) -> bool:
        depths.append(node.batch_depth)
        return True

    apply_policy(perceptron(), look, batching={1: (3, 5)})
    assert depths == [0, 2, 0, 0]


def test_nested_regions_intersect() -> None:
    graph = perceptron()
    inner = apply_policy(graph, save_only_these_names("scores"), nodes={0, 1})
    assert decisions(inner) == ["prefer_save", "must_recompute", "", ""]
    # An outer policy that keeps everything does not undo the inner one, as it does in JAX.
    outer = apply_policy(inner, everything_saveable)
    assert decisions(outer) == ["prefer_save", "must_recompute", "prefer_save", "prefer_save"]
    assert decisions(apply_policy(inner, nothing_saveable)) == ["must_recompute"] * 4
    expected = apply_policy(graph, combine_nested(everything_saveable, save_only_these_names("scores")), nodes={0, 1})
    assert decisions(expected)[:2] == decisions(outer)[:2]


# Nothing without effect -------------------------------------------------------------------------------------------


def warning(policy: Any, graph: Graph | None = None, **kwargs: Any) -> str:
    with pytest.warns(PolicyWarning) as caught:
        apply_policy(graph or perceptron(), policy, **kwargs)
    (only,) = caught
    return str(only.message)


def test_unknown_names() -> None:
    assert warning(save_only_these_names("hiden", "scores", "xyz")) == (
        "the policy save_only_these_names('hiden', 'scores', 'xyz') mentions names that no value has: "
        "'hiden' (did you mean 'hidden'?), 'xyz'. The names are 'hidden', 'scores'."
    )
    text = warning(dots_saveable & ~(everything_saveable & save_only_these_names("score")))
    assert "'score' (did you mean 'scores'?)" in text
    assert "'a'" in warning(combine_nested(everything_saveable, save_anything_except_these_names("a")))


def test_no_names_at_all() -> None:
    graph = perceptron()
    bare = Graph.from_json({**graph.to_json(), "values": [{**v, "names": ()} for v in graph.to_json()["values"]]})
    assert warning(save_anything_except_these_names("a"), bare) == (
        "the policy save_anything_except_these_names('a') mentions names that no value has: 'a'. "
        "No value has one: see checkpoint_name."
    )


def test_keeping_nothing() -> None:
    def exp_saveable(node: PolicyNode) -> bool:
        return node.op == "aten.exp.default"

    assert warning(exp_saveable) == (
        "the policy as_policy(exp_saveable) saves nothing. It was called for 2 aten.mm, 1 aten.tanh, "
        "1 fckpt.tanh_factor. If this is intended, use nothing_saveable."
    )
    assert "saves nothing" in warning(exp_saveable, budgeted=True)
    assert "has no opinion about any operation" in warning(lambda node: None)
    assert "has no opinion about any operation" in warning(lambda node: None, budgeted=True)
    assert "saves nothing" in warning(lambda node: PR)
    assert "saves nothing" in warning(lambda node: None if node.random else False)


def test_policies_with_an_effect_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in (everything_saveable, nothing_saveable, dots_saveable, lambda node: MS):
            apply_policy(perceptron(), policy)
        apply_policy(perceptron(), lambda node: PR, budgeted=True)
        apply_policy(perceptron(), lambda node: None if node.names else False, budgeted=True)
        apply_policy(Graph((), (Value(0, 4, None),), (0,), (), (), (), boundary=0), dots_saveable)


# checkpoint_name --------------------------------------------------------------------------------------------------


def test_checkpoint_name_is_the_identity() -> None:
    x = torch.ones(2)
    tree = {"a": x, "b": (x, None, [x])}
    assert checkpoint_name(x, "x") is x
    assert checkpoint_name(tree, "x") is tree
    assert checkpoint_name(None, "x") is None
    assert checkpoint_name((), "x") == ()


def test_checkpoint_name_reaches_who_traces() -> None:
    outer: list[tuple[Any, str]] = []
    inner: list[tuple[Any, str]] = []
    x, y = torch.ones(2), torch.zeros(3)
    with names_recorded(lambda t, n: outer.append((t, n))):
        checkpoint_name({"x": x, "y": (None, y)}, "a")
        with names_recorded(lambda t, n: inner.append((t, n))):
            checkpoint_name(x, "b")
        checkpoint_name(y, "c")
    checkpoint_name(y, "d")
    assert [(id(t), n) for t, n in outer] == [(id(x), "a"), (id(y), "a"), (id(x), "b"), (id(y), "c")]
    assert [(id(t), n) for t, n in inner] == [(id(x), "b")]


def test_checkpoint_name_stops_recording_after_an_error() -> None:
    found: list[str] = []
    with pytest.raises(ZeroDivisionError), names_recorded(lambda t, n: found.append(n)):
        raise ZeroDivisionError
    checkpoint_name(torch.ones(2), "a")
    assert not found


def test_checkpoint_name_under_transforms() -> None:
    shapes: list[tuple[int, ...]] = []
    wrapped: list[bool] = []

    def record(tensor: torch.Tensor, name: str) -> None:
        shapes.append(tuple(tensor.shape))
        wrapped.append(torch._C._functorch.is_functorch_wrapped_tensor(tensor))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_name(x.sin(), "s").sum()

    x = torch.randn(3, 4)
    with names_recorded(record):
        gradient = torch.func.vmap(torch.func.grad(loss))(x)
    assert torch.equal(gradient, x.cos())
    assert shapes == [(4,)] and wrapped == [True]


def test_checkpoint_name_under_compile() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_name({"y": x.sin()}, "s")["y"].cos()

    x = torch.randn(3)
    assert torch.equal(f(x), x.sin().cos())


@pytest.mark.parametrize(
    ("tree", "name", "error", "message"),
    [
        (torch.ones(2), 3, ArgumentTypeError, "checkpoint_name: a name is a str, not int: 3."),
        (torch.ones(2), "", ArgumentValueError, "checkpoint_name: a name must not be empty."),
        (1.5, "a", ArgumentTypeError, "checkpoint_name names tensors, but it is float: 1.5."),
        (
            {"w": [torch.ones(2), "text"]},
            "a",
            ArgumentTypeError,
            "checkpoint_name names tensors, but tree['w'][1] is str: 'text'.",
        ),
    ],
)
def test_checkpoint_name_errors(tree: Any, name: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        checkpoint_name(tree, name)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "policy",
    [
        policies.everything_saveable,
        policies.dots_saveable,
        policies.save_only_these_names("a"),
        policies.save_any_names_but_these("a"),
        policies.save_anything_except_these_names("a"),
        policies.dots_saveable | policies.nothing_saveable,
        policies.dots_saveable & policies.nothing_saveable,
        ~policies.dots_saveable,
        policies.combine_nested(policies.dots_saveable, policies.nothing_saveable),
        policies.as_policy(lambda node: True),
    ],
    ids=repr,
)
def test_policies_take_no_new_attributes(policy: Any) -> None:
    before = hash(policy)
    for name in ("colour", "names", "policies", "__doc__"):
        with pytest.raises(AttributeError):
            setattr(policy, name, ("b",))
        with pytest.raises(AttributeError):
            delattr(policy, name)
    assert hash(policy) == before and not hasattr(policy, "colour")
