"""A recorded space as a search sees it, and searches played on it: no GPU, and the same every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from codegen.config import Config
from tuner.costmodel import predict
from tuner.records import Status
from tuner.replay.recorded import Recorded
from tuner.strategy import Strategy


@dataclass(frozen=True)
class Field:
    """What there is to search, and what comes of it.

    Attributes:
        recorded: the space.
    """

    recorded: Recorded

    @cached_property
    def candidates(self) -> tuple[Config, ...]:
        """The configs that a search may try: all but those nobody would. Those predicted to be fastest come first."""
        return tuple(self.predicted)

    @cached_property
    def predicted(self) -> dict[Config, float]:
        """Microseconds by the cost model."""
        problem, limits = self.recorded.origin.problem(), self.recorded.origin.limits
        times = {config: predict(problem, config, limits).time_us
                 for config, result in self.recorded.results.items() if result.status is not Status.NOT_RUN}
        return dict(sorted(times.items(), key=lambda entry: entry[1]))

    @cached_property
    def times(self) -> dict[Config, float]:
        """Microseconds of the candidates that are not rejected."""
        return self.recorded.times

    @cached_property
    def best_us(self) -> float:
        """The optimum."""
        return min(self.times.values(), default=math.inf)

    def reached(self, tried: Sequence[Config], after: int) -> float:
        """The fraction of the optimum that the first `after` configs reached: its time over theirs; 0 where none has a time."""
        return self.best_us / min((self.times[config] for config in tried[:after] if config in self.times), default=math.inf)


def play(strategy: Strategy, field: Field, budget: int, ahead: int) -> list[Config]:
    """The configs that a strategy tries, in the order in which their times are told.

    Args:
        budget: how many.
        ahead: configs chosen before their predecessors' times are known, as in a tuning run, where they compile meanwhile.
    """
    asked: list[Config] = []
    told = 0
    while told < budget:
        asked += strategy.ask(min(ahead - (len(asked) - told), budget - len(asked)))
        if told == len(asked):
            break
        strategy.tell(asked[told], field.times.get(asked[told]))
        told += 1
    return asked
