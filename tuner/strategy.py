"""How candidates are chosen: a strategy is asked for configs and told their times. Here is the simplest, and when it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from codegen.config import Config


class Strategy(Protocol):
    """Chooses candidates. Deterministic: the same times, told in the same order, lead to the same choices."""

    def ask(self, count: int) -> list[Config]:
        """Up to `count` configs to try next, none of them ever asked for before.

        Fewer, or none, where the choice waits for times that have not been told. None while nothing is open: the end.
        """

    def tell(self, config: Config, time_us: float | None) -> None:
        """The time of a config that was asked for, microseconds; None where it was rejected."""


class Listed:
    """Tries a list in its order, each config once."""

    def __init__(self, configs: Iterable[Config]) -> None:
        self._open = list(reversed(dict.fromkeys(configs)))

    def ask(self, count: int) -> list[Config]:
        """As Strategy.ask."""
        return [self._open.pop() for _ in range(min(count, len(self._open)))]

    def tell(self, config: Config, time_us: float | None) -> None:
        """As Strategy.tell; it makes no difference."""


@dataclass(frozen=True, slots=True)
class Search:
    """What is to be searched.

    Attributes:
        candidates: all configs that may be tried, the best predicted first.
        predicted: microseconds by the cost model, of some or all of them.
        budget: the largest number of configs to try.
        seed: of everything random.
        first: configs to begin with, those that are candidates.
        tried: what an earlier run has tried, which counts, and the times, None where it was rejected.
    """

    candidates: Sequence[Config]
    predicted: Mapping[Config, float]
    budget: int
    seed: int
    first: Sequence[Config] = ()
    tried: Mapping[Config, float | None] = field(default_factory=dict)


def strategy_for(search: Search) -> Strategy:
    """Everything in its order where the budget suffices; else what a model of the times chooses."""
    left = [config for config in search.candidates if config not in search.tried]
    if len(left) + len(search.tried) <= search.budget:
        return Listed(left)
    from tuner.search import Guided

    return Guided(search.candidates, search.predicted, search.budget, search.seed, search.first, search.tried)
