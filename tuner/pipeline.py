"""Candidates in flight: compiled ahead by a pool of threads, judged one by one in the order in which they were chosen."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from codegen.config import Config
from tuner.errors import DeviceLost
from tuner.evaluate import Compiled, Judge
from tuner.records import Record, Status
from tuner.strategy import Strategy

IN_FLIGHT = 32
"""Candidates chosen before their predecessors' times are known. The same on every machine, so that equal times give an equal
search. Twice as many as a machine with a GPU may have cores: compilers take from one to ten seconds, and none waits for a place
while the slowest holds up the judging (with 16 on 16 cores, a third of the cores idle). The search hardly suffers from it."""


def workers() -> int:
    """Compilers to run at once: one per CPU this process may use, but no more than can have work."""
    return max(1, min(IN_FLIGHT, len(os.sched_getaffinity(0))))


@contextmanager
def thread_pool(count: int, wait: bool = True) -> Iterator[ThreadPoolExecutor]:
    """A pool that, on leaving early, drops what has not begun, so that an interrupt does not wait for all of it.

    Args:
        count: threads.
        wait: for what has begun; else it ends in the background, and before the process does.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


def try_in_turn(strategy: Strategy, judge: Judge, out_of_time: Callable[[], bool],
                on_record: Callable[[Record], None]) -> None:
    """Tries what the strategy chooses until it ends or time is up.

    While one candidate is judged, the next ones compile. They are judged and told in the order in which they were asked for,
    not in the order in which they were compiled: the same times give the same search.

    Raises:
        ToolchainError: there is no compiler for the executor.
        DeviceLost: the device cannot be used any more; the candidate that ran has its record.
    """
    flying: deque[tuple[Config, Future[Compiled]]] = deque()
    with thread_pool(workers(), wait=False) as pool:
        while not out_of_time():
            for config in strategy.ask(IN_FLIGHT - len(flying)):
                flying.append((config, pool.submit(judge.compile, config)))
            if not flying:
                return
            config, compiled = flying.popleft()
            program = compiled.result()
            try:
                record = _judged(judge, program)
            except DeviceLost as error:
                on_record(_last(config, error))
                raise
            on_record(record)
            strategy.tell(config, record.time_us if record.status in (Status.OK, Status.SLOWER) else None)


def try_all(configs: list[Config], judge: Judge, out_of_time: Callable[[], bool]) -> Iterator[Record]:
    """The records of the configs, in their order, where nothing is timed: each thread compiles and judges.

    What has not begun when time is up comes without a record. An interrupt keeps what was yielded.

    Raises:
        ToolchainError: there is no compiler for the executor.
        DeviceLost: the device cannot be used any more; the candidate that ran has its record.
    """

    def one(config: Config) -> Record | None:
        return None if out_of_time() else _judged(judge, judge.compile(config))

    with thread_pool(workers()) as pool:
        try:
            for config, future in [(config, pool.submit(one, config)) for config in configs]:
                try:
                    record = future.result()
                except DeviceLost as error:
                    yield _last(config, error)
                    raise
                if record is not None:
                    yield record
        except BaseException:
            judge.stop()
            raise


def _judged(judge: Judge, compiled: Compiled) -> Record:
    return replace(judge.judge(compiled), source=compiled.digest)


def _last(config: Config, error: DeviceLost) -> Record:
    return Record(config, Status.LAUNCH_ERROR, str(error))
