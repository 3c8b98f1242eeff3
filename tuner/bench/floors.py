"""What no kernel goes below on this GPU: rates measured in the same process, and the bytes and operations of a call over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from codegen.problem import Problem
from tuner.bench.measure import number
from tuner.costmodel import tensor_bytes
from tuner.executors import Executor


class RatedExecutor(Executor, Protocol):
    """An executor that can measure its device."""

    def measure_copy_tbps(self) -> float:
        """Rate of a large copy on the device, bytes read plus bytes written, TB/s."""

    def measure_launch_us(self) -> float:
        """An empty kernel replayed from a graph, microseconds."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the GPU did.

    Attributes:
        copy_tbps: a large copy on the device, bytes read plus bytes written, TB/s.
        launch_us: an empty kernel replayed from a graph, microseconds.
        matrix_tflops: a large bfloat16 matrix product on random data, TFLOP/s; None where there is no PyTorch to do it.
    """

    copy_tbps: float
    launch_us: float
    matrix_tflops: float | None

    @classmethod
    def measure(cls, executor: RatedExecutor, matrix_tflops: Callable[[], float] | None) -> Rates:
        """Measures all three, one after the other."""
        rate = None if matrix_tflops is None else matrix_tflops()
        return cls(executor.measure_copy_tbps(), executor.measure_launch_us(), rate)


@dataclass(frozen=True, slots=True)
class Floor:
    """Least times of one call, microseconds.

    Attributes:
        bytes_us: each input read once and each gradient written once, at the rate of a copy.
        matrix_us: the 4*M*H*O operations of the two matrix products at the rate of bfloat16; None where that is not known.
            Arithmetic of several products of 16-bit parts takes a multiple of it.
        launch_us: one launch.
    """

    bytes_us: float
    matrix_us: float | None
    launch_us: float

    @classmethod
    def of(cls, problem: Problem, rates: Rates) -> Floor:
        """The floor of one call at the problem's row count."""
        operations = 4.0 * problem.rows * problem.hidden * problem.out
        matrix = None if rates.matrix_tflops is None else operations / (1e6 * rates.matrix_tflops)
        return cls(tensor_bytes(problem) / (1e6 * rates.copy_tbps), matrix, rates.launch_us)

    @property
    def us(self) -> float:
        """The largest of them."""
        return max(self.bytes_us, self.matrix_us or 0.0, self.launch_us)

    def as_json(self) -> dict[str, Any]:
        """The floor as JSON values."""
        return {**asdict(self), "us": self.us}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Floor:
        """Reads `as_json` back. Raises KeyError, TypeError: the values have another form."""
        matrix = values["matrix_us"]
        return cls(number(values["bytes_us"]), None if matrix is None else number(matrix), number(values["launch_us"]))
