"""What many times of one thing say: the median, how they spread, and how well the median is known.

The interval of the median is the nonparametric one of order statistics (W. J. Conover, Practical Nonparametric Statistics, 3rd
ed., 3.2; for benchmarks T. Hoefler and R. Belli, "Scientific Benchmarking of Parallel Computing Systems", SC 2015): of n
independent values, as many lie below the median of their distribution as heads fall in n tosses of a coin, whatever that
distribution. So the k-th smallest and the k-th largest enclose it with probability 1 - 2*P(heads < k). Nothing is assumed of the
shape of the distribution, which for times is skewed and has several peaks. That the values are independent is assumed, and those
of one measurement, which share clocks and neighbours, are not quite. So where a thing was measured in several rounds, a round is
one value: its own median.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

LEVEL = 0.95
"""How sure an interval is to be, at least, where there are values enough: six."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a median lies.

    Attributes:
        low, high: its ends, two of the values.
        level: the probability with which it encloses the median. Below LEVEL where there are fewer than six values: then it
            reaches from the smallest to the largest, and one value alone says nothing (0).
    """

    low: float
    high: float
    level: float


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The shortest interval of order statistics, symmetric in rank, that encloses the median with probability `level`.

    Args:
        values: one at least.
    """
    ordered, n = sorted(values), len(values)

    def enclosed(fewer: int) -> float:
        """The probability that is left, given in how many of the 2^n series of tosses fewer than `rank` are heads."""
        return 1.0 - fewer / (1 << (n - 1))

    rank, fewer = 1, 1
    while 2 * (rank + 1) <= n + 1 and enclosed(fewer + math.comb(n, rank)) >= level:
        fewer += math.comb(n, rank)
        rank += 1
    return Interval(ordered[rank - 1], ordered[n - rank], enclosed(fewer))


def iqr(values: Sequence[float]) -> float:
    """How far the first and the third quartile lie apart; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


@dataclass(frozen=True, slots=True)
class Summary:
    """Many times of one thing, microseconds.

    Attributes:
        median: of the rounds' medians, where there were several, else of the samples.
        iqr: between the first and the third quartile of all samples lies this much.
        low, high: the interval of the median, over rounds where there were several, else over samples.
        level: of that interval; see Interval.
        samples: how many there are.
        rounds: in how many rounds they were taken.
    """

    median: float
    iqr: float
    low: float
    high: float
    level: float
    samples: int
    rounds: int = 1

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Summary:
        """Of one round at least, of one sample each at least."""
        samples = [time for times in rounds for time in times]
        values = samples if len(rounds) == 1 else [median(times) for times in rounds]
        known = interval(values)
        return cls(median(values), iqr(samples), known.low, known.high, known.level, len(samples), len(rounds))

    def as_json(self) -> dict[str, Any]:
        """The summary as JSON values; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        """Raises TypeError: the values have another form."""
        return cls(**values)
