"""A program's call in place on the GPU, for clocks other than `CudaProgram.time`: one call at a time, with a cold L2 cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tuner.executors.cuda import CudaProgram
from tuner.executors.cuda_context import Gpu
from tuner.executors.cuda_graph import Graph
from tuner.inputs import Inputs

_WORD = 0x3F9D70A4  # what is written over the cache: any value does


class CudaStream:
    """The GPU's stream with events, graphs and something to fill the L2 cache with. Use it inside `Gpu.active`.

    Args:
        gpu: the GPU.
        flush_bytes: how much `flush` writes.

    Raises:
        LaunchError, through `Gpu.active`: the GPU has not enough memory.
    """

    def __init__(self, gpu: Gpu, flush_bytes: int) -> None:
        self._gpu = gpu
        self._words = flush_bytes // 4
        self._buffer: Any = gpu.driver.mem_alloc(4 * self._words)

    def free(self) -> None:
        """Gives the memory back."""
        self._buffer.free()

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
        """Enqueues writing over everything the L2 cache holds."""
        self._gpu.driver.memset_d32_async(self._buffer, _WORD, self._words, self._gpu.stream)

    @contextmanager
    def graph(self, work: Callable[[], None], repeats: int) -> Iterator[Callable[[], None]]:
        """What `work` enqueues, `repeats` times, captured; the context gives what enqueues one replay."""
        with Graph(self._gpu, work, repeats) as captured:
            yield captured.launch


@contextmanager
def placed(program: CudaProgram, inputs: Inputs, wants: frozenset[str], flush_bytes: int
           ) -> Iterator[tuple[CudaStream, Callable[[], None]]]:
    """The stream of a program, and what enqueues one call of it on these inputs, for the length of a block.

    Args:
        flush_bytes: how much the stream's `flush` writes.

    Raises:
        LaunchError: the call cannot be prepared, or what is done in the block fails.
        DeviceLost: it did, and took the device with it.
    """
    with program.on_device(inputs, wants) as call:
        stream = CudaStream(program.gpu, flush_bytes)
        try:
            yield stream, call.enqueue
        finally:
            if program.gpu.alive:
                stream.free()
