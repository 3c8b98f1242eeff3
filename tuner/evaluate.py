"""One candidate from config to record: rendered, compiled, validated and, where a GPU is, timed.

Where validating is quick, every candidate is validated, and then timed. Where it is not (COSTLY_ELEMENTS), a candidate must first
pass a small exact probe, and then be faster than the best; what is slower is recorded as that, and is not called valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, cast

from codegen.config import Config
from codegen.limits import Limits
from codegen.plan import Plan
from codegen.problem import Problem
from codegen.render import render
from codegen.tensors import TENSORS
from tuner.costmodel import plausible_us
from tuner.errors import CompileError, DeviceLost, LaunchError, OutOfMemory
from tuner.executors import Executor, Program, Resources, Run, TimedProgram, Timing
from tuner.gate.recheck import Audit, Recheck
from tuner.inputs import Gradients, Inputs, random_inputs, read_only, repeated
from tuner.outcome import spills
from tuner.records import Record, Status
from tuner.timing.health import open_watch
from tuner.timing.regimes import Regime
from tuner.timing.tally import Tally
from tuner.validate import BASE_ROWS, Validator, Verdict
from tuner.wisdom.source import digest

HOST_MULTIPLY_ADDS = 30_000_000
"""Largest rows * H * O of one run on the CPU: below a second."""

QUICK_SAMPLES, QUICK_SECONDS = 3, 0.002
"""The first timing of a candidate: one call where calls are long."""

HOPELESS = 2.0
"""A candidate whose first timing is so many times the best is not timed any better."""

SAMPLES, SECONDS = 7, 0.05
"""Timing of every other candidate."""

FINAL_SAMPLES, FINAL_SECONDS = 20, 0.1
"""Timing of a finalist in one round."""

COSTLY_ELEMENTS = 1 << 24
"""Elements of all tensors of a call from which validating takes too long to do for each candidate: at 8192 rows of 4096 and 12288
values, 3e8 elements, comparing alone takes 2.7 s of a CPU, the small probe 0.2 s."""


Report = Callable[[Config], Mapping[str, Resources]]
"""What a device compiler says of a config's kernels. May raise CompileError."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A candidate after its compilation: the program and its plan, or the record of why there is none.

    Neither, where another process loads what was compiled. `digest` is that of its source (wisdom/source.py).
    """

    config: Config
    program: Program | None
    plan: Plan | None
    failure: Record | None
    digest: str = ""


class Judge(Protocol):
    """Turns candidates into records: in this process (Evaluator) or in others that may be lost (tuner.workers).

    `compile` is thread-safe. The rest is called from one thread where candidates are timed, else from several.

    Attributes:
        best_us: the shortest time of a valid candidate so far, microseconds; infinite before there is one.
    """

    best_us: float

    def compile(self, config: Config) -> Compiled:
        """Renders and compiles.

        Raises:
            ToolchainError: there is no compiler.
        """

    def judge(self, compiled: Compiled) -> Record:
        """Validates, and times what is valid. Records without a GPU have no time yet.

        Raises:
            DeviceLost: the device cannot be used any more; this candidate was the last that ran.
        """

    def validate(self, record: Record) -> Record:
        """A record of a candidate that was slower, once more: valid now, or why it is not.

        Raises:
            DeviceLost: as judge.
        """

    def time(self, config: Config, regime: Regime, samples: int, seconds: float) -> Timing:
        """Times of one call on random data at the tuned row count. Whether the GPU was disturbed is for the caller to watch.

        Raises:
            LaunchError: the candidate cannot be timed, or not any more.
            DeviceLost: as judge.
        """

    def get_ready(self) -> None:
        """Before a candidate is timed: what has to be started is started, so that it is no part of what is watched.

        Raises:
            DeviceLost: as judge.
        """

    def recheck(self, record: Record) -> Record:
        """A record of a valid candidate, validated on other data and at other row counts: with these, or why it is not valid.

        Raises:
            DeviceLost: as judge.
        """

    def audit(self, config: Config) -> Audit:
        """Whether a candidate gives the same bits whenever it is run on the same data.

        Raises:
            DeviceLost: as judge.
        """

    def drain(self) -> Tally:
        """What there is to say of the times that were taken by `judge` since the last call."""

    def renew(self) -> None:
        """Before the fastest are timed again: what the candidates left behind is forgotten."""

    def stop(self) -> None:
        """From another thread: what is being judged is not waited for, where it can be abandoned."""


class Material:
    """What it takes to judge candidates for one problem and does not depend on a device: data and references.

    Args:
        problem: what candidates compute.
        eps: of the timed call.
        seed: of the data.
        measures: whether candidates run on a GPU; what runs on the CPU gets fewer rows.
    """

    def __init__(self, problem: Problem, *, eps: float, seed: int, measures: bool) -> None:
        self.problem = problem
        self._eps = eps
        self._seed = seed
        self._measures = measures
        self.validator = Validator(problem, seed=seed, max_multiply_adds=None if measures else HOST_MULTIPLY_ADDS)

    def prepare(self) -> None:
        """Makes all of it now, which the first candidate would wait for otherwise."""
        self.validator.prepare()
        if self._measures:
            _ = self.timed_inputs

    def prepare_screen(self) -> None:
        """Makes what is needed for screening and timing alone."""
        self.validator.prepare_screen()
        _ = self.timed_inputs

    @cached_property
    def recheck(self) -> Recheck:
        """What the winner must pass besides."""
        usual = self.validator
        return Recheck(self.problem, self._seed, self._measures, {*usual.probe_rows, usual.random_rows, usual.hard_rows})

    @cached_property
    def timed_inputs(self) -> Inputs:
        """What candidates are timed on."""
        problem = self.problem
        base = random_inputs(min(problem.rows, BASE_ROWS), problem.hidden, problem.out, self._seed,
                             dtype=problem.dtype, param_dtype=problem.param_dtype)
        data = repeated(base, problem.rows, self._seed).expand()
        return read_only(Inputs(data.dy, data.x, data.gamma, data.beta, data.w, self._eps))


class Evaluator:
    """The judge in this process. See Judge.

    Only CompileError and LaunchError become records. A missing compiler (ToolchainError) and a dead device (DeviceLost) end the
    run: no further candidate would pass.

    Args:
        executor: where candidates run.
        problem: what they compute.
        eps: of the timed call.
        seed: of the data.
        regime: in which candidates are timed.
        report: for executors that have no device compiler; None: nothing is said.
        material: made before; None: it is made when it is needed.
    """

    def __init__(self, executor: Executor, problem: Problem, *, eps: float = 1e-5, seed: int = 0, regime: Regime = "warm",
                 report: Report | None = None, material: Material | None = None) -> None:
        self.executor = executor
        self.problem = problem
        self.best_us = math.inf
        self._regime: Regime = regime
        self._report = report
        self._watch = open_watch(executor.bus_id)
        self._costly = elements(problem) >= COSTLY_ELEMENTS
        self._material = material or Material(problem, eps=eps, seed=seed, measures=executor.measures)
        self._kept: dict[Config, Program] = {}

    @property
    def validator(self) -> Validator:
        """What candidates must pass."""
        return self._material.validator

    def compile(self, config: Config) -> Compiled:
        """As Judge.compile."""
        source = render(self.problem, config)
        try:
            return Compiled(config, self.executor.compile(source), source.plan, None, digest(source))
        except CompileError as error:
            return Compiled(config, None, None, Record(config, Status.COMPILE_ERROR, str(error)), digest(source))

    def judge(self, compiled: Compiled) -> Record:
        """As Judge.judge."""
        config, program = compiled.config, compiled.program
        if program is None or compiled.plan is None:
            assert compiled.failure is not None
            return compiled.failure
        record = Record(config, Status.OK, resources=program.resources)
        if not self.executor.measures:
            record = self._validated(record, program)
            return reported(record, self._report)
        if reason := too_large(compiled.plan, program.resources, self.executor.limits):
            return replace(record, status=Status.LAUNCH_ERROR, reason=reason)
        if spills(record) and self.best_us < math.inf:
            return replace(record, status=Status.SPILLS, reason="keeps values in local memory, for want of registers; not run")
        record = self._measured(record, program)
        if record.status is Status.OK:
            self.best_us = min(self.best_us, record.best_us)
        return record

    def validate(self, record: Record) -> Record:
        """As Judge.validate."""
        return self._validated(replace(record, status=Status.OK, reason=None), self._again(record.config))

    def recheck(self, record: Record) -> Record:
        """As Judge.recheck."""
        program, launched = self._again(record.config), _Launches()
        verdict = self._material.recheck.validate(launched.watching(program.run), launched.watching_all(program.variations))
        return replace(record, gate_rows=verdict.rows) if verdict.ok else launched.rejected(record, verdict)

    def audit(self, config: Config) -> Audit:
        """As Judge.audit."""
        program = self._again(config)
        return self._material.recheck.audit(program.run, program.variations)

    def _again(self, config: Config) -> Program:
        """A program that compiled before."""
        program = self.compile(config).program
        assert program is not None
        return program

    def time(self, config: Config, regime: Regime, samples: int, seconds: float) -> Timing:
        """As Judge.time. Programs are kept from one call to the next."""
        if config not in self._kept:
            compiled = self.compile(config)
            if compiled.program is None:
                raise LaunchError(f"{config} does not compile any more: {compiled.failure and compiled.failure.reason}")
            self._kept[config] = compiled.program
        return self._time(self._kept[config], regime, samples, seconds)

    def get_ready(self) -> None:
        """As Judge.get_ready. Nothing has to be started in this process."""

    def drain(self) -> Tally:
        """As Judge.drain."""
        return self._watch.drain()

    def renew(self) -> None:
        """As Judge.renew. This process goes on."""
        self._kept.clear()

    def stop(self) -> None:
        """As Judge.stop. Nothing can be abandoned in this process."""

    def _time(self, program: Program, regime: Regime, samples: int, seconds: float) -> Timing:
        timed = cast(TimedProgram, program)
        return timed.time(self._material.timed_inputs, self.problem.wants, samples=samples, budget_s=seconds, regime=regime)

    def _measured(self, record: Record, program: Program) -> Record:
        checked = self._screened(record, program) if self._costly else self._validated(record, program)
        timed = self._timed(checked, program) if checked.status is Status.OK else checked
        if timed.status is not Status.OK or not self._costly:
            return timed
        if timed.best_us < self.best_us:
            return self._validated(timed, program)
        reason = f"took {timed.best_us:.4g} us where the best so far took {self.best_us:.4g} us; screened, not validated"
        return replace(timed, status=Status.SLOWER, reason=reason)

    def _screened(self, record: Record, program: Program) -> Record:
        launched = _Launches()
        verdict = self.validator.screen(launched.watching(program.run))
        return record if verdict.ok else launched.rejected(record, verdict)

    def _validated(self, record: Record, program: Program) -> Record:
        launched = _Launches()
        verdict = self.validator.validate(launched.watching(program.run), launched.watching_all(program.variations))
        record = replace(record, errors=verdict.errors, rows=verdict.rows)
        return record if verdict.ok else launched.rejected(record, verdict)

    def _timed(self, record: Record, program: Program) -> Record:
        try:
            time = self._time(program, self._regime, QUICK_SAMPLES, QUICK_SECONDS).median
            if time <= HOPELESS * self.best_us:
                time = self._watch.take(lambda: self._time(program, self._regime, SAMPLES, SECONDS)).timing.median
        except DeviceLost:
            raise
        except LaunchError as error:
            return replace(record, status=_status_of(error), reason=str(error))
        least = plausible_us(self.problem, self.executor.limits)
        if time >= least:
            return replace(record, time_us=time, measured=True)
        reason = f"took {time:.3g} us, where launching a kernel and moving the tensors takes {least:.3g} us at least"
        return replace(record, status=Status.IMPLAUSIBLE, reason=reason, time_us=time, measured=True)


def reported(record: Record, report: Report | None) -> Record:
    """A valid record with what a device compiler says of it; rejected where that refuses it. Others are as they were."""
    if report is None or record.status is not Status.OK:
        return record
    try:
        return replace(record, resources=report(record.config))
    except CompileError as error:
        return replace(record, status=Status.COMPILE_ERROR, reason=str(error))


def elements(problem: Problem) -> int:
    """Of all tensors of a call."""
    return sum(math.prod(tensor.shape(problem.rows, problem.hidden, problem.out)) for tensor in TENSORS)


def too_large(plan: Plan, resources: Mapping[str, Resources], limits: Limits) -> str | None:
    """Why one block of some kernel finds no room on a GPU, now that its registers are known; None where all do."""
    for launch in plan.launches:
        used = resources.get(launch.kernel)
        if used is not None and used.registers * launch.block > limits.registers_per_sm:
            return (f"{launch.kernel} takes {used.registers} registers for each of {launch.block} threads; "
                    f"{limits.name} has {limits.registers_per_sm}")
        if used is not None and used.shared_bytes > limits.shared_per_block:
            return (f"{launch.kernel} takes {used.shared_bytes} bytes of shared memory; "
                    f"a block of {limits.name} has {limits.shared_per_block}")
    return None


class _Launches:
    """Remembers whether a launch failed, and how."""

    def __init__(self) -> None:
        self._failure = Status.WRONG

    def rejected(self, record: Record, verdict: Verdict) -> Record:
        """The record of a candidate that was run so and did not pass."""
        return replace(record, status=self._failure, reason=verdict.reason)

    def watching(self, run: Run) -> Run:
        def watched(inputs: Inputs, wants: frozenset[str]) -> Gradients:
            try:
                return run(inputs, wants)
            except LaunchError as error:
                self._failure = _status_of(error)
                raise

        return watched

    def watching_all(self, runs: Mapping[str, Run]) -> dict[str, Run]:
        return {what: self.watching(run) for what, run in runs.items()}


def _status_of(error: LaunchError) -> Status:
    return Status.OUT_OF_MEMORY if isinstance(error, OutOfMemory) else Status.LAUNCH_ERROR
