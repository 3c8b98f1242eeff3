"""Wisdom from files and to files: exports, the best.json of tuning runs, the bench.json of benchmarks, and folders of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from codegen.limits import TARGETS, target
from codegen.space import why_refused
from tuner.bench.results import Results
from tuner.errors import InputError
from tuner.known import read_best
from tuner.provenance import version
from tuner.records import Status, write_text
from tuner.wisdom.book import Book, merged, write
from tuner.wisdom.points import SCHEMA, Entry, Key, OtherSchema, Point
from tuner.wisdom.recall import key_of, learned
from tuner.wisdom.source import source_digest


def gather(paths: Iterable[Path], trust: bool = False) -> list[Entry]:
    """The points that files hold, by key; of a folder those of all files in it that hold any.

    Args:
        paths: best.json, bench.json, an export of wisdom, one file of it, or folders.
        trust: take kernels whose source is not known, as in results from before it was recorded, for today's. Those of this very
            revision are.

    Raises:
        InputError: a file cannot be read or holds no results, or no file of a folder does.
    """
    found = [entry for path in paths for entry in (_of_folder(path) if path.is_dir() else _of_file(path))]
    here = version()
    certain = here != "unknown" and not here.endswith("+")

    def sourced(key: Key, point: Point) -> Point:
        return _sourced(key, point) if trust or (certain and point.version == here) else point

    return combined(replace(entry, points=tuple(sourced(entry.key, point) for point in entry.points)) for entry in found)


def combined(entries: Iterable[Entry]) -> list[Entry]:
    """The same points with one entry for each key, in the order of keys."""
    points: dict[Key, list[Point]] = {}
    for entry in entries:
        points.setdefault(entry.key, []).extend(entry.points)
    return [Entry(key, merged(key, (), points[key])) for key in sorted(points)]


def as_text(entries: Sequence[Entry]) -> str:
    """An export: JSON that `gather` reads back."""
    values = {"schema": SCHEMA, "wisdom": [entry.as_json() for entry in entries]}
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def save(entries: Sequence[Entry], out: Path) -> None:
    """Writes an export: one file where `out` ends in .json, else a folder with a file for each key, such as the package ships.
    To what such a folder holds already, the points are added.

    Raises:
        OSError: it cannot be written.
    """
    if out.suffix == ".json":
        write_text(out, as_text(entries))
        return
    there = {entry.key: entry.points for entry in Book(out).own()} if out.is_dir() else {}
    for entry in entries:
        write(out / entry.key.path, Entry(entry.key, merged(entry.key, there.get(entry.key, ()), entry.points)))


def _of_folder(folder: Path) -> list[Entry]:
    found: list[Entry] = []
    for path in sorted(folder.rglob("*.json")):
        try:
            found += _of_file(path)
        except InputError:
            continue
    if not found:
        raise InputError(f"no file in {folder} holds results; give best.json, bench.json or an export of wisdom")
    return found


def _of_file(path: Path) -> list[Entry]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON ({error})") from error
    names = set(values) if isinstance(values, dict) else set()
    reader = next((reader for needed, reader in _READERS.items() if set(needed) <= names), None)
    if reader is None:
        raise InputError(f"{path} holds no results; give best.json, bench.json, an export of wisdom, or a folder of them")
    try:
        return list(reader(path, values))
    except OtherSchema as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    except (InputError, CodegenError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged, or of another version: {error}") from error


def _export(path: Path, values: Mapping[str, Any]) -> Iterator[Entry]:
    yield from map(Entry.from_json, values["wisdom"])


def _entry(path: Path, values: Mapping[str, Any]) -> Iterator[Entry]:
    yield Entry.from_json(values)


def _best(path: Path, values: Mapping[str, Any]) -> Iterator[Entry]:
    known = read_best(path)
    if known is None or known.winner.status is not Status.OK:
        raise InputError("it has no winner that this program can read")
    key, points = learned(known.info, known.winner, known.source)
    yield Entry(key, tuple(points))


def _bench(path: Path, values: Mapping[str, Any]) -> Iterator[Entry]:
    """Our kernels' warm times; the cold ones are not of the kernels that are best when cold."""
    results = Results.from_json(values)
    for row in results.rows:
        if row.config is not None and row.ours.warm is not None:
            setting, problem = results.parts[row.part], row.case.problem
            key = key_of(problem, setting.device, _architecture(setting.device), "warm")
            yield Entry(key, (Point(problem.rows, row.config, row.ours.warm.median, None, setting.date, setting.version),))


def _architecture(device: str) -> str:
    """The architecture of a GPU of the table of targets."""
    for limits in map(target, TARGETS):
        if re.search(rf"\b{re.escape(limits.name)}\b", device):
            return limits.arch
    raise InputError(f"the architecture of {device} is not known; tune there instead")


def _sourced(key: Key, point: Point) -> Point:
    """The point with the digest of what this program makes of its config, where it has none."""
    config = point.parsed
    if point.source or config is None or why_refused(key.problem(point.rows), config, target(key.arch)) is not None:
        return point
    return replace(point, source=source_digest(key.problem(point.rows), config))


_READERS: Mapping[tuple[str, ...], Callable[[Path, Mapping[str, Any]], Iterator[Entry]]] = {
    ("wisdom",): _export, ("key", "points"): _entry, ("run", "winner"): _best, ("parts", "rows"): _bench,
}
"""By the names that tell kinds of files apart."""
