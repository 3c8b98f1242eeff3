"""Our side of the benchmark: the best kernel known for a case, or one tuned on the spot, proven valid and ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import render
from tuner.bench.measure import BUDGET_SECONDS
from tuner.bench.results import Case
from tuner.errors import DeviceLost, NoValidKernel
from tuner.evaluate import Evaluator
from tuner.executors import Executor, TimedProgram, Timing
from tuner.inputs import Inputs
from tuner.outcome import Event, why_no_winner
from tuner.records import Record, Status
from tuner.request import Request
from tuner.timing.regimes import Regime
from tuner.tuning import TuningRun
from tuner.wisdom.book import Book
from tuner.wisdom.recall import exact, remember


@dataclass(frozen=True, slots=True)
class Tuning:
    """How to tune where it is needed.

    Attributes:
        always: also where a kernel is known.
        trials, seconds: the budget of one case; None: the tuner's own.
        seed: of the data and the search.
    """

    always: bool = False
    trials: int | None = None
    seconds: float | None = None
    seed: int = 0

    def request(self, case: Case) -> Request:
        """What to ask the tuner for."""
        problem = case.problem
        return Request(case.shape, dtype=problem.dtype, accuracy=problem.accuracy, trials=self.trials, timeout=self.seconds,
                       seed=self.seed, command="tuner bench")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A valid kernel.

    Attributes:
        program: compiled.
        record: its config, and the errors that the validator found.
        origin: "known" or "tuned".
    """

    program: TimedProgram
    record: Record
    origin: str


def choose(case: Case, executor: Executor, tuning: Tuning, on_event: Callable[[Event], None]) -> Kernel:
    """The best known kernel of a case if it proves valid, else the winner of a tuning run.

    Raises:
        NoValidKernel: there is none.
        DeviceLost: a candidate took the GPU with it.
        ToolchainError: there is no compiler.
    """
    known = None if tuning.always else exact(case.problem, executor, Book())
    if known is not None:
        with suppress(NoValidKernel):
            return prove(case.problem, executor, known, tuning.seed)
    return _tune(case, executor, tuning, on_event)


def prove(problem: Problem, executor: Executor, config: Config, seed: int) -> Kernel:
    """The kernel of a config, compiled and found valid.

    Raises:
        NoValidKernel: it is not; the message says why.
        DeviceLost: it took the GPU with it.
        ToolchainError: there is no compiler.
    """
    evaluator = Evaluator(executor, problem, seed=seed)
    compiled = evaluator.compile(config)
    record = evaluator.judge(compiled)
    if record.status is not Status.OK:
        raise NoValidKernel(f"{config} is no kernel for it: {record.status.value} ({record.reason})")
    return Kernel(cast(TimedProgram, compiled.program), record, "known")


def _tune(case: Case, executor: Executor, tuning: Tuning, on_event: Callable[[Event], None]) -> Kernel:
    request = tuning.request(case)
    run = TuningRun(request, executor, on_event=on_event)
    run.execute()
    result = run.result()
    if result.lost is not None:
        raise DeviceLost(result.lost)
    if result.winner is None:
        raise NoValidKernel(why_no_winner(result))
    if request.variants is None:
        remember(result)
    program = executor.compile(render(case.problem, result.winner.config))
    return Kernel(cast(TimedProgram, program), result.winner, "tuned")


class Ours:
    """A kernel with its inputs, ready to be timed as a peer is.

    Attributes:
        name: "ours".
    """

    name = "ours"

    def __init__(self, kernel: Kernel, problem: Problem, inputs: Inputs) -> None:
        self._program = kernel.program
        self._wants = problem.wants
        self._inputs = inputs

    def warm(self, samples: int) -> Timing:
        """Times of one call, replayed from a graph.

        Raises:
            LaunchError, DeviceLost: as TimedProgram.time.
        """
        return self._time(samples, "warm")

    def cold(self, samples: int) -> Timing:
        """Times of single calls that find nothing in the L2 cache.

        Raises:
            LaunchError, DeviceLost: as TimedProgram.time.
        """
        return self._time(samples, "cold")

    def _time(self, samples: int, regime: Regime) -> Timing:
        return self._program.time(self._inputs, self._wants, samples=samples, budget_s=BUDGET_SECONDS, regime=regime)

    def gradients(self) -> Mapping[str, Any]:
        """What it computes, NumPy arrays by name.

        Raises:
            LaunchError, DeviceLost: as Program.run.
        """
        return self._program.run(self._inputs, self._wants).present()
