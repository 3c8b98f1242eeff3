"""Gauges of a GPU that show what a test says, and a watch that does not wait."""

from __future__ import annotations

from collections.abc import Callable

from tuner.timing.health import Reading, Watch

CALM = Reading(1980, 300.0, 50)


class FakeGauge:
    """Shows `now`, and `other` per cent of use by others; None: they cannot be told apart.

    Attributes:
        looks: how often it was looked at.
    """

    def __init__(self, now: Reading = CALM, other: int | None = 0) -> None:
        self.now = now
        self.other = other
        self.looks = 0

    def read(self) -> Reading:
        self.looks += 1
        return self.now

    def others(self) -> int | None:
        return self.other


def watch_over(gauge: FakeGauge, pause: Callable[[float], None] = lambda seconds: None) -> Watch:
    return Watch(gauge, pause=pause)
