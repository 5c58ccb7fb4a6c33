"""Named policies, and their application to a graph. Policies decide which values of a forward pass are saved.

A policy is called once for every operation of the forward pass, with a `PolicyNode`. Its answer holds for all results
of the operation. The answer is a `Decision`, `True` or `False`, or `None` for "no opinion":

| answer                    | without a budget           | with a budget                                |
|---------------------------|----------------------------|----------------------------------------------|
| `MUST_SAVE`               | saved                      | saved                                        |
| `True`, `PREFER_SAVE`     | saved if backward needs it | the solver chooses, and prefers to save      |
| `PREFER_RECOMPUTE`        | recomputed                 | the solver chooses, and prefers to recompute |
| `False`, `MUST_RECOMPUTE` | recomputed                 | never saved                                  |
| `None`                    | recomputed                 | the solver chooses                           |

A policy is a plain function, or one of the objects of this file. The objects are frozen and hashable, and print as the
expression that makes them. They combine with `|` (saves what either saves), `&` (saves what both save) and `~` (saves
what the policy does not save).

Example:
    >>> from fckpt import policies
    >>> policy = policies.dots_saveable & ~policies.save_only_these_names("scores")
    >>> policy
    dots_saveable & ~save_only_these_names('scores')
    >>> node = policies.PolicyNode("aten.mm.default", names=("scores",))
    >>> policies.dots_saveable(node), policy(node)
    (True, False)
    >>> small = policies.as_policy(lambda node: node.nbytes <= 2**20)
    >>> (policy | small)(node)
    True

References:
    The names and their meanings follow `jax.checkpoint_policies` of JAX
    (https://docs.jax.dev/en/latest/gradient-checkpointing.html). The decisions follow
    `torch.utils.checkpoint.CheckpointPolicy` of PyTorch (https://docs.pytorch.org/docs/stable/checkpoint.html).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fckpt.errors import ArgumentTypeError, ArgumentValueError, PolicyWarning, users_stacklevel
from fckpt.graph.graph import Graph
from fckpt.policies.decisions import (
    Decision,
    Frozen,
    Policy,
    PolicyLike,
    PolicyNode,
    as_policy,
    nested_decision,
)
from fckpt.policies.names import check_name

__all__ = [
    "apply_policy",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
    "reductions_saveable",
    "register_dot",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_only_these_names",
]


# By operation -----------------------------------------------------------------------------------------------------

# Matrix products, by packet. As in JAX, convolutions count as dots, but not as dots without batch dimensions.
_LINEAR = "mm addmm _addmm_activation linear mv addmv dot vdot _int_mm _scaled_mm mkldnn_linear"
_BATCHED = "bmm baddbmm addbmm _grouped_mm _scaled_grouped_mm"
_CONVOLUTION = """
    convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution miopen_convolution
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
"""
_ATTENTION = """
    scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
    _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward
