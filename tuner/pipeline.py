"""Candidates in flight: compiled ahead by a pool of threads, and judged one by one in the order in which they were chosen, or as
many at a time as there are devices."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from codegen.config import Config
from tuner.compilers import Group
from tuner.errors import DeviceLost, RunEnded, TunerError
from tuner.evaluate import Compiled
from tuner.pace import Pace
from tuner.records import Record, Status
from tuner.strategy import Strategy

IN_FLIGHT = 32
"""Candidates chosen before their predecessors' times are known. The same on every machine, so that equal times give an equal
search. Twice as many as a machine with a GPU may have cores: compilers take from one to ten seconds, and none waits for a place
while the slowest holds up the judging (with 16 on 16 cores, a third of the cores idle). The search hardly suffers from it."""


_GLANCE_S = 0.1
"""How often whoever waits for a compiler looks at the clock."""


class Tries(Protocol):
    """What of a Judge (tuner.evaluate) is asked for while candidates are tried."""

    def compile(self, config: Config) -> Compiled:
        """As Judge.compile."""

    def judge(self, compiled: Compiled) -> Record:
        """As Judge.judge."""

    def stop(self) -> None:
        """As Judge.stop."""


def workers() -> int:
    """Compilers to run at once: one per CPU this process may use, but no more than can have work."""
    return max(1, min(IN_FLIGHT, len(os.sched_getaffinity(0))))


@contextmanager
def compiling(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that run compilers. On leaving, what has not begun is dropped, and the compilers that run are ended:
    nothing goes on behind the back of what follows, and nobody waits for them."""
    group = Group()
    pool = ThreadPoolExecutor(count, initializer=group.join)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        group.end()


def try_in_turn(strategy: Strategy, judge: Tries, out_of_time: Callable[[], bool], on_record: Callable[[Record], object], *,
                lanes: int = 1, ahead: int = IN_FLIGHT, on_begin: Callable[[Config], None] = lambda config: None,
                pace: Pace | None = None) -> None:
    """Tries what the strategy chooses until it ends or time is up.

    While some candidates are judged, the next ones compile. With one lane they are judged and told in the order in which they
    were asked for, not in the order in which they were compiled: the same times give the same search. With several, each is
    recorded and told when it is finished. What is being judged when time is up is waited for, unless the judge is stopped; no
    compiler is.

    Args:
        on_record: called with each record.
        lanes: how many the judge can judge at a time.
        ahead: how many may be chosen and waiting behind the lanes but one.
        on_begin: called with each config before it is judged.
        pace: learns how long each took.

    Raises:
        ToolchainError: there is no compiler for the executor.
        DeviceLost: the device cannot be used any more; the candidate that ran has its record.
    """
    flying: deque[tuple[Config, Future[Compiled]]] = deque()
    judging: dict[Future[Record], Config] = {}
    pace = pace or Pace()

    def take_one() -> None:
        future = next(iter(wait(judging, return_when=FIRST_COMPLETED).done))
        config = judging.pop(future)
        try:
            record = future.result()
        except RunEnded:  # it was not judged, and has no record
            return
        except DeviceLost as error:
            on_record(Record(config, Status.LAUNCH_ERROR, str(error)))
            raise
        on_record(record)
        strategy.tell(config, told(record))

    with compiling(workers()) as compilers, _judges(judge, lanes) as judges:
        while True:
            if not out_of_time():
                for config in strategy.ask(ahead + lanes - 1 - len(flying) - len(judging)):
                    flying.append((config, compilers.submit(_compiled, judge, config, pace)))
                while flying and len(judging) < lanes:
                    config, compiled = flying.popleft()
                    on_begin(config)
                    judging[judges.submit(_judged, judge, compiled, out_of_time, pace)] = config
            if not judging:
                return
            take_one()


def told(record: Record) -> float | None:
    """What a strategy is told of a candidate: its time; None where it was rejected."""
    return record.time_us if record.status in (Status.OK, Status.SLOWER) else None


def _compiled(judge: Tries, config: Config, pace: Pace) -> Compiled:
    began = time.monotonic()
    compiled = judge.compile(config)
    pace.compiled(time.monotonic() - began)
    return compiled


def _judged(judge: Tries, compiled: Future[Compiled], out_of_time: Callable[[], bool], pace: Pace) -> Record:
    """Raises RunEnded: time was up before it was compiled."""
    while not wait([compiled], timeout=_GLANCE_S).done:
        if out_of_time():
            raise RunEnded("time was up before it was compiled")
    program, began = compiled.result(), time.monotonic()
    record = judge.judge(program)
    pace.judged(time.monotonic() - began)
    return replace(record, source=program.digest)


@contextmanager
def _judges(judge: Tries, lanes: int) -> Iterator[Executor]:
    """Where candidates are judged: in this thread, where it is one at a time."""
    if lanes == 1:
        yield _AtOnce()
        return
    pool = ThreadPoolExecutor(lanes)
    try:
        yield pool
    except BaseException:
        judge.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _AtOnce(Executor):
    """Runs what is submitted before it returns."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """As Executor.submit. What is raised but for errors of this program goes to the caller, as an interrupt does."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **options))
        except TunerError as error:
            future.set_exception(error)
        return future
