"""Workers, and others that take the place of those that ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from codegen.config import Config
from codegen.problem import Problem
from tuner.errors import DeviceLost, NoSuchDevice, RunEnded, ToolchainError
from tuner.evaluate import Report
from tuner.pipeline import workers as cores
from tuner.timing.regimes import Regime
from tuner.workers.judge import IsolatedJudge
from tuner.workers.lanes import Lanes
from tuner.workers.messages import Device, Job, Message, Place
from tuner.workers.nursery import MODULE, Died, Gone, Hung, Nursery, Stuck, Worker
from tuner.workers.patience import Patience
from tuner.workers.scout import scout

ENDS = 3
"""Workers in a row that end before they have answered anything; then the device is given up."""


class Workers:
    """A device whose kernels run in processes of their own; what an executor says of its device, it says too.

    One worker for each GPU where candidates are timed, else one for each core. They are started when they are needed.

    Args:
        place: the executor to open.
        patience: how long to wait.
        module: what the nursery runs.
        gpus: numbers of the GPUs, all of one model; none: all there are. They do not matter where nothing is timed.

    Attributes:
        bus_id: that of the first GPU that is not lost.

    Raises:
        InputError: the GPUs are of several models.
        ToolchainError: the executor cannot be opened.
        DeviceLost: processes that open it end or hang.
    """

    def __init__(self, place: Place, patience: Patience | None = None, module: str = MODULE, *,
                 gpus: Sequence[int] = (0,)) -> None:
        self.patience = patience or Patience()
        self.store = place.store
        self._module = module
        self._place = place
        self._starting = threading.Lock()
        self._job: Job | None = None
        self._nursery = Nursery(module)
        try:
            found = scout(gpus, self._look)
        except BaseException:
            self._nursery.close()
            raise
        self.facts = facts = found[min(found)]
        self.name, self.device, self.slug, self.limits = facts.name, facts.device, facts.slug, facts.limits
        self.measures, self.rates, self.bus_id = facts.measures, facts.rates, facts.bus_id
        self._place = replace(place, executor=facts.name, limits=facts.limits)
        self._gpus = found if facts.measures else {}
        self._free = Lanes(Lane(partial(self._start, gpu), gpu) for gpu in (sorted(found) if facts.measures else cores() * [0]))
        self.said: tuple[str, ...] = ()

    @property
    def lanes(self) -> Sequence[Lane]:
        """Where requests are answered at the same time."""
        return self._free.living

    @property
    def nursery_pid(self) -> int:
        """The process that starts the workers."""
        return self._nursery.pid

    def judge(self, problem: Problem, *, eps: float = 1e-5, seed: int = 0, regime: Regime = "warm",
              report: Report | None = None) -> IsolatedJudge:
        """A judge of candidates for a problem; see Evaluator for the arguments."""
        self._job = job = Job(problem, eps, seed, regime)
        self.renew()  # those that run were forked without the data
        with suppress(Died):  # then the next worker needs another nursery, and that the data
            self._nursery.prepare(job, self.measures)
        return IsolatedJudge(self, job, report)

    def ask(self, request: Message, limit_s: float, given_up: Callable[[], bool] = lambda: False) -> Message:
        """A worker's reply; see tuner.workers.worker. Thread-safe.

        Args:
            given_up: whether nobody wants the reply any more.

        Raises:
            Died, Hung: the request ended a worker, or did not end.
            DeviceLost: no worker can be started, or each ends at once.
            ToolchainError: the worker's compiler or library is missing.
        """
        while True:
            lane = self._free.take()
            try:
                reply = lane.ask(request, limit_s, given_up)
            except RunEnded:
                self._free.give(lane)
                raise
            except DeviceLost as error:
                if not self._free.lose(lane):
                    raise
                self.said += (f"GPU {lane.gpu} was lost, and the others went on without it: {error}",)
                if isinstance(error, Stuck):
                    raise Died("cannot be ended, and its GPU is used no more") from error
            except BaseException:
                self._free.give(lane)
                raise
            else:
                self._free.give(lane)
                return reply

    def get_ready(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Has a worker started, where none is there to take the next request. Raises as `ask`, but for Died and Hung."""
        lane = self._free.take()
        try:
            lane.ready(given_up)
        finally:
            self._free.give(lane)

    def why_invalid(self, problem: Problem, config: Config, seed: int, multiply_adds: int,
                    given_up: Callable[[], bool] = lambda: False) -> str | None:
        """As tuner.companions.why_invalid, by a worker; `given_up` as for `ask`.

        Raises:
            DeviceLost, ToolchainError: as `ask`.
        """
        job = Job(problem, 1e-5, seed).as_json()
        request = {"do": "prove", "job": job, "config": str(config), "multiply_adds": multiply_adds}
        try:
            reply = self.ask(request, 60.0 + self.patience.for_candidate(self.facts, problem, config), given_up)
        except (Died, Hung) as error:
            return f"the process that ran it {error}"
        if "lost" in reply or "memory" in reply:
            return str(reply.get("lost") or reply["memory"])
        reason: str | None = reply["why_invalid"]
        return reason

    def renew(self) -> None:
        """Ends all workers; the next request starts new ones. Not while there is a request."""
        for lane in self.lanes:
            lane.drop()

    def keep_one(self) -> None:
        """From now on one GPU answers all requests, the first that is not lost. Not while there is a request."""
        if len(self._gpus) < 2:
            return
        self.renew()
        used = ", ".join(str(gpu) for gpu in self._gpus)
        kept = self._free.keep_first().gpu
        self.bus_id = self._gpus[kept].bus_id
        self.said += (f"candidates were tried on GPUs {used}; the finals and the safety gate ran on GPU {kept} ({self.bus_id})",)

    def stop(self) -> None:
        """From any thread: ends all processes, those too that are starting or make data. Later requests start new ones."""
        self._job = None
        self._nursery.kill()

    def close(self) -> None:
        """Ends all processes, at once."""
        self._nursery.close()

    def _look(self, gpu: int, first: Device | None) -> Device:
        """What a device is. The worker that tells ends then: later ones are forked with the data that candidates need."""
        if first is not None:
            self._place = replace(self._place, executor=first.name, limits=first.limits)
        try:
            worker, device = self._start(gpu)
            worker.end()
        except (Died, Hung) as error:
            raise DeviceLost(f"the process that was to open the device {error}") from error
        return device

    def _start(self, gpu: int) -> tuple[Worker, Device]:
        with self._starting:
            if not self._nursery.alive:
                self._nursery = Nursery(self._module)
                if self._job is not None:
                    self._nursery.prepare(self._job, self.measures)
            nursery = self._nursery
        worker = nursery.fork(replace(self._place, device_index=gpu))
        reply = worker.reply(self.patience.start)
        _check(reply)
        return worker, Device.from_json(reply["device"])