"""
_DOTS = {f"aten.{op}": op in _LINEAR.split() for op in f"{_LINEAR} {_BATCHED} {_CONVOLUTION} {_ATTENTION}".split()}
"""By operation that is a dot: whether it has no batch dimensions."""

# The operations to which `vmap` maps matrix products, and to which `einsum` maps every product.
_BATCHED_PRODUCTS = frozenset({"aten.bmm", "aten.baddbmm"})


_OP = re.compile(r"[A-Za-z_]\w*(\.|::)\w+(\.\w+)?")  # as torch.ops.mylib.gemm and its overloads print


def _packet(op: str) -> str:
    """Returns an operation without its overload: `aten.mm` for `aten.mm.default` and `aten::mm`."""
    return ".".join(op.replace("::", ".").split(".")[:2])


def register_dot(op: Any, *, batch_dims: bool = False) -> None:
    """Registers an operation as a matrix product, for `dots_saveable` and `dots_with_no_batch_dims_saveable`.

    fckpt does not know custom matrix product kernels, so these policies would recompute them. Register a kernel where
    it is defined, before plans are made. The registration covers all overloads.

    Args:
        op: the operation, `torch.ops.mylib.gemm` or `"mylib::gemm"`.
        batch_dims: whether the operation has batch dimensions, like attention and unlike a linear layer.
            `dots_with_no_batch_dims_saveable` does not save operations with batch dimensions.

    Raises:
        ArgumentTypeError: `op` is not an operation.
        ArgumentValueError: the operation is already registered with the other value of `batch_dims`.

    Example:
        >>> from fckpt.policies import PolicyNode, dots_saveable, register_dot
        >>> register_dot("mylib::gemm")
        >>> dots_saveable(PolicyNode("mylib.gemm.default"))
        True
    """
    if not _OP.fullmatch(str(op)):
        raise ArgumentTypeError(f'register_dot takes an operation, torch.ops.mylib.gemm or "mylib::gemm", not {op!r}.')
    packet = _packet(str(op))
    if _DOTS.setdefault(packet, not batch_dims) == batch_dims:
        raise ArgumentValueError(f"{packet} is already registered, with batch_dims={not batch_dims}.")


@dataclass(frozen=True, repr=False)
class _Constant(Frozen):
    """A policy without parameters, which prints as its name."""

    rule: Callable[[PolicyNode], bool]

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.rule.__doc__)

    def __call__(self, node: PolicyNode) -> bool:
        return self.rule(node)

    def __repr__(self) -> str:
        return self.rule.__name__

    def __reduce__(self) -> str:  # so that unpickling in another process returns the same policy
        return self.rule.__name__


@_Constant
def everything_saveable(node: PolicyNode) -> bool:
    """Allows saving every value, so that nothing needs to be rematerialised."""
    return True


@_Constant
def nothing_saveable(node: PolicyNode) -> bool:
    """Saves nothing: everything is recomputed from the arguments."""
    return False


_REDUCTIONS = frozenset({"fckpt.all_reduce", "fckpt.reduce_scatter", "fckpt.all_to_all"})


@_Constant
def reductions_saveable(node: PolicyNode) -> bool:
    """Allows saving results of reductions over ranks and of exchanges, so that no message is sent twice.

    All other values are recomputed, including gathers of divided parameters. This is the policy of `remat` without a
    policy and budget. On one device it is equivalent to `nothing_saveable`.
    """
    return _packet(node.op) in _REDUCTIONS


@_Constant
def dots_saveable(node: PolicyNode) -> bool:
    """Allows saving results of matrix products, convolutions and attention; see `register_dot` for custom kernels."""
    return _packet(node.op) in _DOTS


@_Constant
def dots_with_no_batch_dims_saveable(node: PolicyNode) -> bool:
    """Allows saving results of matrix products without batch dimensions: linear layers, but not attention scores.

    The policy means the same under `vmap`: batch dimensions of `vmap` do not count (`PolicyNode.batch_sizes`). A batch
    of size one does not count either, because `einsum` computes every product with one. As in JAX, the results of
    convolutions are not saved.
    """
    packet = _packet(node.op)
    if packet in _BATCHED_PRODUCTS:
        return all(shape[:1] == (math.prod(node.batch_sizes),) for shape in node.shapes) and bool(node.shapes)
    return _DOTS.get(packet, False)


checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


# By name ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, init=False, repr=False)
class _Names(Frozen):
    """A policy that depends on the names of values."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        for name in names:
            check_name(type(self).__name__, name)
        object.__setattr__(self, "names", tuple(sorted(set(names))))

    @property
    def mentioned(self) -> frozenset[str]:
        return frozenset(self.names)

    def speaks_of(self, node: PolicyNode) -> bool:
        """Whether the node has one of the names."""
        return not self.mentioned.isdisjoint(node.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.names))})"


class save_only_these_names(_Names):
    """Allows saving values with one of these names, and no others.

    Example:
        >>> from fckpt.policies import PolicyNode, save_only_these_names
        >>> policy = save_only_these_names("attn_out", "mlp_out")
        >>> policy(PolicyNode("aten.mm.default", names=("mlp_out",))), policy(PolicyNode("aten.mm.default"))
        (True, False)
    """

    def __call__(self, node: PolicyNode) -> bool:
        return self.speaks_of(node)


class save_any_names_but_these(_Names):
    """Allows saving values that have a name, except these names; values without a name are not saved.

    Example:
        >>> from fckpt.policies import PolicyNode, save_any_names_but_these
        >>> policy = save_any_names_but_these("scores")
        >>> [policy(PolicyNode("aten.mm.default", names=names)) for names in [("out",), ("scores",), ()]]
        [True, False, False]
    """

    def __call__(self, node: PolicyNode) -> bool:
        return bool(node.names) and not self.speaks_of(node)


class save_anything_except_these_names(_Names):
    """Allows saving every value except those with one of these names.

    A named value is not saved at all, because its name belongs to the memory that the operation fills. (JAX's policy of
    this name saves the value to which the name was given.)

    Example:
        >>> from fckpt.policies import PolicyNode, save_anything_except_these_names
        >>> policy = save_anything_except_these_names("scores")
        >>> [policy(PolicyNode("aten.mm.default", names=names)) for names in [("out",), ("scores",), ()]]
        [True, False, True]
    """

    def __call__(self, node: PolicyNode) -> bool:
        return not self.speaks_of(node)


