"""The best kernels known from earlier tuning runs: their best.json files under the reports folder."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from codegen.config import Config
from codegen.errors import CodegenError
from codegen.problem import Problem, Shape
from tuner.errors import InputError
from tuner.executors import Executor
from tuner.records import Record, RunInfo


@dataclass(frozen=True, slots=True)
class Known:
    """The winner of one run.

    Attributes:
        info: what it was found under.
        shape: what it was tuned for.
        winner: its record.
    """

    info: RunInfo
    shape: Shape
    winner: Record


def reports_folder() -> Path:
    """Where tuning runs leave their results: $LNL_REPORTS, else `reports` in the current folder."""
    return Path(os.environ.get("LNL_REPORTS", "reports"))


def best_known(problem: Problem, executor: Executor) -> Iterator[Config]:
    """Winners of runs for the same H, O, data types and class on this executor's device, those of the nearest row count first.

    They may be unfit for this problem all the same (other gradients or many more rows are wanted, the run's kernels were not
    deterministic). Files that are no results of this program's version are passed over.
    """
    found = [known for path in sorted(reports_folder().glob("*/*/best.json")) if (known := read_best(path)) is not None]
    same = [
        known for known in found
        if (known.shape.hidden, known.shape.out) == (problem.hidden, problem.out)
        and (known.info.dtype, known.info.param_dtype, known.info.accuracy) == (
            problem.dtype, problem.param_dtype, problem.accuracy)
        and (known.info.executor, known.info.target) == (executor.name, executor.limits.arch)
        and (not executor.measures or known.info.device == executor.device)]
    same.sort(key=lambda known: abs(math.log(known.shape.rows / problem.rows)))
    return iter(dict.fromkeys(known.winner.config for known in same))


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
        known = Known(info, Shape.parse(info.shape), Record.from_json(values["winner"]))
    except (CodegenError, InputError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return known if known.shape.rows > 0 else None
