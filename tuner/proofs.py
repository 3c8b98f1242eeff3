"""Proofs of companions, begun before anybody asks for them: while the gate examines the winner, this machine mostly waits."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from contextlib import ExitStack
from types import TracebackType

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import render
from tuner.artifact import MAX_CONFIGS, serve_all_rows
from tuner.companions import asked
from tuner.errors import CompileError
from tuner.guess import best_predicted
from tuner.pipeline import compiling
from tuner.pipeline import workers as cores
from tuner.workers.judge import builder
from tuner.workers.pool import Workers


class Proofs:
    """What is known, or will soon be, of configs that best.cu may hold beside the winner. A context manager; on leaving, whatever
    is not finished is given up.

    What is begun ahead is what would be chosen if each first choice proved valid. An answer that is bad news is not believed, as
    the run may have stopped its processes meanwhile: then it is asked for again.

    Args:
        place: where configs run.
        seed: of the data.
    """

    def __init__(self, place: Workers, seed: int) -> None:
        self._place = place
        self._seed = seed
        self._begun: dict[tuple[Problem, Config], Future[str | None]] = {}
        self._plans: dict[Config, Future[None]] = {}
        self._ended = threading.Event()
        self._left = ExitStack()

    def __enter__(self) -> Proofs:
        self._pool = self._left.enter_context(compiling(min(MAX_CONFIGS, cores())))
        self._build = builder(self._place)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._left.close()

    def begin(self, problem: Problem, winner: Config) -> None:
        """Has those proven that the file with this winner would hold. Returns at once."""
        if winner not in self._plans:
            self._plans[winner] = self._pool.submit(self._plan, problem, winner)

    def finish(self, seconds: float) -> None:
        """Waits until all that was begun has ended, or for so long."""
        ends = time.monotonic() + seconds
        wait(self._plans.values(), timeout=seconds)
        wait(list(self._begun.values()), timeout=max(0.0, ends - time.monotonic()))

    def why_invalid(self, problem: Problem, config: Config, seed: int, multiply_adds: int) -> str | None:
        """As tuner.companions.why_invalid: the answer that is there, or will be, else that of a worker."""
        wait(self._plans.values())
        begun = self._begun.get((problem, config))
        if begun is not None and not begun.cancelled() and begun.exception() is None and begun.result() is None:
            return None
        return self._place.why_invalid(problem, config, seed, multiply_adds)

    def _plan(self, problem: Problem, winner: Config) -> None:
        def guess(at: Problem) -> Config:
            at, multiply_adds = asked(self._place, winner, at)
            config = best_predicted(at, self._place.limits)
            if (at, config) not in self._begun:
                self._begun[at, config] = self._pool.submit(self._proven, at, config, multiply_adds)
            return config

        serve_all_rows(render(problem, winner), self._place.limits, guess)

    def _proven(self, problem: Problem, config: Config, multiply_adds: int) -> str | None:
        try:
            self._build(render(problem, config))
        except CompileError as error:
            return str(error)
        return self._place.why_invalid(problem, config, self._seed, multiply_adds, self._ended.is_set)
