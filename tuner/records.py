"""What a tuning run leaves behind: one record per candidate, in JSON Lines, and the facts the run was made under."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from codegen.config import Config
from codegen.space import parse_config
from tuner.compact import KEPT, Errors, shared
from tuner.errors import CannotWrite, InputError
from tuner.executors import Resources
from tuner.timing.regimes import REGIMES, Regime
from tuner.timing.stats import Summary
from tuner.validate import GradientError

SCHEMA = 1
"""Version of trials.jsonl and best.json. It rises whenever a field changes its meaning or goes."""

LONGEST_US = 1e12
"""No call was ever timed that takes eleven days; what says so is damaged."""

FINISHED = "finished"
"""In the header of trials.jsonl: whether the run came to its end. Files from before it was recorded do not say."""

END = "end"
"""In the header of trials.jsonl: what a run says of itself when it ends (report.run_end). Those that were killed do not."""


class Status(StrEnum):
    """What became of a candidate."""

    OK = "ok"
    REFUSED = "refused"
    COMPILE_ERROR = "compile error"
    LAUNCH_ERROR = "launch error"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"
    CRASH = "crash"
    WRONG = "wrong result"
    IMPLAUSIBLE = "implausible time"
    SLOWER = "slower"
    SPILLS = "spills registers"
    UNSAFE = "unsafe"
    VARIES = "not reproducible"
    NOT_RUN = "not run"


_NONE: Mapping[Regime, Summary] = {}


@dataclass(frozen=True, slots=True)
class Record:
    """One candidate.

    Attributes:
        config: what was tried.
        status: what became of it. Only OK may win.
        reason: why not, as a clause; None where it is OK.
        time_us: microseconds of one call; None where there is no time.
        measured: whether time_us was measured; otherwise it is predicted by the cost model.
        final_us: the time from the interleaved re-timing of the fastest; None for the others.
        errors: by wanted gradient.
        rows: the row counts at which it was validated by the search.
        gate_rows: those at which the gate did so, on other data; none where it was not examined, and in files from before they
            were kept apart.
        resources: what the device compiler reported, by kernel.
        times: final_us and the same in the other regime, with what is known of each; empty where there is no final time.
        source: the digest of its source (wisdom/source.py); empty where it was not rendered, and in files from before there was
            one.
    """

    config: Config
    status: Status
    reason: str | None = None
    time_us: float | None = None
    measured: bool = False
    final_us: float | None = None
    errors: Mapping[str, GradientError] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    resources: Mapping[str, Resources] = field(default_factory=dict)
    times: Mapping[Regime, Summary] = field(default_factory=lambda: _NONE)
    source: str = ""
    gate_rows: tuple[int, ...] = ()

    @property
    def best_us(self) -> float:
        """The time it is ranked by: the final one where there is one; infinite where there is none."""
        times = [time for time in (self.final_us, self.time_us) if time is not None]
        return times[0] if times else float("inf")

    @property
    def time_kind(self) -> str:
        """What to call its time wherever it is shown."""
        return "measured" if self.measured else "predicted"

    @property
    def worst_bound_ratio(self) -> float:
        """The largest error of any gradient in multiples of its bound; 0 where none was measured."""
        return max((error.bound_ratio for error in self.errors.values()), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """The record as JSON values; `from_json` reads it back."""
        time = {"us": self.time_us, "kind": self.time_kind, "final_us": self.final_us}
        return {
            "config": str(self.config), "status": self.status.value, "reason": self.reason,
            "time": time if self.time_us is not None else None,
            "errors": {
                name: {"normwise": _finite(error.normwise), "bound_ratio": _finite(error.bound_ratio)}
                for name, error in self.errors.items()},
            "rows": list(self.rows),
            "resources": {kernel: asdict(entry) for kernel, entry in self.resources.items()},
            "times": {regime: summary.as_json() for regime, summary in self.times.items()},
            "source": self.source, "gate_rows": list(self.gate_rows),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """Reads `as_json` back.

        Raises:
            CodegenError, AttributeError, KeyError, TypeError, ValueError: the values have another form, or make no sense.
        """
        time, found = values["time"] or {}, values.get("times", {})  # files from before there were two regimes have none
        time_us, final_us = time.get("us"), time.get("final_us")
        entries = (*values["resources"].values(), *found.values())
        gate_rows = values.get("gate_rows", ())
        always = (*values["rows"], *gate_rows, *(value for entry in entries for value in entry.values()))
        sometimes = (time_us, final_us, *(value for entry in values["errors"].values() for value in entry.values()))
        for value in (*always, *(value for value in sometimes if value is not None)):
            if not (isinstance(value, int | float) and math.isfinite(value)):
                raise ValueError(f"{value!r} is no finite number")
        if not all(entry["registers"] > 0 for entry in values["resources"].values()):
            raise ValueError("a kernel has no registers")
        reason, source = values["reason"], values.get("source", "")
        if not isinstance(source, str) or not isinstance(reason, str | None):
            raise TypeError(f"neither {reason!r} nor {source!r} may be anything but a text")
        return cls(
            parse_config(values["config"]), Status(values["status"]), reason, time_us, time.get("kind") == "measured", final_us,
            Errors({name: GradientError(**{key: math.inf if value is None else value for key, value in error.items()})
                    for name, error in values["errors"].items()}),
            shared(tuple(values["rows"])),
            _resources(tuple((kernel, Resources(**entry)) for kernel, entry in values["resources"].items())),
            {regime: Summary.from_json(found[regime]) for regime in REGIMES if regime in found} or _NONE, source,
            shared(tuple(gate_rows)))


@lru_cache(KEPT)
def _resources(entries: tuple[tuple[str, Resources], ...]) -> Mapping[str, Resources]:
    """One for all records that say the same."""
    return dict(entries)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The first line of trials.jsonl: what the records below it were made under.

    Attributes:
        shape: "B,S,H,O".
        dtype: data type of dy, x and dx.
        wants: the gradients computed, "dx,dgamma,...".
        deterministic: whether only bitwise reproducible kernels were admitted.
        eps: of the LayerNorm; an argument of every kernel, which nothing depends on but the data of the timing.
        accuracy: the accuracy class.
        executor: "cuda" or "host".
        device: the GPU, or the compiler of the host.
        target: the architecture the kernels are for.
        seed: of the data and the search.
        trials: the largest number of candidates.
        timeout_s: seconds that the run might take; None: no limit.
        date: when the run began, ISO 8601, UTC.
        command: how it was started.
        version: git revision of the sources where they lie in a repository, else the package's version.
        combinations: size of the whole product of parameter choices.
        valid: how many of them can run the problem and are worth trying.
        refused: why the others are not, with counts; of reasons that differ in figures alone the first stands for all.
        measures: whether times are measured; otherwise they are predicted.
        rates: where the rates behind the floor are from, "table" or "measured" (see Executor).
        param_dtype: data type of gamma, beta, w and their gradients; empty, as in files from before there was a choice, stands
            for `dtype`.
        regime: in which times decide; warm, as in files from before there was a choice.
        sources: the digest of all that renders kernels (provenance.sources_digest); empty in files from before it was recorded.
        versions: of the driver, the compiler and the packages, by name; none in files from before they were recorded.
    """

    shape: str
    dtype: str
    wants: str
    deterministic: bool
    eps: float
    accuracy: str
    executor: str
    device: str
    target: str
    seed: int
    trials: int
    timeout_s: float | None
    date: str
    command: str
    version: str
    combinations: int
    valid: int
    refused: Mapping[str, int]
    measures: bool = True
    rates: str = "table"
    param_dtype: str = ""
    regime: Regime = "warm"
    sources: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "param_dtype", self.param_dtype or self.dtype)

    def as_json(self) -> dict[str, Any]:
        """The header line's values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunInfo:
        """Reads `as_json` back.

        Raises:
            InputError: the values are of another schema version.
            AttributeError, TypeError: they have another form.
        """
        if values.get("schema") != SCHEMA:
            raise InputError(f"this file has schema version {values.get('schema')}, this program reads {SCHEMA}; tune again")
        for each in fields(cls):
            value = values.get(each.name, each.default)
            if value is not MISSING and not isinstance(value, _KINDS[str(each.type)]):
                raise TypeError(f"{each.name} is {value!r}")
        return cls(**{name: value for name, value in values.items() if name not in ("schema", FINISHED, END)})


_KINDS = {"str": str, "bool": bool, "int": int, "float": float | int, "float | None": float | int | None, "Regime": str,
          "Mapping[str, int]": dict, "Mapping[str, str]": dict}
"""What JSON makes of the fields of RunInfo."""


class Journal:
    """trials.jsonl while it grows: the header, then a line per record, each on disk before the next candidate begins.

    Every complete line is valid at every moment; a crash can cut off the last one.

    Args:
        path: the file; what was there is replaced.
        info: the header.
        records: of an earlier run, which this one goes on with.

    Raises:
        CannotWrite: the file cannot be written; from `add` and `settle` as well.
    """

    def __init__(self, path: Path, info: RunInfo, records: Iterable[Record] = ()) -> None:
        self._path = path
        self._info = info
        self.settle(records, finished=False)
        with _writing(path):
            self._file: TextIO = path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Ends the file; nothing can be added afterwards."""
        with _writing(self._path):  # what could not be added is tried again
            self._file.close()

    def add(self, record: Record) -> None:
        """Appends one record; where it cost anything to make, it outlives the machine from then on."""
        with _writing(self._path):
            self._file.write(_line(record.as_json()))
            self._file.flush()
            if record.status is not Status.NOT_RUN:
                os.fsync(self._file.fileno())

    def settle(self, records: Iterable[Record], finished: bool = True, end: Mapping[str, Any] | None = None) -> None:
        """Puts `records` in place of all that was added: the same candidates, now with their final times. `end`: as END."""
        header = _line({**self._info.as_json(), FINISHED: finished, **({} if end is None else {END: end})})
        write_text(self._path, header + "".join(_line(record.as_json()) for record in records))


def write_text(path: Path, text: str) -> None:
    """As write_bytes, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: under a temporary name beside it, then renamed.

    Raises:
        CannotWrite: there is no room, the folder cannot be written, ...
    """
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave the new name with nothing in it
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says of an OSError which file it is about: that of a full disk does not know."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(path, error) from error


def _finite(value: float) -> float | None:
    """JSON has no infinity; None stands for every error that is not finite."""
    return value if math.isfinite(value) else None


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n"
