"""When the parts of a tuning run end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tuner.gate.gate import seconds_of

ABLATION_SHARE = 1 / 20
"""Part of the time of a run on a GPU that is kept to change one parameter of the winner at a time."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Moments of time.monotonic().

    Attributes:
        begins: when the run began.
        finds: when the fastest must be found: candidates tried, finalists timed.
        closes: when the gate must have examined them.
        stops: when the run must end.
    """

    begins: float
    finds: float
    closes: float
    stops: float

    @classmethod
    def of(cls, timeout: float | None, measures: bool, ablation: bool, begins: float) -> Schedule:
        """Of a run.

        Args:
            timeout: seconds it may take; None: no limit.
            measures: whether on a GPU. Else nothing is kept for later parts.
            ablation: whether it ends with one.
            begins: when it began.
        """
        if timeout is None:
            return cls(begins, math.inf, math.inf, math.inf)
        stops = begins + timeout
        closes = stops - (ABLATION_SHARE * timeout if measures and ablation else 0.0)
        return cls(begins, closes - (seconds_of(timeout) if measures else 0.0), closes, stops)

    def passed(self, share: float) -> bool:
        """Whether such a part of the time to find the fastest is over."""
        return time.monotonic() >= self.begins + share * (self.finds - self.begins)


@contextmanager
def stopped_at(moment: float, stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` from another thread at a moment of time.monotonic(), unless the block has ended by then."""
    timer = threading.Timer(max(0.0, moment - time.monotonic()), stop)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # where it has begun to stop, nothing new may begin before it has
