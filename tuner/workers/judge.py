"""The judge that has candidates judged in processes of their own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from codegen.config import Config
from codegen.render import Source, render
from tuner.errors import CompileError, DeviceLost, LaunchError, RunEnded
from tuner.evaluate import Compiled, Report, reported
from tuner.executors import Timing
from tuner.gate.recheck import Audit
from tuner.records import Record, Status
from tuner.store import Store
from tuner.timing.regimes import Regime
from tuner.timing.tally import Tally
from tuner.wisdom.source import digest
from tuner.workers.messages import Job, Message
from tuner.workers.nursery import Died, Hung

if TYPE_CHECKING:
    from tuner.workers.pool import Workers

RECHECKS, AUDITS = 4, 3
"""So many times as long as for a candidate: validated twice, on data that has to be made first; run twenty times."""

Build = Callable[[Source], object]


class IsolatedJudge:
    """The judge whose candidates run in workers. See tuner.evaluate.Judge.

    A candidate that ends its worker, hangs or takes the GPU context with it is recorded as that, and the next one gets the next
    worker. One whose worker was killed from outside is tried once more.
    """

    def __init__(self, workers: Workers, job: Job, report: Report | None) -> None:
        self.best_us = math.inf
        self._workers = workers
        self._job = job
        self._report = report
        self._build = builder(workers)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._tally = Tally()

    def compile(self, config: Config) -> Compiled:
        """As Judge.compile: into the store, from which a worker takes it."""
        source = render(self._job.problem, config)
        try:
            self._build(source)
        except CompileError as error:
            return Compiled(config, None, None, Record(config, Status.COMPILE_ERROR, str(error)), digest(source))
        return Compiled(config, None, source.plan, None, digest(source))

    def judge(self, compiled: Compiled) -> Record:
        """As Judge.judge."""
        if compiled.failure is not None:
            return compiled.failure
        config = compiled.config
        best = self.best_us if math.isfinite(self.best_us) else None
        record = self._record(Record(config, Status.OK), {"do": "judge", "config": str(config), "best_us": best})
        if record.status is Status.OK and record.measured:
            with self._lock:
                self.best_us = min(self.best_us, record.best_us)
        return reported(record, self._report)

    def validate(self, record: Record) -> Record:
        """As Judge.validate."""
        return self._record(record, {"do": "validate", "record": record.as_json()})

    def time(self, config: Config, regime: Regime, samples: int, seconds: float) -> Timing:
        """As Judge.time."""
        limit = self._limit(config) + 2 * seconds
        request = {"do": "time", "config": str(config), "regime": regime, "samples": samples, "seconds": seconds}
        try:
            reply = self._ask(request, limit)
        except (Died, Hung) as error:
            raise LaunchError(f"the process that timed it {error}") from error
        for failed in ("failed", "lost", "memory"):
            if failed in reply:
                raise LaunchError(reply[failed])
        timing = reply["timing"]
        return Timing(**{**timing, "samples": tuple(timing["samples"])})

    def get_ready(self) -> None:
        """As Judge.get_ready: a worker."""
        self._workers.get_ready(self._stopped.is_set)

    def recheck(self, record: Record) -> Record:
        """As Judge.recheck."""
        return self._record(record, {"do": "recheck", "record": record.as_json()}, RECHECKS)

    def audit(self, config: Config) -> Audit:
        """As Judge.audit."""
        try:
            reply = self._ask({"do": "audit", "config": str(config)}, AUDITS * self._limit(config))
        except (Died, Hung) as error:
            return Audit(0, 0, f"the process that ran it again {error}")
        if "audit" in reply:
            return Audit(**reply["audit"])
        return Audit(0, 0, str(reply.get("memory") or reply["lost"]))

    def drain(self) -> Tally:
        """As Judge.drain."""
        drained, self._tally = self._tally, Tally()
        return drained

    def renew(self) -> None:
        """As Judge.renew: in processes that have run nothing yet, and on one device."""
        self._workers.keep_one()
        self._workers.renew()

    def stop(self) -> None:
        """As Judge.stop: ends the workers. This judge cannot be used any more."""
        self._stopped.set()
        self._workers.stop()

    def _record(self, record: Record, request: Message, times: float = 1) -> Record:
        try:
            reply = self._ask(request, times * self._limit(record.config))
        except Hung as error:
            return replace(record, status=Status.HANG, reason=f"{error}, and its process was killed")
        except Died as error:
            return replace(record, status=Status.CRASH, reason=f"its process {error}")
        if "tally" in reply:
            with self._lock:
                self._tally.add(Tally.from_json(reply["tally"]))
        if "record" in reply:
            return replace(Record.from_json(reply["record"]), config=record.config)  # one object, however many records name it
        if "memory" in reply:
            return replace(record, status=Status.OUT_OF_MEMORY, reason=reply["memory"])
        return replace(record, status=Status.CRASH, reason=reply["lost"])

    def _ask(self, request: Message, limit_s: float) -> Message:
        if self._stopped.is_set():
            raise RunEnded("the run has ended")
        try:
            return self._workers.ask({**request, "job": self._job.as_json()}, limit_s, self._stopped.is_set)
        except (Died, DeviceLost) as error:
            if self._stopped.is_set():  # the candidate had no part in it
                raise RunEnded("the run has ended") from error
            raise

    def _limit(self, config: Config) -> float:
        return self._workers.patience.for_candidate(self._workers.facts, self._job.problem, config)


def builder(workers: Workers) -> Build:
    """What compiles sources for a device into the store, without touching it.

    Raises:
        ToolchainError: there is no compiler.
    """
    store = Store(workers.store)
    if workers.name == "host":
        from tuner.executors.host import HostExecutor

        return HostExecutor(workers.limits, store).build
    from tuner.toolchain import find_nvcc

    nvcc, arch = find_nvcc(workers.limits.arch), workers.limits.arch
    return lambda source: nvcc.compile(source.text, arch, store)
