"""Runs in whose winners the tests of the gate plant faults: which configs there are, and how fast each is."""

from __future__ import annotations

from collections.abc import Callable

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from tests.fake_gpu import FakeGpu
from tuner.candidates import survey
from tuner.executors import Executor
from tuner.gate.checks import Outcome
from tuner.outcome import Event, TuneResult
from tuner.records import Status
from tuner.tuning import Request, TuningRun

SHAPE = Shape(4, 4, 8, 16)
PROBLEM = Problem.of(SHAPE)
VARIANT = "row_thread"
VALID = survey(Problem.of(SHAPE, deterministic=True), target("sm_90"), [VARIANT]).valid
EVERY = survey(PROBLEM, target("sm_90"), [VARIANT]).valid
BUS_ID = "0000:3b:00.0"


def by_place(config: Config) -> float:
    """Microseconds: each deterministic config is 2 % slower than the one before it, and all others come last."""
    return 2.0 * 1.02 ** (VALID.index(config) if config in VALID else len(VALID))


class GpuWithAddress(FakeGpu):
    bus_id = BUS_ID


def tuned(executor: Executor, on_event: Callable[[Event], None] = lambda event: None, **options: object) -> TuneResult:
    options = {"variants": (VARIANT,), **options}
    run = TuningRun(Request(SHAPE, **options), executor, on_event=on_event)  # type: ignore[arg-type]
    run.execute()
    return run.result()


def statuses(result: TuneResult) -> dict[Config, Status]:
    return {record.config: record.status for record in result.records}


def outcomes(result: TuneResult) -> dict[str, Outcome]:
    return {check.name: check.outcome for check in result.checks}


