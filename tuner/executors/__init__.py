"""Executors: how a rendered source becomes a program that runs. Two implementations, `cuda` and `host`, one protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

from codegen.limits import Limits
from codegen.render import Source
from tuner.inputs import Gradients, Inputs
from tuner.timing.regimes import Regime

Run = Callable[[Inputs, frozenset[str]], Gradients]
"""One call on fresh outputs: what Program.run does with its defaults."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler says one kernel uses.

    Attributes:
        registers: registers a thread.
        shared_bytes: static plus dynamic shared memory a block.
        spill_bytes: bytes a thread spills to local memory (stores plus loads).
        stack_bytes: stack frame a thread.
        estimated: True where no device compiler was there and the figures are an estimate.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int = 0
    stack_bytes: int = 0
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one whole call (all fills and launches of the plan), in microseconds.

    Attributes:
        samples: one mean per sample, each over `repeats` calls replayed from one graph.
        repeats: calls in one sample.
        regime: how they were taken.
        settled: whether the clocks were stable before the first sample.
    """

    samples: tuple[float, ...]
    repeats: int
    regime: Regime = "warm"
    settled: bool = True

    @property
    def median(self) -> float:
        """The median of the samples, microseconds."""
        return median(self.samples)


class Program(Protocol):
    """A compiled source, ready to run on any row count."""

    @property
    def resources(self) -> dict[str, Resources]:
        """Per kernel of the plan; empty where nothing is known."""

    @property
    def variations(self) -> Mapping[str, Run]:
        """Other ways to run that a right kernel must pass as well, by what they vary; empty where there are none."""

    def run(self, inputs: Inputs, wants: frozenset[str], *, prefill: float = math.nan) -> Gradients:
        """One call on fresh outputs. Gradients that are not in `wants` are None.

        Args:
            prefill: what outputs and workspace hold before the call.

        Raises:
            LaunchError: a launch failed, the kernel wrote outside its outputs or into its inputs, or it is for other data types.
            DeviceLost: it did, and took the device with it, or an earlier one had.
        """


class TimedProgram(Program, Protocol):
    """A program on a device that can be timed."""

    def time(self, inputs: Inputs, wants: frozenset[str], *, samples: int = 20, budget_s: float = 0.2,
             regime: Regime = "warm") -> Timing:
        """Times of one call on these inputs in a regime (see tuner.timing.regimes), after the clocks are stable.

        Raises:
            LaunchError: the call cannot be captured or fails.
            DeviceLost: as run.
        """


class Executor(Protocol):
    """Compiles sources for one device.

    Attributes:
        name: "cuda" or "host".
        device: what runs the kernels, for people.
        slug: the device as a folder name.
        limits: of the GPU that sources are compiled for.
        measures: whether its programs can be timed (TimedProgram), and their times mean anything.
        rates: where `limits.copy_tbps` and `limits.launch_us` are from: the table of targets, or measurements of this device.
        bus_id: the GPU's PCI address, by which NVML finds it ("0000:3b:00.0"); None where no GPU runs the programs.
    """

    name: str
    device: str
    slug: str
    limits: Limits
    measures: bool
    rates: Literal["table", "measured"]
    bus_id: str | None

    def compile(self, source: Source) -> Program:
        """Thread-safe.

        Raises:
            CompileError: the compiler refused the source.
            ToolchainError: there is no compiler.
        """

    def close(self) -> None:
        """Gives back what calls left behind on the device. The executor stays usable."""
