"""What a policy is: asked about an operation, it says whether to keep what the operation makes.

The named policies, and the table of what follows from which answer, are in `fckpt.policies`.
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
    """What a policy says of keeping a value for the backward pass; `fckpt.policies` tells what follows."""

    MUST_SAVE = "must_save"
    PREFER_SAVE = "prefer_save"
    PREFER_RECOMPUTE = "prefer_recompute"
    MUST_RECOMPUTE = "must_recompute"


Answer = Decision | bool | None

# From what never keeps to what always keeps: `&` takes the first of two decisions, `|` the last.
_EAGERNESS = (Decision.MUST_RECOMPUTE, Decision.PREFER_RECOMPUTE, Decision.PREFER_SAVE, Decision.MUST_SAVE)
# Across nested regions: what one region forbids is not kept, what one demands is, and of two wishes the meaner counts.
_NESTED = (Decision.MUST_RECOMPUTE, Decision.MUST_SAVE, Decision.PREFER_RECOMPUTE, Decision.PREFER_SAVE)
_OPPOSITE = dict(zip(_EAGERNESS, reversed(_EAGERNESS), strict=True))


@dataclass(frozen=True, slots=True)
class PolicyNode:
    """What a policy sees of an operation."""

    op: str
    """`aten.mm.default`, say."""
    names: tuple[str, ...] = ()
    """What `checkpoint_name` calls the values that it makes, or views of them."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the values that it makes."""
    dtypes: tuple[str, ...] = ()
    nbytes: int = 0
    """What keeping all of them costs."""
    source: str = ""
    """The user's line, `model.py:12 (forward)`."""
    module: str = ""
    """The path of the module that runs it, `encoder.layer.3.mlp`; nothing outside of modules."""
    seconds: float = 0.0
    """What computing them again costs."""
    flops: int = 0
    random: bool = False
    """Whether it draws random numbers."""
    in_forward: bool = True
    """Whether the forward pass runs it. What does not is a factor of the derivative, as 1 - y * y is of tanh's."""
    batch_sizes: tuple[int, ...] = ()
    """The sizes of the `vmap`s inside the region that batched it."""

    @property
    def batch_depth(self) -> int:
        """How many `vmap`s inside the region batched it."""
        return len(self.batch_sizes)

    @staticmethod
    def of(graph: Graph, node: Node, batch_sizes: tuple[int, ...] = ()) -> PolicyNode:
        """Returns what a policy sees of `node`."""
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
    """A function from a `PolicyNode` to a decision, that can be compared, printed and combined."""

    @abc.abstractmethod
    def __call__(self, node: PolicyNode) -> Answer:
        """Returns a `Decision`, whether to save, or None for "no opinion"."""

    @property
    def mentioned(self) -> frozenset[str]:
        """The names of values that the policy speaks of."""
        return frozenset()

    def decide(self, node: PolicyNode) -> Decision | None:
        """Returns the decision that the answer amounts to.

        Raises:
            ArgumentTypeError: the answer is none.
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
    """A policy that cannot be changed: plans are kept by their policies."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to {name!r}: the policy {self!r} is frozen")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {name!r}: the policy {self!r} is frozen")


PolicyLike = Policy | Callable[[PolicyNode], Answer]


def as_policy(policy: PolicyLike) -> Policy:
    """Returns `policy` as an object: itself, or a plain function wrapped.

    A wrapped function is compared and hashed by its identity, so that a plan made for it is not used for another.

    Raises:
        ArgumentTypeError: it is no policy.

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
    """The decisions that answers amount to, without those that are None."""
    return [decision for decision in map(_decision, answers) if decision is not None]


def _extreme(choose: Callable[..., Any], answers: list[Answer]) -> Answer:
    """The first (`choose=min`) or last (`max`) answer by eagerness to keep. Booleans among themselves stay such."""
    known = [answer for answer in answers if answer is not None]
    if all(isinstance(answer, bool) for answer in known):
        return choose(known, default=None)
    return choose(decisions_of(known), key=_EAGERNESS.index)


def nested_decision(answers: Iterable[Answer]) -> Decision | None:
    """Returns what answers of nested regions come to; see `combine_nested`."""
    return min(decisions_of(answers), key=_NESTED.index, default=None)


# Combinations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class _Function(Frozen):
    """A plain function."""

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
        if name == "<lambda>" and code is not None:  # which one it is, the place alone tells
            name = f"<lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}>"
        return f"as_policy({name})"


@dataclass(frozen=True, repr=False)
class _Combination(Frozen):
    """Policies joined by an operator."""

    policies: tuple[Policy, ...]

    @property
    def mentioned(self) -> frozenset[str]:
        return frozenset().union(*(policy.mentioned for policy in self.policies))


class _Either(_Combination):
    """Keeps what one of the policies keeps."""

    def __call__(self, node: PolicyNode) -> Answer:
        return _extreme(max, [_answer(policy, node) for policy in self.policies])

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


class _Both(_Combination):
    """Keeps what all of the policies keep."""

    def __call__(self, node: PolicyNode) -> Answer:
        return _extreme(min, [_answer(policy, node) for policy in self.policies])

    def __repr__(self) -> str:
        return " & ".join(_enclosed(policy, _Either) for policy in self.policies)


class _Nested(_Combination):
    """Keeps what no enclosing region forbids."""

    def __call__(self, node: PolicyNode) -> Answer:
        return nested_decision([_answer(policy, node) for policy in self.policies])

    def __repr__(self) -> str:
        return f"combine_nested({', '.join(map(repr, self.policies))})"


@dataclass(frozen=True, repr=False)
class _Opposite(Frozen):
    """Keeps what the policy does not keep."""

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
    """The policies, those of the same operator opened: a | (b | c) is a | b | c, and prints as it."""
    opened = (p.policies if isinstance(p, kind) else (p,) for p in policies)
    return tuple(itertools.chain.from_iterable(opened))


def _enclosed(policy: Policy, *looser: type[Policy]) -> str:
    return f"({policy!r})" if isinstance(policy, looser) else repr(policy)


def combine_nested(*policies: PolicyLike) -> Policy:
    """Returns the policy for a region inside regions: a value is kept only if every one of them allows it.

    What one region forbids (`False`, `MUST_RECOMPUTE`) is not kept. Else, what one demands (`MUST_SAVE`) is kept.
    Of two preferences that to recompute wins, and a region without an opinion leaves the choice to the others.

    Args:
        *policies: those of the regions, outermost first. A region without policy and budget has
            `reductions_saveable`; one with a budget alone has no opinion, and is left out.

    Example:
        >>> from fckpt.policies import PolicyNode, combine_nested, everything_saveable, nothing_saveable
        >>> combine_nested(everything_saveable, nothing_saveable).decide(PolicyNode("aten.mm.default"))
        <Decision.MUST_RECOMPUTE: 'must_recompute'>
    """
    return _Nested(_operands(_Nested, *map(as_policy, policies)))
