"""What the record says, in the place of a GPU: candidates are judged without being compiled or run, and faults can be planted."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from codegen.config import Config
from tuner.evaluate import Compiled
from tuner.records import Record, Status
from tuner.replay.field import Field


class Fault(StrEnum):
    """What a planted candidate does instead of its work."""

    ILLEGAL_ACCESS = "illegal access"
    HANG = "hang"
    WRONG_RESULT = "wrong result"


_REJECTED = {
    Fault.ILLEGAL_ACCESS: (Status.CRASH, "an illegal memory access was encountered"),
    Fault.HANG: (Status.HANG, "did not end in time and was given up"),
    Fault.WRONG_RESULT: (Status.WRONG, "dx differs from the reference"),
}


class RecordedJudge:
    """Answers as the evaluator does while candidates are tried, out of a recorded space.

    Args:
        field: the space.
        faults: configs that do something else than the record says.
    """

    def __init__(self, field: Field, faults: Mapping[Config, Fault] | None = None) -> None:
        self._field = field
        self._faults = faults or {}

    def compile(self, config: Config) -> Compiled:
        """Nothing is compiled."""
        return Compiled(config, None, None, self._record(config))

    def judge(self, compiled: Compiled) -> Record:
        """What the record says."""
        assert compiled.failure is not None
        return compiled.failure

    def stop(self) -> None:
        """Nothing takes long."""

    def _record(self, config: Config) -> Record:
        if config in self._faults:
            status, reason = _REJECTED[self._faults[config]]
            return Record(config, status, f"{reason} (planted)")
        result = self._field.recorded.results[config]
        time_us = self._field.times.get(config)
        return Record(config, result.status, result.reason, time_us, measured=True, resources=result.resources)
