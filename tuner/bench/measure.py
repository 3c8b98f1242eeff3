"""How much is measured of each contestant, and what two measurements of one say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median
from typing import Any

from tuner.timing.measure import Effort
from tuner.timing.stats import iqr

BUDGET_SECONDS = 1.0
"""GPU time of one measurement: a call that is so long that its samples would take more gives fewer of them."""

LEAST_SAMPLES = 5
"""So many there are however long they take."""


def effort(samples: int) -> Effort:
    """What is spent on one measurement of so many samples."""
    return Effort(samples, BUDGET_SECONDS, LEAST_SAMPLES)


def number(value: object) -> float:
    """A number of a JSON file, as it stands there.

    Raises:
        TypeError: it is a text or something else; a figure in quotation marks was written by another program.
    """
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value


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
        earlier, later = median(first), median(second)
        return cls(median(both), iqr(both), len(both), abs(earlier - later) / min(earlier, later))

    def as_json(self) -> dict[str, float]:
        """The spread as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Spread:
        """Reads `as_json` back.

        Raises:
            TypeError, ValueError: the values have another form, or are no times.
        """
        found = cls(**values)
        if not all(math.isfinite(figure) for figure in astuple(found)) or found.median <= 0:
            raise ValueError(f"{found.median!r} us, with {found.noise!r} of noise, are no time")
        return found
