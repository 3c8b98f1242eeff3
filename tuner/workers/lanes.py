"""Lanes: places where one request is answered at a time, each on a device of its own. One that is lost is used no more."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

L = TypeVar("L")


class Lanes(Generic[L]):
    """Lanes that are free or in use. Thread-safe.

    Attributes:
        living: those that are not lost, in their order.
    """

    def __init__(self, lanes: Iterable[L]) -> None:
        self.living = tuple(lanes)
        self._free = list(self.living)
        self._changed = threading.Condition()

    def take(self) -> L:
        """One that is free, the first of them; waits for it. It is in use until it is given back or lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            return self._free.pop(0)

    def give(self, lane: L) -> None:
        """Gives one back that was taken."""
        with self._changed:
            self._free = [one for one in self.living if one is lane or one in self._free]
            self._changed.notify()

    def lose(self, lane: L) -> bool:
        """Gives up one that was taken; False, and it is given back, where it is the last one."""
        with self._changed:
            if self.living == (lane,):
                self._free = [lane]
                self._changed.notify()
                return False
            self.living = tuple(one for one in self.living if one is not lane)
            return True

    def keep_first(self) -> L:
        """Gives up all but the first, none of which is in use."""
        with self._changed:
            self.living = self.living[:1]
            self._free = list(self.living)
            return self.living[0]
