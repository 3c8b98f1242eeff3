"""One candidate from config to record: rendered, compiled, validated and, where a GPU is, timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import render
from tuner.costmodel import plausible_us
from tuner.errors import CompileError, DeviceLost, LaunchError
from tuner.executors import Executor, Program, Resources, Run, TimedProgram
from tuner.inputs import Gradients, Inputs, random_inputs, read_only, repeated
from tuner.records import Record, Status
from tuner.validate import BASE_ROWS, Validator

HOST_MULTIPLY_ADDS = 30_000_000
"""Largest rows * H * O of one run on the CPU: below a second."""

QUICK_SAMPLES, QUICK_SECONDS = 7, 0.05
"""Timing of every valid candidate."""

FINAL_SAMPLES, FINAL_SECONDS = 20, 0.1
"""Timing of a finalist in one round."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A candidate after its compilation: the program, or the record of why there is none."""

    config: Config
    program: Program | None
    failure: Record | None


class Evaluator:
    """Turns candidates into records. Compilation is thread-safe; the rest is called from one thread per executor that times.

    Only CompileError and LaunchError become records. A missing compiler (ToolchainError) and a dead device (DeviceLost) end the
    run: no further candidate would pass.

    Args:
        executor: where candidates run.
        problem: what they compute.
        eps: of the timed call.
        seed: of the data.
        report: what a device compiler says of a config, for executors that have none; None: nothing.
    """

    def __init__(self, executor: Executor, problem: Problem, *, eps: float = 1e-5, seed: int = 0,
                 report: Callable[[Config], Mapping[str, Resources]] | None = None) -> None:
        self.executor = executor
        self.problem = problem
        self._eps = eps
        self._seed = seed
        self._report = report
        cap = None if executor.measures else HOST_MULTIPLY_ADDS
        self.validator = Validator(problem, seed=seed, max_multiply_adds=cap)

    def compile(self, config: Config) -> Compiled:
        """Renders and compiles."""
        try:
            return Compiled(config, self.executor.compile(render(self.problem, config)), None)
        except CompileError as error:
            return Compiled(config, None, Record(config, Status.COMPILE_ERROR, str(error)))

    def judge(self, compiled: Compiled) -> Record:
        """Validates, and times what is valid. Records without a GPU have no time yet.

        Raises:
            DeviceLost: the device cannot be used any more; this candidate was the last that ran.
        """
        config, program = compiled.config, compiled.program
        if program is None:
            assert compiled.failure is not None
            return compiled.failure
        launched = _Launches()
        variations = {what: launched.watching(run) for what, run in program.variations.items()}
        verdict = self.validator.validate(launched.watching(program.run), variations)
        record = Record(config, Status.OK, errors=verdict.errors, rows=verdict.rows, resources=program.resources)
        if not verdict.ok:
            return replace(record, status=Status.LAUNCH_ERROR if launched.failed else Status.WRONG, reason=verdict.reason)
        if self.executor.measures:
            return self._timed(record, program)
        return record if self._report is None else self._reported(record, self._report)

    def _timed(self, record: Record, program: Program) -> Record:
        try:
            time = self.time(program, QUICK_SAMPLES, QUICK_SECONDS)
        except DeviceLost:
            raise
        except LaunchError as error:
            return replace(record, status=Status.LAUNCH_ERROR, reason=str(error))
        least = plausible_us(self.problem, self.executor.limits)
        if time >= least:
            return replace(record, time_us=time, measured=True)
        reason = f"took {time:.3g} us, where launching a kernel and moving the tensors takes {least:.3g} us at least"
        return replace(record, status=Status.IMPLAUSIBLE, reason=reason, time_us=time, measured=True)

    def _reported(self, record: Record, report: Callable[[Config], Mapping[str, Resources]]) -> Record:
        try:
            return replace(record, resources=report(record.config))
        except CompileError as error:
            return replace(record, status=Status.COMPILE_ERROR, reason=str(error))

    def time(self, program: Program, samples: int, seconds: float) -> float:
        """The median time of one call in microseconds, on random data at the tuned row count.

        Raises:
            LaunchError: the program cannot be timed.
        """
        timed = cast(TimedProgram, program)
        return timed.time(self._timed_inputs, self.problem.wants, samples=samples, budget_s=seconds).median

    @cached_property
    def _timed_inputs(self) -> Inputs:
        problem = self.problem
        base = random_inputs(min(problem.rows, BASE_ROWS), problem.hidden, problem.out, self._seed)
        data = repeated(base, problem.rows, self._seed).expand()
        return read_only(Inputs(data.dy, data.x, data.gamma, data.beta, data.w, self._eps))


class _Launches:
    """Remembers whether a launch failed."""

    def __init__(self) -> None:
        self.failed = False

    def watching(self, run: Run) -> Run:
        def watched(inputs: Inputs, wants: frozenset[str]) -> Gradients:
            try:
                return run(inputs, wants)
            except LaunchError:
                self.failed = True
                raise

        return watched
