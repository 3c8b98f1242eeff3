"""PyTorch on the GPU of this process, where it is installed: tensors, a stream to time, and the rate of its matrix products.

It works in the device's primary context, as the CUDA executor does, so both can be used in turn. Nothing else imports PyTorch.
"""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tuner.bench.measure import effort
from tuner.errors import ToolchainError, TunerError
from tuner.inputs import AnyFloats
from tuner.timing.clocks import Clocks
from tuner.timing.measure import Stream, Work, warm

WARM_UPS = 3
"""Calls before a capture: libraries choose algorithms and take workspace in the first."""

MATRIX_SIZE = 8192
"""Rows and columns of the matrices whose product gives the matrix rate: 1.1 TFLOP, a millisecond on the fastest GPU."""


class PeerFailed(TunerError):
    """PyTorch could not do its part: out of memory, a failed compilation, a refused capture."""


class TorchStream:
    """PyTorch's current stream as something to time.

    Args:
        torch: the module.
        stream: the stream all of PyTorch's work goes to; never the default one, which cannot be captured.
        flush_bytes: how much `flush` writes.
    """

    def __init__(self, torch: Any, stream: Any, flush_bytes: int) -> None:
        self._torch = torch
        self._stream = stream
        self._buffer = torch.empty(flush_bytes // 4, dtype=torch.float32, device="cuda")

    def record(self) -> Any:
        """An event at this place of the stream."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Microseconds between two events that have happened."""
        return 1e3 * float(begin.elapsed_time(end))

    def wait(self) -> None:
        """Waits until all work on the stream is done."""
        self._stream.synchronize()

    def flush(self) -> None:
        """Enqueues writing over everything the L2 cache holds."""
        self._buffer.fill_(1.25)

    @contextmanager
    def graph(self, work: Work, repeats: int) -> Iterator[Work]:
        """What `work` enqueues, `repeats` times, captured; the context gives what enqueues one replay."""
        for _ in range(WARM_UPS):
            work()
        self.wait()
        captured = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(captured, stream=self._stream):
            for _ in range(repeats):
                work()
        try:
            yield captured.replay
        finally:
            self.wait()
            captured.reset()


class Torch:
    """PyTorch, ready for use. Open it with `open_torch`.

    Attributes:
        module: torch.
        device: where its tensors are: "cuda", or "cpu" for checks of the arithmetic alone.
    """

    def __init__(self, module: Any, device: str = "cuda") -> None:
        self.module = module
        self.device = device
        self._stream: Any = None
        if device == "cuda":
            # Autograd runs a backward operation on the stream of its forward one: everything has to happen on the stream that
            # is captured.
            self._stream = module.cuda.Stream()
            module.cuda.set_stream(self._stream)

    @property
    def versions(self) -> dict[str, str]:
        """Versions that times depend on."""
        return {"PyTorch": str(self.module.__version__), "PyTorch's CUDA": str(self.module.version.cuda)}

    def open_stream(self, flush_bytes: int) -> Stream:
        """The stream all work is on; its `flush` writes so many bytes."""
        with failures("PyTorch cannot make room for timing"):
            return TorchStream(self.module, self._stream, flush_bytes)

    def tensor(self, array: AnyFloats) -> Any:
        """A copy of an array on the device."""
        if array.dtype.name == "bfloat16":  # which PyTorch does not take from NumPy
            return self.module.tensor(array.view("int16"), device=self.device).view(self.module.bfloat16)
        return self.module.tensor(array, device=self.device)

    def set_accuracy(self, accuracy: str) -> None:
        """Lets float32 products use tf32 in every class but fp32."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its names for this have changed, and both old and new ones warn
            self.module.set_float32_matmul_precision("highest" if accuracy == "fp32" else "high")

    def matrix_tflops(self) -> float:
        """Rate of a large bfloat16 matrix product on random data, TFLOP/s: the operations of a floor are divided by it.

        Raises:
            PeerFailed: the GPU has not enough memory, or fails.
        """
        with failures("the rate of matrix products cannot be measured"):
            fastest = self._matrix_us()
        self.release()
        return 2e-6 * MATRIX_SIZE**3 / fastest

    def _matrix_us(self) -> float:
        torch, shape = self.module, (MATRIX_SIZE, MATRIX_SIZE)
        left, right, product = (torch.randn(shape, dtype=torch.bfloat16, device=self.device) for _ in range(3))
        return min(warm(self.open_stream(4), lambda: torch.mm(left, right, out=product), effort(10), Clocks()).samples)

    def release(self) -> None:
        """Gives memory that no tensor uses back to the GPU.

        Raises:
            PeerFailed: the GPU fails.
        """
        gc.collect()  # compiled functions hold tensors in circles
        with failures("PyTorch cannot give memory back"):
            self.module.cuda.empty_cache()


def open_torch() -> Torch:
    """PyTorch on the GPU.

    Raises:
        ToolchainError: it is not installed, or finds no GPU.
    """
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        raise ToolchainError(f"PyTorch cannot be used ({error})") from error
    if not module.cuda.is_available():
        raise ToolchainError("this PyTorch finds no GPU")
    return Torch(module)


@contextmanager
def failures(what: str) -> Iterator[None]:
    """PyTorch's errors as a PeerFailed with the first line of what it says: they are RuntimeErrors of many kinds.

    Raises:
        PeerFailed: something in the block failed.
    """
    try:
        yield
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise PeerFailed(f"{what}: {lines[0] if lines else type(error).__name__}") from error
