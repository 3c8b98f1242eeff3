"""What the gate has to say of a winner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, or could not be.

    Attributes:
        name: "memcheck", "other data", ...
        outcome: how it ended.
        said: on what it ran, what it found, or why it was not run, as a clause.
    """

    name: str
    outcome: Outcome
    said: str

    def as_json(self) -> dict[str, str]:
        """The check as JSON values."""
        return asdict(self)


def sentences(checks: Iterable[Check]) -> list[str]:
    """One sentence for all that have the same to say: "memcheck, racecheck: passed, nothing found"."""
    names: dict[tuple[Outcome, str], list[str]] = {}
    for check in checks:
        names.setdefault((check.outcome, check.said), []).append(check.name)
    return [f"{', '.join(those)}: {outcome}, {said}" for (outcome, said), those in names.items()]


SKIPPED = Check("safety gate", Outcome.NOT_RUN, "the run ended before")
"""What there is to say of a winner that was never examined."""


def out_of_time(rejected: int) -> Check:
    """What there is to say of a winner for whose examination no time was left, after so many that would have won but failed."""
    return Check("safety gate", Outcome.NOT_RUN, f"time was up when it had rejected {rejected} faster ones")


def unfit(config: object, first: int, rows: int, reason: str) -> Check:
    """What there is to say of an artifact none of whose configs is fit for certain row counts.

    Args:
        config: the one that serves them, from `first` rows on.
        rows: the lowest of them that was looked at.
        reason: why it is not fit there.
    """
    return Check("row counts that best.cu has no fit config for", Outcome.FAILED,
                 f"do not call it with {rows} rows: {config}, which serves {first} rows and more, is not fit there, and no other "
                 f"was found: {reason}")


COMPANIONS = Check("safety gate of the configs that best.cu holds for other row counts", Outcome.NOT_RUN,
                   "each was only validated when it was chosen, at a row count of its range or as near as the cost allowed")
"""What there is to say of those that the artifact holds beside the winner."""
