"""What the benchmark finds: a row for each shape and data type, and what all rows were measured under."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from codegen.problem import Problem, Shape
from tuner.bench.floors import Floor, Rates
from tuner.bench.measure import Spread
from tuner.bench.peers import COMPLETE
from tuner.bench.shapes import NamedShape

SCHEMA = 2
"""Version of bench.json. It rises whenever a field changes its meaning or goes."""


Standing = Literal["faster", "level", "slower"]
"""How a time of ours stands to a peer's."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one row is about."""

    named: NamedShape
    problem: Problem

    @classmethod
    def of(cls, named: NamedShape, dtype: str, accuracy: str) -> Case:
        """Raises UnsupportedDtype, InvalidProblem: as Problem."""
        return cls(named, Problem.of(named.shape, dtype=dtype, accuracy=accuracy))

    @property
    def name(self) -> str:
        """The shape's name."""
        return self.named.name

    @property
    def shape(self) -> Shape:
        """The four sizes."""
        return self.named.shape

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells rows of one file apart: name, data type, class."""
        return self.name, self.problem.dtype, self.problem.accuracy

    @property
    def title(self) -> str:
        """For people: "gpt2 float32, class fp32"."""
        return f"{self.name} {self.problem.dtype}, class {self.problem.accuracy}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant in one row.

    Attributes:
        warm: one call, replayed back to back from a graph; None where it was not measured.
        cold: one call that finds nothing in the L2 cache.
        errors: relative Frobenius error of each gradient against float64; empty for what computes only a part.
        note: why something is missing, as a clause.
    """

    warm: Spread | None = None
    cold: Spread | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None

    @property
    def worst_error(self) -> float | None:
        """The largest of the errors, NaN where one is."""
        values = list(self.errors.values())
        return next((value for value in values if math.isnan(value)), max(values, default=None))

    def as_json(self) -> dict[str, Any]:
        """The entry as JSON values; errors that are not finite are null."""
        return {
            "warm": None if self.warm is None else self.warm.as_json(),
            "cold": None if self.cold is None else self.cold.as_json(),
            "errors": {name: error if math.isfinite(error) else None for name, error in self.errors.items()},
            "note": self.note,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Entry:
        """Reads `as_json` back; errors that were not finite are NaN."""
        warm, cold = (None if values[name] is None else Spread(**values[name]) for name in ("warm", "cold"))
        errors = {name: math.nan if error is None else error for name, error in values["errors"].items()}
        return cls(warm, cold, errors, values["note"])


@dataclass(frozen=True, slots=True)
class Row:
    """One shape at one data type and accuracy class.

    Attributes:
        case: which.
        floor: least times.
        ours: the tuned kernel.
        config: its config; None where there is none.
        origin: "known" from an earlier tuning run, or "tuned" here.
        judge: the data that errors of `ours` were taken on: "timed", the very data of the timing, or "validation".
        peers: by name, those that were asked for and can be had.
        reason: why the row is not complete, as a clause; None where `ours` was measured.
        gap: the largest known part of what lies between the floor and `ours`, as a clause; empty where none is known.
        part: which of the invocations that made the file measured it, counted from 0.
    """

    case: Case
    floor: Floor
    ours: Entry = field(default_factory=Entry)
    config: str | None = None
    origin: str | None = None
    judge: str | None = None
    peers: Mapping[str, Entry] = field(default_factory=dict)
    reason: str | None = None
    gap: str = ""
    part: int = 0

    @property
    def best_peer(self) -> str | None:
        """The fastest of the peers that compute everything; None where none was measured."""
        times = {name: entry.warm.median for name, entry in self.peers.items() if name in COMPLETE and entry.warm is not None}
        return min(times, key=times.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours: 2 is twice as fast."""
        best = self._best
        return None if best is None or self.ours.warm is None else best.median / self.ours.warm.median

    @property
    def standing(self) -> Standing | None:
        """How ours stands to the best peer. Level: the two times lie no further apart, as a share of the smaller, than their
        noises together, so that measured once more either might be the smaller."""
        best, ours = self._best, self.ours.warm
        if best is None or ours is None:
            return None
        if abs(best.median - ours.median) <= (best.noise + ours.noise) * min(best.median, ours.median):
            return "level"
        return "faster" if ours.median < best.median else "slower"

    @property
    def _best(self) -> Spread | None:
        return None if self.best_peer is None else self.peers[self.best_peer].warm

    @property
    def share(self) -> float | None:
        """The floor over our time: 1 would be all that the GPU allows."""
        return None if self.ours.warm is None else self.floor.us / self.ours.warm.median

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        problem = self.case.problem
        return {
            "name": self.case.name, "shape": str(self.case.shape), "dtype": problem.dtype, "accuracy": problem.accuracy,
            "reason": self.reason, "config": self.config, "origin": self.origin, "judge": self.judge,
            "ours": self.ours.as_json(), "peers": {name: entry.as_json() for name, entry in self.peers.items()},
            "best_peer": self.best_peer, "ratio": self.ratio, "floor": self.floor.as_json(), "share": self.share,
            "gap": self.gap, "part": self.part,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        """Reads `as_json` back."""
        case = Case.of(NamedShape(values["name"], Shape.parse(values["shape"])), values["dtype"], values["accuracy"])
        peers = {name: Entry.from_json(entry) for name, entry in values["peers"].items()}
        return cls(case, Floor.from_json(values["floor"]), Entry.from_json(values["ours"]), values["config"], values["origin"],
                   values["judge"], peers, values["reason"], values["gap"], values["part"])


@dataclass(frozen=True, slots=True)
class Setting:
    """What the rows of one invocation were measured under.

    Attributes:
        command: how the benchmark was started.
        date: when, ISO 8601, UTC.
        version: git revision of the sources.
        device: the GPU.
        versions: of the driver, PyTorch, ...
        seed: of the data.
        samples: how many of each time were asked for, in each of two measurements.
        peers: those asked for.
        rates: what the floors are from.
        absent: why there are no peers, as a sentence; None where there are, or none were asked for.
        asked: titles of the rows that were asked for; none in files from before they were recorded.
    """

    command: str
    date: str
    version: str
    device: str
    versions: Mapping[str, str]
    seed: int
    samples: int
    peers: tuple[str, ...]
    rates: Rates
    absent: str | None = None
    asked: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The setting as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Setting:
        """Reads `as_json` back.

        Raises:
            KeyError, TypeError: the values have another form.
        """
        names = {"peers": tuple(values["peers"]), "asked": tuple(values.get("asked", ()))}
        if not all(isinstance(title, str) for title in names["asked"]):
            raise TypeError(f"{names['asked']!r} are no titles of rows")
        return cls(**{**values, **names, "rates": Rates(**values["rates"])})


@dataclass(frozen=True, slots=True)
class Results:
    """What one file holds.

    Attributes:
        parts: the invocations that measured its rows, in order; they agree in all that sheet.COMMON names.
        rows: the rows of one data type and class stand together.
    """

    parts: tuple[Setting, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Titles of the rows that were asked for, by whichever invocation, and are not there."""
        there = {row.case.title for row in self.rows}
        return tuple(dict.fromkeys(title for part in self.parts for title in part.asked if title not in there))

    def with_row(self, row: Row) -> Results:
        """One row more, in the place of an earlier one of the same case, else behind those of its data type and class."""
        keys = [old.case.key for old in self.rows]
        at = keys.index(row.case.key) if row.case.key in keys else len(keys)
        rows = [*self.rows[:at], row, *self.rows[at + 1:]]
        sections = list(dict.fromkeys(one.case.key[1:] for one in rows))
        return replace(self, rows=tuple(sorted(rows, key=lambda one: sections.index(one.case.key[1:]))))

    def as_json(self) -> dict[str, Any]:
        """The results as JSON values."""
        return {"schema": SCHEMA, "parts": [part.as_json() for part in self.parts], "rows": [row.as_json() for row in self.rows]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Results:
        """Reads `as_json` back.

        Raises:
            AttributeError, CodegenError, KeyError, TypeError, ValueError: the values have another form.
        """
        if values["schema"] != SCHEMA:
            raise ValueError(f"schema version {values['schema']}, where this program reads {SCHEMA}")
        parts, rows = values["parts"], values["rows"]
        return cls(tuple(Setting.from_json(part) for part in parts), tuple(Row.from_json(row) for row in rows))
