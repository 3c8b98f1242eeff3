"""Warming the clocks: a GPU that was idle runs slowly for a while, and the first times would be those of the slow clock.

Whether the clocks are stable is told by what is going to be measured anyway, the time of the work itself: it is run in short
spells until several in a row take equally long, and after idle time for a stated while at least, since clocks rise in steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SPELL_US, IDLE_SPELL_US = 1000.0, 20_000.0
"""So long a spell lasts (or one call, where that is longer), where the GPU was busy just before and where it was idle. Events
resolve a thousandth of the first. Clocks rise in steps, and the second is to last longer than a step, together with its like."""

MAX_REPLAYS = 4000
"""Most replays in a spell: a call of a few microseconds takes Python as long to enqueue."""

ALIKE, SPREAD = 3, 0.01
"""The clocks are stable when so many spells in a row lie within such a share of one another."""

IDLE_SECONDS = 1.0
"""A GPU that has had nothing to time for so long counts as idle: its clocks may have fallen."""

WARM_SECONDS, PATIENCE_SECONDS = 0.2, 2.0
"""After idle time work runs so long at least, and so long at most where spells never agree."""

BRIEF_SECONDS = 0.05
"""Most time for agreeing where the GPU was busy just before, or the budget of the measurement where that is less."""


Timed = Callable[[int], float]
"""Runs work so many times, back to back, and says how many microseconds that took."""


class Clocks:
    """Knows when the GPU last ran work to be timed, and warms it up where needed. One for each GPU of a process.

    Args:
        now: seconds that pass.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._busy_until = -math.inf

    def settle(self, run: Timed, each_us: float, done_us: float = 0.0, budget_s: float = math.inf) -> bool:
        """Runs work until the clocks are stable, or patience ends; returns whether they are, as far as one can tell.

        Args:
            run: the work.
            each_us: how long it takes about.
            done_us: how long it has just run.
            budget_s: of the measurement to come.
        """
        if each_us >= 1e6 * WARM_SECONDS:  # the call that told how long it takes has warmed the clocks
            return True
        idle = self._now() - self._busy_until > IDLE_SECONDS
        least, most = (WARM_SECONDS, PATIENCE_SECONDS) if idle else (0.0, min(BRIEF_SECONDS, budget_s))
        spell_us = IDLE_SPELL_US if idle else SPELL_US
        spent, spells = done_us, [each_us]
        while spent < 1e6 * least or not _alike(spells):
            count = max(1, min(MAX_REPLAYS, math.ceil(spell_us / spells[-1])))
            if spent + count * spells[-1] > 1e6 * most:
                break
            lasted = run(count)
            spent += lasted
            spells.append(max(lasted / count, 1e-3))
        self.busy()
        return len(spells) < ALIKE or _alike(spells)

    def busy(self) -> None:
        """Tells that the GPU has worked until now."""
        self._busy_until = self._now()


def _alike(spells: list[float]) -> bool:
    last = spells[-ALIKE:]
    return len(last) == ALIKE and max(last) <= (1.0 + SPREAD) * min(last)
