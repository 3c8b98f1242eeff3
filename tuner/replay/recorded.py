"""A recorded space: what became of each valid config of one problem on one GPU. The file is JSON, packed with xz.

It holds columns, one entry a config, in the order of the space: its text, the number of its status, of its reason and of its
resources in a list of the different ones, its time, and its second, more careful time where it was among the fastest. A space may
be recorded in part; `Recorded.valid` says how large it is.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from codegen.config import Config
from codegen.errors import CodegenError
from codegen.limits import Limits
from codegen.problem import Problem, Shape
from codegen.space import parse_config
from tuner.errors import InputError
from tuner.executors import Resources
from tuner.records import Status, write_bytes

SCHEMA = 1
"""Version of the file. It rises whenever a field changes its meaning or goes."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one config.

    Attributes:
        status: OK where it has a time.
        reason: why it has none, as a clause.
        time_us: microseconds of one call.
        again_us: of the fastest: the median of several rounds, all of them in turns.
        resources: what the compiler reported, by kernel.
    """

    status: Status
    reason: str | None = None
    time_us: float | None = None
    again_us: float | None = None
    resources: Mapping[str, Resources] = field(default_factory=dict)

    @property
    def best_us(self) -> float | None:
        """The more careful of its times; None where it has none."""
        return self.time_us if self.again_us is None else self.again_us


@dataclass(frozen=True, slots=True)
class Slice:
    """One session of recording.

    Attributes:
        date: when it began, ISO 8601, UTC.
        version: revision of the sources.
        command: how it was started.
    """

    date: str
    version: str
    command: str


@dataclass(frozen=True, slots=True)
class Origin:
    """What a space was recorded under; sessions that differ in any of it do not go into one file.

    Attributes:
        shape: "B,S,H,O".
        dtype, param_dtype, accuracy, wants, deterministic: as in Problem; `wants` as text.
        eps, seed: of the data of the timing.
        variants: those that take part.
        device: the GPU.
        compiler: nvcc and its version.
        sources: a digest of what the templates render.
        limits: of the GPU.
    """

    shape: str
    dtype: str
    param_dtype: str
    accuracy: str
    wants: str
    deterministic: bool
    eps: float
    seed: int
    variants: tuple[str, ...]
    device: str
    compiler: str
    sources: str
    limits: Limits

    def problem(self) -> Problem:
        """What the kernels compute."""
        return Problem.of(Shape.parse(self.shape), dtype=self.dtype, wants=frozenset(self.wants.split(",")),
                          deterministic=self.deterministic, param_dtype=self.param_dtype, accuracy=self.accuracy)

    def differs(self, other: Origin) -> str | None:
        """The name of the first field in which they differ; None: they do not. The rates in the limits may be measured anew."""
        mine, theirs = asdict(self), asdict(other)
        return next((name for name in mine if name != "limits" and mine[name] != theirs[name]), None)


@dataclass(slots=True)
class Recorded:
    """A recorded space; `results` grows while it is recorded.

    Attributes:
        origin: what it was recorded under.
        valid: how many configs the space has.
        slices: the sessions, in order.
        results: by config.
    """

    origin: Origin
    valid: int
    slices: list[Slice] = field(default_factory=list)
    results: dict[Config, Result] = field(default_factory=dict)

    @property
    def times(self) -> dict[Config, float]:
        """Microseconds of the configs that have a time."""
        return {config: result.best_us for config, result in self.results.items() if result.best_us is not None}

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all.

        Raises:
            OSError: the folder cannot be written.
        """
        results = dict(self.results)
        reasons, reason = _numbered(result.reason for result in results.values())
        resources, resource = _numbered(tuple(sorted(
            (name, entry.registers, entry.shared_bytes, entry.spill_bytes, entry.stack_bytes)
            for name, entry in result.resources.items())) for result in results.values())
        content = {
            "schema": SCHEMA, "origin": asdict(self.origin), "valid": self.valid, "slices": [asdict(one) for one in self.slices],
            "reasons": reasons, "resources": resources,
            "columns": {
                "config": [str(config) for config in results], "status": [result.status.value for result in results.values()],
                "reason": reason, "time_us": [_rounded(result.time_us) for result in results.values()],
                "again_us": [_rounded(result.again_us) for result in results.values()], "resources": resource}}
        write_bytes(path, lzma.compress(json.dumps(content, separators=(",", ":")).encode()))


def load(path: Path) -> Recorded:
    """Reads a recorded space.

    Raises:
        InputError: the file cannot be read, is no recorded space, or its configs do not exist any more.
    """
    try:
        content = json.loads(lzma.decompress(path.read_bytes()))
        if content["schema"] != SCHEMA:
            raise InputError(f"{path} has schema version {content['schema']}, this program reads {SCHEMA}; record it again")
        return _read(content)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}); name a file that `python -m tuner record` wrote") from error
    except CodegenError as error:
        raise InputError(f"{path} was recorded for other variants ({error}); record the space again") from error
    except (lzma.LZMAError, EOFError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged or is no recorded space; record it again") from error


def _read(content: Mapping[str, Any]) -> Recorded:
    origin = content["origin"]
    tables = [{name: Resources(registers, shared, spill, stack) for name, registers, shared, spill, stack in entry}
              for entry in content["resources"]]
    columns, reasons = content["columns"], content["reasons"]
    rows = zip(*(columns[name] for name in ("config", "status", "reason", "time_us", "again_us", "resources")), strict=True)
    results = {
        parse_config(config): Result(Status(status), reasons[reason], time_us, again_us, tables[resources])
        for config, status, reason, time_us, again_us, resources in rows}
    return Recorded(
        Origin(**{**origin, "variants": tuple(origin["variants"]), "limits": Limits(**origin["limits"])}),
        content["valid"], [Slice(**one) for one in content["slices"]], results)


def _numbered(values: Iterable[_T]) -> tuple[Sequence[_T], list[int]]:
    """The different values, and for each value its number among them."""
    numbers: dict[_T, int] = {}
    column = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), column


def _rounded(time_us: float | None) -> float | None:
    """To six digits: no clock is better."""
    return None if time_us is None else float(f"{time_us:.6g}")
