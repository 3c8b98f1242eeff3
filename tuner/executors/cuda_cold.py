"""A program's call in place on the GPU, for whoever takes its times other than by `CudaProgram.time`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tuner.executors.cuda import CudaProgram
from tuner.executors.cuda_graph import CudaStream
from tuner.inputs import Inputs


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
