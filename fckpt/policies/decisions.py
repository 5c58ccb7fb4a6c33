"""The class `Policy`: a function from an operation to a decision whether to save the results of the operation.

The named policies, and the table of decisions and their effects, are in `fckpt.policies.named`.
"""

from __future__ import annotations

import abc
import enum
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

from fckpt.errors import ArgumentTypeError
from fckpt.graph.graph import Graph, Node

__all__ = [
    "Answer",
    "Decision",
    "Frozen",
    "Policy",
    "PolicyLike",
    "PolicyNode",
    "as_policy",
    "combine_nested",
    "decisions_of",
    "nested_decision",
]


class Decision(enum.Enum):
    """A policy's decision about one value. `fckpt.policies` describes the effect of each decision."""

    MUST_SAVE = "must_save"
    PREFER_SAVE = "prefer_save"
    PREFER_RECOMPUTE = "prefer_recompute"
    MUST_RECOMPUTE = "must_recompute"


Answer = Decision | bool | None

# From never saving to always saving: `&` takes the first of two decisions, `|` the last.
_EAGERNESS = (Decision.MUST_RECOMPUTE, Decision.PREFER_RECOMPUTE, Decision.PREFER_SAVE, Decision.MUST_SAVE)
# Precedence for nested regions: forbidding to save wins over demanding it, and a demand wins over preferences.
_NESTED = (Decision.MUST_RECOMPUTE, Decision.MUST_SAVE, Decision.PREFER_RECOMPUTE, Decision.PREFER_SAVE)
_OPPOSITE = dict(zip(_EAGERNESS, reversed(_EAGERNESS), strict=True))


@dataclass(frozen=True, slots=True)
class PolicyNode:
    """The properties of an operation that a policy sees."""

    op: str
    """The name of the operation, for example `aten.mm.default`."""
    names: tuple[str, ...] = ()
    """The names that `checkpoint_name` has given to the results of the operation, or to views of them."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the results."""
    dtypes: tuple[str, ...] = ()
    nbytes: int = 0
    """The bytes of all results together."""
    source: str = ""
    """The user's line, `model.py:12 (forward)`."""
    module: str = ""
    """The path of the module that runs the operation, `encoder.layer.3.mlp`; empty outside of modules."""
    seconds: float = 0.0
    """The time of the operation."""
    flops: int = 0
    random: bool = False
    """Whether the operation draws random numbers."""
    in_forward: bool = True
    """Whether the forward pass runs the operation. If not, its result is a factor of a derivative, such as 1 - y * y
    for tanh, that does not depend on cotangents."""
    batch_sizes: tuple[int, ...] = ()
    """The sizes of the `vmap`s inside the region that batched the operation."""

    @property
    def batch_depth(self) -> int:
        """The number of `vmap`s inside the region that batched the operation."""
        return len(self.batch_sizes)

    @staticmethod
    def of(graph: Graph, node: Node, batch_sizes: tuple[int, ...] = ()) -> PolicyNode:
        """Returns the properties of `node` that a policy sees."""
        made = [graph.values[v] for v in node.outputs]
        return PolicyNode(
            op=node.op,
            names=tuple(dict.fromkeys(name for value in made for name in value.names)),
            shapes=tuple(value.shape for value in made),
            dtypes=tuple(value.dtype for value in made),
            nbytes=sum(value.nbytes for value in made),
            source=node.source,
            module=node.module,
            seconds=node.seconds,
            flops=node.flops,
            random=node.random,
            in_forward=node.id < graph.boundary,
            batch_sizes=batch_sizes,
        )


class Policy(abc.ABC):
    """A function from a `PolicyNode` to a decision, which can be compared, printed and combined."""

    @abc.abstractmethod
    def __call__(self, node: PolicyNode) -> Answer:
        """Returns a `Decision`, a bool (whether to save), or None for "no opinion"."""

    @property
    def mentioned(self) -> frozenset[str]:
        """The names of values that the policy mentions."""
        return frozenset()

    def decide(self, node: PolicyNode) -> Decision | None:
        """Returns the decision to which the answer of the policy corresponds.

        Raises:
            ArgumentTypeError: the answer is not a `Decision`, True, False or None.
        """
        return _decision(_answer(self, node))

    def __or__(self, other: PolicyLike) -> Policy:
        return _Either(_operands(_Either, self, as_policy(other)))

    def __ror__(self, other: PolicyLike) -> Policy:
        return as_policy(other) | self

    def __and__(self, other: PolicyLike) -> Policy:
        return _Both(_operands(_Both, self, as_policy(other)))

    def __rand__(self, other: PolicyLike) -> Policy:
        return as_policy(other) & self

    def __invert__(self) -> Policy:
        return _Opposite(self)


class Frozen(Policy):
    """An immutable policy. Immutability matters because caches of plans use policies as keys."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to {name!r}: the policy {self!r} is frozen")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {name!r}: the policy {self!r} is frozen")


PolicyLike = Policy | Callable[[PolicyNode], Answer]


def as_policy(policy: PolicyLike) -> Policy:
    """Returns `policy` itself if it is a `Policy`, or wraps a plain function in one.

    A wrapped function is compared and hashed by identity, so that a plan for one function is not used for another.

    Raises:
        ArgumentTypeError: `policy` is not a policy.

    Example:
        >>> from fckpt import policies
        >>> def small(node):
        ...     return node.nbytes < 1024
        >>> policies.as_policy(small) | policies.dots_saveable
        as_policy(small) | dots_saveable
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise ArgumentTypeError(f"{policy.__name__} makes a policy: call it first, {policy.__name__}('a', 'b').")
    if isinstance(policy, type) or not callable(policy):
        hint = f" Pass the policy itself: fckpt.policies.{policy}." if isinstance(policy, str) else ""
        raise ArgumentTypeError(
            f"a policy is one of fckpt.policies or a function of a PolicyNode, not {policy!r}.{hint}"
        )
    return _Function(policy)


