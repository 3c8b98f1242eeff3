"""What is read of a tuning run's folder: trials.jsonl, and best.cu where best.json is of the same run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from codegen.limits import Limits, target
from codegen.problem import Problem, Shape
from reports.benchmark import read_benchmark
from reports.ending import Ending
from tuner.bench.floors import Floor, Rates
from tuner.bench.results import Results, Row
from tuner.bench.sheet import JSON as BENCH_JSON
from tuner.costmodel import floor_us
from tuner.errors import InputError
from tuner.known import read_best
from tuner.outcome import spills
from tuner.records import Record, RunInfo, Status
from tuner.study.earlier import read_earlier
from tuner.timing.regimes import as_regime

TRIALS, BEST_CU, BEST_JSON = "trials.jsonl", "best.cu", "best.json"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates that bound a kernel on the run's GPU, and where each is from.

    Attributes:
        limits: of the GPU, with those rates.
        rates: copy, launch and, where a benchmark beside the run measured it, products of bfloat16.
        origin: of copy bandwidth and launch time, as a clause.
        matrix_origin: of the rate of products; empty where only the table has one.
    """

    limits: Limits
    rates: Rates
    origin: str
    matrix_origin: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One tuning run.

    Attributes:
        folder: where it lies.
        info: what it was made under.
        problem: what its kernels compute.
        tried: the candidates that were tried, in order.
        untried: those that were not, with predicted times where there are some.
        winner: the one that won; None where none was valid.
        damaged: lines of trials.jsonl that could not be read.
        finished: whether it came to its end.
        ceilings: the rates of its GPU.
        ending: what it said of itself at its end.
        code: best.cu, where it holds this run's winner; else empty.
        kept: where best.* are another run's, when that began; else empty.
        peers: the row of the benchmark beside it that is about the same problem on the same GPU; None where there is none.
    """

    folder: Path
    info: RunInfo
    problem: Problem
    tried: tuple[Record, ...]
    untried: tuple[Record, ...]
    winner: Record | None
    damaged: int
    finished: bool
    ceilings: Ceilings
    ending: Ending = field(default_factory=Ending)
    code: str = ""
    kept: str = ""
    peers: Row | None = None

    @property
    def valid(self) -> list[Record]:
        """The candidates that passed every test."""
        return [record for record in self.tried if record.status is Status.OK]

    @property
    def kind(self) -> str:
        """What to call its times: measured or predicted."""
        return "measured" if self.info.measures else "predicted"

    @property
    def gpu(self) -> str:
        """The GPU its times belong to."""
        return self.info.device if self.info.measures else self.ceilings.limits.name

    @property
    def floor_us(self) -> float:
        """What no kernel is expected to beat: the tensors at copy bandwidth, or one launch."""
        return floor_us(self.problem, self.ceilings.limits)

    @property
    def floor(self) -> Floor:
        """The least times of one call, part by part."""
        return Floor.of(self.problem, self.ceilings.rates)

    @property
    def not_run(self) -> int:
        """Candidates that could run and were not tried."""
        return max(0, self.info.valid - len(self.tried))


Say = Callable[[str], object]
"""Takes what the user is to know besides, as sentences."""


def silent(sentence: str) -> None:
    """Says nothing."""


def read_run(folder: Path, say: Say = silent) -> Run:
    """Reads a folder.

    Args:
        say: called where lines had to be passed over.

    Raises:
        InputError: it has no trials.jsonl, an empty one, or one that is not this program's.
    """
    try:
        earlier = read_earlier(folder / TRIALS)
    except OSError as error:
        raise InputError(f"{folder / TRIALS} cannot be read ({error.strerror}); name the folder of a tuning run") from error
    if earlier is None:
        found = f"{folder / TRIALS} is empty" if (folder / TRIALS).exists() else f"there is no {TRIALS} in {folder}"
        raise InputError(f"{found}; name a folder that python -m tuner has written")
    if earlier.damaged:
        lines = "1 line that cannot be read is" if earlier.damaged == 1 else f"{earlier.damaged} lines that cannot be read are"
        say(f"{lines} left out of {folder / TRIALS}")
    info = earlier.info
    try:
        problem = Problem.of(Shape.parse(info.shape), dtype=info.dtype, wants=info.wants.split(","),
                             deterministic=info.deterministic, param_dtype=info.param_dtype, accuracy=info.accuracy)
        table = target(info.target)
        check_header(info, problem)
    except (CodegenError, InputError, AttributeError, TypeError) as error:
        raise InputError(f"the first line of {folder / TRIALS} is not the header of a tuning run: {error}") from error
    known = read_best(folder / BEST_JSON)
    own = known is not None and (known.info.date, known.info.command) == (info.date, info.command)
    ending = Ending.of(earlier.end or (_values(folder / BEST_JSON) if own else {}))
    bench = _bench(folder.parent / BENCH_JSON, info)
    return Run(folder, info, problem, earlier.records, earlier.not_run, _winner(earlier.records, ending.winner), earlier.damaged,
               earlier.finished, _ceilings(info, table, ending.limits, bench), ending, _text(folder / BEST_CU) if own else "",
               "" if own or known is None else known.info.date, None if bench is None else _row(bench, info))


def check_header(info: RunInfo, problem: Problem) -> None:
    """What pages need of a header beyond what makes a problem.

    Raises:
        InputError: there is something else.
    """
    as_regime(info.regime)
    if problem.rows == 0:
        raise InputError("there are no rows")
    counts = (info.combinations, info.valid, *info.refused.values())
    if not all(isinstance(count, int) and count >= 0 for count in counts) or not math.isfinite(info.eps):
        raise InputError("its counts are no whole numbers from 0, or eps is not finite")


def _winner(tried: tuple[Record, ...], named: str) -> Record | None:
    """The record of that config, else what the records say: of those timed in the finals, where there are some, the fastest."""
    valid = [record for record in tried if record.status is Status.OK]
    finalists = [record for record in valid if record.final_us is not None] or valid
    found = next((record for record in valid if str(record.config) == named), None)
    return found or min(finalists, key=lambda record: (spills(record), record.best_us), default=None)


def _values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _bench(path: Path, info: RunInfo) -> Results | None:
    """The benchmark beside a run of the same GPU; None where there is none."""
    if not info.measures:
        return None
    try:
        results = read_benchmark(path)
    except (InputError, OSError):
        return None
    return results if results is not None and results.parts and results.parts[0].device == info.device else None


def _row(bench: Results, info: RunInfo) -> Row | None:
    """The row about the run's problem: the benchmark's has all gradients, and parameters in the data type of the data."""
    if info.param_dtype != info.dtype or info.regime != "warm" or len(info.wants.split(",")) < 5:
        return None
    wanted = info.shape, info.dtype, info.accuracy
    found = ((str(row.case.shape), row.case.problem.dtype, row.case.problem.accuracy) == wanted for row in bench.rows)
    return next((row for row, same in zip(bench.rows, found, strict=True) if same and row.ratio is not None), None)


def _ceilings(info: RunInfo, table: Limits, own: Limits | None, bench: Results | None) -> Ceilings:
    """The run's own rates where it measured some, else those of the table; the rate of products is the benchmark's."""
    same = own is not None and own.arch == table.arch
    limits, measured = own if own is not None and same else table, same and info.rates == "measured"
    matrix = None if bench is None else bench.parts[0].rates.matrix_tflops
    return Ceilings(limits, Rates(limits.copy_tbps, limits.launch_us, matrix),
                    "measured when the run began" if measured else f"from the table of targets, for {limits.name}",
                    "" if matrix is None else "measured by the benchmark of this GPU")
