"""A worker: opens the executor, says what device it has, and judges candidates until its socket closes or its device is lost."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection

from codegen.space import parse_config
from tuner.companions import why_invalid
from tuner.errors import DeviceLost, LaunchError, NoSuchDevice, TunerError
from tuner.evaluate import Evaluator, Material
from tuner.executors import Executor
from tuner.records import Record
from tuner.workers.messages import Device, Job, Message, Place, receive, send

Open = Callable[[Place], Executor]

Materials = Mapping[Job, Material]
"""What the nursery has prepared."""


def serve(connection: Connection, place: Place, open_executor: Open, materials: Materials) -> None:
    """Answers requests until the other side hangs up.

    The first message is {"device": ...}, or {"refused": sentence} where the executor cannot be opened, {"absent": sentence} where
    the machine has fewer GPUs than the number of this one. Each request has "do":

        judge     job, config, best_us                   -> {"record": ..., "tally": ...}
        validate  job, record                            -> {"record": ...}
        recheck   job, record                            -> {"record": ...}
        audit     job, config                            -> {"audit": ...}
        time      job, config, regime, samples, seconds  -> {"timing": ...}, or {"failed": sentence}
        prove     job, config, multiply_adds             -> {"why_invalid": sentence or null}

    or, to any: {"lost": sentence}, after which the worker ends; {"memory": sentence}; {"refused": sentence}: the tools fail.
    """
    try:
        executor = open_executor(place)
    except TunerError as error:
        send(connection, {"absent" if isinstance(error, NoSuchDevice) else "refused": str(error)})
        return
    send(connection, {"device": asdict(Device.of(executor))})
    desk = _Desk(executor, materials)
    while True:
        try:
            request = receive(connection)
        except EOFError:
            return
        reply = desk.answer(request)
        # Programs refer to themselves, and hold libraries and modules. Should unloading one fail, that is this candidate's doing,
        # so it comes before the reply.
        gc.collect()
        send(connection, reply)
        if "lost" in reply:
            return


class _Desk:
    """One executor, and the evaluator of the job that was asked about last."""

    def __init__(self, executor: Executor, materials: Materials) -> None:
        self._executor = executor
        self._materials = materials
        self._job: Job | None = None
        self._evaluator: Evaluator | None = None

    def answer(self, request: Message) -> Message:
        try:
            return self._done(request)
        except DeviceLost as error:
            return {"lost": str(error)}
        except MemoryError as error:
            return {"memory": str(error) or "there is not enough memory"}
        except TunerError as error:
            return {"refused": str(error)}

    def _done(self, request: Message) -> Message:
        job = Job.from_json(request["job"])
        what = request["do"]
        if what == "prove":
            config = parse_config(request["config"])
            return {"why_invalid": why_invalid(self._executor, job.problem, config, job.seed, request["multiply_adds"])}
        evaluator = self._evaluator_for(job)
        if what == "judge":
            evaluator.best_us = request["best_us"] if request["best_us"] is not None else math.inf
            record = evaluator.judge(evaluator.compile(parse_config(request["config"])))
            return {"record": record.as_json(), "tally": evaluator.drain().as_json()}
        if what == "validate":
            return {"record": evaluator.validate(Record.from_json(request["record"])).as_json()}
        if what == "recheck":
            return {"record": evaluator.recheck(Record.from_json(request["record"])).as_json()}
        if what == "audit":
            return {"audit": asdict(evaluator.audit(parse_config(request["config"])))}
        try:
            config = parse_config(request["config"])
            timing = evaluator.time(config, request["regime"], request["samples"], request["seconds"])
        except DeviceLost:
            raise
        except LaunchError as error:
            return {"failed": str(error)}
        return {"timing": asdict(timing)}

    def _evaluator_for(self, job: Job) -> Evaluator:
        if self._evaluator is None or job != self._job:
            self._job = job
            material = self._materials.get(job)
            self._evaluator = Evaluator(self._executor, job.problem, eps=job.eps, seed=job.seed, regime=job.regime,
                                        material=material)
        return self._evaluator
