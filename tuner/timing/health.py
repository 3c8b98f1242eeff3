"""Whether times can be believed: what the GPU's gauges show while a spell of samples is taken.

A spell is *disturbed* when something beside the measured kernel slowed the GPU: heat, a hardware brake, another process. Its
samples are discarded and taken again, a few times, after a pause. The power limit is another thing: what a kernel draws belongs
to it, and one that runs into the limit always does. Such a spell is *capped*, and the comparison says which of them count.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from tuner.errors import ToolchainError
from tuner.executors import Timing

POWER_LIMIT = "power limit"
"""The reason for a lower clock that is the kernel's own doing."""

CONTENDED_PERCENT = 5
"""Another process that has so much of the GPU disturbs; less is a desktop, or a monitor that looks at the GPU."""

PERIOD_SECONDS = 0.01
"""Between two looks at the gauges, most of which the driver renews every 20 to 100 ms."""

ATTEMPTS, PAUSE_SECONDS = 3, 0.5
"""A disturbed spell is taken so often in all; before each more the GPU cools so long, or is left to whoever else wants it."""


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

    def others(self) -> int:
        """The share of the GPU that other processes had of late, per cent."""


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


@dataclass(slots=True)
class _Range:
    """The readings of a run, from the smallest to the largest."""

    sm_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    temperature_c: list[float] = field(default_factory=list)

    def add(self, reading: Reading) -> None:
        for seen, value in ((self.sm_mhz, reading.sm_mhz), (self.power_w, reading.power_w),
                            (self.temperature_c, reading.temperature_c)):
            if value is not None:
                seen[:] = (min([value, *seen]), max([value, *seen]))

    def text(self) -> str | None:
        parts = [f"{seen[0]:.0f} to {seen[1]:.0f} {unit}" for seen, unit in (
            (self.sm_mhz, "MHz"), (self.power_w, "W"), (self.temperature_c, "degrees Celsius")) if seen]
        return f"while times were taken, the GPU was at {', '.join(parts)}" if parts else None


class Watch:
    """Watches a GPU while it is timed, and remembers what there is to say of a whole run.

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
        self._range = _Range()
        self._discarded: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._spells = self._capped = self._unsettled = 0

    def take(self, measure: Callable[[], Timing], attempts: int = ATTEMPTS) -> Spell:
        """Times something, once more where the spell was disturbed, and gives the first that was not, or the last.

        Raises:
            LaunchError, DeviceLost: as `measure`.
        """
        for attempt in range(attempts):
            spell = self._spell(measure)
            if spell.disturbed is None:
                break
            if attempt + 1 < attempts:
                self._discarded[spell.disturbed] += 1
                self._pause(PAUSE_SECONDS)
            else:
                self._kept[spell.disturbed] += 1
        self._spells += 1
        self._capped += spell.capped
        self._unsettled += not spell.timing.settled
        return spell

    def said(self) -> tuple[str, ...]:
        """What is to be known of the times of this run, as clauses."""
        clauses = []
        if self._absent is not None:
            clauses.append(f"nothing watched the GPU's clocks, heat and other users ({self._absent})")
        if (seen := self._range.text()) is not None:
            clauses.append(seen)
        clauses += [f"{_spells(count)} discarded and taken again: {why}" for why, count in self._discarded.most_common()]
        clauses += [f"{_spells(count)} still disturbed at the last attempt: {why}" for why, count in self._kept.most_common()]
        if self._capped:
            clauses.append(f"{self._capped} of {self._spells} spells of samples ran at the power limit")
        if self._unsettled:
            clauses.append(f"the clocks had not become stable before {self._unsettled} of {self._spells} spells of samples")
        return tuple(clauses)

    def _spell(self, measure: Callable[[], Timing]) -> Spell:
        if self._gauge is None:
            return Spell(measure())
        with _reading(self._gauge) as readings:
            timing = measure()
        for reading in readings:
            self._range.add(reading)
        reasons = frozenset[str]().union(*(reading.reasons for reading in readings))
        clocks = [reading.sm_mhz for reading in readings if reading.sm_mhz is not None]
        return Spell(timing, _disturbance(reasons, self._gauge.others()), POWER_LIMIT in reasons,
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


def _spells(count: int) -> str:
    return "a spell of samples was" if count == 1 else f"{count} spells of samples were"
