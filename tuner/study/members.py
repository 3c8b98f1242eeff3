"""The processes that share a study, and which of them are there no more.

No clocks are compared. Each process raises a counter of its own as long as it lives. The others look at it whenever they raise
theirs: one that did not change while they did so LOST_AFTER times has lost its process. While the storage cannot be reached
nobody raises anything, and so nobody is lost.
"""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress

from tuner.errors import StorageLost
from tuner.study.storage import Ledger

BEAT_S = 3.0
"""Between two of a process's own beats."""

LOST_AFTER = 10
"""Beats. A process may be stopped or wait for a disk for some seconds; half a minute is little beside what a lost trial costs."""

LEFT = -1
"""The counter of a process that has ended in order."""


class Members:
    """This process among those that share a study. A context manager: inside, it counts as alive.

    Attributes:
        own: this process's name; no other has the same.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.own = uuid.uuid4().hex
        self._ledger = ledger
        self._count = 0
        self._seen: dict[str, int | None] = {}
        self._unchanged: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> Members:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(StorageLost):
            self._ledger.beat(self.own, LEFT)

    def lost(self, member: str) -> bool:
        """Whether a member has ended, in order or not."""
        if member == self.own:
            return False
        return self._seen.setdefault(member, None) == LEFT or self._unchanged.get(member, 0) >= LOST_AFTER

    @property
    def alive(self) -> int:
        """How many there are, this process included."""
        return 1 + sum(member != self.own and not self.lost(member) for member in tuple(self._seen))

    def _live(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(StorageLost):  # whoever works will notice
                self._beat()

    def _beat(self) -> None:
        self._count += 1
        self._ledger.beat(self.own, self._count)
        beats = self._ledger.beats()
        for member in {*self._seen, *beats}:
            count = beats.get(member)
            same = member in self._seen and self._seen[member] == count
            self._unchanged[member] = self._unchanged.get(member, 0) + 1 if same else 0
            self._seen[member] = count
