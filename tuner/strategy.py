"""How candidates are chosen: a strategy is asked for configs and told their times. Two simple ones, and one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from codegen.config import Config
from tuner.candidates import Neighbourhood


class Strategy(Protocol):
    """Chooses candidates. Deterministic: the same times, told in the same order, lead to the same choices."""

    def ask(self, count: int) -> list[Config]:
        """Up to `count` configs to try next, none of them ever asked for before.

        Fewer, or none, where the choice waits for times that have not been told. None while nothing is open: the end.
        """

    def tell(self, config: Config, time_us: float | None) -> None:
        """The time of a config that was asked for, microseconds; None where it was rejected."""


class Pool:
    """The valid configs of a run and which of them were given out: strategies that share one never repeat each other.

    Attributes:
        given: how many were given out.
        times: microseconds of those that were told and not rejected.
    """

    def __init__(self, valid: Iterable[Config]) -> None:
        by_variant: dict[str, list[Config]] = {}
        for config in valid:
            by_variant.setdefault(config.variant, []).append(config)
        self._left = {variant: Neighbourhood(configs) for variant, configs in by_variant.items()}
        self.given = 0
        self.times: dict[Config, float] = {}

    def take(self, config: Config) -> bool:
        """Gives the config out; False where it is not valid or was given out before."""
        if config.variant not in self._left or not self._left[config.variant].take(config):
            return False
        self.given += 1
        return True

    def left(self, variant: str) -> int:
        """How many configs of a variant were not given out."""
        return len(self._left[variant]) if variant in self._left else 0

    def nearest(self, config: Config) -> Config | None:
        """The config of the same variant that was not given out and lies nearest; None where all were."""
        return self._left[config.variant].nearest(config) if config.variant in self._left else None

    def within(self, config: Config, reach: int) -> list[Config]:
        """Those of the same variant that were not given out and differ in `reach` parameters at most, nearest first."""
        return self._left[config.variant].within(config, reach) if config.variant in self._left else []

    def best_us(self, variant: str) -> float:
        """The shortest time of a variant told so far; infinite before there is one."""
        return min((time for config, time in self.times.items() if config.variant == variant), default=float("inf"))

    def tell(self, config: Config, time_us: float | None) -> None:
        """Notes the time of a config given out; None where it was rejected."""
        if time_us is not None:
            self.times[config] = time_us


class Listed:
    """Tries a list in its order."""

    def __init__(self, configs: Sequence[Config], pool: Pool) -> None:
        self._open = list(reversed(configs))
        self._pool = pool

    def ask(self, count: int) -> list[Config]:
        """As Strategy.ask."""
        chosen: list[Config] = []
        while self._open and len(chosen) < count:
            config = self._open.pop()
            if self._pool.take(config):
                chosen.append(config)
        return chosen

    def tell(self, config: Config, time_us: float | None) -> None:
        """As Strategy.tell."""
        self._pool.tell(config, time_us)


class HillClimb:
    """Tries what lies round the best config known: first what differs in one parameter, then in two; then round the next best.

    Ends when the pool has given out `limit` configs in all, or everything near any config that was told has been tried.
    """

    REACH = 2

    def __init__(self, pool: Pool, limit: int) -> None:
        self._pool = pool
        self._limit = limit

    def ask(self, count: int) -> list[Config]:
        """As Strategy.ask."""
        count = min(count, self._limit - self._pool.given)
        if count <= 0:
            return []
        for centre in sorted(self._pool.times, key=self._pool.times.__getitem__):
            if near := self._pool.within(centre, self.REACH):
                return [config for config in near[:count] if self._pool.take(config)]
        return []

    def tell(self, config: Config, time_us: float | None) -> None:
        """As Strategy.tell."""
        self._pool.tell(config, time_us)


class InTurn:
    """Strategies one after another; each begins when the one before it has ended and all its times are told."""

    def __init__(self, strategies: Iterable[Strategy]) -> None:
        self._waiting = list(strategies)
        self._open = 0

    def ask(self, count: int) -> list[Config]:
        """As Strategy.ask."""
        while self._waiting:
            chosen = self._waiting[0].ask(count)
            if chosen or self._open:
                self._open += len(chosen)
                return chosen
            self._waiting.pop(0)
        return []

    def tell(self, config: Config, time_us: float | None) -> None:
        """As Strategy.tell."""
        self._open -= 1
        self._waiting[0].tell(config, time_us)


class Until:
    """Another strategy up to some point in time: from then on nothing is chosen any more."""

    def __init__(self, strategy: Strategy, ended: Callable[[], bool]) -> None:
        self._strategy = strategy
        self._ended = ended

    def ask(self, count: int) -> list[Config]:
        """As Strategy.ask."""
        return [] if self._ended() else self._strategy.ask(count)

    def tell(self, config: Config, time_us: float | None) -> None:
        """As Strategy.tell."""
        self._strategy.tell(config, time_us)
