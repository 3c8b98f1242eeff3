"""What a run's records say: its families, how the search went, why others lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from reports.run import Run
from tuner.outcome import REJECTED
from tuner.records import Record, Status


@dataclass(frozen=True, slots=True)
class Family:
    """The candidates of one variant.

    Attributes:
        name: the variant.
        tried: how many were tried.
        valid: those that passed every test, by rising time.
        predicted_us: the predicted times of those not run, by rising time.
    """

    name: str
    tried: int
    valid: tuple[Record, ...]
    predicted_us: tuple[float, ...]

    @property
    def best(self) -> Record | None:
        """The fastest valid one."""
        return self.valid[0] if self.valid else None

    @property
    def median_us(self) -> float | None:
        """The median time of the valid ones, microseconds."""
        return median(record.best_us for record in self.valid) if self.valid else None


def families(run: Run) -> list[Family]:
    """By the time of their best; those without a valid candidate last."""
    names = dict.fromkeys(record.config.variant for record in (*run.tried, *run.untried))
    found = []
    for name in names:
        mine = [record for record in run.tried if record.config.variant == name]
        valid = sorted((record for record in mine if record.status is Status.OK), key=lambda record: record.best_us)
        predicted = sorted(record.time_us for record in run.untried
                           if record.config.variant == name and record.time_us is not None and not record.measured)
        found.append(Family(name, len(mine), tuple(valid), tuple(predicted)))
    return sorted(found, key=lambda family: family.valid[0].best_us if family.valid else float("inf"))


@dataclass(frozen=True, slots=True)
class Step:
    """A candidate that was faster than all before it, by the times of the search.

    Attributes:
        number: of the candidate, in the order in which they were tried, from 1.
        record: the candidate.
        time_us: its time in the search, which a final time may have corrected since.
    """

    number: int
    record: Record
    time_us: float


def improvements(run: Run) -> list[Step]:
    """How the best time fell."""
    steps: list[Step] = []
    for number, record in enumerate(run.tried, 1):
        if record.status is Status.OK and record.time_us is not None and (not steps or record.time_us < steps[-1].time_us):
            steps.append(Step(number, record, record.time_us))
    return steps


@dataclass(frozen=True, slots=True)
class Reason:
    """Why candidates were rejected.

    Attributes:
        status: what became of them.
        count: how many there are.
        first: the reason of the first.
    """

    status: str
    count: int
    first: str


def reasons(records: Iterable[Record]) -> list[Reason]:
    """By falling count."""
    rejected = [record for record in records if record.status in REJECTED]
    counts = Counter(record.status for record in rejected)
    return [Reason(status.value, count, next(record.reason or "" for record in rejected if record.status is status))
            for status, count in counts.most_common()]
