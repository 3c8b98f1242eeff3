"""When the parts of a tuning run end, so that all of it ends in the time it was given.

The end of the time belongs, from the last part to the first, to the files; to the page, where that is no more than PAGE_SHARE of
all; to the ablation, where its share is long enough to learn something; to the companions of best.cu, as far as they are not made
while the gate examines the winner; and to the gate. What is left is for the search. What the companions take is estimated anew
from what compiling and judging candidates has taken so far (Pace), so all moments move while a run goes on; what is kept is
bounded, so that the search has three tenths of the time at least.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tuner.artifact import MAX_CONFIGS
from tuner.gate.gate import LEAST_SECONDS, seconds_of
from tuner.pace import Pace

ABLATION_SHARE, LEAST_ABLATION_S = 1 / 20, 3.0
"""Part of the time of a run on a GPU that is kept to change one parameter of the winner at a time. Where it is less than the
seconds, in which a few kernels can be timed three times, nothing is kept."""

FILES_S, FILES_SHARE = 0.5, 1 / 20
"""CPU time for best.cu, best.h, best.json, report.md and trials.jsonl to be written and for processes to end, and the largest
part of the time that is kept for that."""

PAGE_S, PAGE_SHARE = 3.0, 1 / 10
"""CPU time of a core that report.html takes, with the libraries that it is drawn with. Where that is more than this part of the
time of a run, nothing is kept for it, and it is built only if time is left."""

COMPANIONS, COMPANIONS_SHARE, COMPANIONS_SHARE_CPU = MAX_CONFIGS - 1, 1 / 4, 2 / 5
"""Configs that best.cu has beside the winner at most, and the largest part of the time that is kept for them. On the CPU each of
them takes as long as a candidate."""

GATE_SHARE_CPU = 1 / 10
"""The largest part of the time that is kept for the gate without a GPU."""

COMPILE_S, JUDGE_S = 5.0, 1.0
"""CPU time for a kernel to be compiled, and to be judged, before the first of the run shows how long that takes here."""

PROVE_S, PROVE_S_CPU = 1.0, 4.0
"""CPU time that the proof of a companion takes at least, with a GPU and without: mostly that of its data, and of running it."""

_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Schedule:
    """Moments of `clock`, which is time.monotonic but in tests.

    Attributes:
        timeout: seconds that all may take, from `begins` on; infinite: no limit.
        measures: whether on a GPU.
        ablation: whether the run ends with one.
        files: whether best.cu and its companions, and a page, are written afterwards.
        begins: when the run began.
        pace: how long things take.
    """

    timeout: float
    measures: bool
    ablation: bool
    files: bool
    begins: float
    pace: Pace = field(default_factory=Pace)
    clock: Callable[[], float] = time.monotonic

    @property
    def ends(self) -> float:
        """When all must be over."""
        return self.begins + self.timeout

    @property
    def page_s(self) -> float:
        """What the page will take."""
        return PAGE_S * self.pace.busy

    @property
    def stops(self) -> float:
        """When the ablation must be over, and all else that the files are not waiting for."""
        if not self.files:
            return self.ends
        page_s = self.page_s if self.page_s <= PAGE_SHARE * self.timeout else 0.0
        return self.ends - min(FILES_S * self.pace.busy, FILES_SHARE * self.timeout) - page_s

    @property
    def proves(self) -> float:
        """When the companions must be proven."""
        share = ABLATION_SHARE * self.timeout if self.measures and self.ablation else 0.0
        return self.stops - (share if share >= LEAST_ABLATION_S and math.isfinite(share) else 0.0)

    @property
    def closes(self) -> float:
        """When the gate must have examined the fastest."""
        left = self._companions_s() - (self._gate_s() if self.measures else 0.0)
        share = COMPANIONS_SHARE if self.measures else COMPANIONS_SHARE_CPU
        return self.proves - min(max(0.0, left), share * self.timeout)

    @property
    def gives_up(self) -> float:
        """When what still runs of the search is stopped; the gate has at least half of its time."""
        return self.closes - self._gate_s() / 2

    @property
    def finds(self) -> float:
        """When the fastest must be found: candidates tried, finalists timed."""
        return self.closes - self._gate_s()

    def passed(self, share: float) -> bool:
        """Whether such a part of the time to find the fastest is over."""
        return math.isfinite(self.timeout) and self.clock() >= self.begins + share * (self.finds - self.begins)

    def given_up(self) -> bool:
        """Whether what still runs of the search is stopped."""
        return self.clock() >= self.gives_up

    def closed(self) -> bool:
        """Whether the time of the gate is over."""
        return self.clock() >= self.closes

    def stopped(self) -> bool:
        """Whether nothing but the files may be made any more."""
        return self.clock() >= self.stops

    def left_for_proofs(self) -> float:
        """Seconds until nothing but the files is left to be made; threads can wait for no more than a year."""
        return min(max(0.0, self.stops - self.clock()), 3e7)

    def has_time_for_page(self) -> bool:
        """Whether the page can be built before all must be over."""
        return self.clock() + self.page_s <= self.ends

    def took_text(self) -> str:
        """How long it has taken so far, as a clause."""
        took = f"took {self.clock() - self.begins:.1f} s"
        return took + (f" of {self.timeout:g} s" if math.isfinite(self.timeout) else "")

    def _gate_s(self) -> float:
        """On the CPU it validates once more, on other data, when what is being judged has ended."""
        if not math.isfinite(self.timeout):
            return 0.0
        if self.measures:
            return seconds_of(self.timeout)
        return min(2 * self._judge_s(), LEAST_SECONDS, GATE_SHARE_CPU * self.timeout)

    def _judge_s(self) -> float:
        return JUDGE_S * self.pace.busy if self.pace.judge_s is None else self.pace.judge_s

    def _companions_s(self) -> float:
        """On a GPU they are compiled together and proven one by one. On the CPU compilers and kernels share the cores, as
        they did when they were timed."""
        if not self.files:
            return 0.0
        compile_s = COMPILE_S * self.pace.busy if self.pace.compile_s is None else self.pace.compile_s
        prove_s = max(self._judge_s(), self.pace.busy * (PROVE_S if self.measures else PROVE_S_CPU))
        if self.measures:
            return compile_s + COMPANIONS * prove_s
        return COMPANIONS * (compile_s + prove_s) / len(os.sched_getaffinity(0))


@contextmanager
def stopped_at(moment: Callable[[], float], stop: Callable[[], object]) -> Iterator[threading.Event]:
    """Calls `stop` from another thread at a moment of time.monotonic(), which may move, unless the block has ended by then. The
    event says after the block whether it did."""
    ended, stopped = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(_TICK_S):
            if time.monotonic() >= moment():
                stopped.set()
                stop()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        ended.set()
        thread.join()  # where it has begun to stop, nothing new may begin before it has


def process_began() -> float:
    """When this process was started, as a moment of time.monotonic(); now, where the system does not say so."""
    now = time.monotonic()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc(5): starttime, since the boot
    except (OSError, ValueError, IndexError):
        return now
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - age if 0.0 <= age < now else now
