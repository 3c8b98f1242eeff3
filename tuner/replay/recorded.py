"""A recorded space: what became of each valid config of one problem on one GPU. The file is JSON, packed with xz.

It holds columns, one entry a config, in the order of the space: its text, the number of its status, of its reason and of its
resources in a list of the different ones, its time, and its second, more careful time where it was among the fastest. A space may
be recorded in part; `Recorded.sizes` says how large it is.
"""

from __future__ import annotations

import json
import lzma
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

from codegen.config import Config
from codegen.errors import CodegenError, InvalidConfig
from codegen.limits import Limits
from codegen.problem import Problem, Shape
from codegen.space import parse_config, why_refused
from tuner.errors import InputError
from tuner.executors import Resources
from tuner.records import Status, write_bytes

SCHEMA = 2
"""Version of the file. It rises whenever a field changes its meaning or goes."""

MOST_BYTES = 1 << 28
"""Of a file, unpacked: two million configs. What is more is no recorded space, and is not unpacked into memory."""

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


_MAY_DIFFER = ("variants", "sources", "limits")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a space was recorded under. Sessions that differ in any of it do not go into one file, but that the space may grow.

    Attributes:
        shape: "B,S,H,O".
        dtype, param_dtype, accuracy, wants, deterministic: as in Problem; `wants` as text.
        eps, seed: of the data of the timing.
        variants: those that take part.
        device: the GPU.
        compiler: nvcc and its version.
        sources: digests of what the templates render for some of the configs, by the text of the config.
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
    sources: Mapping[str, str]
    limits: Limits

    def problem(self) -> Problem:
        """What the kernels compute."""
        return Problem.of(Shape.parse(self.shape), dtype=self.dtype, wants=frozenset(self.wants.split(",")),
                          deterministic=self.deterministic, param_dtype=self.param_dtype, accuracy=self.accuracy)

    def differs(self, other: Origin) -> str | None:
        """The name of the first field in which a later session differs; None: in none. It may have more variants, the rates in
        the limits may be measured anew, and what the sources say of other configs is no matter."""
        if not set(self.variants) <= set(other.variants):
            return "variants"
        mine, theirs = asdict(self), asdict(other)
        return next((name for name in mine if name not in _MAY_DIFFER and mine[name] != theirs[name]), None)


@dataclass(slots=True)
class Recorded:
    """A recorded space; `results` grows while it is recorded.

    Attributes:
        origin: what it was recorded under.
        sizes: how many configs the space has of each variant.
        slices: the sessions, in order.
        results: by config.
    """

    origin: Origin
    sizes: Mapping[str, int]
    slices: list[Slice] = field(default_factory=list)
    results: dict[Config, Result] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many configs the space has."""
        return sum(self.sizes.values())

    def extent(self) -> str:
        """How much of it is recorded, for people: of all, and of each variant that is not whole."""
        counts = Counter(config.variant for config in self.results)
        parts = [f"{counts[name]} of {size} of {name}" for name, size in self.sizes.items() if counts[name] < size]
        return f"{len(self.results)} of {self.size} valid configs" + (f" ({', '.join(parts)})" if parts else "")

    @property
    def times(self) -> dict[Config, float]:
        """Microseconds of the configs that have a time, the more careful one where they were timed again. The GPU may have been
        warmer, and slower, by then: the others' times are multiplied by what it made of these, so that none wins by that."""
        ratios = [result.again_us / result.time_us for result in self.results.values() if result.again_us and result.time_us]
        drift = median(ratios or [1.0])
        return {config: result.again_us or drift * result.time_us
                for config, result in self.results.items() if result.time_us is not None}

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
            "schema": SCHEMA, "origin": asdict(self.origin), "sizes": dict(self.sizes),
            "slices": [asdict(one) for one in self.slices], "reasons": reasons, "resources": resources,
            "columns": {
                "config": [str(config) for config in results], "status": [result.status.value for result in results.values()],
                "reason": reason, "time_us": [_rounded(result.time_us) for result in results.values()],
                "again_us": [_rounded(result.again_us) for result in results.values()], "resources": resource}}
        write_bytes(path, lzma.compress(json.dumps(content, separators=(",", ":")).encode()))


