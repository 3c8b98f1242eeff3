"""What there is to say of the measurements of a run: counts that add up over the processes that took them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Tally:
    """Counts of spells of samples, and the readings of the gauges from the smallest to the largest.

    Attributes:
        spells: those whose samples were used.
        capped: how many of them ran at the power limit.
        unsettled: before how many of them the clocks had not become stable.
        mingled: after how many of them, and of those discarded, other processes on the GPU could not be told from this one.
        discarded: how many more were discarded and taken again, by reason.
        disturbed: how many of those used were disturbed all the same, by reason.
        ranges: by unit, the smallest and the largest reading.
        absent: why nothing watched the GPU, as a clause; None where something did, or there was no GPU.
    """

    spells: int = 0
    capped: int = 0
    unsettled: int = 0
    mingled: int = 0
    discarded: Counter[str] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    absent: str | None = None

    def saw(self, unit: str, value: float | None) -> None:
        """One reading; None is none."""
        if value is not None:
            low, high = self.ranges.get(unit, (value, value))
            self.ranges[unit] = min(low, value), max(high, value)

    def add(self, other: Tally) -> None:
        """Counts what another process has counted."""
        self.spells += other.spells
        self.capped += other.capped
        self.unsettled += other.unsettled
        self.mingled += other.mingled
        self.discarded += other.discarded
        self.disturbed += other.disturbed
        for unit, ends in other.ranges.items():
            for value in ends:
                self.saw(unit, value)
        self.absent = self.absent or other.absent

    def said(self) -> tuple[str, ...]:
        """What is to be known, as clauses."""
        clauses = []
        if self.absent is not None:
            clauses.append(f"nothing watched the GPU's clocks, heat and other users ({self.absent})")
        if self.ranges:
            seen = ", ".join(f"{low:.0f} to {high:.0f} {unit}" for unit, (low, high) in self.ranges.items())
            clauses.append(f"while times were taken, the GPU was at {seen}")
        if self.mingled:
            clauses.append("whether other processes used the GPU meanwhile is not known: the driver knows processes by other "
                           "numbers than this one does, as in a container")
        clauses += [f"{_counted(count)} discarded and taken again: {why}" for why, count in self.discarded.most_common()]
        clauses += [f"{_counted(count)} disturbed at the last attempt too, and used: {why}"
                    for why, count in self.disturbed.most_common()]
        if self.capped:
            clauses.append(f"{self.capped} of {self.spells} spells of samples ran at the power limit")
        if self.unsettled:
            clauses.append(f"the clocks had not become stable before {self.unsettled} of {self.spells} spells of samples")
        return tuple(clauses)

    def as_json(self) -> dict[str, Any]:
        """The tally as JSON values; `from_json` reads it back."""
        return {"spells": self.spells, "capped": self.capped, "unsettled": self.unsettled,
                "mingled": self.mingled, "discarded": dict(self.discarded),
                "disturbed": dict(self.disturbed), "ranges": {unit: list(ends) for unit, ends in self.ranges.items()},
                "absent": self.absent}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Tally:
        """Raises KeyError, TypeError, ValueError: the values have another form."""
        return cls(values["spells"], values["capped"], values["unsettled"], values["mingled"], Counter(values["discarded"]),
                   Counter(values["disturbed"]), {unit: (low, high) for unit, (low, high) in values["ranges"].items()},
                   values["absent"])


def _counted(count: int) -> str:
    return "a spell of samples was" if count == 1 else f"{count} spells of samples were"
