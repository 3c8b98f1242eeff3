"""Times from CUDA graphs: work is captured once, replayed, and measured by events, so that Python costs nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tuner.executors import Timing
from tuner.executors.cuda_context import Gpu

MIN_SAMPLE_US = 100.0
"""A sample lasts so long at least: events resolve half a microsecond, and starting a graph takes a few."""

MAX_REPEATS = 200


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


class Stopwatch:
    """Measures graphs of one GPU. Its events are kept from one measurement to the next; use it inside `Gpu.active`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._events: list[Any] = []

    def time(self, enqueue: Callable[[], None], samples: int, budget_s: float) -> Timing:
        """Times of what `enqueue` puts on the stream, warm, replayed back to back.

        Calls are put together until a sample lasts MIN_SAMPLE_US, up to MAX_REPEATS. There are `samples` samples, or as many
        fewer as fit into `budget_s` seconds of GPU time, but one at least.
        """
        repeats = 1
        while True:
            with Graph(self._gpu, enqueue, repeats) as graph:
                lasted = self.measure(graph.launch, 1)[0]
                if lasted >= 1e6 * budget_s:
                    return Timing((lasted / repeats,), repeats)
                if lasted < 10.0 * MIN_SAMPLE_US:  # one hiccup must not pass for a long call
                    lasted = min(self.measure(graph.launch, 3))
                if lasted >= MIN_SAMPLE_US or repeats == MAX_REPEATS:
                    count = max(1, min(samples, int(1e6 * budget_s / lasted)))
                    return Timing(tuple(time / repeats for time in self.measure(graph.launch, count)), repeats)
            needed = math.ceil(1.1 * repeats * MIN_SAMPLE_US / max(lasted, 1.0))
            repeats = min(MAX_REPEATS, max(2 * repeats, needed))

    def measure(self, enqueue: Callable[[], None], count: int) -> list[float]:
        """Microseconds of each of `count` repetitions on the stream, back to back, after one that is not measured.

        Work that ends sooner than Python enqueues the next is not measured rightly; a graph's replay is one piece of work.
        """
        while len(self._events) <= count:
            self._events.append(self._gpu.driver.Event())
        events, stream = self._events[:count + 1], self._gpu.stream
        enqueue()
        events[0].record(stream)
        for event in events[1:]:
            enqueue()
            event.record(stream)
        events[-1].synchronize()
        return [1e3 * end.time_since(begin) for begin, end in itertools.pairwise(events)]
