"""Wisdom as data: a key says what kind of problem on which GPU, a point which kernel won at one row count."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from codegen.config import Config
from codegen.errors import CodegenError, InvalidConfig
from codegen.problem import Problem
from codegen.space import parse_config
from tuner.errors import InputError
from tuner.executors.cuda_limits import slug
from tuner.timing import regimes as timing

SCHEMA = 1
"""Version of the files. It rises whenever a field changes its meaning or goes; files of other versions are left alone."""

MOST_US = 3.6e9
"""An hour: no call takes as long."""

MOST_ROWS = 1 << 63
"""One more than kernels can count."""

PREDICTED = "predicted"
REGIMES = (*timing.REGIMES, PREDICTED)
"""How times came about: measured warm or cold (tuner.timing.regimes), or predicted by the cost model. Times of two regimes are
never in one file."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What two points must agree in for their times to be about the same thing.

    Attributes:
        gpu: the device as its driver names it, "NVIDIA H200"; of predictions the architecture that they are for.
        arch: the nvcc architecture, "sm_90a".
        hidden: H.
        out: O.
        dtype: data type of dy, x and dx.
        param_dtype: data type of gamma, beta, w and their gradients.
        accuracy: the class every kernel had to meet.
        wants: the gradients computed, "dx,dgamma,...".
        deterministic: whether only bitwise reproducible kernels were admitted.
        regime: one of REGIMES.

    Raises:
        InputError: the values are of other types or describe no problem.
    """

    gpu: str
    arch: str
    hidden: int
    out: int
    dtype: str
    param_dtype: str
    accuracy: str
    wants: str
    deterministic: bool
    regime: str

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)).__name__ != field.type:
                raise InputError(f"{field.name} must be of type {field.type}, not {getattr(self, field.name)!r}")
        if self.regime not in REGIMES:
            raise InputError(f"there is no regime {self.regime!r}; there are {', '.join(REGIMES)}")
        if not slug(self.gpu):
            raise InputError(f"{self.gpu!r} is no name of a GPU")
        try:
            problem = self.problem(1)
        except CodegenError as error:
            raise InputError(str(error)) from error
        if (problem.param_dtype, problem.accuracy, problem.wants_key) != (self.param_dtype, self.accuracy, self.wants):
            raise InputError(f"data types, class and gradients must be written out in their order, unlike {self.wants!r}")

    def problem(self, rows: int) -> Problem:
        """The problem at a row count."""
        return Problem(rows, self.hidden, self.out, self.dtype, frozenset(self.wants.split(",")), self.deterministic,
                       self.param_dtype, self.accuracy)

    @property
    def path(self) -> str:
        """Where its file lies below a folder of wisdom: what it mostly is about in clear, and a digest of all of it."""
        digest = hashlib.sha256(json.dumps([SCHEMA, self.as_json()], sort_keys=True).encode()).hexdigest()[:12]
        return f"{slug(self.gpu)}/{self.hidden}x{self.out}-{self.dtype}-{self.accuracy}-{self.regime}-{digest}.json"

    @property
    def pattern(self) -> str:
        """Matches the paths of all keys of the same GPU, H, O and data type."""
        return f"{slug(self.gpu)}/{self.hidden}x{self.out}-{self.dtype}-*.json"

    def as_json(self) -> dict[str, Any]:
        """The key as JSON values; `Key(**values)` reads it back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Point:
    """The winner of one run.

    Attributes:
        rows: M, the row count it was tuned for.
        config: its text; kept also where this program has no such config any more.
        us: microseconds of one call.
        interval: where the median lies, microseconds, with the confidence tuner.timing.stats.LEVEL or more; None where that is
            not known.
        date: when the run began, ISO 8601, UTC.
        version: of the program that ran.
        source: the digest of the kernel's source (source.py); empty where it is not known, as in older results.
        more: JSON of what a file has besides, from a later version of this program; it is kept as it is.

    Raises:
        InputError: the values are of other types or out of range.
    """

    rows: int
    config: str
    us: float
    interval: tuple[float, float] | None = None
    date: str = ""
    version: str = ""
    source: str = ""
    more: str = "{}"

    def __post_init__(self) -> None:
        if type(self.rows) is not int or not 1 <= self.rows < MOST_ROWS:
            raise InputError(f"rows must be a whole number from 1 to {MOST_ROWS - 1}")
        texts = (self.config, self.date, self.version, self.source)
        if not all(isinstance(text, str) for text in texts) or not self.config:
            raise InputError(f"config, date, version and source must be texts, unlike {texts!r}")
        object.__setattr__(self, "us", _microseconds(self.us))
        if self.interval is not None:
            low, high = (_microseconds(bound) for bound in self.interval)
            object.__setattr__(self, "interval", (low, high))

    @property
    def parsed(self) -> Config | None:
        """The config; None where this program has none of that text."""
        try:
            return parse_config(self.config)
        except InvalidConfig:
            return None

    def as_json(self) -> dict[str, Any]:
        """The point as JSON values; `from_json` reads it back."""
        own = {**asdict(self), "interval": None if self.interval is None else list(self.interval)}
        return {**json.loads(own.pop("more")), **own}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Point:
        """Reads `as_json` back.

        Raises:
            InputError, TypeError, ValueError: the values have another form.
        """
        names = {field.name for field in fields(cls)} - {"more"}
        own = {name: value for name, value in values.items() if name in names}
        more = {name: value for name, value in values.items() if name not in names}
        interval = own.get("interval")
        return cls(**{**own, "interval": None if interval is None else tuple(interval)}, more=json.dumps(more, sort_keys=True))


@dataclass(frozen=True, slots=True)
class Entry:
    """All points of one key, by row count, at each the likeliest best first: the content of one file."""

    key: Key
    points: tuple[Point, ...]

    def as_json(self) -> dict[str, Any]:
        """The entry as JSON values; `from_json` reads it back."""
        return {"schema": SCHEMA, "key": self.key.as_json(), "points": [point.as_json() for point in self.points]}

    @classmethod
    def from_json(cls, values: Any) -> Entry:
        """Reads `as_json` back.

        Raises:
            OtherSchema: they were written by another version of this program.
            InputError, KeyError, TypeError, ValueError: the values have another form.
        """
        if not isinstance(values, dict) or not isinstance(values.get("points"), list):
            raise InputError("it is no wisdom")
        if values["schema"] != SCHEMA:
            raise OtherSchema(f"it has schema version {values['schema']}, and this program reads {SCHEMA}")
        if strange := {*values} - {"schema", "key", "points"} | {*values["key"]} - {field.name for field in fields(Key)}:
            raise OtherSchema(f"it says {', '.join(sorted(strange))}, which this program does not know")
        return cls(Key(**values["key"]), tuple(map(Point.from_json, values["points"])))


class OtherSchema(InputError):
    """The file is of another version of this program, and no business of this one's."""


def _microseconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < MOST_US):
        raise InputError("a time must be a number of microseconds above 0, and less than an hour")
    return float(value)
