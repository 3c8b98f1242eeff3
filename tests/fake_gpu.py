"""An executor that stands in for a GPU in tests of the search: right results from NumPy, and times that a test makes up."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping

from codegen.config import Config
from codegen.limits import target
from codegen.render import Source
from tests.numpy_kernels import PLAIN
from tuner.errors import CompileError, LaunchError
from tuner.executors import Resources, Timing
from tuner.inputs import Gradients, Inputs

Run = Callable[[Inputs, frozenset[str]], Gradients]
Times = Callable[[Config], float]


def rugged(config: Config) -> float:
    """Microseconds in which every parameter value has a price of its own, as different from the cost model as may be."""
    price = sum(zlib.crc32(f"{config.variant} {name} {value}".encode()) % 1000 / 1000 for name, value in config.params)
    return 2.0 + 3.0 * price


def failing_launch(inputs: Inputs, wants: frozenset[str]) -> Gradients:
    raise LaunchError("too many resources requested for launch")


class FakeGpu:
    """Calls itself "cuda", so that the tuner believes its times.

    Args:
        times: microseconds of a call, by config.
        kernels: what some configs compute instead of the right thing.
        refused: configs the compiler does not take.

    Attributes:
        compiled: configs in the order of their compilation, repetitions included.
        timed: configs in the order of their timing.
    """

    name = "cuda"
    device = "NVIDIA Test"
    slug = "test"
    limits = target("sm_90")

    def __init__(self, times: Times = rugged, kernels: Mapping[Config, Run] | None = None,
                 refused: frozenset[Config] = frozenset()) -> None:
        self.times = times
        self.kernels = kernels or {}
        self.refused = refused
        self.compiled: list[Config] = []
        self.timed: list[Config] = []
        self._lock = threading.Lock()

    def compile(self, source: Source) -> FakeProgram:
        with self._lock:
            self.compiled.append(source.config)
        if source.config in self.refused:
            raise CompileError("the compiler refused the kernel: error: out of luck")
        return FakeProgram(self, source.config)


class FakeProgram:
    def __init__(self, gpu: FakeGpu, config: Config) -> None:
        self._gpu = gpu
        self._config = config
        self.resources: dict[str, Resources] = {config.variant: Resources(32, 0)}

    def run(self, inputs: Inputs, wants: frozenset[str]) -> Gradients:
        return self._gpu.kernels.get(self._config, PLAIN)(inputs, wants)

    def time(self, inputs: Inputs, wants: frozenset[str], *, samples: int = 20, budget_s: float = 0.2) -> Timing:
        self._gpu.timed.append(self._config)
        return Timing((self._gpu.times(self._config),), 1)