def save_from_both_policies(first: PolicyLike, second: PolicyLike) -> Policy:
    """Returns `first | second`, the policy that saves what either of the two saves, under its JAX name.

    Example:
        >>> from fckpt.policies import dots_saveable, save_from_both_policies, save_only_these_names
        >>> save_from_both_policies(dots_saveable, save_only_these_names("probs"))
        dots_saveable | save_only_these_names('probs')
    """
    return as_policy(first) | second


# To the graph -----------------------------------------------------------------------------------------------------


def apply_policy(
    graph: Graph,
    policy: PolicyLike,
    *,
    nodes: Collection[int] | None = None,
    batching: Mapping[int, tuple[int, ...]] | None = None,
    budgeted: bool = False,
) -> Graph:
    """Returns the graph with the decisions of `policy` in `Value.decision`.

    The policy is called for all operations that do not depend on cotangents, including those that the backward pass of
    the plain function runs. It is not called for operations that must run exactly once (`Node.once`), because their
    results must be saved if the backward pass reads them. Existing decisions come from inner regions; they are combined
    with the new ones as in `combine_nested`.

    Args:
        graph: the graph.
        policy: a policy, or a function of a `PolicyNode`.
        nodes: the ids of the region's nodes; None for all nodes.
        batching: by node id, the sizes of the `vmap`s inside the region that batched the operation.
        budgeted: whether there is a budget, so that a solver chooses where the policy has no opinion.

    Raises:
        ArgumentTypeError: `policy` is not a policy, or it returns something else than a decision.

    Warns:
        PolicyWarning: the policy mentions names that do not occur, or it saves nothing and is not `nothing_saveable` or
            `reductions_saveable`.
    """
    policy, batching = as_policy(policy), batching or {}
    region = [n for n in graph.nodes if not n.backward and n.outputs and (nodes is None or n.id in nodes)]
    asked = [PolicyNode.of(graph, node, batching.get(node.id, ())) for node in region if not node.once]
    answers = [policy.decide(node) for node in asked]
    complaints = [*_unknown_names(graph, policy), *_idle(policy, asked, answers, budgeted)]
    if complaints:
        warnings.warn(" ".join(complaints), PolicyWarning, stacklevel=users_stacklevel())
    remaining = iter(answers)
    decisions: dict[int, Decision | None] = {}
    for node in region:
        decisions.update(dict.fromkeys(node.outputs, Decision.PREFER_SAVE if node.once else next(remaining)))
    values = (dataclasses.replace(v, decision=_met(v.decision, decisions.get(v.id))) for v in graph.values)
    return dataclasses.replace(graph, values=tuple(values))


def _met(inner: str, outer: Decision | None) -> str:
    decision = nested_decision([Decision(inner) if inner else None, outer])
    return decision.value if decision else ""


def _unknown_names(graph: Graph, policy: Policy) -> list[str]:
    """Returns a complaint if `policy` mentions names that no value has."""
    occurring = sorted({name for value in graph.values for name in value.names})
    missing = sorted(policy.mentioned.difference(occurring))
    if not missing:
        return []
    guesses = {name: difflib.get_close_matches(name, occurring, 1) for name in missing}
    texts = [repr(name) + (f" (did you mean {guess[0]!r}?)" if guess else "") for name, guess in guesses.items()]
    known = (
        f"The names are {', '.join(map(repr, occurring))}." if occurring else "No value has one: see checkpoint_name."
    )
    return [f"the policy {policy!r} mentions names that no value has: {', '.join(texts)}. {known}"]


def _idle(policy: Policy, asked: Sequence[PolicyNode], answers: Sequence[Decision | None], budgeted: bool) -> list[str]:
    """Returns a complaint if `policy` has no effect."""
    if not asked or policy in (nothing_saveable, reductions_saveable):
        return []
    keeping = {Decision.MUST_SAVE, Decision.PREFER_SAVE, *([Decision.PREFER_RECOMPUTE] if budgeted else [])}
    opinions = set(answers)
    if opinions == {None}:
        effect = "has no opinion about any operation"
    elif opinions & keeping or (budgeted and None in opinions):
        return []
    else:
        effect = "saves nothing"
    counts = Counter(_packet(node.op) for node in asked).most_common()
    kinds = ", ".join([f"{count} {op}" for op, count in counts[:8]] + (["others"] if counts[8:] else []))
    return [f"the policy {policy!r} {effect}. It was called for {kinds}. If this is intended, use nothing_saveable."]
