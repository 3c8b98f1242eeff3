"""How times are taken, whoever's kernels they are: warm from replayed graphs, and cold with the L2 cache overwritten."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from tuner.executors import Timing
from tuner.timing.clocks import Clocks
from tuner.timing.regimes import Regime

Work = Callable[[], None]
"""Enqueues work on a stream and returns at once."""

MIN_SAMPLE_US, MAX_REPEATS = 100.0, 200
"""As many calls stand in one graph as last so long, up to so many: events resolve half a microsecond, and starting a graph takes
a few."""

FLUSH_L2S = 4
"""A buffer of so many times the L2 cache is written between cold calls: enough whatever the cache's way to choose what goes."""


class Stream(Protocol):
    """What timing needs of one stream of a GPU, from PyCUDA or from PyTorch."""

    def record(self) -> Any:
        """An event at this place of the stream."""

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Microseconds between two events that have happened."""

    def wait(self) -> None:
        """Waits until all work on the stream is done."""

    def flush(self) -> None:
        """Enqueues writing over everything the L2 cache holds."""

    def graph(self, work: Work, repeats: int) -> AbstractContextManager[Work]:
        """What `work` enqueues, `repeats` times, captured; the context gives what enqueues one replay."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Attributes:
        samples: how many, if they fit into the budget.
        budget_s: about how long the GPU may take for them, seconds.
        least: so many there are however long they take.
    """

    samples: int
    budget_s: float
    least: int = 1

    def fitting(self, each_us: float) -> int:
        """As many samples as fit into the budget, and `least` at least (or all there are to be)."""
        return min(self.samples, max(self.least, int(1e6 * self.budget_s / max(each_us, 1e-3))))


def warm(stream: Stream, work: Work, effort: Effort, clocks: Clocks) -> Timing:
    """Times of one call of what `work` enqueues, replayed back to back from a graph, after the clocks are stable.

    Calls are put together until a sample lasts MIN_SAMPLE_US, up to MAX_REPEATS; a sample is the mean over them. A call beyond
    the budget is run twice in all, unless more is asked for.
    """
    repeats, settled = 1, True
    while True:
        with stream.graph(work, repeats) as replay:
            lasted = back_to_back(stream, replay, 1)[0]
            if repeats == 1:
                settled = clocks.settle(_counted(stream, replay), lasted, 2.0 * lasted, effort.budget_s)
                if lasted >= 1e6 * effort.budget_s and effort.fitting(lasted) == 1:
                    return _finished((lasted,), 1, "warm", settled, clocks)
            if lasted < 10.0 * MIN_SAMPLE_US:  # one hiccup must not pass for a long call
                lasted = min(back_to_back(stream, replay, 3))
            if lasted >= MIN_SAMPLE_US or repeats == MAX_REPEATS:
                times = back_to_back(stream, replay, effort.fitting(lasted))
                return _finished([time / repeats for time in times], repeats, "warm", settled, clocks)
        needed = math.ceil(1.1 * repeats * MIN_SAMPLE_US / max(lasted, 1.0))
        repeats = min(MAX_REPEATS, max(2 * repeats, needed))


def cold(stream: Stream, work: Work, effort: Effort, clocks: Clocks) -> Timing:
    """Times of single calls, each replayed from a graph of its own after the L2 cache was written over.

    The budget holds the writing too.
    """
    with stream.graph(work, 1) as replay:
        replay()
        first = _apart(stream, replay, 1)
        alone, whole = first[0]
        settled = clocks.settle(_counted(stream, replay), alone, alone + whole, effort.budget_s)
        count = effort.fitting(whole)
        times = _apart(stream, replay, count) if count > 1 else first
        return _finished([time for time, _ in times], 1, "cold", settled, clocks)


BY_REGIME: Mapping[Regime, Callable[[Stream, Work, Effort, Clocks], Timing]] = {"warm": warm, "cold": cold}
"""How a call is timed in each regime."""


def back_to_back(stream: Stream, replay: Work, count: int) -> list[float]:
    """Microseconds of each of `count` replays in a row, after one that is not measured.

    Work that ends sooner than Python enqueues the next is not measured rightly; a graph's replay is one piece of work.
    """
    replay()
    events = [stream.record()]
    for _ in range(count):
        replay()
        events.append(stream.record())
    stream.wait()
    return [stream.elapsed_us(begin, end) for begin, end in pairwise(events)]


def _finished(times: Sequence[float], repeats: int, regime: Regime, settled: bool, clocks: Clocks) -> Timing:
    clocks.busy()
    return Timing(tuple(times), repeats, regime, settled)


def _counted(stream: Stream, replay: Work) -> Callable[[int], float]:
    """What runs so many replays and gives their microseconds."""
    def run(count: int) -> float:
        begin = stream.record()
        for _ in range(count):
            replay()
        end = stream.record()
        stream.wait()
        return stream.elapsed_us(begin, end)

    return run


def _apart(stream: Stream, replay: Work, count: int) -> list[tuple[float, float]]:
    """Microseconds of each of `count` replays that find nothing in the L2 cache: the replay alone, and with the writing.

    While the GPU writes over the cache, Python enqueues the replay; the time holds no gap before it.
    """
    marks = []
    for _ in range(count):
        before = stream.record()
        stream.flush()
        begin = stream.record()
        replay()
        marks.append((before, begin, stream.record()))
    stream.wait()
    return [(stream.elapsed_us(begin, end), stream.elapsed_us(before, end)) for before, begin, end in marks]
