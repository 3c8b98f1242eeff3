"""What an earlier tuning run left in its folder: its best.json."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import CodegenError
from codegen.problem import Shape
from tuner.errors import InputError
from tuner.records import Record, RunInfo


@dataclass(frozen=True, slots=True)
class Known:
    """The winner of one run.

    Attributes:
        info: what it was found under.
        shape: what it was tuned for.
        winner: its record.
        source: the digest of the winner's source (wisdom/source.py); empty in files from before it was recorded.
    """

    info: RunInfo
    shape: Shape
    winner: Record
    source: str = ""


def reports_folder() -> Path:
    """Where tuning runs leave their results: $LNL_REPORTS, else `reports` in the current folder."""
    return Path(os.environ.get("LNL_REPORTS", "reports"))


def read_best(path: Path) -> Known | None:
    """What a best.json says; None where there is none, or it is no result of this program's version."""
    try:
        return _parse(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=1024)
def _parse(path: Path, changed_ns: int) -> Known | None:
    """`changed_ns` tells versions of a file apart."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        info = RunInfo.from_json(values["run"])
        known = Known(info, Shape.parse(info.shape), Record.from_json(values["winner"]),
                      str(values.get("source", "")))
    except (CodegenError, InputError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return known if known.shape.rows > 0 else None
