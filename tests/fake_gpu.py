"""An executor that stands in for a GPU in tests of the search: right results from NumPy, and times that a test makes up."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem
from codegen.render import Source, render
from tests.numpy_kernels import PLAIN
from tuner.errors import CompileError, DeviceLost, LaunchError
from tuner.executors import Resources, Run, Timing
from tuner.inputs import Gradients, Inputs
from tuner.prebuild import Built
from tuner.timing.regimes import Regime

Times = Callable[[Config], float]

COLD = 10.0
"""So many times as long a call takes that finds nothing in the cache."""


def rugged(config: Config) -> float:
    """Microseconds in which every parameter value has a price of its own, as different from the cost model as may be."""
    price = sum(zlib.crc32(f"{config.variant} {name} {value}".encode()) % 1000 / 1000 for name, value in config.params)
    return 2.0 + 3.0 * price


def failing_launch(inputs: Inputs, wants: frozenset[str]) -> Gradients:
    raise LaunchError("too many resources requested for launch")


def stub_artifact(cu: Path, header: Path, *_: object) -> tuple[()]:
    """In the place of tuner.publish.write_artifact where the files are not the point: to choose companions takes long."""
    for path in (cu, header):
        path.write_text("stub")
    return ()


class FakeGpu:
    """Calls itself "cuda", so that the tuner believes its times.

    Args:
        times: microseconds of a call, by config.
        kernels: what some configs compute instead of the right thing.
        refused: configs the compiler does not take.

    Attributes:
        compiled: configs in the order of their compilation, repetitions included.
        timed: configs in the order of their timing.
        closed: how often it was closed.
    """

    name = "cuda"
    device: str = "NVIDIA Test"
    slug = "test"
    limits = target("sm_90")
    measures = True
    rates: Literal["table", "measured"] = "measured"
    bus_id: str | None = None

    def __init__(self, times: Times = rugged, kernels: Mapping[Config, Run] | None = None,
                 refused: frozenset[Config] = frozenset()) -> None:
        self.times = times
        self.kernels = kernels or {}
        self.refused = refused
        self.compiled: list[Config] = []
        self.timed: list[Config] = []
        self.closed = 0
        self._lock = threading.Lock()

    def compile(self, source: Source) -> FakeProgram:
        with self._lock:
            self.compiled.append(source.config)
        if source.config in self.refused:
            raise CompileError("the compiler refused the kernel: error: out of luck")
        return FakeProgram(self, source.config)

    def close(self) -> None:
        self.closed += 1


class FakeProgram:
    def __init__(self, gpu: FakeGpu, config: Config) -> None:
        self._gpu = gpu
        self._config = config
        self.resources: dict[str, Resources] = {config.variant: Resources(32, 0)}
        self.variations: dict[str, Run] = {}

    def run(self, inputs: Inputs, wants: frozenset[str], *, prefill: float = math.nan) -> Gradients:
        return self._gpu.kernels.get(self._config, PLAIN)(inputs, wants)

    def time(self, inputs: Inputs, wants: frozenset[str], *, samples: int = 20, budget_s: float = 0.2,
             regime: Regime = "warm") -> Timing:
        self._gpu.timed.append(self._config)
        return Timing((self._gpu.times(self._config) * (1.0 if regime == "warm" else COLD),), 1, regime)


def lost_at(doomed: Callable[[FakeGpu, Config], bool]) -> FakeGpu:
    """A GPU whose context dies at a call, as after an illegal access; nothing works afterwards."""

    class Dying(FakeGpu):
        dead = False

        def use(self, config: Config) -> None:
            if self.dead or doomed(self, config):
                self.dead = True
                raise DeviceLost("the kernel failed and took the process's GPU context with it: an illegal memory access")

        def compile(self, source: Source) -> FakeProgram:
            program = super().compile(source)
            gpu, config, run, measure = self, source.config, program.run, program.time

            def dying_run(inputs: Inputs, wants: frozenset[str], *, prefill: float = math.nan) -> Gradients:
                gpu.use(config)
                return run(inputs, wants, prefill=prefill)

            def dying_time(inputs: Inputs, wants: frozenset[str], *, samples: int = 20, budget_s: float = 0.2,
                           regime: Regime = "warm") -> Timing:
                gpu.use(config)
                return measure(inputs, wants, samples=samples, budget_s=budget_s, regime=regime)

            program.run, program.time = dying_run, dying_time  # type: ignore[method-assign]
            return program

    return Dying()


class FakeBuilds:
    """Stands in for tuner.prebuild.Builders: renders, in this thread, and leaves the compiling to the executor.

    Args:
        gpu: whose compiler refuses what it refuses.
    """

    count = 2

    def __init__(self, gpu: FakeGpu, problem: Problem) -> None:
        self._gpu = gpu
        self._problem = problem

    def submit(self, config: Config) -> Future[Built]:
        future: Future[Built] = Future()
        refused = config in self._gpu.refused
        future.set_result(Built(render(self._problem, config), {}, "the compiler refused the kernel" if refused else None))
        return future

    def __enter__(self) -> FakeBuilds:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was begun."""