_BROKEN = (lzma.LZMAError, EOFError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What reading a file raises that is no recorded space."""


def load(path: Path) -> Recorded:
    """Reads a recorded space.

    Raises:
        InputError: the file cannot be read, is no recorded space, or its configs do not exist any more.
    """
    try:
        content = json.loads(_unpacked(path), parse_constant=_no_number)
        if content["schema"] != SCHEMA:
            raise InputError(f"{path} has schema version {content['schema']!r}, this program reads {SCHEMA}; record it again")
        return _read(content)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}); name a file that `python -m tuner record` wrote") from error
    except CodegenError as error:
        raise InputError(f"{path} was recorded for other variants ({error}); record the space again") from error
    except _BROKEN as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged or is no recorded space; record it again") from error


def _unpacked(path: Path) -> bytes:
    """Raises LZMAError, EOFError: it is not whole; ValueError: it is too much."""
    unpack = lzma.LZMADecompressor()
    data = unpack.decompress(path.read_bytes(), MOST_BYTES)
    if not unpack.eof:
        raise EOFError if unpack.needs_input else ValueError
    return data


def _no_number(name: str) -> None:
    """Python's JSON reads NaN and Infinity, which no file of ours has."""
    raise ValueError(name)


def _read(content: Mapping[str, Any]) -> Recorded:
    values = content["origin"]
    variants, limits = tuple(map(_text, values["variants"])), _typed(Limits(**values["limits"]))
    sources = {_text(config): _text(digest) for config, digest in values["sources"].items()}
    origin = _typed(Origin(**{**values, "variants": variants, "sources": sources, "limits": limits}))
    problem = origin.problem()
    tables = [{_text(name): _typed(Resources(*numbers)) for name, *numbers in entry} for entry in content["resources"]]
    reasons = [None if reason is None else _text(reason) for reason in content["reasons"]]
    columns = content["columns"]
    rows = zip(*(columns[name] for name in ("config", "status", "reason", "time_us", "again_us", "resources")), strict=True)
    results: dict[Config, Result] = {}
    for text, status, reason, time_us, again_us, resources in rows:
        config = parse_config(_text(text))
        if (refusal := why_refused(problem, config, limits)) is not None:
            raise InvalidConfig(f"{config}: {refusal}")
        results[config] = Result(Status(status), reasons[_place(reason)], _time(time_us), _time(again_us),
                                 tables[_place(resources)])
        if results[config].status is Status.OK and time_us is None:
            raise ValueError(text)
    sizes = {_text(name): _place(size) for name, size in content["sizes"].items()}
    counts = Counter(config.variant for config in results)
    if any(counts[name] > sizes.get(name, 0) for name in counts) or len(results) < len(columns["config"]):
        raise ValueError(sizes)
    return Recorded(origin, sizes, [_typed(Slice(**one)) for one in content["slices"]], results)


def _typed(instance: _T) -> _T:
    """The instance of a dataclass, all numbers and texts of which are what its fields say. Raises TypeError: they are not."""
    kinds: Mapping[Any, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}
    for one in fields(cast(Any, instance)):
        value = getattr(instance, one.name)
        if one.type in kinds and type(value) not in kinds[one.type]:
            raise TypeError(one.name)
        if one.type in ("int", "float") and not (value >= 0 and math.isfinite(value)):
            raise ValueError(one.name)
    return instance


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _place(value: object) -> int:
    """A whole number from 0: Python would take others for places from the end."""
    if type(value) is not int or value < 0:
        raise TypeError(value)
    return value


def _time(value: object) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not (cast(float, value) > 0 and math.isfinite(cast(float, value))):
        raise ValueError(value)
    return float(cast(float, value))


def _numbered(values: Iterable[_T]) -> tuple[Sequence[_T], list[int]]:
    """The different values, and for each value its number among them."""
    numbers: dict[_T, int] = {}
    column = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), column


def _rounded(time_us: float | None) -> float | None:
    """To six digits: no clock is better."""
    return None if time_us is None else float(f"{time_us:.6g}")
