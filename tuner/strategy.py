"""How candidates are chosen: a strategy is asked for configs and told their times. Here is the simplest."""

from __future__ import annotations

from collections.abc import Iterable
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
