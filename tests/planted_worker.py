"""A nursery whose workers run planted candidates: `Workers(..., module="tests.planted_worker")`.

What is planted where stands in the environment, which processes inherit: $LNL_TEST_PLANTS, config text -> name of a plant. With
$LNL_TEST_SEEN, the device is a GPU with made-up times, and which process timed what is written to that file. With
$LNL_TEST_OPENING, a file that is not there yet, the first worker opens its device, and all others end instead, or, with
$LNL_TEST_SLOW, never finish.

With $LNL_TEST_GPUS, models separated by commas, the machine has a GPU of each; with $LNL_TEST_DEAD, the number of one and perhaps
a config, that GPU is dead from when it timed that, or anything.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from codegen.config import Config
from codegen.render import Source
from tests.fake_gpu import FakeGpu, rugged
from tuner.choose import open_for_worker
from tuner.errors import DeviceLost, LaunchError, NoSuchDevice, OutOfMemory
from tuner.executors import Executor, Program, Timing
from tuner.inputs import Gradients, Inputs
from tuner.records import Status
from tuner.workers import main
from tuner.workers.messages import Place

PLANTS, OPENING, SEEN, SLOW = "LNL_TEST_PLANTS", "LNL_TEST_OPENING", "LNL_TEST_SEEN", "LNL_TEST_SLOW"
GPUS, DEAD = "LNL_TEST_GPUS", "LNL_TEST_DEAD"

ENTRY = r"__global__ void [^{;]*Params p\) \{"

TEXTS = {
    "endless": ("for (volatile unsigned i = 0;; i = i + 1) {}", Status.HANG),
    "aborts": ("__builtin_abort();", Status.CRASH),
    "exits": ("__builtin__exit(0);", Status.CRASH),
    "out of bounds": ("if (threadIdx.x == 0) p.db[1LL << 40] = 1.0f;", Status.LAUNCH_ERROR),
    "prints": (r'if (blockIdx.x == 0 && threadIdx.x == 0) printf("{\"lost\": \"all of it\"}\n");', Status.OK),
}
"""What stands at the beginning of each kernel, and what becomes of the candidate on the CPU."""

ON_GPU = ("out of bounds", "endless", "prints")
"""Those that a GPU's compiler takes too."""

MEMORY_BYTES, PIECE_BYTES = 1 << 30, 1 << 28
"""What a worker may take, and what one that runs away takes at once."""


def take_all_memory() -> None:
    taken = []
    try:
        while True:
            taken.append(np.empty(PIECE_BYTES // 8))
    except MemoryError as error:
        raise MemoryError(f"no more than {len(taken)} pieces") from error


def lose_the_device() -> None:
    raise DeviceLost("the kernel failed and took the process's GPU context with it: an illegal memory access")


def ask_for_too_much() -> None:
    raise OutOfMemory("the kernel needs 1099511627776 more bytes of GPU memory where 1024 are free")


def fail() -> None:
    raise LaunchError("too many resources requested for launch")


RUNS: dict[str, tuple[Callable[[], object], Status]] = {
    "segfaults": (lambda: ctypes.string_at(0), Status.CRASH),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), Status.CRASH),
    "takes all memory": (take_all_memory, Status.OUT_OF_MEMORY),
    "needs too much": (ask_for_too_much, Status.OUT_OF_MEMORY),
    "loses the device": (lose_the_device, Status.CRASH),
    "fails": (fail, Status.LAUNCH_ERROR),
    "sleeps": (lambda: time.sleep(1000), Status.HANG),
}
"""What is done where the kernel should run."""

IN_FINALS = "aborts when it is timed again"



def plants() -> dict[str, str]:
    return json.loads(os.environ.get(PLANTS, "{}"))  # type: ignore[no-any-return]


def planted(source: Source) -> Source:
    """The source as a worker will compile it."""
    name = plants().get(str(source.config))
    if name not in TEXTS:
        return source
    text, count = re.subn(ENTRY, lambda found: f"{found[0]} {TEXTS[name][0]}", source.text)
    assert count
    return replace(source, text=f"#include <stdio.h>\n{text}")


def plant(program: Program, name: str | None) -> None:
    run, measure = program.run, getattr(program, "time", None)
    ran = False

    def planted_run(inputs: Inputs, wants: frozenset[str], *, prefill: float = math.nan) -> Gradients:
        nonlocal ran
        ran = True
        if name in RUNS:
            RUNS[name][0]()
        return run(inputs, wants, prefill=prefill)

    def planted_time(*arguments: Any, **options: Any) -> Timing:
        if name == IN_FINALS and not ran:
            os.abort()
        assert measure is not None
        return measure(*arguments, **options)  # type: ignore[no-any-return]

    program.run, program.time = planted_run, planted_time  # type: ignore[method-assign, attr-defined]


class Planting:
    """An executor that spoils some candidates."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.name, self.device, self.slug, self.limits = inner.name, inner.device, inner.slug, inner.limits
        self.measures, self.rates, self.bus_id = inner.measures, inner.rates, inner.bus_id

    def compile(self, source: Source) -> Program:
        program = self._inner.compile(planted(source))
        if str(source.config) in plants():
            plant(program, plants()[str(source.config)])
        return program

    def close(self) -> None:
        self._inner.close()


def made_up(config: Config) -> float:
    with Path(os.environ[SEEN]).open("a") as file:
        file.write(f"{os.getpid()} {config}\n")
    return rugged(config)


def open_planted(place: Place) -> Executor:
    opening = os.environ.get(OPENING)
    if opening and not Path(opening).exists():
        Path(opening).touch()
    elif opening:
        time.sleep(1000 if SLOW in os.environ else 0)
        os._exit(3)
    if GPUS in os.environ:
        return Planting(open_one_of_several(place.device_index))
    return Planting(FakeGpu(made_up) if SEEN in os.environ else open_for_worker(place))


def open_one_of_several(index: int) -> FakeGpu:
    models = os.environ[GPUS].split(",")
    if index >= len(models):
        raise NoSuchDevice(f"there is no GPU {index}; this machine has {len(models)}, counted from 0")
    doomed, _, config_text = os.environ.get(DEAD, "").partition(" ")
    tomb = Path(os.environ[SEEN] + ".dead")
    if doomed == str(index) and tomb.exists():
        os._exit(3)

    def times(config: Config) -> float:
        time.sleep(0.02)
        with Path(os.environ[SEEN]).open("a") as file:
            file.write(f"{index} {config}\n")
        if doomed == str(index) and (not config_text or config_text == str(config)):
            tomb.touch()
            lose_the_device()
        return rugged(config)

    gpu = FakeGpu(times)
    gpu.device, gpu.bus_id = models[index], None
    return gpu


if __name__ == "__main__":
    main.MEMORY_SHARE = MEMORY_BYTES / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    main.main(open_planted)
