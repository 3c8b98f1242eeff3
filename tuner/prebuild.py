"""Kernels compiled into the store by processes, without a GPU: rendering takes a good part of a core, which one interpreter's
threads would share with whoever takes times."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Protocol

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import Source, render
from tuner.compilers import end_compilers
from tuner.errors import CompileError, ToolchainError
from tuner.executors import Resources
from tuner.store import Store
from tuner.toolchain import Nvcc, find_nvcc

AHEAD = 6
"""Configs in flight for each process: the slowest takes several times as long as the others, and none of these waits for it."""

POLITE = 5
"""By how much builders give way to the process that takes times."""

_GLANCE_S = 0.05
"""How often a builder that nobody wants any more looks whether it has begun another compiler."""


@dataclass(frozen=True, slots=True)
class Built:
    """A config after its compilation.

    Attributes:
        source: what was compiled.
        resources: what the compiler says of each kernel.
        failure: why it refused the source; None: it did not.
    """

    source: Source
    resources: dict[str, Resources]
    failure: str | None = None


class Builds(Protocol):
    """What compiles configs of one problem, several at a time."""

    count: int

    def submit(self, config: Config) -> Future[Built]:
        """Compiles a config some time later. The future raises ToolchainError where there is no compiler."""


class Builders(AbstractContextManager["Builders"], Builds):
    """Processes that compile. On leaving they are ended, whatever they are at, and so are the compilers that they have started;
    the same happens when this process ends in any other way.

    Args:
        problem: what the kernels compute.
        arch: "sm_90a".
        store: where compiled kernels are kept.
        count: processes.

    Attributes:
        count: the same.
    """

    def __init__(self, problem: Problem, arch: str, store: Store, count: int) -> None:
        self.count = count
        # Spawned: a process that holds a GPU's context, or threads, must not be forked.
        spawning = multiprocessing.get_context("spawn")
        ended, self._open = spawning.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(count, spawning, _begin, (problem, arch, store.root, ended))

    def submit(self, config: Config) -> Future[Built]:
        """As Builds.submit."""
        return self._pool.submit(_build, config)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._open.close()


def built(builds: Builds, configs: Iterable[Config], glance_s: float) -> Iterator[tuple[Config, Built] | None]:
    """The configs as they are finished; None whenever none was for so long, so that whoever waits can look at the clock.

    Raises:
        ToolchainError: there is no compiler, or a process that compiles was ended.
    """
    waiting = iter(configs)
    flying: dict[Future[Built], Config] = {}
    while True:
        with _none_ended():
            while len(flying) < AHEAD * builds.count and (config := next(waiting, None)) is not None:
                flying[builds.submit(config)] = config
        if not flying:
            return
        done = wait(flying, timeout=glance_s, return_when=FIRST_COMPLETED).done
        if not done:
            yield None
        for future in [future for future in flying if future in done]:
            config = flying.pop(future)
            with _none_ended():
                found = future.result()
            yield config, found


@contextmanager
def _none_ended() -> Iterator[None]:
    try:
        yield
    except BrokenExecutor as error:
        raise ToolchainError("a process that compiles was ended from outside, perhaps for want of memory") from error


_here: tuple[Problem, str, Nvcc, Store] | None = None
_building = _leaving = False
"""Of a builder: what for, whether it is at it, and whether nobody wants it any more."""


def _begin(problem: Problem, arch: str, root: Path, ended: Connection) -> None:
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for all processes; the first one ends the others
    threading.Thread(target=_leave, args=(ended,), daemon=True).start()
    os.nice(POLITE)
    _here = problem, arch, find_nvcc(arch), Store(root)


def _leave(ended: Connection) -> None:
    """Gives up what is built once the first process has closed its end of the pipe, or has been killed. Where it lives, its pool
    ends this process. Nobody may kill it: in the middle of a result that would leave the pool waiting for ever."""
    global _leaving
    with suppress(EOFError):
        ended.recv()
    _leaving = True
    first = multiprocessing.parent_process()
    while True:
        end_compilers()
        if not _building and first is not None and not first.is_alive():
            os._exit(1)
        time.sleep(_GLANCE_S)


def _build(config: Config) -> Built:
    global _building
    _building = True
    try:
        if _leaving:
            raise CancelledError
        return _built(config)
    finally:
        _building = False


def _built(config: Config) -> Built:
    assert _here is not None
    problem, arch, nvcc, store = _here
    source = render(problem, config)
    try:
        return Built(source, nvcc.compile(source.text, arch, store).resources(source.plan))
    except CompileError as error:
        return Built(source, {}, str(error))