class Lane:
    """A worker and those that take its place, on GPU `gpu`. Used by one thread at a time."""

    def __init__(self, start: Callable[[], tuple[Worker, Device]], gpu: int) -> None:
        self.gpu = gpu
        self._start = start
        self.worker: Worker | None = None
        self._ends = 0

    def ask(self, request: Message, limit_s: float, given_up: Callable[[], bool]) -> Message:
        """As Workers.ask."""
        again = True
        while True:
            try:
                worker = self.ready(given_up)
                reply = worker.ask(request, limit_s)
            except Gone as error:
                self._ended(error)
                continue
            except Died as error:
                self.worker = None
                if again and error.killed and not given_up():
                    again = False  # by somebody outside, and not for what it did; if it was, it will be again
                    continue
                raise
            except BaseException:
                self.worker = None
                raise
            self._ends = 0
            if "lost" in reply or "bug" in reply:
                self.drop()
            _check(reply)
            return reply

    def ready(self, given_up: Callable[[], bool]) -> Worker:
        """The worker, which has opened its device. Raises DeviceLost: none can be started, or nobody wants it any more."""
        while self.worker is None:
            if given_up():
                raise RunEnded("the run has ended")
            try:
                self.worker, _ = self._start()
            except ToolchainError as error:
                raise DeviceLost(f"the device cannot be opened any more: {error}") from error
            except (Died, Hung) as error:
                self._ended(error)
        return self.worker

    def _ended(self, error: Exception) -> None:
        self.worker = None
        self._ends += 1
        if self._ends >= ENDS:
            raise DeviceLost(f"{self._ends} processes in a row that were to run kernels ended at once; the last {error}"
                             ) from error

    def drop(self) -> None:
        """Ends the worker."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.end()


def _check(reply: Message) -> None:
    """Raises what a reply says that is not about a candidate."""
    if "absent" in reply:
        raise NoSuchDevice(reply["absent"])
    if "refused" in reply:
        raise ToolchainError(reply["refused"])
    if "bug" in reply:
        raise RuntimeError(f"a process that runs kernels failed:\n{reply['bug']}")

