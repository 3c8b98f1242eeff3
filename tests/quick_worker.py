"""A nursery whose workers run nothing: each claims that what it is asked about is right and takes a made-up time.

With $LNL_TEST_PAUSES, seconds by what is asked for, an answer takes that long.

So a run with a thousand candidates takes seconds, and everything but the judging is that of a real one. Such a run is `python -m
tests.quick_worker SHAPE TRIALS VARIANT,...`, which prints its resident memory, KiB, after 100 candidates and after all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from contextlib import closing
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from codegen.limits import target
from codegen.problem import Shape
from codegen.space import parse_config
from tests.fake_gpu import rugged
from tuner.executors import Resources, Timing
from tuner.heap import keep_compact
from tuner.publish import Folder
from tuner.records import Record, Status
from tuner.timing.tally import Tally
from tuner.tuning import Request, TuningRun
from tuner.validate import GradientError
from tuner.workers import judge as workers_judge
from tuner.workers import main
from tuner.workers.messages import Device, Job, Message, Place, receive, send
from tuner.workers.pool import Workers
from tuner.workers.worker import Materials, Open

BETWEEN = 100

PAUSES = "LNL_TEST_PAUSES"


def serve(connection: Connection, place: Place, open_executor: Open, materials: Materials) -> None:
    """As tuner.workers.worker.serve."""
    limits = place.limits or target("sm_90")
    send(connection, {"device": asdict(Device("cuda", "NVIDIA Test", "test", limits, True, "measured", None))})
    pauses = json.loads(os.environ.get(PAUSES, "{}"))
    while True:
        try:
            request = receive(connection)
        except EOFError:
            return
        time.sleep(pauses.get(request["do"], 0.0))
        send(connection, answer(request))


def answer(request: Message) -> Message:
    if "record" in request:
        return {"record": request["record"]}
    if request["do"] == "prove":
        return {"why_invalid": None}
    config = parse_config(request["config"])
    time_us = rugged(config)
    if request["do"] == "time":
        return {"timing": asdict(Timing((time_us,), 1, request["regime"]))}
    wants = Job.from_json(request["job"]).problem.wants
    if zlib.crc32(str(config).encode()) % 4:
        errors = {name: GradientError(time_us * 1e-7, time_us * 1e-2) for name in sorted(wants)}
        record = Record(config, Status.OK, None, time_us, True, errors=errors, rows=(1, 7, 257),
                        resources={config.variant: Resources(32, 0)})
    else:
        record = Record(config, Status.WRONG, f"dx is {time_us} off")
    return {"record": record.as_json(), "tally": Tally(spells=1).as_json()}


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def run(shape: str, trials: int, variants: tuple[str, ...]) -> tuple[int, list[int]]:
    """How many candidates there were, and the memory after BETWEEN and after all of them."""
    seen: list[int] = []
    count = 0

    def note(record: Record) -> None:
        nonlocal count
        folder.add(record)
        count += 1
        if count in (BETWEEN, trials):
            seen.append(resident_kib())

    with (TemporaryDirectory() as name, mock.patch.object(workers_judge, "builder", lambda workers: lambda source: None),
          closing(Workers(Place("cuda", "sm_90", Path(name)), module=__spec__.name)) as workers):
        tuning = TuningRun(Request(Shape.parse(shape), variants=variants, trials=trials, timeout=1e4), workers)
        with Folder(Path(name) / "out", tuning.info) as folder:
            tuning.on_record = note
            tuning.execute()
    return count, seen


if __name__ == "__main__":
    if len(sys.argv) == 2:
        with mock.patch.object(main, "serve", serve):
            main.main()
    else:
        keep_compact()
        counted, memory = run(sys.argv[1], int(sys.argv[2]), tuple(sys.argv[3].split(",")))
        print(counted, *memory)
