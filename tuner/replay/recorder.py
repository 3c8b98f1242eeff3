"""Records a space: every valid config compiled ahead on all cores, passed through the quick exact probe, and timed.

Configs come in one random order, the same in every session, so that a drift of the clocks falls on all of them alike, and what is
recorded so far is a fair sample; of each variant, where some are to come first. One that is compiled is not held up by an earlier
one that is not. At the end of a session the fastest so far are timed again in turns, so that the optimum is no lucky
sample. Nothing is validated beyond the probe: a recorded time is not a promise that the kernel is right.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import cast

from codegen.config import Config
from tuner.arguments import FAILED
from tuner.candidates import Space
from tuner.costmodel import plausible_us
from tuner.errors import DeviceLost, LaunchError
from tuner.evaluate import HOPELESS, QUICK_SAMPLES, QUICK_SECONDS, SAMPLES, SECONDS, Material
from tuner.executors import Executor, Program, TimedProgram
from tuner.guess import longest, rank
from tuner.outcome import spills
from tuner.prebuild import Builds, Built, built
from tuner.records import Record, Status
from tuner.replay.recorded import Recorded, Result

SAVE_EVERY_S = 10.0
"""What a kill costs at most."""

HANG_S = 30.0
"""A candidate that is on the GPU for so long hangs: probe and timing take a second where they take long."""

_GLANCE_S = 0.5
"""How often the clock is looked at while compilers are waited for."""

AGAIN_WITHIN, AGAIN_MOST, AGAIN_ROUNDS = 1.12, 100, 3
"""What is timed again at the end of a session: so many at most, within this factor of the best, in so many rounds."""

AGAIN_SHARE = 0.2
"""Part of the time of a session that is kept for it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a recording is.

    Attributes:
        stage: "recording" or "timing the fastest again".
        done, total: steps of the stage.
        best: the fastest config so far and its time in microseconds.
    """

    stage: str
    done: int
    total: int
    best: tuple[Config, float] | None


class Recorder:
    """One session of recording.

    Args:
        recorded: what is there already; it grows.
        space: all there is to record.
        first: the variants whose configs come before all others.
        executor: runs what was compiled.
        builds: compiles.
        material: the data of the probe and of the timing.
        path: where it is saved, every SAVE_EVERY_S and at the end, whatever ends it.
        out_of_time: whether such a share of the time is over.
        on_progress: told after each config.
    """

    def __init__(self, recorded: Recorded, space: Space, first: Sequence[str], executor: Executor, builds: Builds,
                 material: Material, path: Path, out_of_time: Callable[[float], bool],
                 on_progress: Callable[[Progress], None]) -> None:
        self._recorded = recorded
        self._space = space
        self._first = first
        self._executor = executor
        self._builds = builds
        self._material = material
        self._path = path
        self._out_of_time = out_of_time
        self._on_progress = on_progress
        self._saved = time.monotonic()
        self._best = min(recorded.times.items(), key=lambda entry: entry[1], default=None)

    def run(self) -> bool:
        """Records until all is recorded, or time is up; whether all is, and the fastest were timed again.

        Raises:
            DeviceLost: a config took the GPU with it. It is recorded; the next session goes on behind it.
            ToolchainError: there is no compiler.
            OSError: the file cannot be written.
        """
        try:
            whole = self._record_all()
            return self._time_again() and whole
        finally:
            self._recorded.save(self._path)

    def _record_all(self) -> bool:
        left = [config for config in self._order() if config not in self._recorded.results]
        for config, reason in self._too_long(left):
            self._add(config, Result(Status.NOT_RUN, reason))
        self._material.prepare_screen()  # or it would be part of the first config's time, and taken for a hang
        to_time = [config for config in left if config not in self._recorded.results]
        for config, compiled in self._compiled(to_time, 1.0 - AGAIN_SHARE):
            with self._watched(config):
                result = self._judge(config, compiled)
            self._add(config, result)
        return len(self._recorded.results) >= len(self._space.valid)

    def _order(self) -> list[Config]:
        mixed = random.Random(0).sample(self._space.valid, len(self._space.valid))
        return sorted(mixed, key=lambda config: config.variant not in self._first)

    def _too_long(self, configs: Iterable[Config]) -> Iterator[tuple[Config, str]]:
        """What a tuning run would not try either."""
        predicted = rank(self._space)
        limit = longest(predicted)
        for config in configs:
            if predicted.get(config, 0.0) > limit:
                yield config, "is predicted to take far too long"

    def _compiled(self, configs: Sequence[Config], share: float) -> Iterator[tuple[Config, Built]]:
        """The configs as their compilation ends; fewer when that share of the time is over."""
        for found in built(self._builds, configs, _GLANCE_S):
            if self._out_of_time(share):
                return
            if found is not None:
                yield found

    def _judge(self, config: Config, compiled: Built) -> Result:
        if compiled.failure is not None:
            return Result(Status.COMPILE_ERROR, compiled.failure)
        program = self._executor.compile(compiled.source)
        resources = program.resources
        if spills(Record(config, Status.OK, resources=resources)):
            return Result(Status.SPILLS, "keeps values in local memory, for want of registers", resources=resources)
        try:
            verdict = self._material.validator.screen(program.run)
            if not verdict.ok:
                return Result(Status.WRONG, verdict.reason, resources=resources)
            time_us = self._time(program)
        except DeviceLost:
            raise
        except LaunchError as error:
            return Result(Status.LAUNCH_ERROR, str(error), resources=resources)
        least = plausible_us(self._space.problem, self._space.limits)
        if time_us < least:
            return Result(Status.IMPLAUSIBLE, f"took {time_us:.3g} us, where {least:.3g} us is the least", resources=resources)
        return Result(Status.OK, time_us=time_us, resources=resources)

    def _time(self, program: Program) -> float:
        time_us = self._time_once(program, QUICK_SAMPLES, QUICK_SECONDS)
        if self._best is None or time_us <= HOPELESS * self._best[1]:
            time_us = self._time_once(program, SAMPLES, SECONDS)
        return time_us

    def _time_once(self, program: Program, samples: int, seconds: float) -> float:
        return cast(TimedProgram, program).time(
            self._material.timed_inputs, self._space.problem.wants, samples=samples, budget_s=seconds, regime="warm").median

    def _time_again(self) -> bool:
        """The fastest in turns; whether there was time for it. A round that was begun in vain does not count."""
        times, results = self._recorded.times, self._recorded.results
        limit = AGAIN_WITHIN * min(times.values(), default=0.0)
        fastest = sorted((config for config in times if times[config] <= limit), key=times.__getitem__)[:AGAIN_MOST]
        if all(results[config].again_us is not None for config in fastest):
            return True
        programs = {config: self._executor.compile(compiled.source) for config, compiled in self._compiled(fastest, 1.0)}
        rounds: list[dict[Config, float]] = []
        while len(rounds) < AGAIN_ROUNDS and (found := self._round(programs, len(rounds))) is not None:
            rounds.append(found)
        for config in programs if rounds else ():
            results[config] = replace(results[config], again_us=median(times_us[config] for times_us in rounds))
        return len(rounds) == AGAIN_ROUNDS and len(programs) == len(fastest)

    def _round(self, programs: dict[Config, Program], number: int) -> dict[Config, float] | None:
        """Each program's time, in random order; None when time is up. A program that fails is taken out."""
        found: dict[Config, float] = {}
        for done, config in enumerate(random.Random(number).sample(list(programs), len(programs))):
            if self._out_of_time(1.0):
                return None
            try:
                with self._watched(config):
                    found[config] = self._time_once(programs[config], SAMPLES, SECONDS)
            except DeviceLost:
                raise
            except LaunchError:  # it ran before: its first time stays
                del programs[config]
            self._on_progress(Progress("timing the fastest again", number * len(programs) + done + 1,
                                       AGAIN_ROUNDS * len(programs), self._best))
        return found

    @contextmanager
    def _watched(self, config: Config) -> Iterator[None]:
        """A config that takes the GPU with it, or does not give it back, is recorded as that before the session ends."""
        timer = threading.Timer(HANG_S, self._hung, (config,))
        timer.daemon = True
        timer.start()
        try:
            yield
        except DeviceLost as error:
            self._recorded.results[config] = Result(Status.LAUNCH_ERROR, str(error))
            raise
        finally:
            timer.cancel()

    def _hung(self, config: Config) -> None:
        """Ends the process: a thread that waits for a kernel cannot be told to give up."""
        self._recorded.results[config] = Result(Status.LAUNCH_ERROR, f"did not end within {HANG_S:.0f} s")
        self._recorded.save(self._path)
        print(f"record: {config} hangs, and this process ends with it; run the same command again to go on", file=sys.stderr)
        os._exit(FAILED)

    def _add(self, config: Config, result: Result) -> None:
        results = self._recorded.results
        results[config] = result
        if result.time_us is not None and (self._best is None or result.time_us < self._best[1]):
            self._best = config, result.time_us
        if time.monotonic() >= self._saved + SAVE_EVERY_S:
            self._recorded.save(self._path)
            self._saved = time.monotonic()
        self._on_progress(Progress("recording", len(results), len(self._space.valid), self._best))
