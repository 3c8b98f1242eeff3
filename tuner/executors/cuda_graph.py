"""CUDA graphs, and the GPU's stream as something to time: work is captured once, replayed, and measured by events, so that Python
costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tuner.executors.cuda_context import Gpu

_WORD = 0x3F9D70A4  # what is written over the cache: any value does


class Graph:
    """What `enqueue` puts on the GPU's stream, `repeats` times in a row, ready to be replayed. A context manager.

    Use it inside `Gpu.active`.

    Raises:
        LaunchError, through `Gpu.active`: the work cannot be captured.
    """

    def __init__(self, gpu: Gpu, enqueue: Callable[[], None], repeats: int) -> None:
        self._gpu = gpu
        self._stream = gpu.bindings.CUstream(gpu.stream.handle)
        graph = self._capture(enqueue, repeats)
        try:
            self._executable = gpu.call("cuGraphInstantiate", graph, 0)
        finally:
            gpu.call("cuGraphDestroy", graph)

    def _capture(self, enqueue: Callable[[], None], repeats: int) -> Any:
        gpu = self._gpu
        # Other threads may allocate and load meanwhile.
        gpu.call("cuStreamBeginCapture", self._stream, gpu.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            for _ in range(repeats):
                enqueue()
        except BaseException:
            _, graph = gpu.bindings.cuStreamEndCapture(self._stream)  # its status repeats what went wrong
            if graph:
                gpu.bindings.cuGraphDestroy(graph)
            raise
        return gpu.call("cuStreamEndCapture", self._stream)

    def launch(self) -> None:
        """Enqueues one replay."""
        self._gpu.call("cuGraphLaunch", self._executable, self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._gpu.bindings.cuGraphExecDestroy(self._executable)


class CudaStream:
    """The GPU's stream with events, graphs and something to fill the L2 cache with, for tuner.timing. Use it inside `Gpu.active`.

    Args:
        gpu: the GPU.
        flush_bytes: how much `flush` writes; the memory is taken at the first, and given back by `free`.
    """

    def __init__(self, gpu: Gpu, flush_bytes: int) -> None:
        self._gpu = gpu
        self._words = flush_bytes // 4
        self._buffer: Any = None

    def free(self) -> None:
        """Gives the memory back."""
        if self._buffer is not None:
            self._buffer.free()
            self._buffer = None

    def record(self) -> Any:
        """An event at this place of the stream."""
        event = self._gpu.driver.Event()
        event.record(self._gpu.stream)
        return event

    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Microseconds between two events that have happened."""
        return 1e3 * float(end.time_since(begin))

    def wait(self) -> None:
        """Waits until all work on the stream is done."""
        self._gpu.stream.synchronize()

    def flush(self) -> None:
        """Enqueues writing over everything the L2 cache holds.

        Raises:
            LaunchError, through `Gpu.active`: the GPU has not enough memory.
        """
        driver = self._gpu.driver
        if self._buffer is None:
            self._buffer = driver.mem_alloc(4 * self._words)
        driver.memset_d32_async(self._buffer, _WORD, self._words, self._gpu.stream)

    @contextmanager
    def graph(self, work: Callable[[], None], repeats: int) -> Iterator[Callable[[], None]]:
        """What `work` enqueues, `repeats` times, captured; the context gives what enqueues one replay."""
        with Graph(self._gpu, work, repeats) as captured:
            yield captured.launch