def _answer(policy: Policy, node: PolicyNode) -> Answer:
    answer = policy(node)
    if answer is None or isinstance(answer, (bool, Decision)):
        return answer
    inside = f" in {node.module}" if node.module else ""
    at = inside + (f" at {node.source}" if node.source else "")
    hint = f" Did you mean {policy!r}(...)(node)?" if isinstance(answer, Policy) else ""
    raise ArgumentTypeError(
        f"the policy {policy!r} answered {answer!r} for {node.op}{at}. "
        f"It must answer with a Decision, True, False or None.{hint}"
    )


def _decision(answer: Answer) -> Decision | None:
    if isinstance(answer, bool):
        return Decision.PREFER_SAVE if answer else Decision.MUST_RECOMPUTE
    return answer


def decisions_of(answers: Iterable[Answer]) -> list[Decision]:
    """Returns the decisions to which the answers correspond, without None."""
    return [decision for decision in map(_decision, answers) if decision is not None]


def _extreme(choose: Callable[..., Any], answers: list[Answer]) -> Answer:
    """Returns the answer that saves the least (`choose=min`) or the most (`max`); a boolean if all are booleans."""
    known = [answer for answer in answers if answer is not None]
    if all(isinstance(answer, bool) for answer in known):
        return choose(known, default=None)
    return choose(decisions_of(known), key=_EAGERNESS.index)


def nested_decision(answers: Iterable[Answer]) -> Decision | None:
    """Returns the combined decision of the answers of nested regions; see `combine_nested`."""
    return min(decisions_of(answers), key=_NESTED.index, default=None)


# Combinations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class _Function(Frozen):
    """A policy that calls a plain function."""

    function: Callable[[PolicyNode], Answer]

    def __call__(self, node: PolicyNode) -> Answer:
        return self.function(node)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", None) or repr(self.function)
        code = getattr(self.function, "__code__", None)
        if name == "<lambda>" and code is not None:  # the line identifies the lambda
            name = f"<lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}>"
        return f"as_policy({name})"


@dataclass(frozen=True, repr=False)
class _Combination(Frozen):
    """A policy made of several policies by an operator."""

    policies: tuple[Policy, ...]

    @property
    def mentioned(self) -> frozenset[str]:
        return frozenset().union(*(policy.mentioned for policy in self.policies))


class _Either(_Combination):
    """The policy that saves what at least one of its policies saves."""

    def __call__(self, node: PolicyNode) -> Answer:
        return _extreme(max, [_answer(policy, node) for policy in self.policies])

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


class _Both(_Combination):
    """The policy that saves what all of its policies save."""

    def __call__(self, node: PolicyNode) -> Answer:
        return _extreme(min, [_answer(policy, node) for policy in self.policies])

    def __repr__(self) -> str:
        return " & ".join(_enclosed(policy, _Either) for policy in self.policies)


class _Nested(_Combination):
    """The policy that saves what no enclosing region forbids."""

    def __call__(self, node: PolicyNode) -> Answer:
        return nested_decision([_answer(policy, node) for policy in self.policies])

    def __repr__(self) -> str:
        return f"combine_nested({', '.join(map(repr, self.policies))})"


@dataclass(frozen=True, repr=False)
class _Opposite(Frozen):
    """The policy that saves what its policy does not save."""

    policy: Policy

    @property
    def mentioned(self) -> frozenset[str]:
        return self.policy.mentioned

    def __call__(self, node: PolicyNode) -> Answer:
        answer = _answer(self.policy, node)
        return not answer if isinstance(answer, bool) else None if answer is None else _OPPOSITE[answer]

    def __invert__(self) -> Policy:
        return self.policy

    def __repr__(self) -> str:
        return f"~{_enclosed(self.policy, _Either, _Both)}"


def _operands(kind: type[_Combination], *policies: Policy) -> tuple[Policy, ...]:
    """Flattens policies with the same operator: a | (b | c) becomes a | b | c."""
    opened = (p.policies if isinstance(p, kind) else (p,) for p in policies)
    return tuple(itertools.chain.from_iterable(opened))


def _enclosed(policy: Policy, *looser: type[Policy]) -> str:
    return f"({policy!r})" if isinstance(policy, looser) else repr(policy)


def combine_nested(*policies: PolicyLike) -> Policy:
    """Returns the policy for nested regions: a value is saved only if every region allows it.

    If one region forbids to save a value (`False`, `MUST_RECOMPUTE`), the value is not saved. Otherwise, if one region
    demands to save it (`MUST_SAVE`), the value is saved. Otherwise, a preference to recompute wins over a preference to
    save. A region without an opinion leaves the choice to the others.

    Args:
        *policies: the policies of the regions, outermost first. A region without policy and budget has the policy
            `reductions_saveable`. A region with only a budget has no opinion, and is omitted.

    Example:
        >>> from fckpt.policies import PolicyNode, combine_nested, everything_saveable, nothing_saveable
        >>> combine_nested(everything_saveable, nothing_saveable).decide(PolicyNode("aten.mm.default"))
        <Decision.MUST_RECOMPUTE: 'must_recompute'>
    """
    return _Nested(_operands(_Nested, *map(as_policy, policies)))
