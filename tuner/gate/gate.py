"""The gate: the fastest in turn until one passes all that can be run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.config import Config
from codegen.problem import Problem
from tuner.evaluate import Judge
from tuner.executors import Executor
from tuner.gate.checks import Check, Outcome
from tuner.gate.recheck import AUDIT_RUNS
from tuner.gate.sanitizer import NAME, Sanitizer
from tuner.outcome import spills
from tuner.records import Record, Status
from tuner.workers.pool import Workers

SHARE, LEAST_SECONDS, MOST_SHARE = 1 / 10, 15.0, 1 / 4
"""Of the time of a run on a GPU the gate has one part in ten, and where that is less than the seconds, those, but no more than a
quarter: the tools take about 7 s, validation on other data 2 to 5."""


def seconds_of(timeout: float) -> float:
    """What the gate has of the time of a run."""
    return min(max(SHARE * timeout, LEAST_SECONDS), MOST_SHARE * timeout)


def contenders(records: Iterable[Record], fastest: Config | None) -> list[Record]:
    """The valid ones in the order in which they would win: the fastest, the other finalists by their final times, the rest."""
    return sorted((record for record in records if record.status is Status.OK),
                  key=lambda record: (record.config != fastest, record.final_us is None, spills(record), record.best_us))


@dataclass(frozen=True, slots=True)
class Passage:
    """What became of one contender.

    Attributes:
        record: its record; its status is no longer OK where it has not passed.
        checks: what was run, and what was not.
    """

    record: Record
    checks: tuple[Check, ...]

    @property
    def rejection(self) -> str:
        """Why one that would have won does not, as a clause."""
        return f"the safety gate rejected {self.record.config}, which took {self.record.best_us:.4g} us: {self.record.reason}"

    @property
    def passed(self) -> bool:
        """Whether nothing that was run speaks against it."""
        return self.record.status is Status.OK


def open_gate(judge: Judge, executor: Executor | Workers, problem: Problem, store: Path, audits: bool, ends: float) -> Gate:
    """The gate of a run on an executor; where a GPU runs the kernels, with the sanitizer.

    Args:
        problem: what the kernels compute.
        store: where they are kept.
        judge, audits, ends: as Gate.
    """
    if executor.bus_id is not None:
        return Gate(judge, Sanitizer(problem, executor.bus_id, executor.limits, store), "", audits, ends)
    without = ("the laws of the host executor, which every candidate has kept, stand in its place" if executor.name == "host"
               else "no GPU ran the kernel")
    return Gate(judge, None, without, audits, ends)


class Gate:
    """Examines contenders one by one.

    Validation on other data is always run. The sanitizer's tools are run as far as there is time.

    Args:
        judge: of the run's candidates.
        sanitizer: None: no GPU runs them.
        without: why there is no sanitizer, as a clause.
        audits: whether results must repeat bit by bit.
        ends: of time.monotonic, when time is up.
    """

    def __init__(self, judge: Judge, sanitizer: Sanitizer | None, without: str, audits: bool, ends: float = math.inf) -> None:
        self._judge = judge
        self._sanitizer = sanitizer
        self._without = without
        self._steps: list[Callable[[Record], Passage]] = [self._on_other_data, self._sanitized]
        if audits:
            self._steps.append(self._audited)
        self._ends = ends

    def examine(self, record: Record) -> Passage:
        """All checks in turn, up to the first that fails.

        Raises:
            DeviceLost: the device cannot be used any more.
        """
        checks: list[Check] = []
        for step in self._steps:
            passage = step(record)
            record = passage.record
            checks += passage.checks
            if not passage.passed:
                break
        return Passage(record, tuple(checks))

    def _on_other_data(self, record: Record) -> Passage:
        found = self._judge.recheck(record)
        outcome = Outcome.PASSED if found.status is Status.OK else Outcome.FAILED
        new = ", ".join(str(rows) for rows in found.gate_rows if rows not in record.rows)
        said = found.reason or "validated with another seed" + (f", at {new} rows that the search had not seen" if new else "")
        return Passage(found, (Check("other data", outcome, said),))

    def _sanitized(self, record: Record) -> Passage:
        if self._sanitizer is None:
            return Passage(record, (Check(NAME, Outcome.NOT_RUN, self._without),))
        checks = tuple(self._sanitizer.check(record.config, self._ends - time.monotonic()))
        for check in checks:
            if check.outcome is Outcome.FAILED:
                record = replace(record, status=Status.UNSAFE, reason=f"{check.name} of {NAME}: {check.said}")
        return Passage(record, checks)

    def _audited(self, record: Record) -> Passage:
        audit = self._judge.audit(record.config)
        if audit.reason is not None:
            return Passage(replace(record, status=Status.VARIES, reason=audit.reason),
                           (Check("bit-equality", Outcome.FAILED, audit.reason),))
        short = "" if audit.runs == AUDIT_RUNS else f" (time did not allow {AUDIT_RUNS})"
        said = f"{audit.runs} runs gave the same bits at {audit.rows} rows{short}"
        return Passage(record, (Check("bit-equality", Outcome.PASSED, said),))
