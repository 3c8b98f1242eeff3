"""How times are taken, whoever's kernels they are: warm from replayed graphs, and cold with the L2 cache overwritten."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, Protocol

from tuner.executors import Timing

Work = Callable[[], None]
"""Enqueues work on a stream and returns at once."""

MIN_SAMPLE_US, MAX_REPEATS = 100.0, 200
"""As many calls stand in one graph as last so long, up to so many: events resolve half a microsecond."""

BUDGET_SECONDS = 1.0
"""GPU time of one measurement: a call that is so long that its samples would take more gives fewer of them."""

LEAST_SAMPLES = 5
"""So many there are however long they take."""

CLOCK_SECONDS = 0.2
"""So long each contestant runs before its samples, so that the clocks have risen."""

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
class Spread:
    """Many times of one thing, microseconds.

    Attributes:
        median: the middle one.
        iqr: between the first and the third quartile lies this much.
        samples: how many there are.
        noise: how far apart the medians of a first and a second measurement lie, as a share of the smaller.
    """

    median: float
    iqr: float
    samples: int
    noise: float

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Spread:
        """The spread of two measurements of the same, each of one sample at least."""
        both = [*first, *second]
        low, _, high = quantiles(both, n=4, method="inclusive")
        earlier, later = median(first), median(second)
        return cls(median(both), high - low, len(both), abs(earlier - later) / min(earlier, later))

    def as_json(self) -> dict[str, float]:
        """The spread as JSON values."""
        return asdict(self)


def warm(stream: Stream, work: Work, samples: int) -> Timing:
    """Times of one call of what `work` enqueues, replayed back to back from a graph.

    A sample is the mean over as many calls as last MIN_SAMPLE_US, so inputs that fit the caches are found there.
    """
    with stream.graph(work, 1) as replay:
        _run_for(stream, replay, min(_back_to_back(stream, replay, 3)))
        alone = min(_back_to_back(stream, replay, 3))
    repeats = max(1, min(MAX_REPEATS, math.ceil(MIN_SAMPLE_US / alone)))
    with stream.graph(work, repeats) as replay:
        times = _back_to_back(stream, replay, count_within(samples, repeats * alone))
    return Timing(tuple(time / repeats for time in times), repeats)


def cold(stream: Stream, work: Work, samples: int) -> Timing:
    """Times of single calls, each replayed from a graph of its own after the L2 cache was written over."""
    with stream.graph(work, 1) as replay:
        alone = min(_apart(stream, replay, 3))
        _run_for(stream, replay, alone)
        return Timing(tuple(_apart(stream, replay, count_within(samples, alone))), 1)


def count_within(samples: int, each_us: float) -> int:
    """As many of `samples` as fit into BUDGET_SECONDS, and LEAST_SAMPLES at least (or all there are to be)."""
    return min(samples, max(LEAST_SAMPLES, int(1e6 * BUDGET_SECONDS / each_us)))


def _run_for(stream: Stream, replay: Work, each_us: float) -> None:
    """Raises the clocks."""
    for _ in range(math.ceil(1e6 * CLOCK_SECONDS / each_us)):
        replay()
    stream.wait()


def _back_to_back(stream: Stream, replay: Work, count: int) -> list[float]:
    """Microseconds of each of `count` replays in a row, after one that is not measured."""
    replay()
    events = [stream.record()]
    for _ in range(count):
        replay()
        events.append(stream.record())
    stream.wait()
    return [stream.elapsed_us(begin, end) for begin, end in pairwise(events)]


def _apart(stream: Stream, replay: Work, count: int) -> list[float]:
    """Microseconds of each of `count` replays that find nothing in the L2 cache.

    While the GPU writes over the cache, Python enqueues the replay; the time holds no gap before it.
    """
    pairs = []
    for _ in range(count):
        stream.flush()
        begin = stream.record()
        replay()
        pairs.append((begin, stream.record()))
    stream.wait()
    return [stream.elapsed_us(begin, end) for begin, end in pairs]
