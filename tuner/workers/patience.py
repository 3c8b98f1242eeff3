"""How long to wait for a worker. Generous: to end a slow candidate is a fault, to end a hang late costs seconds."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.config import Config
from codegen.problem import Problem
from tuner.costmodel import predict
from tuner.evaluate import HOST_MULTIPLY_ADDS, elements
from tuner.workers.messages import Device

CALLS = 1000
"""Calls of the predicted length that one candidate may take. It is called about 20 times where calls are long, and no prediction
has been found to be 30 times too short."""

ELEMENT_S = 2e-7
"""For each element of all tensors: five tests upload, fetch and compare them, which takes 4.5e-8 s on one core (2.7 s for a test
of 3e8 elements)."""

MULTIPLY_ADD_S = 4e-6
"""For each multiplication of one run on the CPU: seven runs, the slowest of which (tensor-core products, all lanes of which are
fibers) do 2e7 a second and more, and a machine with four times as much to do as it has cores for."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds.

    Attributes:
        start: for a worker to open its device. The first of all on the CPU compiles the runtime.
        least: for one candidate, however small: its code is loaded, and 50 kernels or more are launched.
    """

    start: float = 120.0
    least: float = 10.0

    def for_candidate(self, device: Device, problem: Problem, config: Config) -> float:
        """For one candidate to be judged, validated or timed."""
        if not device.measures:
            size = min(problem.rows * problem.hidden * problem.out, HOST_MULTIPLY_ADDS)
            return 2 * self.least + MULTIPLY_ADD_S * max(size, problem.hidden * problem.out)
        return self.least + ELEMENT_S * elements(problem) + CALLS * 1e-6 * predict(problem, config, device.limits).time_us
