"""How long things take on this machine while a run is at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

FROM_STORE_S = 0.2
"""What is compiled in less was in the store, and says nothing of how long compiling takes."""


@dataclass(slots=True)
class Pace:
    """How long one thing after another takes on this machine, now that it has something else to do as well. Thread-safe.

    Attributes:
        compile_s, judge_s: the longest that a candidate took so far; None before the first.
        busy: seconds by the clock for each second of CPU time, on the whole.
    """

    compile_s: float | None = None
    judge_s: float | None = None
    busy: float = 1.0
    _clock_s: float = field(default=0.0, repr=False)
    _cpu_s: float = field(default=0.0, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def compiled(self, seconds: float) -> None:
        """A candidate was compiled in so long."""
        if seconds >= FROM_STORE_S:
            with self._lock:
                self.compile_s = max(seconds, self.compile_s or 0.0)

    def judged(self, seconds: float) -> None:
        """A candidate was judged in so long."""
        with self._lock:
            self.judge_s = max(seconds, self.judge_s or 0.0)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The block computes in this thread and waits for nothing: how busy the machine is shows."""
        clock, cpu = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._clock_s += time.monotonic() - clock
            self._cpu_s += time.thread_time() - cpu
            if self._cpu_s > 0.0:
                self.busy = max(1.0, self._clock_s / self._cpu_s)
