"""Whether times can be believed: what the GPU's gauges show while a spell of samples is taken.

A spell is *disturbed* when something beside the measured kernel slowed the GPU: heat, a hardware brake, another process. Its
samples are discarded and taken again, a few times, after a pause. The power limit is another thing: what a kernel draws belongs
to it, and one that runs into the limit always does. Such a spell is *capped*, and the comparison says which of them count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from tuner.errors import ToolchainError
from tuner.executors import Timing
from tuner.timing.tally import Tally

POWER_LIMIT = "power limit"
"""The reason for a lower clock that is the kernel's own doing."""

CONTENDED_PERCENT = 5
"""Another process that has so much of the GPU disturbs; less is a desktop, or a monitor that looks at the GPU."""

PERIOD_SECONDS = 0.01
"""Between two looks at the gauges, most of which the driver renews every 20 to 100 ms."""

ATTEMPTS, PAUSE_SECONDS = 3, 0.5
"""A disturbed spell is taken so often in all; before each more the GPU cools so long, or is left to whoever else wants it."""

MOST_PAUSED_SECONDS = 10.0
"""Pauses of one watch in all. What disturbs for longer stays, and waiting would only take the time for measuring."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the gauges show at one moment; None where the GPU does not tell.

    Attributes:
        sm_mhz: clock of the SMs.
        power_w: what the board draws.
        temperature_c: of the GPU.
        reasons: why the clock is below the highest, in words.
    """

    sm_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    reasons: frozenset[str] = frozenset()


class Gauge(Protocol):
    """Where readings come from; tuner.timing.nvml has the real one."""

    def read(self) -> Reading:
        """What the gauges show now. May be called from another thread."""

    def others(self) -> int | None:
        """The share of the GPU that other processes had of late, per cent; None where they cannot be told from this one."""


@dataclass(frozen=True, slots=True)
class Spell:
    """Samples, and the state of the GPU while they were taken.

    Attributes:
        timing: the samples.
        disturbed: what slowed the GPU beside the kernel, as a clause; None: nothing that is known.
        capped: whether the power limit lowered the clock.
        sm_mhz: the clock of the SMs, the median of the readings.
    """

    timing: Timing
    disturbed: str | None = None
    capped: bool = False
    sm_mhz: float | None = None


class Watch:
    """Watches a GPU while it is timed, and counts what there is to say of it.

    Args:
        gauge: of the GPU; None: nothing is watched.
        absent: why there is none, as a clause.
        pause: waits so many seconds.
    """

    def __init__(self, gauge: Gauge | None = None, absent: str | None = None,
                 pause: Callable[[float], None] = time.sleep) -> None:
        self._gauge = gauge
        self._absent = absent
        self._pause = pause
        self._paused = 0.0
        self._tally = Tally(absent=absent)

    def take(self, measure: Callable[[], Timing], attempts: int = ATTEMPTS) -> Spell:
        """Times something, once more where the spell was disturbed, and gives the first that was not, or the last.

        Raises:
            LaunchError, DeviceLost: as `measure`.
        """
        spell = self._spell(measure)
        for _ in range(attempts - 1):
            if spell.disturbed is None or self._paused >= MOST_PAUSED_SECONDS:
                break
            self._tally.discarded[spell.disturbed] += 1
            self._paused += PAUSE_SECONDS
            self._pause(PAUSE_SECONDS)
            spell = self._spell(measure)
        if spell.disturbed is not None:
            self._tally.disturbed[spell.disturbed] += 1
        self._tally.spells += 1
        self._tally.capped += spell.capped
        self._tally.unsettled += not spell.timing.settled
        return spell

    def drain(self) -> Tally:
        """What was counted since the last time."""
        counted, self._tally = self._tally, Tally(absent=self._absent)
        return counted

    def _spell(self, measure: Callable[[], Timing]) -> Spell:
        if self._gauge is None:
            return Spell(measure())
        with _reading(self._gauge) as readings:
            timing = measure()
        for reading in readings:
            self._tally.saw("MHz", reading.sm_mhz)
            self._tally.saw("W", reading.power_w)
            self._tally.saw("degrees Celsius", reading.temperature_c)
        reasons = frozenset[str]().union(*(reading.reasons for reading in readings))
        others = self._gauge.others()
        self._tally.mingled += others is None
        clocks = [reading.sm_mhz for reading in readings if reading.sm_mhz is not None]
        return Spell(timing, _disturbance(reasons, others or 0), POWER_LIMIT in reasons,
                     median(clocks) if clocks else None)


def open_watch(bus_id: str | None) -> Watch:
    """The watch over a GPU; where NVML cannot be used, one that watches nothing and says why.

    Args:
        bus_id: Executor.bus_id.
    """
    if bus_id is None:
        return Watch()
    from tuner.timing.nvml import NvmlGauge

    try:
        return Watch(NvmlGauge(bus_id))
    except ToolchainError as error:
        return Watch(None, str(error))


def _disturbance(reasons: frozenset[str], others: int) -> str | None:
    """What slowed the GPU beside the kernel."""
    causes = sorted(reasons - {POWER_LIMIT})
    if others >= CONTENDED_PERCENT:
        causes.append("another process used the GPU")
    return " and ".join(causes) or None


@contextmanager
def _reading(gauge: Gauge) -> Iterator[list[Reading]]:
    """What the gauge shows at the beginning of the block, all through it (from a thread), and at its end."""
    readings = [gauge.read()]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(PERIOD_SECONDS):
            readings.append(gauge.read())

    thread = threading.Thread(target=look, name="gauge", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()
    readings.append(gauge.read())
