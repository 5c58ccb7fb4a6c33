"""Code that computes with a number, or asks something of it: the plan of one value is not used for another one."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fckpt


@dataclasses.dataclass
class Data:
    a: int


Pair = collections.namedtuple("Pair", "a b")
Named = type("Named", (), {"k3": 5})
SCOPE = {**globals(), "functools": functools, "itertools": itertools, "math": math, "operator": operator}

ARITHMETIC = """
n // 2; -n // 2; n % 3; (-n) % 3; n ** 2; 2 ** n; n / 4; n << 1; n & 2; n | 1; n ^ 3; ~n; abs(3 - n); divmod(n, 3)[1]
pow(n, 2, 3); round(n / 3); round(n * 0.333, 1); int(n * 0.7); n.bit_length(); (n / 2).is_integer(); n.real; -n * 1.0
min(n, 3, 4); max([n, 2.5]); sum([n, 1]); sum(range(n)); math.sqrt(n); math.floor(n * 0.7); math.ceil(n / 2)
math.log(n); math.gcd(n, 6); math.prod([n, 2]); math.isclose(n, 3); math.comb(n, 1); math.copysign(1, n - 3)
functools.reduce(operator.mul, [n, 2]); operator.index(n); operator.mod(n, 3); (lambda v=n: v)(); n.__index__()
"""
COMPARISONS = """
n == 3; n != 3; n > 3; 1 < n < 4; (n > 3) is True; (n > 3) is not False; (n > 3) == True; (n > 3) in (True,); not n - 3
(n > 3) == (n < 5); (n > 3) & (n < 5); (n > 3) ^ (n < 5); all([n > 3, True]); [4, 5][n > 3]; {True: 4, False: 5}[n > 3]
operator.is_(n > 3, True); operator.is_not(n > 3, True); operator.eq(n, 3); operator.truth(n - 3); n.__eq__(3)
n and 5; n or 5; bool(n - 3); int(n > 3); n is 3; n is None; isinstance(n > 3, bool); isinstance(n, bool)
[n, 1] == [3, 1]; (n, 1) < (3, 2); {n, 1} == {3, 1}; {n: 1} == {3: 1}; {'a': n} == {'a': 3}; slice(n) == slice(3)
Data(n) == Data(3); Pair(n, 1) == Pair(3, 1); torch.Size([n]) == torch.Size([3]); x.shape == (32, n + 13)
"""
CONTAINERS = """
n in (3, 4); n in [3, 4]; n in {3, 4}; n in range(3, 5); n in {3: 1}; 3 in (n,); 3 in [n, 1]; 3 in {n}; 3 in {n: 1}
3 in {1: n}.values(); (3, 1) in [(n, 1)]; [3, 1] in [[n, 1]]; (1, 3) in {1: n}.items(); 3 in collections.deque([n])
3 in (v for v in (n, 1)); 3 in torch.Size([n]); operator.contains([n], 3); 'a' in ['a', n]; 3 not in [n, 1]
[1, n, 3].index(3); (1, n, 3).count(3); sorted([n, 3, 4])[0]; [1, 2, 3, 4, 5, 6, 7, 8][n]; [5, 6, 7, 8, 9][:n][-1]
{1: 5, 2: 6, 3: 7}.get(n, 0); {(3, 1): 5}.get((n, 1), 6); {(n, 1): 5}.get((3, 1), 6); len({n, 3, 4}); len([1] * n)
collections.Counter([n, 3])[3]; collections.defaultdict(int, {3: 4})[n]; collections.deque([1, n], maxlen=1)[0]
list(itertools.accumulate([n, 1, 2]))[-1]; next(v for v in range(1, 9) if v >= n); list(enumerate([5], start=n))[0][0]
{n} & {3} == {3}; {n}.isdisjoint({3}); frozenset([n]) <= {3, 4}; len(range(n)); list(range(n))[-1]; [*range(n)][-1]
"""
TEXTS = """
str(n) == '3'; repr(n) == '3'; f'{n}' == '3'; f'{n:02d}' == '03'; f'{n!r}' == '3'; f'{n=}' == 'n=3'; f'{n + 1}' == '4'
'%d' % n == '3'; '{}'.format(n) == '3'; '{:03d}'.format(n) == '003'; format(n, '03d') == '003'; len(f'{10 ** n}')
{'k3': 4}.get(f'k{n}', 1); {'k3': 4}.get('k' + str(n), 1); getattr(Named, f'k{n}', 9); int(f'{n}{n}'); bin(n) == '0b11'
str(n > 3) == 'True'; f'{n > 3}' == 'True'; f'{n / 2:.2f}' == '1.50'; f'{[n]}' == '[3]'; str((n, 1)) == '(3, 1)'
'abcdefgh'[n] == 'd'; 'ab' * n == 'ababab'; ','.join(map(str, [n, 1])) == '3,1'; f'{x.shape[0] + n}' == '35'
"""
CLASSES = """
n.__class__ is int; (n > 3).__class__ is bool; (n / 2).__class__ is float
[n].__class__ is list; (n,).__class__ is tuple
x.shape.__class__ is torch.Size; collections.deque([n]).__class__ is collections.deque; x.__class__ is torch.Tensor
{1: n}.keys().__class__ is type({}.keys()); type(n) is int; type(n > 3) is bool; isinstance(n, (int, float))
n.__class__.__name__ == 'int'; n.__class__(4); Data(n).__class__ is Data; Pair(n, 1).__class__ is Pair
"""
EXPRESSIONS = [
    expression.strip()
    for group in (ARITHMETIC, COMPARISONS, CONTAINERS, TEXTS, CLASSES)
    for line in group.strip().splitlines()
    for expression in line.split(";")
]
INTEGERS = (2, 4, 3, 5, 6, 3, 1, 7)
MIXED = (3, 3.0, True, 1, 2.5, False, 0, -0.0, None, "3")


class Layer(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.linear, self.compute, self.n = nn.Linear(16, 16), compute, 0

    def forward(self, x: Tensor, *n: Any) -> Tensor:
        return torch.tanh(self.linear(x)) * self.compute(x, *(n or (self.n,)))


def _outcome(call: Callable[[], Tensor]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


@pytest.mark.sweep(8)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::fckpt.PlanWarning")
@pytest.mark.parametrize("values", [INTEGERS, MIXED], ids=["integers", "mixed"])
@pytest.mark.parametrize("place", ["argument", "attribute"])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_number_that_changes(expression: str, place: str, values: Sequence[Any]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Layer(eval(f"lambda x, n: {expression}", {**SCOPE, "Data": Data, "Pair": Pair, "Named": Named}))
    planned, x = fckpt.remat(layer, budget=0.9, solver="greedy"), torch.randn(32, 16)
    for value in values:
        layer.n = value
        given = (value,) if place == "argument" else ()
        plain, found = _outcome(lambda: layer(x, *given)), _outcome(lambda: planned(x, *given))
        if isinstance(found, fckpt.FckptError):
            assert values is MIXED
            return
        if isinstance(plain, Exception):
            assert type(found) is type(plain), value
        else:
            assert torch.allclose(plain, found, rtol=0, atol=0, equal_nan=True), value
