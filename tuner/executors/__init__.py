"""Executors: how a rendered source becomes a program that runs. Two implementations, `cuda` and `host`, one protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from codegen.limits import Limits
from codegen.render import Source
from tuner.inputs import Gradients, Inputs


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
    """

    samples: tuple[float, ...]
    repeats: int

    @property
    def median(self) -> float:
        """The middle sample, microseconds."""
        ordered = sorted(self.samples)
        return ordered[len(ordered) // 2]


class Program(Protocol):
    """A compiled source, ready to run on any row count."""

    @property
    def resources(self) -> dict[str, Resources]:
        """Per kernel of the plan; empty where nothing is known."""

    def run(self, inputs: Inputs, wants: frozenset[str]) -> Gradients:
        """One call on fresh outputs. Gradients that are not in `wants` are None.

        Raises:
            LaunchError: a launch failed, or the kernel wrote outside its outputs or into its inputs.
        """


class TimedProgram(Program, Protocol):
    """A program on a device that can be timed."""

    def time(self, inputs: Inputs, wants: frozenset[str], *, samples: int = 20, budget_s: float = 0.2) -> Timing:
        """Times of one call on these inputs, replayed from a graph, warm.

        Raises:
            LaunchError: the call cannot be captured or fails.
        """


class Executor(Protocol):
    """Compiles sources for one device."""

    name: str
    device: str
    limits: Limits

    def compile(self, source: Source) -> Program:
        """Thread-safe.

        Raises:
            CompileError: the compiler refused the source.
            ToolchainError: there is no compiler.
        """
