"""bench.json and bench.md while they grow: both whole at every moment, by one invocation or by several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from tuner.arguments import check_folder
from tuner.bench.report import bench_json, bench_markdown
from tuner.bench.results import Case, Results, Row, Setting
from tuner.errors import InputError, why
from tuner.records import write_text

JSON, MARKDOWN = "bench.json", "bench.md"

COMMON = {
    "device": "the GPU", "version": "the revision of the sources", "versions": "the versions of the software", "seed": "--seed",
    "samples": "--samples", "peers": "--peers"}
"""In what the parts of one file agree, and what it is called: what changes times, and what tables are made of."""


class Sheet:
    """The two files: each row is on disk as soon as it is added. Before the first one, files that were there stay.

    Args:
        folder: where they go.
        setting: what this invocation measures under.
        cases: what it is to measure.
        resume: whether rows that are there already stay, and count as measured where they have a time of our kernel; else they
            are replaced.

    Raises:
        InputError: the folder cannot be written; or there are rows that cannot be continued, being of another card, revision, ...
    """

    def __init__(self, folder: Path, setting: Setting, cases: Sequence[Case], resume: bool) -> None:
        self._folder = folder
        self._cases = cases
        check_folder(folder)
        earlier = _continued(folder / JSON, setting) if resume else Results()
        check_names(earlier, cases, folder / JSON)
        self._results = earlier
        self._parts = (*earlier.parts, setting)

    @property
    def paths(self) -> tuple[Path, Path]:
        """The files, for people first."""
        return self._folder / MARKDOWN, self._folder / JSON

    @property
    def missing(self) -> list[Case]:
        """The cases that have no time of our kernel yet."""
        done = {row.case.key for row in self._results.rows if row.ours.warm is not None}
        return [case for case in self._cases if case.key not in done]

    @property
    def rows(self) -> list[Row]:
        """The rows of the cases of this invocation, as far as they are there."""
        asked = {case.key for case in self._cases}
        return [row for row in self._results.rows if row.case.key in asked]

    def add(self, row: Row) -> None:
        """Writes both files with one row more."""
        row = replace(row, part=len(self._parts) - 1)
        self._results = replace(self._results, parts=self._parts).with_row(row)
        markdown, values = self.paths
        write_text(values, bench_json(self._results))
        write_text(markdown, bench_markdown(self._results))


def read_results(path: Path) -> Results | None:
    """The results in a file; None where there is none.

    Raises:
        InputError: it is no result of this program's version.
    """
    try:
        return Results.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, AttributeError, CodegenError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no result of this program ({why(error)})") from error


def why_apart(earlier: Setting, later: Setting) -> str | None:
    """Why rows of the two may not stand in one file, as a clause in which they are "there" and "here"; None where they may."""
    for name, words in COMMON.items():
        there, here = getattr(earlier, name), getattr(later, name)
        if there != here:
            return f"{words} there: {_text(there)}, here: {_text(here)}"
    if later.version.endswith("+"):
        return f"the sources were changed after revision {later.version[:-1]}, and nothing tells whether they are the same"
    return None


def _continued(path: Path, setting: Setting) -> Results:
    """What a file holds that this invocation goes on with; nothing where there is none.

    Raises:
        InputError: it cannot be continued.
    """
    advice = "leave --resume out to replace it, or choose another folder with --out"
    try:
        earlier = read_results(path) or Results()
    except InputError as error:
        raise InputError(f"{error}; {advice}") from error
    for part in earlier.parts:
        if (why := why_apart(part, setting)) is not None:
            raise InputError(f"{path} cannot be continued: {why}; {advice}")
    return earlier


def check_names(earlier: Results, cases: Sequence[Case], path: Path) -> None:
    """Raises InputError: of the rows that are there one has the name of a case, but another shape."""
    shapes = {row.case.name: row.case.shape for row in earlier.rows}
    for case in cases:
        if (before := shapes.get(case.name, case.shape)) != case.shape:
            raise InputError(f"{path} has another shape called {case.name!r}, {before}; give the shape {case.shape} another name")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return ",".join(value) or "none" if isinstance(value, tuple) else str(value)
