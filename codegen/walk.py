"""Every combination of a variant's parameters, judged by its rules, without looking at each one.

Spaces have millions of combinations, and rules look at few parameters each. So a rule is asked once for each combination of those
it looks at, and what falls to it is counted together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from operator import itemgetter
from typing import Final

from codegen.config import Config, Value
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.variant import Clash, Params, Variant

Values = tuple[Value, ...]
"""The values of a variant's first parameters, in the order of its choices."""

Rule = Callable[[Params], str | None]


class Walk:
    """Judges every combination of one variant, in the order of the product of its choices.

    What is below a combination of the first parameters that clashes is refused at once. Among the clashes that refuse a
    combination, the one counts whose last parameter is chosen first, then the one that the variant names first; else the first of
    `refuses`, `inexact` and `wasteful` that objects.

    Args:
        problem: what is to be computed.
        limits: the GPU.
        variant: whose combinations.

    Attributes:
        valid: the configs that nothing speaks against.
        refused: the reasons why the others are refused, and how many fall to each.
    """

    def __init__(self, problem: Problem, limits: Limits, variant: Variant) -> None:
        self.valid: list[Config] = []
        self.refused: Counter[str] = Counter()
        names = tuple(variant.choices)
        self._name = variant.name
        self._choices = list(variant.choices.values())
        # One pair of each name and value, shared by all configs.
        self._pairs = [{value: (name, value) for value in values} for name, values in variant.choices.items()]
        self._combinations = [math.prod(map(len, self._choices[level:])) for level in range(len(names) + 1)]
        self._clashes: list[list[Callable[[Values], str | None]]] = [[] for _ in names]
        for clash in variant.clashes:
            self._clashes[max(map(names.index, clash.names))].append(remembered(problem, limits, clash, names))
        self._settled = max((level + 1 for level, clashes in enumerate(self._clashes) if clashes), default=0)
        self._rules = (_Remembered(lambda params: variant.refuses(problem, params, limits), names, names),
                       _Remembered(lambda params: variant.inexact(problem, params), names, names),
                       _Remembered(lambda params: variant.wasteful(problem, params), names, names))
        self._below(())

    def _below(self, chosen: Values) -> None:
        """All combinations that begin with these values."""
        level = len(chosen)
        if level >= self._settled and self._judge(chosen):
            return
        clashes = self._clashes[level]
        for value in self._choices[level]:
            longer = (*chosen, value)
            for clash in clashes:
                if reason := clash(longer):
                    self.refused[reason] += self._combinations[level + 1]
                    break
            else:
                self._below(longer)

    def _judge(self, chosen: Values) -> bool:
        """Settles all combinations that begin with these values, which no clash refuses; False where that takes more of them."""
        for rule in self._rules:
            answer = rule.ask(chosen)
            if answer is _LATER:
                return False
            if answer is not None:
                self.refused[answer] += self._combinations[len(chosen)]
                return True
        if len(chosen) < len(self._pairs):
            return False
        self.valid.append(Config(self._name, tuple(pairs[value] for pairs, value in zip(self._pairs, chosen, strict=True))))
        return True


def remembered(problem: Problem, limits: Limits, clash: Clash, names: tuple[str, ...]) -> Callable[[Values], str | None]:
    """A clash, asked once for each combination of the parameters it looks at."""
    rule = _Remembered(lambda params: clash.refuses(problem, params, limits), names, clash.names)
    looked_at = itemgetter(*(names.index(name) for name in clash.names))
    answers: dict[object, str | None] = {}  # quicker than a rule's tree

    def answer(chosen: Values) -> str | None:
        key = looked_at(chosen)
        if key not in answers:
            answers[key] = rule.ask(chosen)
        return answers[key]

    return answer


_LATER: Final = "it depends on parameters that have no value yet"
"""In place of an answer."""

_UNKNOWN: Final = "it was not asked"
"""In place of an answer that nobody knows."""


class _NotChosen(Exception):
    """A rule looks at a parameter that has no value yet."""


class _Step:
    """A rule looks at the parameter at a position. What it does next follows from the value: another step, or an answer."""

    __slots__ = ("next", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self.next: dict[Value, _Step | str | None] = {}


class _Remembered:
    """A rule with a tree of its steps so far, which tells most of its answers without asking it.

    Args:
        rule: gives equal values equal answers.
        names: of all parameters, in order.
        given: of those that the rule is given.
    """

    def __init__(self, rule: Rule, names: tuple[str, ...], given: tuple[str, ...]) -> None:
        self._rule = rule
        self._positions = {name: names.index(name) for name in given}
        self._first: _Step | str | None = _UNKNOWN

    def ask(self, chosen: Values) -> str | None:
        """Its answer; _LATER where it looks at parameters after these."""
        step, count = self._first, len(chosen)
        while isinstance(step, _Step):
            if step.position >= count:
                return _LATER
            step = step.next.get(chosen[step.position], _UNKNOWN)
        return self._learn(chosen) if step is _UNKNOWN else step

    def _learn(self, chosen: Values) -> str | None:
        looked_at = _LookedAt(chosen, self._positions)
        end: _Step | str | None
        try:
            answer = end = self._rule(looked_at)
        except _NotChosen as missing:
            answer, end = _LATER, _Step(missing.args[0])
        path = list(looked_at.positions)
        if not path:
            self._first = end
            return answer
        step = self._first = self._first if isinstance(self._first, _Step) else _Step(path[0])
        for position, following in pairwise(path):
            after = step.next.setdefault(chosen[position], _Step(following))
            assert isinstance(after, _Step)
            step = after
        step.next[chosen[path[-1]]] = end
        return answer


class _LookedAt(Mapping[str, Value]):
    """The first values as the parameters of a rule; notes the positions of those it looks at.

    Raises:
        _NotChosen: with its position, where one has no value yet.
    """

    def __init__(self, chosen: Values, positions: Mapping[str, int]) -> None:
        self.positions: dict[int, None] = {}  # in order
        self._chosen = chosen
        self._by_name = positions

    def __getitem__(self, name: str) -> Value:
        position = self._by_name[name]
        if position >= len(self._chosen):
            raise _NotChosen(position)
        self.positions[position] = None
        return self._chosen[position]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)
